"""Methods that are set to do nothing: the run without them, bit for bit, and another run with them."""

import pytest
from reference import same

from medfedaug.federation import run_in_process

SITES = ["site_A", "site_B"]
FEDMIX = {"fedmix": {"group": 2}}

# The methods, the settings without effect, the methods and settings of the equal run, and options of both.
CASES = [
    ("fedavgm", {"fedavgm": {"momentum": 0}}, "fedavg", {}, {}),
    ("fedmix", {"fedmix": {"mixing": 0}}, "fedavg", {}, {}),
    (
        "fedrobust,fedfa,fedmix,fedsam",
        {**FEDMIX, "fedrobust": {"learning_rate": 0}},
        "fedavg,fedfa,fedmix,fedsam",
        FEDMIX,
        {},
    ),
    ("fedsam,fedfa,fedprox,scaffold", {"fedsam": {"rho": 0}}, "fedavg,fedfa,fedprox,scaffold", {}, {}),
    ("finetune", {"finetune": {"epochs": 0}}, "fedavg", {}, {}),
    ("manifold_mixup", {"manifold_mixup": {"alpha": 0}}, "fedavg", {}, {}),
    ("mixstyle", {"mixstyle": {"prob": 0}}, "fedavg", {}, {}),
    ("mixup", {"mixup": {"alpha": 0}}, "fedavg", {}, {}),
    ("moex", {"moex": {"prob": 0}}, "fedavg", {}, {}),
    # Passes without gradients draw nothing and change no statistics, also of layers that do.
    ("randaugment", {"randaugment": {"num_ops": 0}}, "fedavg", {}, {}),
]


@pytest.fixture(scope="module")
def run(tiny_config, phantom_dir):
    """Run methods with settings and options, each combination once."""
    runs = {}

    def once(methods, settings, options):
        key = repr((methods, settings, options))
        if key not in runs:
            config = tiny_config(methods, settings=settings, **options)
            runs[key] = run_in_process(config, phantom_dir, SITES, "cpu")
        return runs[key]

    return once


@pytest.mark.all_layers
@pytest.mark.parametrize(("methods", "idle", "plain", "settings", "options"), CASES)
def test_a_method_without_effect_is_the_run_without_it_to_the_bit(
    run, methods, idle, plain, settings, options
):
    first, second = run(methods, idle, options), run(plain, settings, options)
    assert same(first.state, second.state)
    assert first.results()["test"] == second.results()["test"]
