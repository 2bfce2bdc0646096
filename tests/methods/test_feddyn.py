"""FedDyn against Acar et al., ICLR 2021, Algorithm 1."""

from __future__ import annotations

import pytest
import torch
from reference import UNEVEN, assert_same, copied, descend, entries, mean


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_local_objectives_and_the_servers_correction(federate, weighting):
    alpha = 0.3
    run = federate(
        "feddyn",
        plan=UNEVEN,
        settings={"feddyn": {"alpha": alpha}},
        network="reference_convolutional",
        weighting=weighting,
        local_epochs=2,
    )
    network = run.network()
    zero = {name: torch.zeros_like(p).detach() for name, p in network.named_parameters()}
    weight = {site: n if weighting == "samples" else 1 for site, n in run.server.sites.items()}
    h, g = dict(zero), {site: dict(zero) for site in weight}
    for round_, participants in enumerate(UNEVEN, start=1):
        start = {name: p.detach().clone() for name, p in network.named_parameters()}
        local = []
        for site in participants:

            def term(net, _x, _y, site=site, start=start):
                return sum(
                    alpha / 2 * ((p - start[name]) ** 2).sum() - (g[site][name] * p).sum()
                    for name, p in net.named_parameters()
                )

            trained = descend(copied(network), run.batches[site, round_], 0.05, term)
            local.append(entries(trained))
            g[site] = {name: g[site][name] - alpha * (local[-1][name] - start[name]) for name in zero}
        model = mean(local, [weight[site] for site in participants])
        for name in zero:
            moved = sum(
                weight[s] * (one[name] - start[name]) for s, one in zip(participants, local, strict=True)
            )
            h[name] = h[name] - alpha * moved / sum(weight.values())
            model[name] = model[name] - h[name] / alpha
        network = copied(network, model)
        assert_same(run.models[round_], model, atol=2e-6)
