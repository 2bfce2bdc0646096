"""The server of a federation, without any engine: aggregation, model selection and the record of a run."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from medfedaug.config import RunConfig, derive_seed
from medfedaug.errors import RunFailed, UpdateRefused
from medfedaug.federation.averaging import WeightedMean
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages import (
    PREPARE,
    TEST,
    TRAIN,
    VALIDATE,
    Reply,
    Request,
    check_tensors,
    namespaced,
    num_bytes,
    own_entries,
)
from medfedaug.methods.base import Payload, ServerContext, ServerExchange, Shapes
from medfedaug.statistics import ChannelStatistics
from medfedaug.tasks import make_task

__all__ = ["FederationServer"]

Event = Callable[[dict[str, Any]], None]


class FederationServer:
    """What the server knows and decides; an engine only carries its requests and the sites' replies.

    An engine calls ``prepare`` → ``accept_preparation`` for each site → for every round ``start_round`` →
    ``accept`` for each reply → ``finish_round``; then ``validate`` → ``accept_validation`` → ``test`` →
    ``accept_test``; `results` is the record of the run at any time.

    The best global model is the one with the highest mean of the sites' validation scores, unweighted. A
    round's model is scored by the sites when it reaches them, with the next round's request, and the last
    one with a request of its own.

    Args:
        config: the run.
        on_event: called with a small dictionary whenever something happened that a user may want to see.
    """

    def __init__(self, config: RunConfig, on_event: Event | None = None) -> None:
        self.config = config
        composition = Composition(config)
        self.metric = make_task(config, normalised=composition.normalises_input).metric
        self.state: dict[str, Tensor] = {k: v.clone() for k, v in composition.network.state_dict().items()}
        self.shared = composition.shared
        self._weight_shapes: Shapes = {key: tuple(self.state[key].shape) for key in self.shared}
        context = ServerContext(composition.network, config.in_channels)
        self._once = _exchanges({m.name: m.before_training(context) for m in composition.methods})
        self._every_round = _exchanges({m.name: m.every_round(context) for m in composition.methods})
        self._on_event = on_event or (lambda event: None)
        self._lock = threading.Lock()

        self.sites: dict[str, int] = {}  # training sites, with their number of samples
        self.unseen: list[str] = []
        self.round = 0
        self.rounds: list[dict[str, Any]] = []
        self.selected_round = 0
        self.selected_state: dict[str, Tensor] = {}
        self.statistics: dict[str, ChannelStatistics] = {}
        self._best = -math.inf
        self._payload: Payload = {}
        self._once_payload: Payload = {}
        self._once_known: dict[str, int] = {}
        self._once_version = 0
        self._once_bytes: dict[str, int] = {}
        self._test: dict[str, dict[str, Any]] = {}
        self._mean = WeightedMean()
        self._accepted: list[str] = []
        self._asked = 0
        self._started = time.perf_counter()

    # ------------------------------------------------------------------ before training

    def prepare(self) -> Request:
        """Ask a site how much data it has and what the methods exchange before training."""
        return Request(PREPARE)

    def accept_preparation(self, site: str, reply: Reply) -> None:
        """Take in a site's answer to `prepare`.

        Raises:
            RunFailed: when the site cannot take part.
            UpdateRefused: when what it sent cannot be used.
        """
        if reply.error:
            raise RunFailed(reply.error)
        with self._lock:
            if not reply.num_samples:
                self.unseen = sorted({*self.unseen, site})
                self._on_event({"event": "unseen", "site": site})
                return
            _check_payload(site, reply.payload, self._once)
            for name, exchange in self._once.items():
                exchange.accept(site, own_entries(reply.payload, name))
            for name, size in _bytes_by_method(reply.payload).items():
                self._once_bytes[name] = self._once_bytes.get(name, 0) + size
            self.sites[site] = reply.num_samples
            self._once_version += 1
            self._on_event({"event": "prepared", "site": site, "samples": reply.num_samples})

    def finish_preparation(self) -> None:
        """All sites have answered.

        Raises:
            RunFailed: when fewer than two sites have training data.
        """
        if len(self.sites) < 2:
            raise RunFailed(f"{len(self.sites)} of the sites have training data; a federation needs two")
        self._once_payload = _results(self._once)
        for exchange in self._once.values():
            self.statistics.update(exchange.channel_statistics())

    # ------------------------------------------------------------------ rounds

    def choose_sites(self) -> list[str]:
        """The sites that the next round asks: all that train, or a share of them drawn by seed and round."""
        sites = sorted(self.sites)
        count = max(1, round(self.config.participation * len(sites)))
        if count == len(sites):
            return sites
        generator = random.Random(derive_seed(self.config.seed, "participation", self.round + 1))
        return sorted(generator.sample(sites, count))

    def start_round(self, targets: Iterable[str] | None = None) -> Request:
        """Begin the next round.

        Args:
            targets: the sites that the request goes to; by default those of `choose_sites`.
        """
        targets = list(targets) if targets is not None else self.choose_sites()
        self.round += 1
        self._asked = len(targets)
        self._mean, self._accepted, self._started = WeightedMean(), [], time.perf_counter()
        fresh = any(self._once_known.get(site) != self._once_version for site in targets)
        self._once_known.update(dict.fromkeys(targets, self._once_version))
        request = Request(
            TRAIN,
            self.round,
            weights={key: self.state[key] for key in self.shared},
            once=self._once_payload if fresh else {},
            payload=self._payload,
            selected_round=self.selected_round,
        )
        down = {"model": num_bytes(request.weights), **_bytes_by_method(request.payload, request.once)}
        self.rounds.append(
            {
                "round": self.round,
                "sites": {},
                "bytes_up": 0,
                "bytes_down": len(targets) * sum(down.values()),
                "bytes": {name: {"up": 0, "down": len(targets) * n} for name, n in down.items()},
                "methods": {},
                "refused": [],
            }
        )
        self._on_event({"event": "round_started", "round": self.round, "rounds": self.config.rounds})
        return request

    def accept(self, site: str, reply: Reply) -> bool:
        """Take in a site's update of the current round, or refuse it.

        Returns:
            Whether the update was used; where it was not, the reason is recorded under ``refused``.
        """
        with self._lock:
            entry = self.rounds[-1]
            try:
                self._check_update(site, reply)
            except UpdateRefused as refusal:
                entry["refused"].append({"site": site, "reason": str(refusal)})
                self._on_event(
                    {"event": "refused", "round": self.round, "site": site, "reason": str(refusal)}
                )
                return False
            for name, exchange in self._every_round.items():
                exchange.accept(site, own_entries(reply.payload, name))
            self._accepted.append(site)
            self._mean.add(reply.weights, reply.num_samples if self.config.weighting == "samples" else 1.0)
            score = reply.metrics.pop(f"val_{self.metric}", None)
            if self.round > 1:
                self.rounds[-2]["sites"].setdefault(site, {})[f"val_{self.metric}"] = score
            entry["sites"][site] = {**reply.metrics, "samples": reply.num_samples}
            up = {"model": num_bytes(reply.weights), **_bytes_by_method(reply.payload)}
            for name, size in up.items():
                entry["bytes"].setdefault(name, {"up": 0, "down": 0})["up"] += size
            entry["bytes_up"] += sum(up.values())
            self._on_event({"event": "trained", "round": self.round, "site": site, **entry["sites"][site]})
            return True

    def _check_update(self, site: str, reply: Reply) -> None:
        if reply.error:
            raise UpdateRefused(site, "update", expected="a trained model", got=reply.error)
        if site not in self.sites:
            raise UpdateRefused(site, "update", expected="a site that was prepared", got="another")
        if site in self._accepted:
            raise UpdateRefused(site, "update", expected="one update a round", got="a second one")
        if reply.round != self.round:
            raise UpdateRefused(site, "round", expected=str(self.round), got=str(reply.round))
        if not 0 < reply.num_samples <= self.sites[site]:
            raise UpdateRefused(
                site, "num_samples", expected=f"1 to {self.sites[site]}", got=str(reply.num_samples)
            )
        check_tensors(site, reply.weights, self._weight_shapes)
        _check_payload(site, reply.payload, self._every_round)

    def finish_round(self) -> dict[str, Tensor]:
        """Average what was accepted; first settle whether the model of the round before is the best so far.

        Returns:
            The full state dict of the new global model.

        Raises:
            RunFailed: when too few updates were accepted; the last good model stands.
        """
        entry = self.rounds[-1]
        needed = self.config.min_sites or self._asked
        if len(self._accepted) < needed:
            reasons = "; ".join(refusal["reason"] for refusal in entry["refused"])
            raise RunFailed(
                f"round {self.round}: {len(self._accepted)} of {needed} needed updates could be used"
                + (f" ({reasons})" if reasons else "")
            )
        if self.round > 1:
            self._score(self.round - 1)
        self.state = {**self.state, **self._mean.result()}
        self._payload = _results(self._every_round)
        entry["methods"] = {name: exchange.summary() for name, exchange in self._every_round.items()}
        entry["seconds"] = time.perf_counter() - self._started
        self._on_event({"event": "round_finished", "round": self.round, "seconds": entry["seconds"]})
        return self.state

    # ------------------------------------------------------------------ after training

    def validate(self) -> Request:
        """Ask the training sites to score the last model."""
        return self._score_request(VALIDATE, self.round, self.state)

    def accept_validation(self, site: str, reply: Reply) -> None:
        """Take in a site's score of the last model."""
        if reply.error:
            raise RunFailed(reply.error)
        with self._lock:
            score = reply.metrics.get(self.metric)
            self.rounds[-1]["sites"].setdefault(site, {})[f"val_{self.metric}"] = score

    def finish_validation(self) -> None:
        """Settle the best round."""
        self._score(self.round)
        if not self.selected_round:
            # No validation case of any site has foreground, so that no round can be preferred.
            self.selected_round, self.selected_state = self.round, self.state

    def test(self) -> Request:
        """Ask all sites, the unseen among them, to score the selected model on their test cases."""
        return self._score_request(TEST, self.selected_round, self.selected_state)

    def accept_test(self, site: str, reply: Reply) -> None:
        """Take in a site's test scores."""
        if reply.error:
            raise RunFailed(reply.error)
        with self._lock:
            self._test[site] = dict(reply.metrics)
            self._on_event({"event": "tested", "site": site, self.metric: reply.metrics.get(self.metric)})

    def results(self) -> dict[str, Any]:
        """The record of the run, ready for JSON."""
        test = {
            group: {site: self._test[site] for site in sorted(members) if site in self._test}
            for group, members in (("sites", self.sites), ("unseen", self.unseen))
        }
        known = [s[self.metric] for s in test["sites"].values() if s[self.metric] is not None]
        return {
            "config": self.config.to_dict(),
            "sites": dict(sorted(self.sites.items())),
            "unseen": self.unseen,
            "bytes_up_before_training": self._once_bytes,
            "rounds": self.rounds,
            "selected_round": self.selected_round,
            "test": {**test, "mean": {self.metric: sum(known) / len(known) if known else None}},
        }

    def _score_request(self, task: str, round_: int, state: dict[str, Tensor]) -> Request:
        return Request(
            task,
            round_,
            weights={key: state[key] for key in self.shared},
            once=self._once_payload,
            selected_round=self.selected_round,
        )

    def _score(self, round_: int) -> None:
        entry = self.rounds[round_ - 1]
        scores = [s.get(f"val_{self.metric}") for s in entry["sites"].values()]
        known = [score for score in scores if score is not None]
        if not known:
            return
        mean = sum(known) / len(known)
        entry[f"val_{self.metric}"] = mean
        self._on_event({"event": "validated", "round": round_, f"val_{self.metric}": mean})
        if mean > self._best:
            self._best, self.selected_round = mean, round_
            # `self.state` is still the model of `round_`: it is replaced after this.
            self.selected_state = {key: value.clone() for key, value in self.state.items()}


def _exchanges(found: dict[str, ServerExchange | None]) -> dict[str, ServerExchange]:
    return {name: exchange for name, exchange in found.items() if exchange is not None}


def _check_payload(site: str, payload: Payload, exchanges: dict[str, ServerExchange]) -> None:
    """Everything that could be refused is refused here, before the first exchange takes anything in."""
    shapes: Shapes = {}
    for name, exchange in exchanges.items():
        shapes.update({f"{name}/{key}": shape for key, shape in exchange.shapes.items()})
    check_tensors(site, payload, shapes)
    for name, exchange in exchanges.items():
        try:
            exchange.check(own_entries(payload, name))
        except ValueError as error:
            raise UpdateRefused(site, name, expected="usable statistics", got=str(error)) from error


def _results(exchanges: dict[str, ServerExchange]) -> Payload:
    merged: Payload = {}
    for name, exchange in exchanges.items():
        merged.update(namespaced(exchange.result(), name))
    return merged


def _bytes_by_method(*payloads: Payload) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for payload in payloads:
        for key, value in payload.items():
            name = key.split("/", 1)[0]
            sizes[name] = sizes.get(name, 0) + num_bytes({key: value})
    return sizes
