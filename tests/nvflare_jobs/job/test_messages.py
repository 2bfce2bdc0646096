"""A peer that means harm: absurd numbers, pickles, unknown keys. None reaches the model or is executed.

Beside it, what a site's own NVFlare filters do to its weights, and that they leave the statistics alone.
"""

import pickle
import subprocess
import sys

import pytest
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from medfedaug.config.run import Execution
from medfedaug.federation import FederationServer, Reply
from medfedaug.metrics.registry import METRICS
from medfedaug.nvflare_jobs.job.messages import reply_from_model, reply_to_model

METHODS = "fedrdn,fedfa+"


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def pair(mean=0.5, std=0.2, count=12.0):
    return {
        "fedrdn/mean": torch.tensor([mean]),
        "fedrdn/std": torch.tensor([std]),
        "fedrdn/count": torch.tensor([count]),
    }


@pytest.fixture
def server(tiny_config):
    server = FederationServer(tiny_config(METHODS), execution=Execution(min_sites=1))
    for site in "AB":
        assert server.accept_preparation(site, Reply("prepare", num_samples=10, payload=pair()))
    server.finish_preparation()
    server.start_round()
    return server


def update(server, site="A", **changes):
    payload = {}
    for name, exchange in server.aggregation.every_round.items():
        for key, shape in exchange.shapes.items():
            value = torch.rand(shape)
            payload[f"{name}/{key}"] = value / value.sum(dim=-1, keepdim=True)
    weights = {key: torch.ones_like(server.state[key]) for key in server.shared}
    reply = Reply("train", server.round, weights=weights, payload=payload, num_samples=10)
    for part, entries in changes.items():
        if isinstance(entries, dict):
            entries = {**getattr(reply, part), **entries}
            entries = {key: value for key, value in entries.items() if value is not ...}
        setattr(reply, part, entries)
    return reply


def bomb_bytes():
    return pickle.dumps(Bomb("/nonexistent/never"))


ABSURD = {
    "weights of NaN": lambda s: {
        "weights": {s.shared[0]: torch.full_like(s.state[s.shared[0]], float("nan"))}
    },
    "weights of 1e30": lambda s: {"weights": {s.shared[0]: torch.full_like(s.state[s.shared[0]], 1e30)}},
    "statistics of 1e30": lambda s: {"payload": {"fedfa/enc1/mean": torch.full((4,), 1e30)}},
    "a negative deviation": lambda s: {"payload": {"fedfa/enc2/std": torch.tensor([-1e-3] + [1.0] * 7)}},
    "a histogram of 1e9": lambda s: {"payload": {"fedfa_h/histogram": torch.full((8, 8), 1e9)}},
    "a negative histogram": lambda s: {"payload": {"fedfa_h/histogram": torch.eye(8) * 2 - 1 / 8}},
    "an unknown key": lambda s: {"payload": {"fedfa/enc9/mean": torch.zeros(4)}},
    "another method's key": lambda s: {"payload": {"fraug/generator": torch.zeros(4)}},
    "a key that is no text": lambda s: {"payload": {7: torch.zeros(4)}},
    "a pickle in the payload": lambda s: {"payload": {"fedfa/enc1/mean": bomb_bytes()}},
    "an object in the weights": lambda s: {"weights": {s.shared[0]: Bomb("/nonexistent/never")}},
    "numbers of 8 bits": lambda s: {"weights": {s.shared[0]: s.state[s.shared[0]].to(torch.float8_e5m2)}},
    "a sparse tensor": lambda s: {"weights": {s.shared[0]: s.state[s.shared[0]].to_sparse()}},
    "a tensor without values": lambda s: {"weights": {s.shared[0]: s.state[s.shared[0]].to("meta")}},
    "a negative variance": lambda s: {
        "weights": {k: -s.state[k] for k in s.shared if k.endswith("running_var")}
    },
    "one infinite weight": lambda s: {
        "weights": {s.shared[0]: s.state[s.shared[0]].index_fill(0, torch.tensor([0]), float("inf"))}
    },
    "another shape": lambda s: {"weights": {s.shared[0]: torch.zeros(1)}},
    "a missing entry": lambda s: {"weights": {s.shared[0]: ...}},
    "an unknown entry": lambda s: {"weights": {"extra": torch.zeros(1)}},
    "a text": lambda s: {"weights": {s.shared[0]: "text"}},
    "integers": lambda s: {"weights": {s.shared[0]: s.state[s.shared[0]].long()}},
    "another round": lambda s: {"round": 9},
    "no samples": lambda s: {"num_samples": 0},
    "more samples than it has": lambda s: {"num_samples": 10**9},
    "trouble": lambda s: {"error": "site A: disk on fire"},
}
WORDS = {
    "weights of NaN": "NaN or infinite",
    "another shape": "got (1,)",
    "a missing entry": "got none",
    "an unknown entry": "'extra'",
    "a text": "got str",
    "integers": "torch.int64",
    "another round": "expected 1, got 9",
    "no samples": "num_samples",
    "more samples than it has": "num_samples",
    "another method's key": "no such",
    "trouble": "disk on fire",
}
"""Of some refusals."""


def test_what_a_site_calls_its_metrics_is_its_own_affair(tiny_config):
    told = []
    server = FederationServer(tiny_config(METHODS), told.append, Execution(min_sites=1))
    for site in "AB":
        server.accept_preparation(site, Reply("prepare", num_samples=10, payload=pair()))
    server.finish_preparation()
    server.start_round()
    names = {"event": "failed", "site": "B", "round": 7, "large": 10**400, 5: 1.0, "self": 2.0}
    assert server.accept("A", update(server, "A", metrics=names))
    assert {**told[-1], "event": "trained", "site": "A", "round": 1} == told[-1]
    assert "large" not in server.rounds[0]["sites"]["A"]
    assert not server.rounds[0]["refused"]


@pytest.mark.parametrize("field", ["num_samples", "round", "weights", "payload", "metrics"])
def test_a_reply_in_which_nothing_is_what_it_should_be_ends_nobody_elses_round(server, field):
    for wrong in (None, "text", [1], {"x": 1}, object(), float("nan"), 1 + 1j):
        reply = update(server, "A")
        setattr(reply, field, wrong)
        before = len(server.rounds[-1]["refused"])
        used = server.accept("A", reply)
        assert used is (len(server.rounds[-1]["refused"]) == before)
        if used:  # metrics decide nothing
            assert field == "metrics"
            break
    assert server.accept("B", update(server, "B"))
    server.finish_round()


def test_what_a_site_says_in_place_of_an_answer_is_one_line_of_some_length(server):
    assert not server.accept("A", Reply("train", 1, error="no\nround 7: refused: site B " + "x" * 10**6))
    (refused,) = server.rounds[0]["refused"]
    assert refused["reason"].startswith("no round 7: refused")
    assert len(refused["reason"]) <= 1_000


def test_more_metrics_than_a_record_can_hold_are_refused_for_that_site_alone(server):
    for name, metrics in {
        "many": {str(n): 0.5 for n in range(1001)},
        "nested": {"a": {"b": {str(n): 0.5 for n in range(1001)}}},
    }.items():
        assert not server.accept("A", update(server, "A", metrics=metrics)), name
        assert "site A, metrics: expected up to 1000 entries" in server.rounds[-1]["refused"][-1]["reason"]
    itself: dict = {}
    itself["self"] = itself
    assert not server.accept("A", update(server, "A", metrics=itself))
    assert server.accept("B", update(server, "B", metrics={str(n): 0.5 for n in range(900)}))
    server.finish_round()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((11, 1, 4, 4), "fedmix/images: expected up to 10 rows, one for each sample, got 11"),
        ((2, 1, 2**14 + 1, 1), "fedmix/images: expected up to 16384 along an axis"),
        ((5, 1, 2**12, 2**12), "fedmix/images: expected up to 67108864 numbers"),
    ],
)
def test_means_of_images_have_the_size_of_images(tiny_config, shape, words):
    server = FederationServer(tiny_config("fedmix"), execution=Execution(min_sites=1))
    images = torch.zeros(1, 1, 1, 1).expand(shape)  # takes no memory
    labels = torch.tensor([1.0, 0.0]).reshape(1, 2, 1, 1).expand(shape[0], 2, *shape[2:])
    payload = {"fedmix/images": images, "fedmix/labels": labels}
    assert not server.accept_preparation("A", Reply("prepare", num_samples=10, payload=payload))
    assert words in server.left_out["A"]
    small = {
        "fedmix/images": torch.zeros(2, 1, 4, 4),
        "fedmix/labels": labels[:2, :, :1, :1].expand(2, 2, 4, 4),
    }
    assert server.accept_preparation("A", Reply("prepare", num_samples=10, payload=small))


@pytest.mark.parametrize("harm", ABSURD)
def test_a_harmful_update_is_refused_by_name_and_leaves_no_trace(server, harm):
    assert not server.accept("A", update(server, "A", **ABSURD[harm](server)))
    (refusal,) = server.rounds[-1]["refused"]
    assert refusal["site"] == "A"
    assert WORDS.get(harm, "") in refusal["reason"]
    assert server.accept("B", update(server, "B"))
    state = server.finish_round()
    assert all(bool((state[key] == 1.0).all()) for key in server.shared)
    for key, value in server.start_round().payload.items():
        assert bool(torch.isfinite(value).all()), key
        assert float(value.abs().max()) < 100, key


@pytest.mark.parametrize(
    "payload",
    [
        pair(mean=1e30),
        pair(std=1e30),
        pair(std=-1.0),
        pair(std=0.0),
        pair(count=0.0),
        pair(count=-3.0),
        {**pair(), "fedrdn/secret": torch.zeros(1)},
        {**pair(), "fedrdn/mean": bomb_bytes()},
        {**pair(), "fedrdn/mean": Bomb("/nonexistent/never")},
        {"fedrdn/mean": torch.zeros(1)},
        {},
    ],
)
def test_harmful_statistics_before_training_keep_a_site_out(tiny_config, payload):
    server = FederationServer(tiny_config(METHODS), execution=Execution(min_sites=2))
    assert not server.accept_preparation("E", Reply("prepare", num_samples=10, payload=payload))
    assert list(server.left_out) == ["E"]
    for site in "AB":
        server.accept_preparation(site, Reply("prepare", num_samples=10, payload=pair()))
    server.finish_preparation()
    assert set(server.sites) == {"A", "B"}
    assert not [key for key in server.start_round().once if key.endswith("/E")]


def test_of_a_sites_test_scores_only_those_are_kept_that_a_metric_can_have(server):
    for site in "AB":
        server.accept(site, update(server, site))
    server.finish_round()
    server.finish_validation()
    absurd = {
        "dice": 7.0,
        "hd95": 12.5,
        "nsd": float("nan"),
        "accuracy": 1.0,
        "missed": -3,
        "undivided": True,
        "unit": "furlong",
        "samples": 10**9,
        "note": "short",
        "classes": {
            "foreground": {
                "dice": 0.5,
                "hd95": -1.0,
                "nsd": "1",
                "missed": 2,
                "secret": 1.0,
                "deep": {"a": 1},
            },
            **{f"class {k}": {"dice": 1.0} for k in range(1000)},
        },
        "cases": {"p1": 0.5, "p2": "text", "p3": -0.1, "p4": None},
        "case_metrics": {"hd95": {"p1": 3.0, "p2": 1e9}, "secret": {"p1": 0.5}, "nsd": [1]},
        "patients": {"p1": 3, "p2": True, "p3": -1, "p4": "Meyer", "nobody": 0},
    }
    assert server.accept_test("A", Reply("test", 1, metrics=absurd))
    assert server.accept_test(
        "B", Reply("test", 1, metrics={"dice": 0.25, "classes": "x", "cases": [1], "patients": 2})
    )
    test = server.results()["test"]
    assert test["sites"]["A"] == {
        "dice": None,
        "hd95": 12.5,
        "note": "short",
        "classes": {"foreground": {"dice": 0.5, "hd95": None, "nsd": None, "missed": 2}},
        "cases": {"p1": 0.5, "p2": None, "p3": None, "p4": None},
        "case_metrics": {"hd95": {"p1": 3.0, "p2": None}},
        "patients": {"p1": 3},
    }
    assert test["sites"]["B"] == {"dice": 0.25, "cases": {}}
    assert set(test["mean"]) == {metric.name for metric in METRICS.values() if metric.task == "segmentation"}
    assert [test["mean"][name] for name in ("dice", "hd95", "nsd")] == [0.25, 12.5, None]
    assert test["worst"]["dice"] == {"site": "B", "value": 0.25}


# ---------------------------------------------------------------- on the wire


def test_a_message_with_a_pickle_is_data_and_stays_so(tmp_path):
    """Bytes travel as bytes: nothing on the way looks inside."""
    fobs.register(TensorDecomposer)
    target = tmp_path / "exploded"
    harmful = Reply("train", 1, weights={"w": torch.ones(1)}, payload={"fedfa/x": pickle.dumps(Bomb(target))})
    wire = fobs.dumps(FLModelUtils.to_shareable(reply_to_model(harmful)))
    arrived = reply_from_model(FLModelUtils.from_shareable(fobs.loads(wire)))
    assert isinstance(arrived.payload["fedfa/x"], bytes)
    assert not target.exists()


RECEIVER = """
import sys, pathlib
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
fobs.register(TensorDecomposer)
try:
    fobs.loads(pathlib.Path(sys.argv[1]).read_bytes())
except ValueError as error:
    sys.exit(0 if "is not allowed" in str(error) else 3)
sys.exit(2)
"""


@pytest.mark.slow
def test_an_object_of_a_class_that_nobody_registered_does_not_arrive(tmp_path):
    """A sender can put anything on the wire; what counts is another process that receives it."""
    reply = Reply("train", 1, payload={"x": Bomb("/nonexistent/never")})
    wire = tmp_path / "message"
    wire.write_bytes(fobs.dumps(FLModelUtils.to_shareable(reply_to_model(reply))))
    assert b"Bomb" in wire.read_bytes()
    assert subprocess.run([sys.executable, "-c", RECEIVER, str(wire)]).returncode == 0


def test_a_message_that_is_nothing_we_know_becomes_an_empty_reply():
    model = reply_to_model(Reply("train", 1, weights={"w": torch.ones(1)}))
    model.meta["medfedaug"] = Bomb("/nonexistent/never")
    reply = reply_from_model(model)
    assert (reply.task, reply.round, reply.num_samples, reply.payload) == ("", 0, 0, {})
    model.meta["medfedaug"] = {"round": "1", "num_samples": True, "payload": [1], "metrics": "x", "error": 3}
    reply = reply_from_model(model)
    assert (reply.round, reply.num_samples, reply.payload, reply.metrics) == (0, 0, {}, {})


# ---------------------------------------------------------------- a site's own filters

WEIGHTS = {"enc.w": torch.linspace(-2.0, 2.0, 9).view(3, 3), "dec.b": torch.tensor([1.0, 0.1])}
STATISTICS = {"fedfa/enc1/mean": torch.tensor([20.0, 2.0])}


def filtered(filter_, reply):
    wire = filter_.process(FLModelUtils.to_shareable(reply_to_model(reply)), FLContext())
    return reply_from_model(FLModelUtils.from_shareable(wire))


def test_a_sites_filter_sees_the_weights_and_not_the_statistics():
    weights = {key: value.clone() for key, value in WEIGHTS.items()}
    reply = Reply("train", 3, weights=weights, payload=dict(STATISTICS), num_samples=7)
    filter_ = PercentilePrivacy(gamma=0.5)
    found = filtered(filter_, reply)
    assert any(not torch.equal(found.weights[key], WEIGHTS[key]) for key in WEIGHTS)
    assert all(isinstance(value, torch.Tensor) for value in found.weights.values())
    before = filtered(filter_, Reply("prepare", payload=dict(STATISTICS), num_samples=7))
    for filtered_reply in (found, before):
        assert all(torch.equal(filtered_reply.payload[key], STATISTICS[key]) for key in STATISTICS)


def test_what_a_filter_leaves_can_be_averaged_and_what_it_takes_out_is_named(server):
    good = filtered(PercentilePrivacy(gamma=0.5), update(server, "A"))
    assert server.accept("A", good), server.rounds[-1]["refused"]
    lacking = filtered(ExcludeVars([server.shared[0]]), update(server, "B"))
    assert not server.accept("B", lacking)
    assert f"site B, {server.shared[0]}" in server.rounds[-1]["refused"][0]["reason"]
    assert float(server.finish_round()[server.shared[0]].flatten()[0]) == 0.5
