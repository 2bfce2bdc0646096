"""The methods that augmentation is compared with: each update against its equation written out in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from monai.fl.utils.constants import ExtraItems
from monai.fl.utils.exchange_object import ExchangeObject
from torch import nn

from medfedaug.errors import ConfigError, DataError
from medfedaug.federation import SiteTrainer, run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages import check_tensors
from medfedaug.methods import FedAvgM, FedMix, FedSAM, MixUp, Scaffold, build_methods
from medfedaug.methods.base import ServerContext, SiteContext, Step
from medfedaug.tasks import ClassificationTask, SegmentationTask

SITES = ["site_A", "site_B"]


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)


def linear(weight=(1.0, -2.0), bias=0.5):
    network = nn.Linear(2, 1)
    network.load_state_dict({"weight": torch.tensor([weight]), "bias": torch.tensor([bias])})
    return network


def server_context(network, weights=None, kept=frozenset()):
    return ServerContext(network, 1, kept=kept, weights=lambda: weights or {"A": 1.0, "B": 3.0})


def sgd(network, part, batches, lr):
    """Local training as the trainer has it: gradients, the method's hooks, a step of plain SGD."""
    part.start_round()
    for x, y in batches:
        outputs = network(x)
        step = Step(network, x, y, outputs)

        def again(x=x, y=y):
            network.zero_grad()
            ((network(x) - y) ** 2).mean().backward()

        again()
        part.gradients(step, again)
        part.before_step(step)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= lr * parameter.grad


def mean_squares_gradient(w, x, y):
    """Of mean((x·w + b − y)²) for w = (w₁, w₂, b), in float64."""
    x = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    return 2 * x.T @ (x @ w - y.double().flatten()) / len(x)


def flat(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()]).double()


def batches(seed, count=3, size=4):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 2, generator=generator), torch.randn(size, 1, generator=generator))
        for _ in range(count)
    ]


# ---------------------------------------------------------------- FedAvgM


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_fedavgm_is_momentum_at_the_server(rate):
    network = nn.BatchNorm1d(2)
    server = FedAvgM(momentum=0.8, server_lr=rate).at_server(server_context(network))
    state = {"weight": torch.tensor([1.0, 2.0]), "bias": torch.zeros(2), "running_mean": torch.zeros(2)}
    w = torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    velocity = torch.zeros(4, dtype=torch.float64)
    for round_ in range(3):
        mean = {key: value * 0.5 + round_ + 0.25 for key, value in state.items()}
        target = torch.cat([mean["weight"], mean["bias"]]).double()
        velocity = 0.8 * velocity + (w - target)
        w = w - rate * velocity
        state = server.update(state, mean, {"A": 1.0})
        torch.testing.assert_close(
            torch.cat([state["weight"], state["bias"]]).double(), w, rtol=1e-6, atol=1e-6
        )
        # Running statistics have no momentum: a variance could become negative.
        assert torch.equal(state["running_mean"], mean["running_mean"])
    assert server.summary()["velocity"] == pytest.approx(float(velocity.norm()))


def test_fedavgm_without_momentum_is_fedavg_to_the_bit(phantom_dir, tiny_config):
    plain = run_in_process(tiny_config(), phantom_dir, SITES, "cpu")
    config = tiny_config("fedavgm", settings={"fedavgm": {"momentum": 0}})
    assert same(run_in_process(config, phantom_dir, SITES, "cpu").state, plain.state)
    moving = run_in_process(tiny_config("fedavgm"), phantom_dir, SITES, "cpu")
    assert not same(moving.state, plain.state)
    assert moving.rounds[0]["methods"]["fedavgm"]["velocity"] > 0


def test_only_one_method_makes_the_global_model(tiny_config):
    with pytest.raises(ConfigError, match=r"momentum 1\.5 in"):
        build_methods([{"name": "fedavgm", "args": {"momentum": 1.5}}])
    network = linear()
    with pytest.raises(ConfigError, match=r"fedavgm acts on the parameters .* all stay at their sites"):
        FedAvgM().at_server(server_context(network, kept=frozenset(network.state_dict())))


# ---------------------------------------------------------------- SCAFFOLD


def test_scaffold_is_algorithm_1_with_option_ii():
    """Two rounds of two sites; one of them misses the second."""
    lr, weights = 0.1, {"A": 1.0, "B": 3.0}
    shares = {"A": 0.25, "B": 0.75}
    model = linear()
    server = Scaffold().every_round(server_context(model, weights))
    networks = {name: linear() for name in weights}
    sites = {name: Scaffold().at_site(SiteContext(name, net)) for name, net in networks.items()}

    x, c = flat(model), torch.zeros(3, dtype=torch.float64)
    own = {name: torch.zeros(3, dtype=torch.float64) for name in weights}
    for round_, taking_part in enumerate((["A", "B"], ["B"])):
        changes = {}
        for number, name in enumerate(taking_part):
            data = batches(10 * round_ + number)
            networks[name].load_state_dict(model.state_dict())
            sgd(networks[name], sites[name], data, lr)
            payload = sites[name].every_round.collect()
            assert {key: tuple(value.shape) for key, value in payload.items()} == server.shapes
            server.accept(name, payload)

            y = x.clone()
            for inputs, targets in data:
                y = y - lr * (mean_squares_gradient(y, inputs, targets) - own[name] + c)
            new = own[name] - c + (x - y) / (len(data) * lr)
            changes[name] = new - own[name]
            own[name] = new
            torch.testing.assert_close(flat(networks[name]), y, rtol=1e-5, atol=1e-5)
            sent = torch.cat([payload["weight"].flatten(), payload["bias"]]).double()
            torch.testing.assert_close(sent, changes[name], rtol=1e-4, atol=1e-5)
        c = c + sum(shares[name] * change for name, change in changes.items())
        result = server.result()
        found = torch.cat([result["weight"].flatten(), result["bias"]]).double()
        torch.testing.assert_close(found, c, rtol=1e-4, atol=1e-5)
        x = flat(networks["A"])
        model.load_state_dict(networks["A"].state_dict())
        for site in sites.values():
            site.every_round.apply(result)
    assert float(c.norm()) > 0.1


def test_scaffold_leaves_a_sites_norm_layers_at_the_site(phantom_dir, tiny_config):
    config = tiny_config("scaffold,fedbn", rounds=1)
    server = run_in_process(config, phantom_dir, SITES, "cpu")
    composition = Composition(config)
    assert composition.kept_keys
    assert set(server._every_round["scaffold"].shapes) == {
        name for name, _ in composition.network.named_parameters() if name not in composition.kept_keys
    }


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_scaffolds_corrections_cancel_over_the_sites(phantom_dir, tiny_config, weighting):
    """c is the mean of the sites' control variates in the sense in which the model is that of the models."""
    from medfedaug.federation import FederationServer, Site, SiteTrainer

    config = tiny_config("scaffold", weighting=weighting)
    server = FederationServer(config)
    sites = {name: Site(name, SiteTrainer(config, phantom_dir, "cpu")) for name in SITES}
    for name, site in sites.items():
        server.accept_preparation(name, site.answer(server.prepare()))
    server.finish_preparation()
    for _ in range(2):
        request = server.start_round()
        for name, site in sites.items():
            assert server.accept(name, site.answer(request))
        server.finish_round()
    weights = server._every_round["scaffold"].weights()
    assert len(set(weights.values())) == (1 if weighting == "uniform" else 2)
    for key, common in server._every_round["scaffold"].result().items():
        own = sum(w * sites[name].trainer.parts["scaffold"].own[key] for name, w in weights.items())
        own = own / sum(weights.values())
        torch.testing.assert_close(common, own, rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------- FedSAM


def test_fedsam_descends_along_the_gradient_at_the_worst_weights_nearby():
    network, data = linear(), batches(0)
    w = flat(network)
    sgd(network, FedSAM(rho=0.3).at_site(SiteContext("A", network)), data, lr=0.1)
    for x, y in data:
        g = mean_squares_gradient(w, x, y)
        w = w - 0.1 * mean_squares_gradient(w + 0.3 * g / g.norm(), x, y)
    torch.testing.assert_close(flat(network), w, rtol=1e-5, atol=1e-5)


def test_fedsam_with_a_gradient_of_zero_stays_where_it_is():
    network = linear()
    x = torch.zeros(1, 2)
    sgd(network, FedSAM().at_site(SiteContext("A", network)), [(x, network(x).detach())], lr=0.1)
    assert torch.equal(flat(network), flat(linear()))


@pytest.mark.parametrize("company", ["", ",fedfa,fedprox,scaffold"])
def test_fedsam_with_radius_zero_is_its_company_to_the_bit(phantom_dir, tiny_config, company):
    """The second pass draws the same random numbers and leaves running statistics alone."""
    plain = run_in_process(tiny_config("fedavg" + company), phantom_dir, SITES, "cpu")
    flat_config = tiny_config("fedsam" + company, settings={"fedsam": {"rho": 0}})
    assert same(run_in_process(flat_config, phantom_dir, SITES, "cpu").state, plain.state)
    sharp = run_in_process(tiny_config("fedsam" + company), phantom_dir, SITES, "cpu")
    assert not same(sharp.state, plain.state)


# ---------------------------------------------------------------- MixUp


def test_mixup_is_the_weighted_mean_of_images_and_losses():
    part = MixUp(alpha=0.7).at_site(SiteContext("A", nn.Identity()))
    inputs, labels = torch.rand(5, 2, 4, 4), torch.arange(5)
    torch.manual_seed(3)
    mixed, targets = part.mix(inputs, [(1.0, labels)])
    torch.manual_seed(3)
    weight = float(torch.distributions.Beta(0.7, 0.7).sample())
    order = torch.randperm(5)
    assert 0.01 < weight < 0.99
    expected = weight * inputs.double() + (1 - weight) * inputs[order].double()
    torch.testing.assert_close(mixed.double(), expected)
    (first, own), (second, other) = targets
    assert (first, second) == (weight, 1 - weight)
    assert torch.equal(own, labels)
    assert torch.equal(other, labels[order])


def test_mixup_of_a_mixed_batch_weighs_all_four():
    part = MixUp(alpha=1.0).at_site(SiteContext("A", nn.Identity()))
    _, targets = part.mix(torch.rand(3, 1, 2, 2), [(0.25, torch.arange(3)), (0.75, torch.arange(3, 6))])
    assert len(targets) == 4
    assert sum(weight for weight, _ in targets) == pytest.approx(1.0)


def test_mixup_draws_lambda_from_a_symmetric_beta():
    from medfedaug.methods.mixup import draw_lambda

    torch.manual_seed(0)
    drawn = torch.tensor([draw_lambda(0.4) for _ in range(4000)])
    # Beta(α, α): mean 1/2, variance 1/(4(2α + 1)).
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(drawn.var()) == pytest.approx(1 / (4 * 1.8), abs=0.01)
    assert draw_lambda(0.0) == 1.0


def test_the_loss_of_a_mixed_batch_is_the_weighted_sum(phantom_dir, tiny_config):
    """One step of the trainer with a U-Net and Dice, against the same written out."""
    config = tiny_config("mixup", settings={"mixup": {"alpha": 1.0}}, batch_size=1000)
    config = replace(config, optimizer="sgd", learning_rate=0.1)
    trainer = SiteTrainer(config, phantom_dir, "cpu")
    trainer.initialize({ExtraItems.CLIENT_NAME: "site_A"})
    seen = {}
    mix = trainer.parts["mixup"].mix

    def spy(inputs, targets):
        seen["mixed"] = mix(inputs, targets)
        return seen["mixed"]

    trainer.parts["mixup"].mix = spy
    network = Composition(config).network.train()
    trainer.train(ExchangeObject(), {"round": 1})
    inputs, targets = seen["mixed"]
    outputs = network(inputs)
    loss = sum(weight * trainer.task.loss(outputs, labels) for weight, labels in targets)
    assert trainer.last_metrics["train_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    loss.backward()
    found = trainer.get_weights().weights
    for name, parameter in network.named_parameters():
        expected = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)


def test_mixup_with_alpha_zero_is_fedavg_to_the_bit(phantom_dir, tiny_config):
    plain = run_in_process(tiny_config(), phantom_dir, SITES, "cpu")
    config = tiny_config("mixup", settings={"mixup": {"alpha": 0}})
    assert same(run_in_process(config, phantom_dir, SITES, "cpu").state, plain.state)


# ---------------------------------------------------------------- FedMix


class Points:
    """A task of points (B, 1, H, W) with labels (B,), for loss and targets alone."""

    dense, num_classes = False, 3

    def probabilities(self, targets):
        return nn.functional.one_hot(targets, 3).float()

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)


def fedmix_sites(counts, group=5, mixing=0.1, size=(2, 3)):
    torch.manual_seed(0)
    sites = {}
    for name, count in counts.items():
        images, labels = torch.rand(count, 1, *size), torch.randint(3, (count,))
        network = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        context = SiteContext(
            name,
            network,
            num_samples=lambda n=count: n,
            training_batches=lambda x=images, y=labels: zip(x.split(4), y.split(4), strict=True),
            task=Points(),
        )
        part = FedMix(mixing, group).at_site(context)
        sites[name] = (images, labels, network, part)
    return sites


def test_fedmix_sends_means_of_groups_that_cover_the_site():
    sites = fedmix_sites({"A": 13, "B": 5}, group=5)
    server = FedMix().before_training(ServerContext(nn.Identity(), 1, task=Points()))
    for name, (images, labels, _, part) in sites.items():
        payload = part.before_training.collect()
        groups = len(images) // 5
        assert payload["images"].shape == (groups, 1, 2, 3)
        assert payload["labels"].shape == (groups, 3)
        check_tensors(name, payload, server.shapes)
        server.check(payload)
        server.accept(name, payload)
        # 13 images in two groups of 7 and 6: whichever they are, together they are all.
        sizes = torch.tensor([7.0, 6.0] if groups == 2 else [5.0])
        total = (payload["images"] * sizes[:, None, None, None]).sum(0)
        torch.testing.assert_close(total, images.sum(0))
        counts = (payload["labels"] * sizes[:, None]).sum(0)
        torch.testing.assert_close(counts, labels.bincount(minlength=3).float())
    for *_, part in sites.values():
        part.before_training.apply(server.result())
        assert len(part.means) == 3


def test_fedmix_loss_is_proposition_1():
    ((images, labels, network, part),) = fedmix_sites({"A": 8}, mixing=0.2).values()
    part.before_training.apply(
        {"images/B": torch.rand(1, 1, 2, 3), "labels/B": torch.tensor([[0.2, 0.5, 0.3]])}
    )
    mean, soft = part.means[0][0].double(), part.means[0][1].double()
    x = images.double()
    inputs, targets = part.mix(x, [(1.0, labels)])
    targets = [(w, y if y.ndim == 1 else y.double()) for w, y in targets]
    outputs = network(inputs)
    step = Step(network, inputs, labels, outputs)
    found = sum(w * Points().loss(outputs, y) for w, y in targets) + part.loss(step)

    shrunk = (0.8 * x).requires_grad_()
    logs = network(shrunk).log_softmax(dim=1)
    own = -logs.gather(1, labels[:, None]).mean()
    other = -(logs * soft).sum(1).mean()
    (slope,) = torch.autograd.grad(own, shrunk, create_graph=True)
    expected = 0.8 * own + 0.2 * other + 0.2 * sum((slope[i] * mean).sum() for i in range(8))
    torch.testing.assert_close(found, expected)
    # The derivative is itself a function of the weights.
    weight = network[1].weight
    (by_hand,) = torch.autograd.grad(expected, weight, retain_graph=True)
    (theirs,) = torch.autograd.grad(found, weight)
    torch.testing.assert_close(theirs, by_hand)


def test_fedmix_pads_with_background():
    from medfedaug.methods.fedmix import _background, _fit

    label = torch.stack([torch.zeros(2, 2), torch.ones(2, 2)])
    padded = _background(_fit(label, (4, 4)))
    assert padded.shape == (2, 4, 4)
    assert torch.equal(padded.sum(0), torch.ones(4, 4))
    assert torch.equal(padded[1], nn.functional.pad(torch.ones(2, 2), (1, 1, 1, 1)))
    assert torch.equal(_background(_fit(padded, (2, 2))), label)


def test_fedmix_refuses_what_it_cannot_use():
    server = FedMix().before_training(ServerContext(nn.Identity(), 1, task=Points()))
    images, labels = torch.rand(2, 1, 4, 4), torch.full((2, 3), 1 / 3)
    server.check({"images": images, "labels": labels})
    for wrong in ({"labels": labels[:1]}, {"labels": labels * 2}, {"labels": labels - 0.5}):
        with pytest.raises(ValueError, match="labels"):
            server.check({"images": images, "labels": labels, **wrong})
    with pytest.raises(DataError, match=r"site A.*4 training samples.*means of 5"):
        fedmix_sites({"A": 4})["A"][3].collect()
    with pytest.raises(ConfigError, match="fedmix and mixup both mix"):
        build_methods([{"name": "fedmix"}, {"name": "mixup"}])


def test_fedmix_segments_and_is_fedavg_without_mixing(phantom_dir, tiny_config):
    plain = run_in_process(tiny_config(), phantom_dir, SITES, "cpu")
    config = tiny_config("fedmix", settings={"fedmix": {"mixing": 0}})
    assert same(run_in_process(config, phantom_dir, SITES, "cpu").state, plain.state)
    mixed = run_in_process(tiny_config("fedmix,fedrdn,fedfa"), phantom_dir, SITES, "cpu")
    assert not any(entry["refused"] for entry in mixed.rounds)
    assert all(bool(torch.isfinite(value).all()) for value in mixed.state.values())


def test_the_loss_takes_probabilities_for_labels():
    outputs = torch.randn(4, 3, 8, 8)
    labels = torch.randint(3, (4, 1, 8, 8))
    segmentation = SegmentationTask(3)
    assert segmentation.probabilities(labels).shape == (4, 3, 8, 8)
    torch.testing.assert_close(
        segmentation.loss(outputs, segmentation.probabilities(labels)), segmentation.loss(outputs, labels)
    )
    classification = ClassificationTask(["a", "b", "c"], scale=True)
    logits, classes = outputs[:, :, 0, 0], labels[:, 0, 0, 0]
    torch.testing.assert_close(
        classification.loss(logits, classification.probabilities(classes)),
        classification.loss(logits, classes),
    )


# ---------------------------------------------------------------- MixStyle, MOEX, Manifold MixUp


@pytest.mark.parametrize(
    ("methods", "off"),
    [("mixstyle", {"prob": 0}), ("moex", {"prob": 0}), ("manifold_mixup", {"alpha": 0})],
)
def test_mixing_layers_that_are_never_active_are_fedavg_to_the_bit(phantom_dir, tiny_config, methods, off):
    plain = run_in_process(tiny_config(), phantom_dir, SITES, "cpu")
    config = tiny_config(methods, settings={methods: off})
    assert same(run_in_process(config, phantom_dir, SITES, "cpu").state, plain.state)
    mixed = run_in_process(tiny_config(methods), phantom_dir, SITES, "cpu")
    assert not same(mixed.state, plain.state)
