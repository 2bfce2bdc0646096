"""Weights in half precision on their way: what is rounded, what the server adds up, and how many bytes."""

import pytest
import torch
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from medfedaug.errors import ConfigError
from medfedaug.federation import FederationServer, Reply, run_in_process
from medfedaug.federation.in_process import InProcessCarrier
from medfedaug.federation.messages.messages import TRAIN, num_bytes, packed

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SITES = ["site_A", "site_B", "site_C"]


def started(config, samples):
    server = FederationServer(config)
    for site, count in samples.items():
        server.accept_preparation(site, Reply("prepare", num_samples=count))
    server.finish_preparation()
    return server


@pytest.mark.parametrize("wire", HALF)
def test_matrices_are_rounded_and_vectors_are_not(wire):
    weights = {"kernel": torch.randn(3, 4), "running_var": torch.tensor([1e5, 1e-9])}
    sent = packed(weights, wire)
    assert sent["kernel"].equal(weights["kernel"].to(HALF[wire]))
    assert sent["running_var"].equal(weights["running_var"])


@pytest.mark.parametrize("extreme", [65505.0, -65505.0, float("nan")])
def test_numbers_that_float16_cannot_hold_stay_float32(extreme):
    value = torch.tensor([[extreme, 1.0]])
    torch.testing.assert_close(packed({"w": value}, "float16")["w"], value, equal_nan=True, rtol=0, atol=0)


def test_packing_copies_and_closes_gaps():
    value = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    sent = packed({"w": value}, "float32")["w"]
    value.zero_()
    assert sent.is_contiguous()
    assert sent.any()


@pytest.mark.parametrize("wire", HALF)
def test_the_mean_of_rounded_models_is_not_rounded(tiny_config, wire):
    samples, models = {"A": 10, "B": 30}, {}
    server = started(tiny_config(wire=wire, max_share=1.0), samples)
    request = server.start_round()
    for site, count in samples.items():
        models[site] = packed(
            {key: value.float() + torch.rand_like(value.float()) for key, value in request.weights.items()},
            wire,
        )
        assert server.accept(site, Reply("train", 1, weights=dict(models[site]), num_samples=count))
    state = server.finish_round()
    for key in server.sent:
        expected = sum(samples[site] * models[site][key].double() for site in samples) / 40
        assert state[key].dtype == torch.float32
        torch.testing.assert_close(state[key].double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("methods", ["fedavg", "fedfa,fedbn", "scaffold"])
@pytest.mark.all_layers
def test_a_run_travels_in_half_the_bytes(tiny_config, phantom_dir, methods):
    seen = []

    class Watched(InProcessCarrier):
        def ask(self, request, sites, needed, accept):
            def see(site, reply):
                seen.append((request.task, request.weights, reply.weights))
                return accept(site, reply)

            return super().ask(request, sites, needed, see)

    config = tiny_config(methods, rounds=2, wire="bfloat16")
    server = run_in_process(config, phantom_dir, SITES, "cpu", carrier=Watched)
    whole = num_bytes({key: server.state[key] for key in server.sent})
    trained = [ways for task, *ways in seen if task == TRAIN]
    assert len(trained) == 4  # a site is held out
    assert all(0.5 * whole < num_bytes(weights) < 0.6 * whole for ways in trained for weights in ways)
    assert all(value.dtype != torch.bfloat16 for value in server.state.values())


@pytest.mark.all_layers
def test_an_aggregator_computes_in_float32(tiny_config, monkeypatch):
    server, seen = started(tiny_config("trimmed_mean", wire="float16"), {"A": 10, "B": 10, "C": 10}), []
    (aggregator,) = server.aggregation.aggregators.values()
    monkeypatch.setattr(aggregator, "accept", lambda update: seen.append(update.weights))
    request = server.start_round()
    for site in "ABC":
        server.accept(site, Reply("train", 1, weights=dict(request.weights), num_samples=10))
    server.aggregation.compare(server.state)
    assert len(seen) == 3
    assert {value.dtype for weights in seen for value in weights.values()} == {torch.float32}


@pytest.mark.parametrize("wire", HALF)
def test_nvflare_delivers_the_same_bits(wire):
    fobs.register(TensorDecomposer)
    sent = packed({"kernel": torch.randn(3, 4), "bias": torch.randn(3)}, wire)
    for key, value in fobs.loads(fobs.dumps(dict(sent))).items():
        assert value.dtype == sent[key].dtype
        assert value.equal(sent[key])


def test_masked_numbers_have_a_format_of_their_own(tiny_config):
    with pytest.raises(ConfigError, match="secure_aggregation and wire cannot"):
        tiny_config(wire="float16", secure_aggregation=True)
