"""The cap on the share of one site, in the model and in what methods exchange."""

import pytest
import torch

from medfedaug.federation import FederationServer, Reply, run_in_process
from medfedaug.functional.means import capped_weights
from medfedaug.methods.exchanges import AverageServer


def test_the_cap_holds_in_what_methods_exchange_too(tiny_config, monkeypatch):
    given, accept = {}, AverageServer.accept

    def noted(self, site, payload, weight=1.0):
        given[site] = weight
        accept(self, site, payload, weight)

    monkeypatch.setattr(AverageServer, "accept", noted)
    network = {"network": "unet", "network_args": {"channels": [4, 8], "strides": [2], "norm": "batch"}}
    server = FederationServer(tiny_config("fedfd", max_share=0.3, **network))
    samples = {"A": 1000, **dict.fromkeys("BCDE", 10)}
    for site, number in samples.items():
        server.accept_preparation(site, Reply("prepare", num_samples=number))
    server.finish_preparation()
    server.start_round()
    shapes = server.aggregation.every_round["fedfd"].shapes
    for site, number in samples.items():
        weights = {key: server.state[key].clone() for key in server.shared}
        payload = {f"fedfd/{key}": torch.ones(shape) for key, shape in shapes.items()}
        assert server.accept(site, Reply("train", 1, weights, payload, number))
    server.finish_round()
    assert given["A"] / sum(given.values()) == pytest.approx(0.3)


def test_without_a_cap_and_with_one_that_nobody_reaches_the_bits_are_the_same(phantom_dir, tiny_config):
    sites = ["site_A", "site_B"]
    plain = run_in_process(tiny_config("fedrdn,fedfa"), phantom_dir, sites, "cpu")
    capped = run_in_process(tiny_config("fedrdn,fedfa", max_share=0.9), phantom_dir, sites, "cpu")
    assert all(torch.equal(plain.state[key], value) for key, value in capped.state.items())


@pytest.mark.parametrize("largest", [0.2, 0.25, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("weights", [[5, 5, 5, 5, 5], [1, 2, 3, 4, 2**31], [2**31, 2**31, 1, 1, 1], [7]])
def test_no_share_is_above_the_cap_and_the_smaller_ones_stay_as_they_are(weights, largest):
    given = {str(index): float(weight) for index, weight in enumerate(weights)}
    capped = capped_weights(given, largest)
    total = sum(capped.values())
    assert max(capped.values()) / total <= max(largest, 1 / len(weights)) + 1e-12
    level = max(capped.values())
    assert all(capped[site] == min(weight, level) for site, weight in given.items())
    if max(given.values()) / sum(given.values()) <= largest:
        assert capped == given
    elif largest * len(weights) > 1:
        assert level / total == pytest.approx(largest)
