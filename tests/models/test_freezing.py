"""Entries that training leaves alone."""

import fnmatch

import pytest
import torch

from medfedaug.errors import ConfigError
from medfedaug.federation.composition import Composition
from medfedaug.federation.in_process import run_in_process

SITES = ["site_A", "site_B"]


def matching(config):
    names = Composition(config).network.state_dict()
    return {name for name in names for pattern in config.freeze if fnmatch.fnmatchcase(name, pattern)}


@pytest.mark.all_layers
@pytest.mark.parametrize("methods", ["fedrdn,fedfa+,scaffold", "fedfd_a", "fedsam,fedavgm,fedprox", "fedbn"])
def test_frozen_entries_neither_change_nor_travel_to_the_server(phantom_dir, tiny_config, methods):
    plain = tiny_config(methods, rounds=2, limit=1)
    config = tiny_config(methods, rounds=2, limit=1, freeze=["model.0.*", "*.submodule.0.adn.*"])
    before = Composition(config).network.state_dict()
    server = run_in_process(config, phantom_dir, SITES, "cpu")
    frozen = matching(config)
    assert any("running_mean" in name for name in frozen)
    kept = Composition(config).kept_keys
    for name, value in server.state.items():
        assert torch.equal(value, before[name]) == (name in frozen | kept or "num_batches" in name), name
    sent, shared = (
        {n: v for n, v in before.items() if n in names}
        for names in (Composition(config).sent, Composition(plain).shared)
    )
    numbers = lambda entries: sum(value.numel() for value in entries.values())  # noqa: E731
    first, second = (entry["bytes"] for entry in server.rounds)
    assert first["model"] == second["model"] == {"up": 2 * 4 * numbers(sent), "down": 2 * 4 * numbers(sent)}
    assert first["frozen"] == {"up": 0, "down": 2 * 4 * (numbers(shared) - numbers(sent))}
    assert "frozen" not in second
    assert set(shared) - set(sent) == frozen & set(shared)


def test_running_statistics_that_match_are_used_in_training(phantom_dir, tiny_config):
    """A norm whose weights alone are frozen goes on to follow its batches."""
    config = tiny_config(rounds=1, limit=1, freeze=["model.0.*.weight"])
    before = Composition(config).network.state_dict()
    server = run_in_process(config, phantom_dir, SITES, "cpu")
    mean = "model.0.adn.N.running_mean"
    assert not torch.equal(server.state[mean], before[mean])
    assert torch.equal(server.state["model.0.conv.weight"], before["model.0.conv.weight"])


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["encoder.*"], r"freeze: no entry matches 'encoder\.\*'; entries are for instance model\.0"),
        (["*"], "freeze: no parameter is left to be trained"),
    ],
)
def test_a_pattern_that_means_nothing_is_refused(tiny_config, patterns, words):
    with pytest.raises(ConfigError, match=words):
        Composition(tiny_config(freeze=patterns))
