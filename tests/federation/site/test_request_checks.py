"""What a hostile or damaged server sends is checked at the site, before anything of it is loaded."""

from dataclasses import replace

import pytest
import torch

from medfedaug.config.run import Execution
from medfedaug.federation import FederationServer
from medfedaug.federation.messages.messages import FINGERPRINT, TEST, VALIDATE, Request
from medfedaug.federation.site.site import Site
from medfedaug.federation.site.trainer import SiteTrainer

NETWORK = {"network": "unet", "network_args": {"channels": [4, 8], "strides": [2], "norm": "batch"}}


@pytest.fixture
def federation(phantom_dir, tiny_config):
    """A server and two sites, prepared, and the request of the first round."""

    def make(methods):
        config = tiny_config(methods, rounds=2, **NETWORK)
        server = FederationServer(config, execution=Execution(min_sites=1))
        sites = {name: Site(name, SiteTrainer(config, phantom_dir, "cpu")) for name in ("site_A", "site_B")}
        for name, site in sites.items():
            assert server.accept_preparation(name, site.answer(server.prepare()))
        server.finish_preparation()
        request = server.start_round()
        return server, sites["site_A"], request

    return make


def first(weights, end):
    return next(key for key in sorted(weights) if key.endswith(end))


def entry(end, change):
    """A change of the first entry of the model whose name ends like this."""

    def spoil(request):
        weights = {key: value.clone() for key, value in request.weights.items()}
        key = first(weights, end)
        weights[key] = change(weights[key])
        return replace(request, weights=weights)

    return spoil


def once(end, change):
    """A change of what was exchanged before training."""

    def spoil(request):
        entries = {key: value.clone() for key, value in request.once.items()}
        key = next(key for key in sorted(entries) if end in key)
        entries[key] = change(entries[key])
        return replace(request, once=entries)

    return spoil


MESSAGES = {
    "int8 weights": (
        "fedavg",
        entry(".weight", lambda v: v.to(torch.int8)),
        "floating point of 16, 32 or 64",
    ),
    "8-bit floats": ("fedavg", entry(".weight", lambda v: v.to(torch.float8_e4m3fn)), "floating point of 16"),
    "sparse weights": ("fedavg", entry(".weight", lambda v: v.to_sparse()), "floating point of 16"),
    "NaN": ("fedavg", entry(".weight", lambda v: v * float("nan")), "NaN or infinite"),
    "1e30": ("fedavg", entry(".weight", lambda v: v * 0 + 1e30), "values up to 1e+10"),
    "another shape": ("fedavg", entry(".bias", lambda v: v[:1]), "expected shape"),
    "a negative variance": ("fedavg", entry("running_var", lambda v: v * 0 - 1), "a variance, 0 or above"),
    "a text": ("fedavg", entry(".weight", lambda v: "weights"), "expected a tensor"),
    "zero deviations": ("fedrdn", once("/std/", lambda v: v * 0), "standard deviation of channel 0 is 0.0"),
    "negative deviations": ("fedrdn", once("/std/", lambda v: -v), "standard deviation of channel 0 is -"),
    "NaN means": ("fedrdn", once("/mean/", lambda v: v * float("nan")), "NaN or infinite"),
    "int8 means": ("fedrdn", once("/mean/", lambda v: v.to(torch.int8)), "floating point of 16, 32 or 64"),
}


@pytest.mark.parametrize("methods", ["fedavg", "fedrdn"])
def test_what_no_honest_server_sends_is_refused_before_anything_is_loaded(federation, methods):
    server, site, request = federation(methods)
    assert site.answer(request).error == ""
    other = {key: value + 1 for key, value in request.weights.items()}
    for message, (method, spoil, words) in MESSAGES.items():
        if method != methods:
            continue
        reply = site.answer(spoil(replace(request, weights=other, once=server.once.payload)))
        assert "refused what the server sent" in reply.error, message
        assert words in reply.error, message
        assert "\n" not in reply.error, message
        assert not reply.weights, message
        assert not reply.payload, message
        after = site.trainer.network.state_dict()
        assert not any(torch.equal(after[key], value) for key, value in other.items()), message
    # Nor do they spoil the site for the next message.
    assert site.answer(request).error == ""


@pytest.mark.parametrize("task", [VALIDATE, TEST])
def test_a_model_to_be_scored_is_checked_too(federation, task):
    _, site, request = federation("fedavg")
    site.answer(request)
    spoiled = entry("running_var", lambda v: v * 0 - 1)(replace(request, task=task, round=1))
    assert "a variance, 0 or above" in site.answer(spoiled).error


def test_statistics_that_a_round_brings_are_checked(federation):
    server, site, request = federation("fedfd")
    update = site.answer(request)
    assert server.accept("site_A", update)
    server.finish_round()
    following = server.start_round(["site_A"])
    payload = {k: -v if k.endswith("running_var") else v for k, v in following.payload.items()}
    assert "running_var is negative" in site.answer(replace(following, payload=payload)).error
    assert site.answer(following).error == ""


def test_no_fingerprint_leaves_in_a_job_that_is_not_planned(federation):
    """The page for the approval does not name it."""
    _, site, request = federation("fedavg")
    reply = site.answer(Request(FINGERPRINT, run=request.run))
    assert "no task 'fingerprint' in a job that is not planned" in reply.error
