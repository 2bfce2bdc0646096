"""The methods that augmentation is compared with: each update against its equation written out in float64."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from monai.fl.utils.constants import ExtraItems
from monai.fl.utils.exchange_object import ExchangeObject
from monai.utils import CommonKeys as Keys
from torch import nn

from medfedaug.averaging import WeightedMean
from medfedaug.config import derive_seed
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, DataError, PrivacyRefused, RunFailed
from medfedaug.evaluate import evaluate_model
from medfedaug.federation import Site, SiteTrainer, run_in_process
from medfedaug.federation.acceptance import check_tensors
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages import PREPARE, TRAIN, Request
from medfedaug.federation.output import write_run
from medfedaug.federation.pooled import run_pooled
from medfedaug.federation.training import LocalTraining
from medfedaug.methods import (
    FedAvgM,
    FedDyn,
    FedHarmo,
    FedMix,
    FedProto,
    FedSAM,
    MixUp,
    PartialFed,
    RandAugment,
    Scaffold,
    build_methods,
)
from medfedaug.methods.base import RoundMean, ServerContext, SiteContext, Step
from medfedaug.models import build_network
from medfedaug.privacy import PrivacyPolicy
from medfedaug.simulate import configure
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

        def again(x=x, y=y, step=step):
            network.zero_grad()
            loss = ((network(x) - y) ** 2).mean()
            term = part.loss(step)
            (loss if term is None else loss + term).backward()

        again()
        part.gradients(step, again)
        part.before_step(step)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= lr * parameter.grad
    part.end_round()


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
    server = FedAvgM(momentum=0.8, server_lr=rate).aggregator(server_context(network))
    state = {"weight": torch.tensor([1.0, 2.0]), "bias": torch.zeros(2), "running_mean": torch.zeros(2)}
    w = torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    velocity = torch.zeros(4, dtype=torch.float64)
    for round_ in range(3):
        mean = {key: value * 0.5 + round_ + 0.25 for key, value in state.items()}
        target = torch.cat([mean["weight"], mean["bias"]]).double()
        velocity = 0.8 * velocity + (w - target)
        w = w - rate * velocity
        state = server.result(RoundMean(round_ + 1, state, mean, {"A": 1.0}))
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
        FedAvgM().aggregator(server_context(network, kept=frozenset(network.state_dict())))


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
    assert set(server.aggregation.every_round["scaffold"].shapes) == {
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
    weights = server.aggregation.every_round["scaffold"].weights()
    assert len(set(weights.values())) == (1 if weighting == "uniform" else 2)
    for key, common in server.aggregation.every_round["scaffold"].result().items():
        own = sum(w * sites[name].trainer.parts["scaffold"].own[key] for name, w in weights.items())
        own = own / sum(weights.values())
        torch.testing.assert_close(common, own, rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------- FedDyn


def test_feddyn_is_algorithm_1():
    """Three rounds of two sites; one of them misses the second."""
    lr, alpha, weights = 0.05, 0.3, {"A": 1.0, "B": 3.0}
    shares = {"A": 0.25, "B": 0.75}
    model = linear()
    server = FedDyn(alpha).aggregator(server_context(model, weights))
    networks = {name: linear() for name in weights}
    sites = {name: FedDyn(alpha).at_site(SiteContext(name, net)) for name, net in networks.items()}
    theta = flat(model)
    h = torch.zeros(3, dtype=torch.float64)
    g = {name: torch.zeros(3, dtype=torch.float64) for name in weights}
    for round_, taking_part in enumerate((["A", "B"], ["B"], ["A", "B"])):
        mean, local = WeightedMean(), {}
        for number, name in enumerate(taking_part):
            data = batches(10 * round_ + number)
            networks[name].load_state_dict(model.state_dict())
            sgd(networks[name], sites[name], data, lr)
            mean.add(networks[name].state_dict(), weights[name])
            y = theta.clone()
            for x, target in data:
                y = y - lr * (mean_squares_gradient(y, x, target) - g[name] + alpha * (y - theta))
            local[name] = y
            g[name] = g[name] - alpha * (y - theta)
            torch.testing.assert_close(flat(networks[name]), y, rtol=1e-5, atol=1e-5)
        taken = {name: weights[name] for name in taking_part}
        updated = server.result(RoundMean(round_ + 1, model.state_dict(), mean.result(), taken))
        model.load_state_dict(updated)
        h = h - alpha * sum(shares[name] * (local[name] - theta) for name in taking_part)
        average = sum(weights[name] * local[name] for name in taking_part) / sum(taken.values())
        theta = average - h / alpha
        torch.testing.assert_close(flat(model), theta, rtol=1e-5, atol=1e-5)
    assert float(h.norm()) > 0.01


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


# ---------------------------------------------------------------- FedHarmo


def harmo_site(images, name="A", **args):
    """A site of slices, which pass the method's transforms on their way to the network."""

    def batches():
        for x in images:
            sample = {Keys.IMAGE: x, "label": 0}
            for transform in part.transforms(training=False):
                sample = transform(sample)
            yield nn.functional.pad(sample[Keys.IMAGE], (0, 3))[None]  # as the network wants it

    part = FedHarmo(**args).at_site(SiteContext(name, nn.Identity(), training_images=batches))
    return part


@pytest.mark.parametrize("band", [None, 0])
def test_fedharmo_gives_images_the_amplitudes_of_the_sites_average(band):
    generator = torch.Generator().manual_seed(0)
    data = {k: torch.rand(n, 2, 6, 5, generator=generator) for k, n in {"A": 1, "B": 4, "C": 2}.items()}
    server = FedHarmo(band=band).before_training(ServerContext(nn.Identity(), 2))
    sites = {name: harmo_site(images, name, band=band) for name, images in data.items()}
    for name, site in sites.items():
        assert site.transforms(training=True) == ()
        payload = site.collect()
        check_tensors(name, payload, server.shapes)
        server.check(payload)
        server.accept(name, payload, weight=len(data[name]))
        if band == 0:
            assert int((payload["amplitude"] > 0).sum()) == 2  # nothing else leaves the site
    # Every site alike, however many images it has.
    spectra = {k: torch.fft.fft2(x.double()).abs().mean(0) for k, x in data.items()}
    mean = sum(spectra.values()) / 3
    result = server.result()
    for name, site in sites.items():
        site.apply(result)
        x = data[name][0]
        for training in (True, False):
            (transform,) = site.transforms(training=training)
            found = transform({Keys.IMAGE: x})[Keys.IMAGE]
            own = torch.fft.fft2(x.double())
            target = torch.polar(mean, own.angle())
            if band == 0:
                own[:, 0, 0] = target[:, 0, 0]
                target = own
            expected = torch.fft.ifft2(target).real
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_fedharmos_amplitudes_are_final_once_they_were_sent():
    one, other = ({"amplitude": torch.rand(1, 4, 3)} for _ in range(2))
    server = FedHarmo().before_training(ServerContext(nn.Identity(), 1))
    assert server.result() == {}
    server.accept("A", one)
    sent = server.result()
    server.accept("B", other)  # joins later
    assert torch.equal(server.result()["amplitude"], sent["amplitude"])
    restarted = FedHarmo().before_training(ServerContext(nn.Identity(), 1))
    restarted.restore(server.state())
    restarted.accept("C", other)
    assert torch.equal(restarted.result()["amplitude"], sent["amplitude"])
    for server_ in (server, restarted):
        with pytest.raises(ValueError, match=r"\(1, 4, 4\) where other sites have \(1, 4, 3\)"):
            server_.check({"amplitude": torch.rand(1, 4, 4)})
    with pytest.raises(ValueError, match="negative"):
        server.check({"amplitude": -one["amplitude"]})


def test_fedharmo_names_the_site_whose_images_have_several_sizes(
    phantom_dir, tiny_config, make_site, tmp_path
):
    with pytest.raises(DataError, match=r"site A.*different size, \(6, 5\) and \(8, 5\).*one size"):
        harmo_site([torch.rand(1, 6, 5), torch.rand(1, 8, 5)]).collect()
    # Of two sites, the second to come; of one site, test images that differ from those it trained on.
    for name, size in (("A", 16), ("B", 32)):
        make_site(name, shape=(size, size, 4))
    with pytest.raises(RunFailed, match=r"must have one size"):
        run_in_process(tiny_config("fedharmo", rounds=1), tmp_path / "data", ["A", "B"], "cpu")
    trainer = SiteTrainer(tiny_config("fedharmo"), phantom_dir, "cpu")
    site = Site("site_A", trainer)
    site.answer(Request(PREPARE, run="0" * 32))
    trainer.parts["fedharmo"].apply({"amplitude": torch.ones(1, 8, 5)})
    reply = site.answer(Request(TRAIN, 1, run="0" * 32))
    assert "site site_A: ValueError" in reply.error
    assert "do not belong to an image of shape (1, 32, 32)" in reply.error


def test_fedharmo_steps_as_fedsam_does():
    networks = [linear(), linear()]
    for network, method in zip(networks, (FedSAM(rho=0.3), FedHarmo(perturbation=0.3)), strict=True):
        sgd(network, method.at_site(SiteContext("A", network)), batches(0), lr=0.1)
    assert torch.equal(flat(networks[0]), flat(networks[1]))
    assert not torch.equal(flat(networks[0]), flat(linear()))
    still = linear()
    sgd(still, FedHarmo(perturbation=0).at_site(SiteContext("A", still)), batches(0), lr=0.1)
    plain = linear()
    sgd(plain, FedSAM(rho=0).at_site(SiteContext("A", plain)), batches(0), lr=0.1)
    assert torch.equal(flat(still), flat(plain))
    for wrong in ({"perturbation": -1}, {"band": -0.1}):
        with pytest.raises(ConfigError, match="fedharmo: perturbation"):
            FedHarmo(**wrong)


def test_fedharmos_model_is_evaluated_with_the_amplitudes_it_was_trained_with(
    phantom_dir, tiny_config, tmp_path
):
    sites = [*SITES, "site_C"]
    server = run_in_process(tiny_config("harmofl,fedbn"), phantom_dir, sites, "cpu")
    size = 32 * 17 * 4
    assert server.results()["bytes_up_before_training"]["fedharmo"] == 2 * size
    server = run_in_process(tiny_config("harmofl"), phantom_dir, sites, "cpu")
    write_run(tmp_path, server)
    found = evaluate_model(tmp_path / "global_model.pt", phantom_dir, device="cpu")
    test = server.results()["test"]
    expected = {**test["sites"], **test["unseen"]}
    assert {name: scores["dice"] for name, scores in found["sites"].items()} == {
        name: expected[name]["dice"] for name in sites
    }
    saved = torch.load(tmp_path / "global_exchange.pt", weights_only=True)
    assert saved.keys() == {"fedharmo/amplitude"}


def test_fedharmo_is_refused_by_a_site_that_adds_noise(phantom_dir, tiny_config):
    policy = PrivacyPolicy(min_images=1, noise_multiplier=1.0, max_epsilon=10.0)
    trainer = SiteTrainer(tiny_config("fedharmo"), phantom_dir, "cpu", policy=policy)
    trainer.initialize({ExtraItems.CLIENT_NAME: "site_A"})
    with pytest.raises(PrivacyRefused, match="fedharmo: there is no form of this exchange"):
        trainer.get_data_stats()
    few = SiteTrainer(tiny_config("fedharmo"), phantom_dir, "cpu", policy=PrivacyPolicy(min_images=100))
    few.initialize({ExtraItems.CLIENT_NAME: "site_A"})
    with pytest.raises(PrivacyRefused, match="min_images"):
        few.get_data_stats()


# ---------------------------------------------------------------- PartialFed


def staged_network():
    return build_network("lenet5", in_channels=3, out_channels=2)


@pytest.mark.parametrize("strategy", ["norm", "head", "norm+head", "bottom_up", "top_down"])
def test_partialfeds_strategies_are_about_modules(strategy):
    network = staged_network()
    entries = list(network.state_dict())
    norms = {e for e in entries if isinstance(network.get_submodule(e.rpartition(".")[0]), nn.BatchNorm1d)}
    norms |= {e for e in entries if isinstance(network.get_submodule(e.rpartition(".")[0]), nn.BatchNorm2d)}
    head = set(entries[-2:])
    first = {e for e in entries if e.startswith("encoder.0.")}
    expected = {
        "norm": norms,
        "head": head,
        "norm+head": norms | head,
        "bottom_up": set(entries) - first,
        "top_down": first,
    }[strategy]
    assert PartialFed(strategy).kept_at_site(network) == expected
    assert len(norms) == 20
    assert len(first) == 7


@pytest.mark.parametrize("name", ["basicunet", "unet", "resnet18"])
def test_partialfed_cuts_a_network_where_its_stages_end(name):
    network = build_network(name, in_channels=1, out_channels=2)
    entries = list(network.state_dict())
    for stages in (1, 2, 3):
        above = PartialFed("bottom_up", stages=stages).kept_at_site(network)
        below = PartialFed("top_down", stages=stages).kept_at_site(network)
        assert above | below == set(entries)
        assert not above & below
        assert entries[: len(below)] == [e for e in entries if e in below]  # an initial part of the network
    first = {"basicunet": "conv_0.", "unet": "model.0.", "resnet18": ("conv1.", "bn1.")}[name]
    assert PartialFed("top_down").kept_at_site(network) == {e for e in entries if e.startswith(first)}


def test_partialfed_with_norm_layers_is_fedbn_to_the_bit(phantom_dir, tiny_config):
    plain = run_in_process(tiny_config("fedbn"), phantom_dir, SITES, "cpu")
    config = tiny_config("partialfed", settings={"partialfed": {"strategy": "norm"}})
    partial = run_in_process(config, phantom_dir, SITES, "cpu")
    assert same(partial.state, plain.state)
    assert partial.results()["test"] == plain.results()["test"]


def test_partialfed_goes_on_with_what_a_site_did_not_load(phantom_dir, tiny_config, tmp_path):
    """And finds it again after a restart."""
    config = tiny_config("partialfed", settings={"partialfed": {"strategy": "head"}})
    extra, run = {ExtraItems.CLIENT_NAME: "site_A"}, "0" * 32
    trainer = SiteTrainer(config, phantom_dir, "cpu", tmp_path)
    trainer.initialize(extra)
    trainer.enter_run(run)
    kept = sorted(trainer.kept_keys)
    assert kept == ["final_conv.bias", "final_conv.weight"]
    initial = {key: value.clone() for key, value in trainer.network.state_dict().items()}
    trainer.train(ExchangeObject(), {"round": 1})
    own = {key: trainer.network.state_dict()[key].clone() for key in kept}
    assert not any(torch.equal(own[key], initial[key]) for key in kept)
    assert not set(kept) & trainer.get_weights().weights.keys()
    loaded = ExchangeObject(weights={key: initial[key] for key in trainer.shared})

    restarted = SiteTrainer(config, phantom_dir, "cpu", tmp_path)
    restarted.initialize(extra)
    restarted.enter_run(run)
    for site in (trainer, restarted):
        site.receive(loaded)
        assert site.recall_round(1)
        state = site.network.state_dict()
        assert all(torch.equal(state[key], own[key] if key in own else initial[key]) for key in site.shared)
        assert all(torch.equal(state[key], own[key]) for key in kept)
        site.train(loaded, {"round": 2})
    states = trainer.network.state_dict(), restarted.network.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in [*trainer.shared, *kept])


def test_partialfed_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match=r"strategy is one of norm\+head, .*not 'adaptive'"):
        PartialFed("adaptive")
    with pytest.raises(ConfigError, match="stages 0"):
        PartialFed("bottom_up", stages=0)
    with pytest.raises(ConfigError, match=r"has \d stages"):
        PartialFed("bottom_up", stages=9).kept_at_site(staged_network())
    with pytest.raises(ConfigError, match="stages of Linear are not known"):
        PartialFed("top_down").kept_at_site(linear())
    with pytest.raises(ConfigError, match="head leaves all of Linear at the site"):
        PartialFed("head").kept_at_site(linear())
    with pytest.raises(ConfigError, match="no normalisation layer"):
        PartialFed().kept_at_site(linear())


# ---------------------------------------------------------------- RandAugment


def test_randaugment_without_operations_is_fedavg_to_the_bit(phantom_dir, tiny_config):
    plain = run_in_process(tiny_config(), phantom_dir, SITES, "cpu")
    config = tiny_config("randaugment", settings={"randaugment": {"num_ops": 0}})
    assert same(run_in_process(config, phantom_dir, SITES, "cpu").state, plain.state)
    augmented = run_in_process(tiny_config("randaugment"), phantom_dir, SITES, "cpu")
    assert not same(augmented.state, plain.state)
    again = run_in_process(tiny_config("randaugment"), phantom_dir, SITES, "cpu")
    assert same(augmented.state, again.state)


@pytest.mark.parametrize("dense", [True, False])
def test_randaugment_moves_labels_where_pixels_have_them(dense):
    task = SegmentationTask(2) if dense else ClassificationTask(["a", "b"], scale=True)
    part = RandAugment(2, 9.0, ["flip_x", "rotate"]).at_site(SiteContext("A", nn.Identity(), task=task))
    assert part.transforms(training=False) == ()
    (transform,) = part.transforms(training=True)
    transform.set_random_state(0)
    label = (torch.rand(1, 8, 8) * 3).to(torch.uint8) if dense else torch.tensor(1)
    out = transform({Keys.IMAGE: torch.rand(1, 8, 8), Keys.LABEL: label})
    assert torch.equal(torch.as_tensor(out[Keys.LABEL]), label) is not dense
    with pytest.raises(ConfigError, match=r"randaugment: operations \['blur'\]"):
        build_methods([{"name": "randaugment", "args": {"operations": ["blur"]}}])


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


# ---------------------------------------------------------------- FedProto


def proto_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def proto_site(network, images, labels, **args):
    context = SiteContext(
        "A",
        network,
        num_samples=lambda: len(images),
        training_batches=lambda: zip(images.split(4), labels.split(4), strict=True),
        task=Points(),
    )
    return FedProto(**args).at_site(context)


def test_fedproto_averages_the_features_of_a_class_over_all_images():
    network = proto_network()
    server = FedProto().every_round(ServerContext(network, 1, task=Points()))
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.rand(9, 1, 2, 3, generator=generator), torch.tensor([0, 0, 0, 0, 1, 1, 0, 1, 0])),
        (torch.rand(5, 1, 2, 3, generator=generator), torch.tensor([1, 1, 0, 1, 1])),
    ]
    for images, labels in data:
        payload = proto_site(network, images, labels, passes="evaluation").collect()
        check_tensors("A", payload, server.shapes)
        server.check(payload)
        server.accept("A", payload)
    result = server.result()
    images, labels = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    features = network[:3](images).double()
    for label in (0, 1):
        expected = features[labels == label].mean(0)
        torch.testing.assert_close(result["means"][label].double(), expected, rtol=1e-5, atol=1e-6)
    assert result["counts"].tolist() == [7.0, 7.0, 0.0]
    assert result["means"][2].tolist() == [0.0] * 4
    assert server.summary() == {"classes": 2}
    spoilt = {key: value.clone() for key, value in payload.items()}
    spoilt["sums"][2] = 1.0
    with pytest.raises(ValueError, match="class without images"):
        server.check(spoilt)


def test_fedproto_sums_the_features_of_the_last_local_epoch():
    network, site_images = proto_network(), torch.rand(6, 1, 2, 3)
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    site = proto_site(network, site_images, labels)
    for _ in range(2):  # the second round has nothing of the first
        site.start_round()
        expected = torch.zeros(3, 4, dtype=torch.float64)
        for epoch in range(2):
            for batch in torch.randperm(6).split(4):
                images = site_images[batch] + epoch  # as augmentation changes them
                step = Step(network, images, labels[batch], network(images))
                site.loss(step)
                site.after_step(step)
                if epoch == 1:
                    expected.index_add_(0, labels[batch], network[:3](images).detach().double())
        sent = site.collect()
        torch.testing.assert_close(sent["sums"].double(), expected, rtol=1e-5, atol=1e-6)
        assert sent["counts"].tolist() == [2.0, 1.0, 3.0]
    with pytest.raises(ConfigError, match="passes is training or evaluation, got 'both'"):
        FedProto(passes="both")


def test_fedproto_loss_is_the_distance_of_the_batchs_prototypes():
    network = proto_network()
    images, labels = torch.rand(6, 1, 2, 3), torch.tensor([0, 0, 1, 2, 2, 2])
    site = proto_site(network, images, labels, weight=0.7)
    step = Step(network, images, labels, network(images))
    assert site.loss(step) is None  # the first round has no prototypes
    means = torch.rand(3, 4)
    site.apply({"means": means, "counts": torch.tensor([3.0, 0.0, 1.0])})
    step = Step(network, images, labels, network(images))
    loss = site.loss(step)
    features = network[:3](images).double()
    expected = 0.7 * sum(
        (features[labels == label].mean(0) - means[label].double()).square().sum().sqrt() for label in (0, 2)
    )
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    loss.backward()
    assert float(network[1].weight.grad.abs().max()) > 0
    assert network[3].weight.grad is None


def test_fedproto_at_its_prototypes_has_no_gradient_and_no_nan():
    network = proto_network()
    images, labels = torch.rand(2, 1, 2, 3), torch.tensor([0, 1])
    site = proto_site(network, images, labels)
    means = torch.cat([network[:3](images).detach(), torch.zeros(1, 4)])
    site.apply({"means": means, "counts": torch.ones(3)})
    site.loss(Step(network, images, labels, network(images))).backward()
    assert bool(torch.isfinite(network[1].weight.grad).all())


def test_fedproto_is_for_classification(tiny_config, make_photos, tmp_path):
    with pytest.raises(ConfigError, match="fedproto is defined for classification alone"):
        Composition(tiny_config("fedproto"))
    with pytest.raises(ConfigError, match="mixup mixes the labels of a batch, and fedproto needs them"):
        build_methods([{"name": "mixup"}, {"name": "fedproto"}])
    for name in "AB":
        make_photos(name, per_class=6)
    for methods in (("fedproto",), ("single", "fedproto"), ("fedproto", "fedrdn", "fedfa", "fedsam")):
        config = configure(
            find_sites(tmp_path / "photos"),
            methods=[{"name": name} for name in methods],
            network="lenet5",
            rounds=2,
            image_size=32,
        )
        server = run_in_process(config, tmp_path / "photos", ["A", "B"], "cpu")
        assert not any(entry["refused"] for entry in server.rounds)
        assert server.rounds[1]["methods"]["fedproto"] == {"classes": 2}


# ---------------------------------------------------------------- fine-tuning


def test_fine_tuning_is_local_training_before_the_test(phantom_dir, tiny_config, monkeypatch):
    sites, tested = [*SITES, "site_C"], []
    plain = run_in_process(tiny_config(), phantom_dir, sites, "cpu")
    evaluate = SegmentationTask.evaluate

    def spy(self, network, *args):
        tested.append({key: value.clone() for key, value in network.state_dict().items()})
        return evaluate(self, network, *args)

    monkeypatch.setattr(SegmentationTask, "evaluate", spy)
    config = tiny_config("finetune", settings={"finetune": {"epochs": 2}})
    tuned = run_in_process(config, phantom_dir, sites, "cpu")
    assert same(tuned.state, plain.state)
    assert same(tuned.selection.state, plain.selection.state)
    first, _, unseen = tested[-3:]
    assert all(torch.equal(unseen[key], tuned.selection.state[key]) for key in tuned.shared)

    trainer = SiteTrainer(config, phantom_dir, "cpu")
    trainer.initialize({ExtraItems.CLIENT_NAME: "site_A"})
    trainer.receive(ExchangeObject(weights={key: tuned.selection.state[key] for key in tuned.shared}))
    seed = derive_seed(config.seed, "site_A", "fine-tuning")
    torch.manual_seed(seed)
    trainer.training.run(trainer.samples.loader(trainer.own_dataset(seed), seed), 2)
    found = trainer.network.state_dict()
    assert all(torch.equal(found[key], first[key]) for key in tuned.shared)
    assert not all(torch.equal(found[key], tuned.selection.state[key]) for key in tuned.shared)


def test_fine_tuning_for_no_epochs_is_fedavg_to_the_bit(phantom_dir, tiny_config):
    plain = run_in_process(tiny_config(), phantom_dir, SITES, "cpu")
    config = tiny_config("finetune", settings={"finetune": {"epochs": 0}})
    assert run_in_process(config, phantom_dir, SITES, "cpu").results()["test"] == plain.results()["test"]


def test_a_pooled_model_is_fine_tuned_on_the_sites_own_images(phantom_dir, tiny_config, monkeypatch):
    sizes = []
    steps = LocalTraining.run

    def counted(self, loader, *args, **kwargs):
        sizes.append(len(loader.dataset))
        return steps(self, loader, *args, **kwargs)

    monkeypatch.setattr(LocalTraining, "run", counted)
    server = run_pooled(tiny_config("pooled,finetune", rounds=1), phantom_dir, SITES, "cpu")
    own = [server.sites[name] for name in SITES]
    assert sizes == [sum(own), *own]


# ---------------------------------------------------------------- on NVFlare


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods",
    [
        "scaffold,fedmix,fedavgm",
        "feddyn,fedsam,moex",
        "fednova,fedbn,mixstyle,fedrobust",
        "fedharmo,partialfed,randaugment",
        "partialfed_adaptive,fedfa,fedbn",
    ],
)
def test_nvflare_gives_the_weights_of_the_in_process_runner_bit_for_bit(
    phantom_dir, tiny_config, tmp_path, methods
):
    from medfedaug.nvflare_jobs.simulator import run_in_simulator

    config = tiny_config(methods, rounds=3)
    output = run_in_simulator(config, phantom_dir, SITES, tmp_path, "cpu")
    server = run_in_process(config, phantom_dir, SITES, "cpu")
    assert same(torch.load(output / "final_model.pt", weights_only=True), server.state)
    assert same(torch.load(output / "global_model.pt", weights_only=True), server.selection.state)
    results = json.loads((output / "results.json").read_text())
    assert results["test"] == json.loads(json.dumps(server.results()["test"]))
