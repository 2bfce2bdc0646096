"""Each method's exchange and local step against values written out by hand."""

from __future__ import annotations

import pytest
import torch
from monai.networks.nets import BasicUNet
from torch import nn

from medfedaug import functional as F
from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.methods import (
    FedBN,
    FedFA,
    FedFAh,
    FedProx,
    FedRDN,
    Norm,
    build_methods,
    method_names,
    parse_methods,
)
from medfedaug.methods.base import ServerContext, SiteContext, Step
from medfedaug.methods.fedfa import FedFAServer
from medfedaug.models import build_network, ffa_layers
from medfedaug.statistics import ChannelStatistics


def unet():
    return BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, features=(4, 8, 8, 8, 8, 4), norm="batch")


def test_parse_methods_keeps_order_and_arguments():
    assert parse_methods(" FedRDN, fedfa ", {"fedfa": {"prob": 0.2}}) == [
        {"name": "fedrdn", "args": {}},
        {"name": "fedfa", "args": {"prob": 0.2}},
    ]
    assert parse_methods("fedrdn_v,fedfa+", {"fedfa_h": {"bins": 4}}) == [
        {"name": "fedrdn", "args": {"average": True}},
        {"name": "fedfa", "args": {}},
        {"name": "fedfa_h", "args": {"bins": 4}},
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: parse_methods("fedavg,fedwrong"), ["'fedwrong'", *method_names()]),
        (lambda: parse_methods(" , "), ["no method"]),
        (lambda: parse_methods("fedavg", {"fedfa": {"prob": 1}}), ["fedfa", "not among"]),
        (lambda: build_methods([{"name": "fedfa", "args": {"probability": 1}}]), ["probability", "prob"]),
        (lambda: build_methods([{"name": "fedavg", "args": {"x": 1}}]), ["takes none"]),
        (lambda: build_methods([{"name": "fedfa"}, {"name": "fedfa"}]), ["more than once"]),
        (lambda: build_methods([{"name": "fedprox", "args": {"mu": -1}}]), ["negative"]),
        (lambda: build_methods([{"name": "norm"}, {"name": "fedrdn"}]), ["both normalise"]),
        (lambda: build_methods([{"name": "fedfa_h", "args": {"bins": 1}}]), ["bins"]),
        (lambda: FedFAh(stage=9).every_round(ServerContext(unet(), 1)), ["9", "enc1", "enc5"]),
        (lambda: FedFAh().every_round(ServerContext(nn.Conv2d(1, 1, 1), 1)), ["Conv2d", "not known"]),
    ],
)
def test_what_cannot_be_built_says_why(call, words):
    with pytest.raises(ConfigError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_fedbn_keeps_norm_layers_by_type_not_by_name():
    class Oddly(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn_conv = nn.Conv2d(1, 2, 1)  # a word in a key proves nothing
            self.downsample = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2))
            self.last = nn.InstanceNorm3d(2, affine=True)
            self.plain = nn.InstanceNorm2d(2)

    kept = FedBN().kept_at_site(Oddly())
    batch = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    expected = {f"downsample.1.{key}" for key in batch}
    expected |= {"downsample.2.weight", "downsample.2.bias", "last.weight", "last.bias"}
    assert kept == expected
    with pytest.raises(ConfigError, match=r"has none.*norm='batch'"):
        FedBN().kept_at_site(nn.Conv2d(1, 1, 1))


def test_fedrdn_exchange_gives_every_site_all_pairs():
    own = {
        "A": ChannelStatistics([1.0, 2.0], [0.5, 0.25], 3),
        "B": ChannelStatistics([-1.0, 0.1], [2.0, 4.0], 7),
    }
    method = FedRDN()
    server = method.before_training(ServerContext(nn.Identity(), in_channels=2))
    sites = {name: method.at_site(SiteContext(name, nn.Identity(), lambda s=s: s)) for name, s in own.items()}
    for name, site in sites.items():
        payload = site.before_training.collect()
        assert {key: tuple(value.shape) for key, value in payload.items()} == server.shapes
        server.check(payload)
        server.accept(name, payload)
    for name, site in sites.items():
        site.before_training.apply(server.result())
        assert site.pairs == own
        image = torch.ones(2, 4, 4)
        (evaluation,) = site.transforms(training=False)
        expected = (image - own[name].mean[:, None, None]) / own[name].std[:, None, None]
        torch.testing.assert_close(torch.as_tensor(evaluation({"image": image})["image"]), expected.float())
    assert server.channel_statistics() == own


def test_fedrdn_at_a_site_that_joined_no_exchange_uses_its_own():
    own = ChannelStatistics([3.0], [2.0], 1)
    site = FedRDN().at_site(SiteContext("late", nn.Identity(), lambda: own))
    (evaluation,) = site.transforms(training=False)
    assert float(torch.as_tensor(evaluation({"image": torch.full((1, 2, 2), 7.0)})["image"])[0, 0, 0]) == 2.0


@pytest.mark.parametrize("std", [0.0, -1.0, 1e30])
def test_fedrdn_refuses_a_deviation_that_cannot_divide(std):
    server = FedRDN().before_training(ServerContext(nn.Identity(), in_channels=1))
    with pytest.raises(ValueError, match="standard deviation"):
        server.check({"mean": torch.zeros(1), "std": torch.tensor([std]), "count": torch.ones(1)})


def test_fedfa_exchange_equals_equations_6_and_7():
    method = FedFA()
    networks = [method.prepare_network(unet()) for _ in range(3)]
    sites = [method.at_site(SiteContext(str(i), net, lambda: None)) for i, net in enumerate(networks)]
    server = method.every_round(ServerContext(networks[0], 1))
    generator = torch.Generator().manual_seed(0)
    for network in networks:
        for layer in ffa_layers(network).values():
            layer.running_mean.normal_(generator=generator)
            layer.running_std.uniform_(0.1, 2, generator=generator)
            layer.num_active_batches.fill_(1)
    sent = [site.every_round.collect() for site in sites]
    for i, payload in enumerate(sent):
        assert {key: tuple(value.shape) for key, value in payload.items()} == server.shapes
        server.accept(str(i), payload)
    result = server.result()
    for stage in ffa_layers(networks[0]):
        for key in ("mean", "std"):
            values = torch.stack([payload[f"{stage}/{key}"] for payload in sent]).double()
            variance = ((values - values.mean(0)) ** 2).mean(0)
            weight = 1 / (1 + 1 / variance)
            gamma = len(variance) * weight / weight.sum()
            torch.testing.assert_close(result[f"{stage}/gamma_{key}"].double(), gamma, rtol=1e-6, atol=1e-7)
            assert float(gamma.std()) > 0.01  # it differs by channel
    sites[0].every_round.apply(result)
    for stage, layer in ffa_layers(networks[0]).items():
        assert torch.equal(layer.gamma_mean, result[f"{stage}/gamma_mean"])
    low, high = server.summary()["enc1"]["gamma_std"]
    assert low < 1 < high


def test_fedfa_starts_afresh_each_round_and_direct_fusion_sends_variances():
    network = FedFA(variance="direct").prepare_network(unet())
    server = FedFA(variance="direct").every_round(ServerContext(network, 1))
    for values in ((0.0, 2.0), (5.0, 5.0)):
        for site, value in enumerate(values):
            server.accept(str(site), {key: torch.full(shape, value) for key, shape in server.shapes.items()})
        expected = F.across_site_variance(torch.tensor(values)[:, None])
        assert float(server.result()["enc1/gamma_mean"][0]) == float(expected)


def test_a_run_gives_the_gamma_of_the_public_equations(tiny_config, phantom_dir, monkeypatch):
    sent, accept = [], FedFAServer.accept

    def keep(self, site, payload, *args):
        sent.append(payload)
        accept(self, site, payload, *args)

    monkeypatch.setattr(FedFAServer, "accept", keep)
    config = tiny_config("fedfa", rounds=1, settings={"fedfa": {"prob": 1.0}})
    server = run_in_process(config, phantom_dir, ["site_A", "site_B"], "cpu")
    assert len(sent) == 2
    ranges = server.results()["rounds"][0]["methods"]["fedfa"]
    for stage, which in (key.rsplit("/", 1) for key in sent[0]):
        values = torch.stack([payload[f"{stage}/{which}"].double() for payload in sent])
        gamma = F.student_t_modulation(F.across_site_variance(values))
        expected = [float(gamma.min()), float(gamma.max())]
        assert ranges[stage][f"gamma_{which}"] == pytest.approx(expected, rel=1e-6)
        assert expected[0] < expected[1]


def test_fedfa_payload_of_the_papers_unet_is_15_5_kib():
    network = FedFA().prepare_network(
        BasicUNet(spatial_dims=2, features=(32, 64, 128, 256, 512, 32), norm="batch", act="relu")
    )
    server = FedFA().every_round(ServerContext(network, 1))
    site = FedFA().at_site(SiteContext("A", network, lambda: None))
    up = site.every_round.collect()
    server.accept("A", up)
    both = [*up.values(), *server.result().values()]
    assert sum(value.numel() * value.element_size() for value in both) == 15.5 * 1024


def test_fedprox_term_is_half_mu_times_the_squared_distance():
    network = nn.Linear(2, 1)
    part = FedProx(mu=0.4).at_site(SiteContext("A", network, lambda: None))
    part.start_round()
    start = [p.detach().clone() for p in network.parameters()]
    step = Step(network, torch.zeros(1), torch.zeros(1), torch.zeros(1))
    assert float(part.loss(step).detach()) == 0.0
    with torch.no_grad():
        network.weight.add_(torch.tensor([[1.0, 2.0]]))
        network.bias.add_(3.0)
    loss = part.loss(step)
    assert float(loss.detach()) == pytest.approx(0.2 * (1 + 4 + 9))
    loss.backward()
    torch.testing.assert_close(network.weight.grad, 0.4 * (network.weight.detach() - start[0]))


def test_fedrdn_v_uses_the_average_pair_in_training_and_at_test():
    pairs = {"A": ChannelStatistics([1.0], [1.0], 1), "B": ChannelStatistics([3.0], [5.0], 1)}
    site = FedRDN(average=True).at_site(SiteContext("A", nn.Identity(), lambda: pairs["A"]))
    server = FedRDN().before_training(ServerContext(nn.Identity(), 1))
    for name, pair in pairs.items():
        server.accept(name, {"mean": pair.mean, "std": pair.std, "count": torch.ones(1)})
    site.before_training.apply(server.result())
    for training in (True, False):
        (transform,) = site.transforms(training=training)
        found = torch.as_tensor(transform({"image": torch.full((1, 2, 2), 8.0)})["image"])
        torch.testing.assert_close(found, torch.full((1, 2, 2), (8.0 - 2.0) / 3.0))


def test_norm_uses_the_sites_own_pair_in_training_and_at_test():
    own = ChannelStatistics([2.0], [4.0], 1)
    site = Norm().at_site(SiteContext("A", nn.Identity(), lambda: own))
    for training in (True, False):
        (transform,) = site.transforms(training=training)
        assert float(torch.as_tensor(transform({"image": torch.full((1, 1, 1), 10.0)})["image"])) == 2.0
    assert Norm().before_training(ServerContext(nn.Identity(), 1)) is None


def histogram_site(images, **args):
    """A site of FedFAʰ whose network is a U-Net and whose training set is ``images`` in batches of two."""
    torch.manual_seed(0)
    network = unet()
    method = FedFAh(**args)
    context = SiteContext(
        "A", network, num_samples=lambda: len(images), training_images=lambda: iter(images.split(2))
    )
    return network, method, method.at_site(context)


@pytest.mark.parametrize("samples", ["images", "pixels"])
def test_fedfa_h_histogram_is_equations_11_and_12_over_the_training_set(samples):
    # Plainly different images, or rounding is what fills the bins.
    images = torch.rand(5, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    images = images * torch.tensor([1.0, 9.0, 3.0, -4.0, 30.0])[:, None, None, None]
    network, _, site = histogram_site(images, bins=6, tau=0.1, samples=samples, stage=1)
    found = site.collect()["histogram"].double()

    features = {}
    network.down_1.max_pooling.register_forward_hook(lambda m, i, o: features.update(z=o.detach().double()))
    network.eval()(images)
    z = (
        features["z"].mean(dim=(2, 3))
        if samples == "images"
        else features["z"].permute(0, 2, 3, 1).flatten(0, 2)
    )
    scaled = (z - z.amin(0)) / (z.amax(0) - z.amin(0)).clamp_min(1e-30)
    bins = 6
    cuts = [index / (bins - 2) for index in range(bins - 1)]
    bias = torch.tensor([-sum(cuts[:index]) for index in range(bins)], dtype=torch.float64)
    logits = (scaled[..., None] * torch.arange(1, bins + 1) + bias) / 0.1
    expected = torch.softmax(logits, dim=-1).mean(dim=0)
    alive = (z.amax(0) - z.amin(0)) > 1e-2
    assert int(alive.sum()) >= 2
    torch.testing.assert_close(found[alive], expected[alive], rtol=1e-3, atol=1e-4)


def test_fedfa_h_gives_the_same_histogram_when_it_cannot_keep_the_features(monkeypatch):
    images = torch.rand(5, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    kept = histogram_site(images)[2].collect()["histogram"]
    monkeypatch.setattr("medfedaug.methods.fedfa_h._KEPT_BYTES", 0)
    torch.testing.assert_close(histogram_site(images)[2].collect()["histogram"], kept)


def test_fedfa_h_loss_is_lambda_times_the_divergence_and_moves_the_encoder():
    images = torch.rand(4, 1, 32, 32, generator=torch.Generator().manual_seed(2))
    network, method, site = histogram_site(images, weight=0.5, tau=2.0)
    network.train()
    step = Step(network, images, images, network(images))
    assert site.loss(step) is None  # the first round has nothing to align with
    histogram = site.collect()["histogram"]
    target = torch.softmax(torch.randn(histogram.shape, generator=torch.Generator().manual_seed(3)), dim=1)
    site.apply({"histogram": target})
    # Batch statistics and running statistics are far apart in an untrained network, and bins then empty.
    site.low, site.high = torch.full((8,), -3.0), torch.full((8,), 3.0)
    network.train()
    features = {}
    hook = network.down_4.register_forward_hook(lambda m, i, o: features.update(z=o.mean(dim=(2, 3))))
    step = Step(network, images, images, network(images))
    hook.remove()
    own = F.soft_histogram(features["z"], 8, 2.0, site.low, site.high).double()
    kl = 0.5 * ((own * (own / target).log()).sum(1) + (target * (target / own).log()).sum(1)).mean()
    loss = site.loss(step)
    assert float(loss.detach()) == pytest.approx(float(method.weight * kl.detach()), rel=1e-4)
    loss.backward()
    gradient = network.conv_0.conv_0.conv.weight.grad
    assert bool(torch.isfinite(gradient).all())
    assert float(gradient.abs().max()) > 0


def test_fedfa_plus_aligns_the_augmented_features():
    images = torch.rand(4, 1, 32, 32)
    network = FedFA(prob=1.0).prepare_network(unet())
    site = FedFAh().at_site(SiteContext("A", network))
    seen = {}
    layer = ffa_layers(network)["enc5"]
    layer.register_forward_hook(lambda m, i, o: seen.update(before=i[0], after=o))
    network.train()(images)
    assert not torch.equal(seen["before"], seen["after"])
    torch.testing.assert_close(site._features, seen["after"].flatten(2).mean(2))


def test_fedfa_h_server_averages_and_refuses_what_is_no_histogram():
    server = FedFAh(bins=2).every_round(ServerContext(unet(), 1))
    assert server.shapes == {"histogram": (8, 2)}
    a, b = torch.tensor([[0.2, 0.8]]).repeat(8, 1), torch.tensor([[0.6, 0.4]]).repeat(8, 1)
    for site, histogram in (("A", a), ("B", b)):
        server.check({"histogram": histogram})
        server.accept(site, {"histogram": histogram})
    torch.testing.assert_close(server.result()["histogram"], (a + b) / 2)
    server.accept("A", {"histogram": b})
    torch.testing.assert_close(server.result()["histogram"], b)
    for wrong in (a * 1e30, a - 0.3, torch.zeros(8, 2)):
        with pytest.raises(ValueError, match="not histograms"):
            server.check({"histogram": wrong})


@pytest.mark.parametrize(
    ("network", "args", "both_ways"),
    [("alexnet", {}, 16), ("basicunet", {"features": (32, 64, 128, 256, 512, 32)}, 32)],
)
def test_histogram_payload_is_the_papers(network, args, both_ways):
    net = build_network(network, in_channels=3, out_channels=10, **args)
    server = FedFAh().every_round(ServerContext(net, 3))
    channels, bins = server.shapes["histogram"]
    assert 2 * 4 * channels * bins == both_ways * 1024


def test_ffa_payload_of_the_papers_alexnet_is_18_kib():
    network = FedFA().prepare_network(build_network("alexnet", in_channels=3, out_channels=10))
    server = FedFA().every_round(ServerContext(network, 3))
    assert 2 * sum(4 * shape[0] for shape in server.shapes.values()) == 18 * 1024
