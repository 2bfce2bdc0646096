"""Ditto against Li et al., ICML 2021, Algorithm 1."""

import pytest
import torch
from reference import (
    UNEVEN,
    assert_models,
    assert_same,
    assert_tested,
    copied,
    descend,
    entries,
    federated_averaging,
    same,
)
from running import TINY_ARGS
from torch import nn

from medfedaug.federation import run_in_process
from medfedaug.methods import Ditto
from medfedaug.methods.base import SiteContext, Step
from medfedaug.models.adaptation import UnsavedModule

SITES = ["site_A", "site_B", "site_C"]  # the third has no training cases
WEIGHT, RATE, MOMENTUM = 0.7, 0.05, 0.9


def test_a_model_of_its_own_is_held_near_the_global_one_of_the_round(federate, tmp_path):
    run = federate(
        "ditto",
        plan=UNEVEN,
        settings={"ditto": {"weight": WEIGHT}},
        states=tmp_path / "states",
        local_epochs=2,
        momentum=MOMENTUM,
    )
    own = {}

    def train(site, round_, network):
        w = {name: p.detach().clone() for name, p in network.named_parameters()}
        v = copied(network, own.get((site, round_ - 1), own.get((site, round_ - 2))))

        def term(net, _x, _y):
            return WEIGHT / 2 * sum(((p - w[name]) ** 2).sum() for name, p in net.named_parameters())

        batches = run.batches[site, round_]
        own[site, round_] = entries(descend(v, batches, RATE, term, momentum=MOMENTUM))
        descend(network, batches, RATE, momentum=MOMENTUM)

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    selected = run.server.selected_round
    for site in "ABC":
        last = max(r for r in range(1, selected + 1) if site in run.took_part(r))
        result = run.sites[site].trainer.parts["ditto"].own
        expected = own[site, last]
        assert_same({key: result[key] for key in expected}, expected, atol=2e-6)
        assert float((expected["head.2.weight"] - rounds[selected - 1].model["head.2.weight"]).norm()) > 1e-3
        assert_tested(run, site, expected, lambda images: images / 255)
        # Outside of the scores the network is the global model.
        state = run.sites[site].trainer.network.state_dict()
        assert_same({key: state[key] for key in rounds[0].model}, rounds[selected - 1].model)


@pytest.mark.all_layers
def test_the_global_model_equals_the_run_without_ditto_to_the_bit(phantom_dir, tiny_config):
    methods = "scaffold,fedfa,mixup,fedsam"
    args = {**TINY_ARGS, "dropout": 0.2}
    with_ditto, without = (
        run_in_process(tiny_config(names, network_args=args), phantom_dir, SITES, "cpu")
        for names in (f"ditto,{methods}", methods)
    )
    # Which round is selected is another matter: the personal models are scored.
    assert same(with_ditto.state, without.state)
    losses = [site["ditto/loss"] for site in with_ditto.rounds[-1]["sites"].values()]
    assert len(losses) == 2
    assert all(loss > 0 for loss in losses)


def test_a_site_that_did_not_train_is_scored_with_the_global_model(federate):
    """With λ = 0, sites score as in training alone, until the server's first model."""
    options = {"rounds": 1, "sizes": {"A": 5, "B": 10, "D": 5}, "holdout": ("D",)}
    run = federate("ditto", settings={"ditto": {"weight": 0.0}}, **options)
    assert not run.sites["D"].trainer.parts["ditto"].own
    assert_tested(run, "D", {key: value.double() for key, value in run.models[1].items()}, lambda x: x / 255)
    for site in "AB":
        own = run.sites[site].trainer.parts["ditto"].own
        assert_same({key: own[key] for key in run.models[1]}, run.replies[1][site].weights, atol=1e-7)


@pytest.mark.all_layers
def test_the_personal_pass_has_the_mixed_labels_of_the_batch(federate):
    """One step of MixUp and Ditto: v and w begin alike, so that they end alike."""
    run = federate("mixup,ditto", rounds=1, sizes={"A": 5, "B": 5})
    for site in "AB":
        result, sent = run.sites[site].trainer.parts["ditto"].own, run.replies[1][site].weights
        assert len(run.batches[site, 1]) == 1
        assert all(torch.allclose(result[key], value, atol=1e-7) for key, value in sent.items())


class Scale(UnsavedModule):
    """A parameter that a method exchanges by itself."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.by * x


def test_a_parameter_that_is_no_entry_is_the_global_models():
    network = nn.Sequential(nn.Linear(2, 1), Scale())
    context = SiteContext("A", network, optimiser=lambda trained: torch.optim.SGD(trained, lr=0.1))
    part = Ditto().at_site(context)
    part.start_round()
    x, y = torch.rand(3, 2), torch.rand(3, 1)
    part.after_step(Step(network, x, y, network(x), nn.functional.mse_loss))
    part.end_round()
    assert list(part.own) == ["0.weight", "0.bias"]
    assert not any(torch.equal(part.own[key], value) for key, value in network.state_dict().items())


def test_a_personal_model_that_diverges_is_named(federate):
    with pytest.raises(AssertionError, match=r"ditto's personal model is (nan|inf).*lower the learning rate"):
        federate("ditto", settings={"ditto": {"weight": 1e30}}, local_epochs=4)
