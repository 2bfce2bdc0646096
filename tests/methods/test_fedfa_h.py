"""FedFAʰ against Eq. 11 to 15 of the FedFA+ paper, at sites that join late and miss rounds."""

import pytest
import torch
from monai.networks.nets import BasicUNet
from reference import assert_same, copied, descend, entries, images_of, mean

from medfedaug.methods import FedFA, FedFAh
from medfedaug.methods.base import ServerContext, SiteContext
from medfedaug.models import build_network, ffa_layers

BINS, TAU, WEIGHT = 4, 0.8, 0.05


def features(network, images):
    """z of Eq. 12: the last stage's output, averaged over space, (N, C)."""
    return network.encoder(images).mean(dim=(2, 3))


def histogram(z, low, high):
    """Eq. 11 and 12, (C, L)."""
    cuts = torch.arange(BINS - 1, dtype=torch.float64) / (BINS - 2)
    bias = torch.tensor([-float(cuts[:k].sum()) for k in range(BINS)], dtype=torch.float64)
    scaled = (z - low) / (high - low)
    logits = torch.arange(1, BINS + 1) * scaled[..., None] + bias
    return torch.softmax(logits / TAU, dim=-1).mean(dim=0)


def divergence(p, q):
    """Eq. 14, the mean over the channels."""
    both = (p * (p / q).log()).sum(1) + (q * (q / p).log()).sum(1)
    return both.mean() / 2


@torch.no_grad()
def range_of(network, images):
    z = features(network.eval(), images)
    return z.amin(0), z.amax(0)


def by_hand(run, plan, reading="stored"):
    """The global models and histograms, by round, under a reading of the range."""
    model, target, ranges, result = run.network(), None, {}, []
    for round_, participants in enumerate(plan, start=1):
        local, histograms = [], []
        for site in participants:
            batches = run.batches[site, round_]
            images, _ = images_of(batches, run.server.sites[site])
            network = copied(model)
            # The site's own model of the round before, or the global one where it took no part in it.
            low, high = ranges.get((site, round_ - 1)) or range_of(network, images)

            # What the pass of the loss itself makes of the batch.
            seen = {}
            handle = network.encoder.register_forward_hook(
                lambda _module, _args, out, seen=seen: seen.update(z=out.mean(dim=(2, 3)))
            )

            def term(_net, _x, _y, low=low, high=high, target=target, seen=seen):
                if target is None:
                    return 0.0
                if reading == "batch":
                    low, high = seen["z"].amin(0), seen["z"].amax(0)
                return WEIGHT * divergence(histogram(seen["z"], low, high), target)

            descend(network, batches, 0.05, term)
            handle.remove()
            ranges[site, round_] = range_of(network, images)
            with torch.no_grad():
                histograms.append(histogram(features(network, images), *ranges[site, round_]))
            local.append(entries(network))
        model = copied(model, mean(local, [run.server.sites[site] for site in participants]))
        target = sum(histograms) / len(histograms)
        result.append((entries(model), target))
    return result


SETTINGS = {"fedfa_h": {"bins": BINS, "tau": TAU, "weight": WEIGHT, "range": "stored"}}
NETWORK = {"learning_rate": 0.05}
# C joins late, B misses two rounds, A is always there; D comes for the last round alone.
PLAN = [("A", "B"), ("A", "C"), ("A", "C"), ("A", "B", "C", "D")]


def check(run, plan, reading="stored"):
    for round_, (model, target) in enumerate(by_hand(run, plan, reading), start=1):
        assert_same(run.models[round_], model, atol=2e-5)
        received = run.server.payload if round_ == len(plan) else run.requests[round_ + 1].payload
        torch.testing.assert_close(received["fedfa_h/histogram"].double(), target, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("reading", "restarts"), [("batch", False), ("stored", False), ("stored", True)])
def test_a_site_that_joins_late_or_misses_rounds_aligns_from_its_first_step_on(
    federate, tmp_path, reading, restarts
):
    states = tmp_path / "states" if restarts else None
    sizes = {"A": 5, "B": 10, "C": 15, "D": 5}
    settings = {"fedfa_h": {**SETTINGS["fedfa_h"], "range": reading}}
    run = federate("fedfa_h", plan=PLAN, sizes=sizes, settings=settings, rounds=4, states=states, **NETWORK)
    check(run, PLAN, reading)


def unet():
    return BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, features=(4, 8, 8, 8, 8, 4), norm="batch")


def histogram_site(images, **args):
    """A site of FedFAʰ whose network is a U-Net and whose training set is ``images`` in batches of two."""
    torch.manual_seed(0)
    network = unet()
    method = FedFAh(**args)
    context = SiteContext(
        "A", network, num_samples=lambda: len(images), training_images=lambda: iter(images.split(2))
    )
    return network, method, method.at_site(context)


def test_the_histogram_of_pixels_is_equations_11_and_12_over_the_training_set():
    # Plainly different images, or rounding is what fills the bins.
    images = torch.rand(5, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    images = images * torch.tensor([1.0, 9.0, 3.0, -4.0, 30.0])[:, None, None, None]
    network, _, site = histogram_site(images, bins=6, tau=0.1, samples="pixels", stage=1)
    result = site.collect()["histogram"].double()

    features = {}
    network.down_1.max_pooling.register_forward_hook(lambda m, i, o: features.update(z=o.detach().double()))
    network.eval()(images)
    z = features["z"].permute(0, 2, 3, 1).flatten(0, 2)
    scaled = (z - z.amin(0)) / (z.amax(0) - z.amin(0)).clamp_min(1e-30)
    bins = 6
    cuts = [index / (bins - 2) for index in range(bins - 1)]
    bias = torch.tensor([-sum(cuts[:index]) for index in range(bins)], dtype=torch.float64)
    logits = (scaled[..., None] * torch.arange(1, bins + 1) + bias) / 0.1
    expected = torch.softmax(logits, dim=-1).mean(dim=0)
    alive = (z.amax(0) - z.amin(0)) > 1e-2
    assert int(alive.sum()) >= 2
    torch.testing.assert_close(result[alive], expected[alive], rtol=1e-3, atol=1e-4)


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


def test_the_server_averages_histograms_and_refuses_other_values():
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


def test_histogram_payload_is_the_papers():
    net = build_network("basicunet", in_channels=3, out_channels=10, features=(32, 64, 128, 256, 512, 32))
    server = FedFAh().every_round(ServerContext(net, 3))
    channels, bins = server.shapes["histogram"]
    assert 2 * 4 * channels * bins == 32 * 1024
