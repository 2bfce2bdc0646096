"""SCAFFOLD against Karimireddy et al., ICML 2020, Algorithm 1 with option II."""

import pytest
import torch
from reference import UNEVEN, assert_same, copied, descend, entries, mean

from medfedaug.federation import FederationServer
from medfedaug.federation.composition import Composition


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_gradients_are_corrected_and_controls_are_means_of_gradients(federate, weighting):
    rate = 0.05
    run = federate("scaffold", plan=UNEVEN, weighting=weighting, local_epochs=2)
    network = run.network()
    names = [name for name, _ in network.named_parameters()]
    weight = {site: n if weighting == "samples" else 1 for site, n in run.server.sites.items()}
    common = {name: torch.zeros_like(p).detach() for name, p in network.named_parameters()}
    own = {site: dict(common) for site in weight}
    for round_, participants in enumerate(UNEVEN, start=1):
        local, change = [], []
        for site in participants:
            batches = run.batches[site, round_]

            def correct(g, site=site, common=common):
                return {name: g[name] - own[site][name] + common[name] for name in g}

            trained = descend(copied(network), batches, rate, correct=correct)
            local.append(entries(trained))
            steps = len(batches)
            after = {
                name: own[site][name]
                - common[name]
                + (dict(network.named_parameters())[name].detach() - local[-1][name]) / (steps * rate)
                for name in names
            }
            change.append({name: weight[site] * (after[name] - own[site][name]) for name in names})
            own[site] = after
        network = copied(network, mean(local, [weight[site] for site in participants]))
        common = {
            name: common[name] + sum(one[name] for one in change) / sum(weight.values()) for name in names
        }
        assert_same(run.models[round_], entries(network))
        sent = run.server.payload if round_ == 3 else run.requests[round_ + 1].payload
        for name in names:
            torch.testing.assert_close(sent[f"scaffold/{name}"].double(), common[name], rtol=1e-4, atol=1e-6)


def test_scaffold_leaves_a_sites_norm_layers_at_the_site(tiny_config):
    config = tiny_config("scaffold,fedbn", rounds=1)
    server = FederationServer(config)
    composition = Composition(config)
    assert composition.kept_keys
    assert set(server.aggregation.every_round["scaffold"].shapes) == {
        name for name, _ in composition.network.named_parameters() if name not in composition.kept_keys
    }
