"""FedFA against Eq. 2 to 10 and Algorithms 1 and 2 of the FedFA+ paper, with the draws of the run."""

import pytest
import torch
from monai.networks.nets import BasicUNet
from reference import UNEVEN, assert_models, assert_same, federated_averaging, step_down
from torch.nn.functional import cross_entropy

from medfedaug import functional as F
from medfedaug.methods import FedFA
from medfedaug.methods.base import ServerContext

EPS = 1e-6  # inside the root of Eq. 2


def statistics(z):
    """Eq. 2, (B, C) each."""
    mean = z.mean((2, 3))
    return mean, ((z - mean[..., None, None]).square().mean((2, 3)) + EPS).sqrt()


def variance(values):
    """Eq. 4 and 6: over the images of a batch, or over the sites."""
    return (values - values.mean(0)).square().mean(0)


def modulated(values):
    """Eq. 7 of (M, C)."""
    weights = 1 / (1 + 1 / variance(values))
    return len(weights) * weights / weights.sum()


def spread(values, gamma, kind):
    """The deviations of the Gaussians of Eq. 3, (C,): Eq. 8 and its variants."""
    if kind == "random":
        return torch.full_like(values[0], 0.5)
    return ((gamma + 1) * variance(values)).sqrt()


@pytest.mark.parametrize(("kind", "momentum"), [("adaptive", 0.5), ("client", 0.9), ("random", 0.9)])
def test_features_are_augmented_by_as_much_as_the_sites_differ(federate, kind, momentum):
    settings = {"fedfa": {"variance": kind, "momentum": momentum}}
    # B comes back with what it had: its statistics begin anew, as Algorithm 1 says.
    run = federate("fedfa", plan=UNEVEN, settings=settings, local_epochs=2)
    stages = ("enc1", "enc2")
    gamma = dict.fromkeys([(stage, which) for stage in stages for which in (0, 1)], torch.zeros(()))
    sent, active = {}, []

    def augmented(z, stage, running, draws):
        active.append(float(draws.pop(0)) < 0.5)
        if not active[-1]:
            return z
        noise = [draws.pop(0).double() for _ in range(2)]
        result = statistics(z)
        for which, values in enumerate(result):
            running[stage, which] = momentum * running[stage, which] + (1 - momentum) * values.detach().mean(
                0
            )
        factor = gamma if kind == "adaptive" else dict.fromkeys(gamma, torch.zeros(()))
        mean, std = (
            values + noise[which] * spread(values, factor[stage, which], kind)
            for which, values in enumerate(result)
        )
        normal = (z - result[0][..., None, None]) / result[1][..., None, None]
        return normal * std[..., None, None] + mean[..., None, None]

    def train(site, round_, network):
        if (round_, "done") not in sent and round_ > 1:  # the server, between two rounds
            for key in gamma:
                gamma[key] = modulated(torch.stack([one[key] for one in sent[round_ - 1].values()]))
            sent[round_, "done"] = True
        running = {
            (stage, which): torch.full((w,), float(which), dtype=torch.float64)
            for stage, w in zip(stages, (4, 5), strict=True)
            for which in (0, 1)
        }
        network.train()
        batches = run.batches[site, round_]
        for (x, y), drawn in zip(batches, batches.draws, strict=True):
            z, draws = x, list(drawn)
            for name, stage in zip(stages, network.encoder, strict=True):
                z = augmented(stage(z), name, running, draws)
            step_down(network, cross_entropy(network.head(z), y), 0.05)
        sent.setdefault(round_, {})[site] = running

    rounds = federated_averaging(run, train)
    assert {True, False} == set(active)
    for round_ in (1, 2, 3):
        for site, running in sent[round_].items():
            payload = run.replies[round_][site].payload
            expected = {f"fedfa/{s}/{('mean', 'std')[which]}": value for (s, which), value in running.items()}
            assert_same(payload, expected, atol=5e-6)
    assert_models(run, rounds, atol=5e-6)
    for key, value in run.requests[3].payload.items():
        stage, which = key.removeprefix("fedfa/").split("/")
        result = modulated(torch.stack([s[stage, int(which == "gamma_std")] for s in sent[2].values()]))
        torch.testing.assert_close(value.double(), result, rtol=1e-3, atol=1e-3)


def unet():
    return BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, features=(4, 8, 8, 8, 8, 4), norm="batch")


def test_fedfa_starts_afresh_each_round_and_direct_fusion_sends_variances():
    network = FedFA(variance="direct").prepare_network(unet())
    server = FedFA(variance="direct").every_round(ServerContext(network, 1))
    for values in ((0.0, 2.0), (5.0, 5.0)):
        for site, value in enumerate(values):
            server.accept(str(site), {key: torch.full(shape, value) for key, shape in server.shapes.items()})
        expected = F.across_site_variance(torch.tensor(values)[:, None])
        assert float(server.result()["enc1/gamma_mean"][0]) == float(expected)
