"""Every pair of methods for one round, and every method on every network."""

from __future__ import annotations

import itertools

import pytest
import torch

from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation import run_in_process
from medfedaug.methods import method_names
from medfedaug.models import network_names
from medfedaug.simulate import configure

SITES = ["site_A", "site_B"]
SEGMENTING = ("basicunet", "unet")
PAPERS = ["fedavg", "fedprox", "fedbn", "norm", "fedrdn", "fedfa", "fedfa_h"]
COMPARED = [name for name in method_names() if name not in (*PAPERS, "fedrdn_v", "fedfa+")]

SMALL = {"fedmix": {"group": 2}}

# Of each group one alone, and nothing of the second beside the first.
ALTERNATIVES = [{"norm", "fedrdn"}, {"mixup", "manifold_mixup", "moex", "fedmix"}]
EXCLUDED = {
    "pooled": {"single", "fedbn", "fedrdn", "fedfa", "fedfa_h", "fedavgm", "scaffold", "fedmix"},
    "single": {"fedprox", "fedavgm", "scaffold"},
}


def goes_together(pair):
    return not any(set(pair) <= group for group in ALTERNATIVES) and not any(
        first in pair and set(pair) & others for first, others in EXCLUDED.items()
    )


PAIRS = [
    pytest.param(pair, marks=[pytest.mark.slow] if set(pair) & set(COMPARED) else [], id="+".join(pair))
    for pair in itertools.combinations([*PAPERS, *COMPARED], 2)
]


def check(server):
    results = server.results()
    assert results["rounds"][0]["refused"] == []
    assert len(results["rounds"][0]["sites"]) == 2
    assert all(bool(torch.isfinite(value).all()) for value in server.state.values())


@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_of_methods(tiny_config, phantom_dir, pair):
    config = tiny_config(",".join(pair), rounds=1, limit=1, settings=SMALL if "fedmix" in pair else None)
    if goes_together(pair):
        check(run_in_process(config, phantom_dir, SITES, "cpu"))
        return
    with pytest.raises((ConfigError, RunFailed), match=r"choose one|sites apart|all stay at their sites"):
        run_in_process(config, phantom_dir, SITES, "cpu")


@pytest.mark.parametrize("name", COMPARED)
def test_every_other_method_beside_the_papers(tiny_config, phantom_dir, name):
    company = {"pooled": "norm,mixstyle", "single": "fedrdn,fedfa+"}.get(name, "fedrdn,fedfa+,fedbn")
    settings = SMALL if name == "fedmix" else None
    config = tiny_config(f"{company},{name}", rounds=2, limit=1, settings=settings)
    check(run_in_process(config, phantom_dir, SITES, "cpu"))


# Together they name every method; what a method does to a network does not depend on its company.
@pytest.mark.parametrize(
    "methods",
    [
        "fedrdn,fedfa+,fedprox",
        "norm,fedbn,fedavg",
        pytest.param("mixstyle,moex,scaffold,fedsam,fedavgm", marks=pytest.mark.slow),
        pytest.param("fedmix,single", marks=pytest.mark.slow),
        pytest.param("manifold_mixup,pooled", marks=pytest.mark.slow),
        pytest.param("mixup", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("network", network_names())
def test_every_method_on_every_network(phantom_dir, make_photos, tmp_path, tiny_config, network, methods):
    settings = SMALL if "fedmix" in methods else None
    specs = tiny_config(methods, settings=settings).methods
    if network in SEGMENTING:
        config = tiny_config(methods, rounds=1, limit=1, network=network, network_args={}, settings=settings)
        check(run_in_process(config, phantom_dir, SITES, "cpu"))
        return
    for name in "AB":
        make_photos(name, per_class=5, size=64)
    sites = find_sites(tmp_path / "photos", limit=2)
    config = configure(sites, methods=specs, network=network, rounds=1, limit=2, threads=1)
    check(run_in_process(config, tmp_path / "photos", ["A", "B"], "cpu"))
