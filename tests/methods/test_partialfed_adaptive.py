"""PartialFed-Adaptive: which layers a site loads, learned; what it keeps, and what it is scored with."""

from __future__ import annotations

import json

import pytest
import torch
from reference import UNEVEN, assert_same, copied, descend, entries, labels_of, mean, pixels
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation import SiteTrainer
from medfedaug.methods import PartialFedAdaptive
from medfedaug.methods.base import SiteContext
from medfedaug.runs.evaluate import evaluate_model
from medfedaug.simulate import simulate


class Squares:
    """The least that the method asks of a task."""

    metric = "none"

    def loss(self, outputs, targets):
        return (outputs - targets).square().mean()


def two_layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


@pytest.fixture
def site():
    """A site whose own first layer and whose received last layer are those that made the targets."""
    truth, network = two_layers(0), two_layers(1)
    truth.eval()
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        batches = [(part, truth(part)) for part in inputs.split(8)]
    context = SiteContext("A", network, training_batches=lambda: batches, task=Squares())
    part = PartialFedAdaptive(epochs=20).at_site(context)
    network[0].load_state_dict(truth[0].state_dict())
    part.end_round()  # what the network has now is the site's own
    network[0].load_state_dict(two_layers(3)[0].state_dict())
    network[2].load_state_dict(truth[2].state_dict())
    return part, network, truth


def test_a_site_learns_to_keep_the_layers_that_serve_it(site):
    part, network, truth = site
    received = {key: value.clone() for key, value in network.state_dict().items()}
    torch.manual_seed(0)
    part.personalise()
    assert all(torch.equal(value, received[key]) for key, value in network.state_dict().items())
    part.start_round()
    assert list(part.layers) == ["0", "1", "2"]
    assert part.logits[0] < -0.5
    assert part.logits[2] > 0.5
    assert "0" not in part.loaded()
    assert part.metrics()["loaded"] == len(part.loaded()) / 3
    # Both are right now: its own first layer, and the global last one.
    torch.testing.assert_close(network[0].weight, truth[0].weight)
    torch.testing.assert_close(network[2].weight, truth[2].weight)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_loss_that_is_not_finite_is_named(site):
    part, network, _ = site
    with torch.no_grad():
        network[2].weight.fill_(float("inf"))
    part.personalise()
    with pytest.raises(MedFedAugError, match="site A: partialfed_adaptive: the loss between"):
        part.start_round()


def test_a_site_finds_its_weights_and_logits_again(phantom_dir, tiny_config, tmp_path):
    settings = {"partialfed_adaptive": {"epochs": 2, "learning_rate": 0.3}}
    config = tiny_config("partialfed_adaptive,fedbn", settings=settings)
    run = "0" * 32

    def start() -> SiteTrainer:
        trainer = SiteTrainer(config, phantom_dir, "cpu", tmp_path)
        trainer.open("site_A")
        trainer.enter_run(run)
        return trainer

    trainer = start()
    received = {key: trainer.network.state_dict()[key].clone() for key in trainer.shared}
    for round_ in (1, 2):
        trainer.start_round(round_, received)
        trainer.train(round_)
    part = trainer.parts["partialfed_adaptive"]
    own = {key: trainer.network.state_dict()[key].clone() for key in trainer.shared}
    loaded = part.loaded()
    assert 0 < len(loaded) < len(part.layers)
    assert not set(trainer.kept_keys) & {key for keys in part.layers.values() for key in keys}

    again = start()
    for site in (trainer, again):
        site.receive(received)
        assert site.recall_round(2)
        state = site.network.state_dict()
        for name, keys in part.layers.items():
            expected = received if name in loaded else own
            assert all(torch.equal(state[key], expected[key]) for key in keys)
        assert site.recall_round(2)  # once more changes nothing
        assert all(torch.equal(value, state[key]) for key, value in site.network.state_dict().items())
        site.start_round(3, received)
        site.train(3)
    both = trainer.network.state_dict(), again.network.state_dict()
    assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])


def test_a_finished_run_is_evaluated_with_each_sites_weights(phantom_dir, tiny_config, tmp_path):
    settings = {"partialfed_adaptive": {"learning_rate": 0.3}}
    config = tiny_config("partialfed_adaptive", rounds=3, settings=settings)
    out = tmp_path / "run"
    results = simulate(phantom_dir, out, config, engine="inprocess", device="cpu", report=False)
    shares = [round_["sites"]["site_A"]["partialfed_adaptive/loaded"] for round_ in results["rounds"]]
    assert shares[0] == 1.0
    scores = evaluate_model(out / "global_model.pt", phantom_dir, device="cpu")["sites"]
    tested = {**results["test"]["sites"], **results["test"]["unseen"]}
    assert {name: site["cases"] for name, site in scores.items()} == {
        name: site["cases"] for name, site in json.loads(json.dumps(tested)).items()
    }
    (out / "state").rename(out / "elsewhere")
    with pytest.raises(ConfigError, match="left layers or weights at the sites"):
        evaluate_model(out / "global_model.pt", phantom_dir, device="cpu")
    evaluation = evaluate_model(out / "global_model.pt", phantom_dir, device="cpu", state=out / "elsewhere")
    assert evaluation["sites"] == scores


RATE, TEMPERATURE, EPOCHS = 0.3, 0.7, 2


def test_sites_learn_what_to_load(federate):
    settings = {"learning_rate": RATE, "temperature": TEMPERATURE, "epochs": EPOCHS}
    run = federate(
        "partialfed_adaptive",
        plan=UNEVEN,
        settings={"partialfed_adaptive": settings},
        network="reference_convolutional",
        local_epochs=2,
    )
    start = run.network()
    model, own, logits, loaded = entries(start), {}, {}, set()
    layers = list(dict.fromkeys(key.rpartition(".")[0] for key in model))
    trainable = {name for name, _ in start.named_parameters()}
    for round_, participants in enumerate(UNEVEN, start=1):
        local = []
        for site in participants:
            batches, begun = run.batches[site, round_], dict(model)
            if site in own:
                theta = logits.get(site, torch.zeros(len(layers), dtype=torch.float64)).requires_grad_()
                adam, draws = torch.optim.Adam([theta], lr=RATE), list(batches.first_draws)
                images = pixels(run, site) / 255
                labels = labels_of(run, site)
                network = copied(start).eval()
                for _ in range(EPOCHS):
                    for x, y in zip(images.split(6), labels.split(6), strict=True):
                        uniform = draws.pop(0).double()
                        share = torch.sigmoid((uniform.log() - (1 - uniform).log() + theta) / TEMPERATURE)
                        mixed = {}
                        for key in model:
                            u = share[layers.index(key.rpartition(".")[0])]
                            u = u if key in trainable else u.detach()
                            mixed[key] = u * model[key] + (1 - u) * own[site][key]
                        loss = cross_entropy(functional_call(network, mixed, (x,)), y)
                        (theta.grad,) = torch.autograd.grad(loss, [theta])
                        adam.step()
                logits[site] = theta.detach()
                takes = {name: value >= 0 for name, value in zip(layers, theta.tolist(), strict=True)}
                loaded |= set(takes.values())
                begun = {k: model[k] if takes[k.rpartition(".")[0]] else own[site][k] for k in model}
                share_loaded = run.server.rounds[round_ - 1]["sites"][site]["partialfed_adaptive/loaded"]
                assert share_loaded == sum(takes.values()) / len(takes)
            trained = descend(copied(start, begun), batches, 0.05)
            own[site] = entries(trained)
            local.append(own[site])
        model = mean(local, [run.server.sites[site] for site in participants])
        assert_same(run.models[round_], model, atol=2e-6)
    assert loaded == {True, False}
