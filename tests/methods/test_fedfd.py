"""FedFD, FedFD-A and SiloBN: losses, exchanges and what becomes of an unseen site."""

import copy

import pytest
import torch
from fedfd_loop import L1, L2, SITES, STATISTICS, diversified_loss, layers
from monai.networks.nets import BasicUNet
from reference import UNEVEN, assert_models, assert_same, federated_averaging, mean, step_down
from running import TINY_ARGS
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.federation import FederationServer, SiteTrainer, run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.methods import FedFD, build_methods
from medfedaug.methods.base import ServerContext, SiteContext, Step
from medfedaug.models import build_network, find_head, instance_adapters
from medfedaug.models.adaptation import RandomMix, adaptive_norms, interpolating


def step_of(network, inputs, targets, criterion):
    outputs = network(inputs)
    return Step(network, inputs, targets, outputs, criterion)


def drawn_payload(network, method, seed=0):
    """Draw a server's payload: averages of two different sites."""
    server = method.every_round(ServerContext(network, 1))
    generator = torch.Generator().manual_seed(seed)
    payload = {}
    for key, shape in server.shapes.items():
        low = 0.5 if key.endswith("running_var") else -0.5
        payload[key] = torch.empty(shape).uniform_(low, 1.5, generator=generator)
    return payload


CASES = {
    "segmentation": ("basicunet", {"features": (4, 8, 8, 8, 8, 4)}, 1, (3, 1, 32, 32), nn.CrossEntropyLoss()),
    "3D": ("unet", {"spatial_dims": 3}, 1, (2, 1, 16, 16, 16), nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize(("case", "distance"), [("segmentation", "sum"), ("3D", "mean")])
def test_the_loss_is_equation_5(case, distance):
    name, args, channels, shape, criterion = CASES[case]
    torch.manual_seed(0)
    network = build_network(name, in_channels=channels, out_channels=2, **args)
    method = FedFD(lambda1=0.3, lambda2=2.0, distance=distance)
    network = method.prepare_network(network).double().train()
    site = method.at_site(SiteContext("A", network))
    inputs = torch.randn(shape, dtype=torch.float64)
    targets = torch.randint(0, 2, (shape[0], *shape[2:]))
    step = step_of(network, inputs, targets, criterion)
    site.after_pass(step)
    assert site.loss(step) is None  # nothing was averaged yet
    site.apply(drawn_payload(network, method))

    kept = {}
    find_head(network).register_forward_pre_hook(lambda m, a: kept.update(f=a[0]))
    reference = copy.deepcopy(network)
    torch.manual_seed(1)
    step = step_of(network, inputs, targets, criterion)
    site.after_pass(step)
    result = step.task_loss + site.loss(step)

    kept_of = {}
    find_head(reference).register_forward_pre_hook(lambda m, a: kept_of.update(f=a[0]))
    torch.manual_seed(1)
    plain = criterion(reference(inputs), targets)
    f = kept_of["f"]
    with interpolating(reference, RandomMix()):
        diversified = criterion(reference(inputs), targets)
    squares = (f - kept_of["f"]) ** 2
    cafl = squares.sum() / (squares.numel() / f.shape[1]) / (f.shape[1] if distance == "mean" else 1)
    torch.testing.assert_close(result, 0.7 * plain + 0.3 * diversified + 2.0 * cafl)
    assert float(cafl.detach()) > 0.01
    ours = torch.autograd.grad(result, next(iter(network.parameters())))[0]
    theirs = torch.autograd.grad(0.7 * plain + 0.3 * diversified + 2.0 * cafl, next(reference.parameters()))[
        0
    ]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("methods", ["fedfd", "fedfd_a", "silobn"])
def test_a_network_without_batch_norm_is_refused_with_the_way_out(tiny_config, methods):
    config = tiny_config(methods, network_args={**TINY_ARGS, "norm": ["group", {"num_groups": 1}]})
    with pytest.raises(ConfigError, match=r"UNet has no .*norm='batch'"):
        Composition(config)


def test_the_exchange_is_the_average_weighted_as_the_models_are():
    method, networks = FedFD(), []
    for seed in range(2):
        torch.manual_seed(seed)
        network = method.prepare_network(BasicUNet(2, 1, 2, features=(4, 8, 8, 8, 8, 4), norm="batch"))
        network.train()(torch.randn(2, 1, 32, 32) * (seed + 1))
        networks.append(network)
    sites = [method.at_site(SiteContext(str(i), net)) for i, net in enumerate(networks)]
    server = method.every_round(ServerContext(networks[0], 1))
    sent = [site.every_round.collect() for site in sites]
    for index, payload in enumerate(sent):
        assert {key: tuple(value.shape) for key, value in payload.items()} == server.shapes
        server.check(payload)
        server.accept(str(index), payload, weight=(1.0, 3.0)[index])
    result = server.result()
    for key in server.shapes:
        torch.testing.assert_close(result[key], (sent[0][key] + 3 * sent[1][key]) / 4)
    sites[0].apply(result)
    name, norm = next(iter(adaptive_norms(networks[0]).items()))
    assert torch.equal(norm.global_mean, result[f"{name}.running_mean"])
    kept = sites[0].default_local_entries()
    assert kept.keys() <= networks[0].state_dict().keys()
    wrong = {**sent[0], f"{name}.running_var": -torch.ones_like(norm.running_var)}
    with pytest.raises(ValueError, match="negative"):
        server.check(wrong)


def trained_payload(server):
    return {key.split("/", 1)[1]: value for key, value in server.selection.payload.items()}


@pytest.mark.parametrize("methods", ["fedfd", "fedfd_a,silobn"])
def test_an_unseen_site_is_scored_by_the_selected_model_and_its_entries(tiny_config, phantom_dir, methods):
    server = run_in_process(tiny_config(methods, rounds=3), phantom_dir, SITES, "cpu")
    scores = server.results()["test"]["unseen"]["site_C"]
    assert 0 <= scores["dice"] <= 1

    # The same by hand: the selected weights, with the statistics and adapters of that round.
    composition = Composition(server.config)
    network, payload = composition.network, trained_payload(server)
    network.load_state_dict({key: server.selection.state[key] for key in composition.shared}, strict=False)
    for name, norm in adaptive_norms(network).items():
        norm.set_global_statistics(payload[f"{name}.running_mean"], payload[f"{name}.running_var"])
        norm.running_mean.copy_(payload[f"{name}.running_mean"])
        norm.running_var.copy_(payload[f"{name}.running_var"])
    for name, adapter in instance_adapters(network).items():
        for key, parameter in adapter.named_parameters():
            parameter.data.copy_(payload[f"{name}.adapter.{key}"])
    trainer = SiteTrainer(server.config, phantom_dir, "cpu")
    trainer.open("site_C")
    cases = [trainer.task.evaluation_case(trainer.folder, case) for case in trainer.folder.cases["test"]]
    transform = trainer.evaluation_transform()
    assert trainer.task.evaluate(network, cases, transform, 4, full=True) == scores


def test_the_selected_payload_survives_a_restart_of_the_server(tiny_config, phantom_dir, tmp_path):
    server = run_in_process(tiny_config("fedfd_a", rounds=2), phantom_dir, SITES, "cpu")
    server.save(tmp_path / "server.pt")
    other = FederationServer(server.config)
    other.restore(tmp_path / "server.pt")
    request, expected = other.test(), server.test()
    assert request.payload.keys() == expected.payload.keys()
    assert len(request.payload) > 0
    assert all(torch.equal(request.payload[key], value) for key, value in expected.payload.items())


def test_methods_whose_loss_runs_the_network_again_come_last():
    methods = build_methods([{"name": "fedfd_a"}, {"name": "fedfa_h"}, {"name": "fedfa"}])
    assert [method.name for method in methods] == ["fedfa_h", "fedfa", "fedfd_a"]


@pytest.mark.parametrize("other", ["", ",silobn"])
def test_a_federation_mixes_statistics_with_those_of_the_round_before(federate, other):
    settings = {"fedfd": {"lambda1": L1, "lambda2": L2}}
    network = {"local_epochs": 2}
    run = federate(f"fedfd{other}", plan=UNEVEN, settings=settings, **network)
    shared, sent = {0: None}, {}

    def train(site, round_, net):
        if round_ not in shared and round_ > 1:  # what the server made of the round before
            sites = sent[round_ - 1]
            shared.setdefault(
                round_ - 1, mean(list(sites.values()), [run.server.sites[name] for name in sites])
            )
        net.train()
        batches = run.batches[site, round_]
        for (x, y), draws in zip(batches, batches.draws, strict=True):
            step_down(net, diversified_loss(net, x, y, shared[round_ - 1], list(draws)), 0.05)
        sent.setdefault(round_, {})[site] = {
            f"{name}.{entry}": getattr(norm, entry).clone()
            for name, _, norm in layers(net)
            for entry in STATISTICS
        }

    keeps = (lambda key: key.endswith(STATISTICS)) if other else (lambda key: False)
    assert_models(run, federated_averaging(run, train, keeps), atol=2e-6)
    assert_same(
        {key.removeprefix("fedfd/"): value for key, value in run.requests[3].payload.items()}, shared[2]
    )
