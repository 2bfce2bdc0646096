"""FedSR in whole federations, against the loss of Nguyen et al., NeurIPS 2022, with the draws of the run."""

from __future__ import annotations

import pytest
import torch
from reference import UNEVEN, assert_models, assert_same, federated_averaging, mean
from torch.nn.functional import cross_entropy, softplus

from medfedaug.federation.composition import Composition

L2, CMI, RATE = 0.05, 0.1, 0.2


@pytest.mark.parametrize("share", [True, False])
def test_the_head_learns_from_draws_that_hold_little(federate, share):
    settings = {"fedsr": {"l2": L2, "cmi": CMI, "learning_rate": RATE, "share_references": share}}
    run = federate("fedsr", plan=UNEVEN, settings=settings, network="reference_convolutional", local_epochs=2)
    method = next(m for m in Composition(run.config).methods if m.name == "fedsr")
    start = {key: value.double() for key, value in method.representation().state_dict().items()}
    sent, own, common = {}, {}, {}

    def train(site, round_, network):
        if round_ > 1 and round_ not in common:
            sites = sent[round_ - 1]
            common[round_] = mean(list(sites.values()), [run.server.sites[one] for one in sites])
        extra = {**start, **own.get(site, {}), **common.get(round_, {})}
        extra = {key: value.clone().requires_grad_() for key, value in extra.items()}
        network.train()
        batches = run.batches[site, round_]
        for (x, y), draws in zip(batches, batches.draws, strict=True):
            mu = network.encoder(x).mean((2, 3))
            sigma = softplus(mu @ extra["deviation.weight"].T + extra["deviation.bias"]) + 1e-6
            z = mu + sigma * draws[0].double()
            m, s = extra["means"][y], softplus(extra["spreads"][y]) + 1e-6
            divergence = (s / sigma).log() + (sigma.square() + (mu - m).square()) / (2 * s.square()) - 0.5
            loss = cross_entropy(network.head[2](z), y) + L2 * z.square().sum(1).mean()
            loss = loss + CMI * divergence.sum(1).mean()
            parameters = list(network.parameters())
            gradients = torch.autograd.grad(loss, [*parameters, *extra.values()])
            with torch.no_grad():
                for index, value in enumerate([*parameters, *extra.values()]):
                    value -= (0.05 if index < len(parameters) else RATE) * gradients[index]
        found = {key: value.detach() for key, value in extra.items()}
        travels = [key for key in found if share or key.startswith("deviation.")]
        sent.setdefault(round_, {})[site] = {key: found[key] for key in travels}
        own[site] = {key: found[key] for key in found if key not in travels}

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    for round_, sites in sent.items():
        for site, expected in sites.items():
            payload = run.replies[round_][site].payload
            assert_same({k.removeprefix("fedsr/"): v for k, v in payload.items()}, expected, atol=2e-6)
