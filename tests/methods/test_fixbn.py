"""FixBN against Zhong, Chen and Chao, arXiv:2303.06530: batch norms in two stages."""

import pytest
import torch
from reference import UNEVEN, assert_models, assert_same, federated_averaging, same, step_down
from running import TINY_ARGS
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, linear

from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation import run_in_process
from medfedaug.methods import FixBN

PLAN = [*UNEVEN, ("A", "B", "C")]
STATISTICS = ("running_mean", "running_var")


def calibrated(network, x, statistics):
    """`reference.convolutional` with batch norms that take given statistics."""
    for number, stage in enumerate(network.encoder):
        norm = stage[1]
        mean, variance = (statistics[f"encoder.{number}.1.{key}"][:, None, None] for key in STATISTICS)
        x = conv2d(x, stage[0].weight, stage[0].bias, padding=1)
        x = (x - mean) / torch.sqrt(variance + norm.eps)
        x = torch.tanh(x * norm.weight[:, None, None] + norm.bias[:, None, None])
        x = x.unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(4, 5))
    return linear(x.mean(dim=(2, 3)), network.head[2].weight, network.head[2].bias)


@pytest.mark.parametrize(("exploration", "first"), [(0.3, 2), (0.0, 0)])
def test_statistics_are_those_of_batches_first_and_then_fixed(federate, exploration, first):
    run = federate(
        "fixbn", plan=PLAN, rounds=4, settings={"fixbn": {"exploration": exploration}}, local_epochs=2
    )

    def train(site, round_, network):
        network.train()
        received = {key: value.clone() for key, value in network.state_dict().items()}
        for x, y in run.batches[site, round_]:
            outputs = network(x) if round_ <= first else calibrated(network, x, received)
            step_down(network, cross_entropy(outputs, y), 0.05)

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    fixed = {key: value for key, value in run.models[first].items() if key.endswith(STATISTICS)}
    assert len(fixed) == 4
    for model in run.models[first:]:
        assert_same({key: model[key] for key in fixed}, fixed)


def test_without_a_second_stage_nothing_changes(federate):
    other = "fedbn"
    options = {"plan": UNEVEN}
    whole = federate(f"{other},fixbn", settings={"fixbn": {"exploration": 1.0}}, **options)
    assert same(whole.models[3], federate(other, **options).models[3])


def test_a_layer_that_keeps_statistics_at_the_site_fixes_its_own(federate):
    run = federate("silobn,fixbn", plan=UNEVEN, settings={"fixbn": {"exploration": 0.0}})
    for site in "ABC":
        state = run.sites[site].trainer.network.state_dict()
        for key in run.initial:
            if key.endswith((*STATISTICS, "num_batches_tracked")):
                assert torch.equal(state[key], run.initial[key])


def test_fixbn_refuses_networks_without_batch_norm_statistics(phantom_dir, tiny_config):
    with pytest.raises(ConfigError, match="fixbn: Sequential has no batch norm with running statistics"):
        FixBN().prepare_network(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)))
    args = {**TINY_ARGS, "norm": "instance"}
    with pytest.raises((ConfigError, RunFailed), match="fixbn: UNet has no batch norm"):
        run_in_process(tiny_config("fixbn", network_args=args), phantom_dir, ["site_A"], "cpu")
