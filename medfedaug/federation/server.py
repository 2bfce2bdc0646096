"""The server of a federation, without any engine: aggregation, model selection and the record of a run."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfedaug.averaging import WeightedMean
from medfedaug.config import RunConfig, derive_seed, recorded_settings
from medfedaug.errors import ConfigError, MedFedAugError, RunFailed, UpdateRefused
from medfedaug.federation.checkpoint import load_checkpoint, save_checkpoint
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages import (
    PREPARE,
    TEST,
    TRAIN,
    VALIDATE,
    Reply,
    Request,
    check_tensors,
    clean_metrics,
    namespaced,
    num_bytes,
    own_entries,
)
from medfedaug.methods.base import (
    Aggregator,
    Payload,
    RoundMean,
    ServerContext,
    ServerExchange,
    Shapes,
    SiteUpdate,
)
from medfedaug.statistics import ChannelStatistics
from medfedaug.tasks import make_task

__all__ = ["FederationServer"]

Event = Callable[[dict[str, Any]], None]

# An update that moves the weights by so many times their own norm is no training that went well.
_LARGEST_MOVE = 100.0

# What may differ between a run and its continuation: neither changes what a round computes.
_CHANGEABLE = ("rounds", "round_timeout", "grace", "min_sites", "threads")


class FederationServer:
    """What the server knows and decides; an engine only carries its requests and the sites' replies.

    An engine calls ``prepare`` → ``accept_preparation`` for each site → ``finish_preparation``; for every
    round ``start_round`` → ``accept`` for each reply → ``finish_round``; then ``validate`` →
    ``accept_validation`` → ``finish_validation`` → ``test`` → ``accept_test``. `no_answer` takes the place
    of a reply that did not come. `results` is the record of the run at any time.

    A site that fails is left out of what it failed in, by name and with the reason, and is asked again in the
    next round. A round needs `needed` good updates.

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
        self.input, self.intensity = composition.input, composition.intensity
        task = make_task(config, normalised=composition.normalises_input)
        self.metric = task.metric
        self.state: dict[str, Tensor] = {k: v.clone() for k, v in composition.network.state_dict().items()}
        self.shared = composition.shared
        self.pools_data = composition.pools_data
        self._parameters = {name for name, _ in composition.network.named_parameters()} & set(self.shared)
        self._weight_shapes: Shapes = {key: tuple(self.state[key].shape) for key in self.shared}
        context = ServerContext(
            composition.network,
            config.in_channels,
            kept=composition.kept_keys,
            weights=lambda: {site: self._weight(samples) for site, samples in self.sites.items()},
            task=task,
        )
        self._once = _exchanges({m.name: m.before_training(context) for m in composition.methods})
        self._every_round = _exchanges({m.name: m.every_round(context) for m in composition.methods})
        self._aggregators: dict[str, Aggregator] = {}
        for method in composition.methods:
            aggregator = method.aggregator(context)
            if aggregator is not None:
                self._aggregators[method.name] = aggregator
        self._on_event = on_event or (lambda event: None)
        self._lock = threading.Lock()

        self.run = uuid.uuid4().hex
        self.sites: dict[str, int] = {}  # training sites, with their number of samples
        self.unseen: list[str] = []
        self.left_out: dict[str, str] = {}  # sites that could not be prepared, with the reason
        self.round = 0
        self.rounds: list[dict[str, Any]] = []
        self.selected_round = 0
        self.selected_state: dict[str, Tensor] = {}
        self.selected_payload: Payload = {}  # what of the methods' exchange belongs to the selected model
        self.statistics: dict[str, ChannelStatistics] = {}
        self._best = -math.inf
        self.payload: Payload = {}  # what the methods' exchange of the last round gave
        self._once_payload: Payload = {}
        self._once_known: dict[str, int] = {}
        self._once_version = 0
        self._once_bytes: dict[str, int] = {}
        self._test: dict[str, dict[str, Any]] = {}
        self._untested: dict[str, str] = {}
        self._mean = WeightedMean()
        self._accepted: dict[str, float] = {}  # with their weights
        self._started = time.perf_counter()

    @property
    def known(self) -> set[str]:
        """The sites that were prepared, whether they train or are tested only."""
        return {*self.sites, *self.unseen}

    @property
    def needed(self) -> int:
        """Good updates that a round needs: ``min_sites``, or all that a round asks."""
        return self.config.min_sites or self._round_size()

    def _round_size(self) -> int:
        return max(1, round(self.config.participation * len(self.sites)))

    def _weight(self, samples: int) -> float:
        """What a site with so many samples weighs in the mean."""
        return float(samples) if self.config.weighting == "samples" else 1.0

    def _sizes(self, weights: Mapping[str, Tensor], *payloads: Payload) -> dict[str, int]:
        """The bytes that travel, by method: none where the data of all sites are in one place."""
        return {} if self.pools_data else {"model": num_bytes(weights), **_bytes_by_method(*payloads)}

    def no_answer(self, task: str, site: str, reason: str) -> None:
        """A site did not answer a request in a way that can be used.

        Args:
            task: the request's.
            site: its name.
            reason: why, for the log and for ``results.json``.
        """
        with self._lock:
            if task == PREPARE:
                self._leave_out(site, reason)
                return
            if task == TEST:
                self._untested[site] = reason
            else:
                self.rounds[-1]["missing"].append({"site": site, "task": task, "reason": reason})
            self._tell("missing", round=self.round, task=task, site=site, reason=reason)

    def _leave_out(self, site: str, reason: str) -> None:
        if self.left_out.get(site) != reason:
            self._tell("left_out", site=site, reason=reason)
        self.left_out[site] = reason

    def _tell(self, event: str, **details: Any) -> None:
        self._on_event({"event": event, **details})

    # ------------------------------------------------------------------ before training

    def prepare(self) -> Request:
        """Ask a site how much data it has and what the methods exchange before training."""
        return Request(PREPARE, run=self.run)

    def accept_preparation(self, site: str, reply: Reply) -> bool:
        """Take in a site's answer to `prepare`.

        Returns:
            Whether the site takes part; where it does not, the reason is in `left_out`.
        """
        with self._lock:
            if site in self.known:
                return False
            try:
                if reply.error:
                    raise MedFedAugError(reply.error)
                if not 0 <= reply.num_samples <= 2**31:
                    raise UpdateRefused(
                        site, "num_samples", expected="a number of images", got=str(reply.num_samples)
                    )
                if reply.num_samples:
                    _check_payload(site, reply.payload, self._once)
            except MedFedAugError as error:
                self._leave_out(site, str(error))
                return False
            self.left_out.pop(site, None)
            if not reply.num_samples:
                self.unseen = sorted({*self.unseen, site})
                self._tell("unseen", site=site)
                return True
            for name, exchange in self._once.items():
                exchange.accept(site, own_entries(reply.payload, name), self._weight(reply.num_samples))
            for name, size in _bytes_by_method(reply.payload).items():
                self._once_bytes[name] = self._once_bytes.get(name, 0) + size
            self.sites[site] = reply.num_samples
            self._once_version += 1
            self._tell("prepared", site=site, samples=reply.num_samples)
            return True

    def finish_preparation(self) -> None:
        """All sites have answered, or those that joined since.

        Raises:
            RunFailed: before the first round, when fewer sites can train than the federation needs.
        """
        with self._lock:
            if not self.round:
                self._check_federation()
            self._once_payload = _results(self._once)
            for exchange in self._once.values():
                self.statistics.update(exchange.channel_statistics())

    def payload_for_inference(self, payload: Payload) -> Payload:
        """What a model is used with, beside what its methods exchanged in the round that it is of."""
        once = {
            key: value
            for key, value in self._once_payload.items()
            if self._once[key.split("/", 1)[0]].needed_at_inference
        }
        return {**once, **payload}

    def _check_federation(self) -> None:
        reasons = "; ".join(f"{reason}" for _, reason in sorted(self.left_out.items()))
        if self.left_out and not self.config.min_sites:
            raise RunFailed(f"every site is needed, since min_sites is 0: {reasons}")
        needed = max(2, self.config.min_sites)
        if len(self.sites) < needed:
            text = f"{len(self.sites)} of the sites can train; the federation needs {needed}"
            raise RunFailed(text + (f" ({reasons})" if reasons else ""))
        if self.needed > self._round_size():
            raise ConfigError(
                f"min_sites is {self.config.min_sites}, and with participation {self.config.participation} a "
                f"round asks {self._round_size()} of {len(self.sites)} sites"
            )

    # ------------------------------------------------------------------ rounds

    def choose_sites(self, available: Collection[str] | None = None) -> list[str]:
        """The sites that the next round asks: all that train, or a share of them drawn by seed and round.

        Args:
            available: the sites that are known to be connected; by default all.
        """
        sites = sorted(self.sites if available is None else self.sites.keys() & set(available))
        if len(sites) <= self._round_size():
            return sites
        generator = random.Random(derive_seed(self.config.seed, "participation", self.round + 1))
        return sorted(generator.sample(sites, self._round_size()))

    def start_round(self, targets: Iterable[str] | None = None) -> Request:
        """Begin the next round.

        Args:
            targets: the sites that the request goes to; by default those of `choose_sites`.
        """
        targets = list(targets) if targets is not None else self.choose_sites()
        self.round += 1
        self._mean, self._accepted, self._started = WeightedMean(), {}, time.perf_counter()
        fresh = any(self._once_known.get(site) != self._once_version for site in targets)
        self._once_known.update(dict.fromkeys(targets, self._once_version))
        request = Request(
            TRAIN,
            self.round,
            weights={key: self.state[key] for key in self.shared},
            once=self._once_payload if fresh else {},
            payload=self.payload,
            selected_round=self.selected_round,
            run=self.run,
        )
        down = self._sizes(request.weights, request.payload, request.once)
        self.rounds.append(
            {
                "round": self.round,
                "sites": {},
                "bytes_up": 0,
                "bytes_down": len(targets) * sum(down.values()),
                "bytes": {name: {"up": 0, "down": len(targets) * n} for name, n in down.items()},
                "methods": {},
                "refused": [],
                "missing": [],
            }
        )
        self._tell("round_started", round=self.round, rounds=self.config.rounds)
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
            except MedFedAugError as refusal:
                entry["refused"].append({"site": site, "reason": str(refusal)})
                self._tell("refused", round=self.round, site=site, reason=str(refusal))
                return False
            weight = self._weight(reply.num_samples)
            for name, exchange in self._every_round.items():
                exchange.accept(site, own_entries(reply.payload, name), weight)
            for name, aggregator in self._aggregators.items():
                own = own_entries(reply.payload, name)
                update = SiteUpdate(site, self.round, reply.weights, own, weight)
                weight = aggregator.weigh(update)
                aggregator.accept(update)
            self._accepted[site] = weight
            self._mean.add(reply.weights, weight)
            metrics = clean_metrics(reply.metrics)
            score = _score_of(metrics.pop(f"val_{self.metric}", None))
            if self.round > 1:
                self.rounds[-2]["sites"].setdefault(site, {})[f"val_{self.metric}"] = score
            entry["sites"][site] = {**metrics, "samples": reply.num_samples}
            up = self._sizes(reply.weights, reply.payload)
            for name, size in up.items():
                entry["bytes"].setdefault(name, {"up": 0, "down": 0})["up"] += size
            entry["bytes_up"] += sum(up.values())
            self._tell("trained", **{**entry["sites"][site], "round": self.round, "site": site})
            return True

    def _check_update(self, site: str, reply: Reply) -> None:
        if reply.error:
            raise MedFedAugError(reply.error)
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
        self._check_move(site, reply.weights)
        _check_payload(site, reply.payload, self._every_round)

    def _check_move(self, site: str, weights: Mapping[str, Tensor]) -> None:
        """Running statistics may leap in the first round, parameters may not."""
        moved = math.hypot(*(float((weights[k] - self.state[k]).norm()) for k in self._parameters))
        allowed = _LARGEST_MOVE * max(
            math.hypot(*(float(self.state[k].norm()) for k in self._parameters)), 1.0
        )
        if moved > allowed:
            raise UpdateRefused(
                site, "parameters", expected=f"a step of norm up to {allowed:.4g}", got=f"{moved:.4g}"
            )

    def finish_round(self) -> dict[str, Tensor]:
        """Average what was accepted; first settle whether the model of the round before is the best so far.

        Returns:
            The full state dict of the new global model.

        Raises:
            RunFailed: when too few updates were accepted; the last good model stands.
        """
        entry = self.rounds[-1]
        if len(self._accepted) < self.needed:
            reasons = "; ".join(trouble["reason"] for trouble in (*entry["refused"], *entry["missing"]))
            raise RunFailed(
                f"round {self.round}: {len(self._accepted)} of {self.needed} needed updates could be used"
                + (f" ({reasons})" if reasons else "")
            )
        if self.round > 1:
            self._score(self.round - 1)
        shared = self._mean.result()
        for aggregator in self._aggregators.values():
            previous = {key: self.state[key] for key in self.shared}
            shared = aggregator.result(RoundMean(self.round, previous, shared, self._accepted))
        self.state = {**self.state, **shared}
        self.payload = _results(self._every_round)
        halves: list[tuple[str, ServerExchange | Aggregator]] = [
            *self._every_round.items(),
            *self._aggregators.items(),
        ]
        for name, half in halves:
            entry["methods"].setdefault(name, {}).update(half.summary())
        entry["seconds"] = time.perf_counter() - self._started
        self._tell("round_finished", round=self.round, seconds=entry["seconds"])
        return self.state

    # ------------------------------------------------------------------ after training

    def validate(self) -> Request:
        """Ask the training sites to score the last model."""
        return self._score_request(VALIDATE, self.round, self.state, self.payload)

    def accept_validation(self, site: str, reply: Reply) -> bool:
        """Take in a site's score of the last model.

        Returns:
            Whether it could be used.
        """
        if reply.error or site not in self.sites:
            self.no_answer(VALIDATE, site, reply.error or f"site {site} does not train")
            return False
        with self._lock:
            score = _score_of(reply.metrics.get(self.metric))
            self.rounds[-1]["sites"].setdefault(site, {})[f"val_{self.metric}"] = score
        return True

    def finish_validation(self) -> None:
        """Settle the best round."""
        self._score(self.round)
        if not self.selected_round:
            # No validation case of any site has foreground, so that no round can be preferred.
            self.selected_round, self.selected_state = self.round, self.state
            self.selected_payload = self.payload

    def test(self) -> Request:
        """Ask all sites, the unseen among them, to score the selected model on their test cases."""
        return self._score_request(TEST, self.selected_round, self.selected_state, self.selected_payload)

    def accept_test(self, site: str, reply: Reply) -> bool:
        """Take in a site's test scores.

        Returns:
            Whether they could be used.
        """
        if reply.error or site not in self.known:
            self.no_answer(TEST, site, reply.error or f"site {site} was not prepared")
            return False
        with self._lock:
            metrics = clean_metrics(reply.metrics)
            cases = metrics.get("cases")
            self._test[site] = {
                **metrics,
                self.metric: _score_of(metrics.get(self.metric)),
                "cases": cases if isinstance(cases, dict) else {},
            }
            self._tell("tested", site=site, **{self.metric: self._test[site][self.metric]})
        return True

    def results(self) -> dict[str, Any]:
        """The record of the run, ready for JSON."""
        test = {
            group: {site: self._test[site] for site in sorted(members) if site in self._test}
            for group, members in (("sites", self.sites), ("unseen", self.unseen))
        }
        known = [s[self.metric] for s in test["sites"].values() if s[self.metric] is not None]
        return {
            "config": self.config.to_dict(),
            "input": self.input,
            "run": self.run,
            "sites": dict(sorted(self.sites.items())),
            "unseen": self.unseen,
            "left_out": dict(sorted(self.left_out.items())),
            "bytes_up_before_training": self._once_bytes,
            "rounds": self.rounds,
            "selected_round": self.selected_round,
            "test": {
                **test,
                "mean": {self.metric: sum(known) / len(known) if known else None},
                **({"missing": dict(sorted(self._untested.items()))} if self._untested else {}),
            },
        }

    @property
    def has_aggregators(self) -> bool:
        """Whether a method makes the global model of the sites' mean."""
        return bool(self._aggregators)

    def move_models(self, device: torch.device) -> None:
        """Keep the models there; updates must then come from there too."""
        self.state = {key: value.to(device) for key, value in self.state.items()}
        self.selected_state = {key: value.to(device) for key, value in self.selected_state.items()}

    # ------------------------------------------------------------------ restarts

    def save(self, path: Path) -> None:
        """Write all that the rounds to come need, to be called between two rounds.

        Raises:
            StorageError: when it cannot be written; the checkpoint of before is then intact.
        """
        save_checkpoint(
            path,
            {
                "config": self.config.to_dict(),
                "input": self.input,
                "run": self.run,
                "sites": self.sites,
                "unseen": self.unseen,
                "round": self.round,
                "rounds": self.rounds,
                "model": self.state,
                "payload": self.payload,
                "once": self._once_payload,
                "once_bytes": self._once_bytes,
                "selected_round": self.selected_round,
                "selected_model": self.selected_state,
                "selected_payload": self.selected_payload,
                "best": self._best,
                "methods": {name: state for name, half in self._halves_by_name() if (state := half.state())},
            },
        )

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint, in a server that has done nothing yet.

        Raises:
            ConfigError: when there is none, or it is of another run: only the number of rounds and the limits
                for sites that fail may differ.
        """
        saved = load_checkpoint(path)
        # Through `RunConfig`, so that a setting that came with a later release has its default.
        asked, before = self.config.to_dict(), RunConfig.from_dict(recorded_settings(saved)).to_dict()
        differing = sorted(name for name in {*asked} - {*_CHANGEABLE} if asked[name] != before[name])
        if differing:
            name = differing[0]
            raise ConfigError(
                f"{path} is of a run with another {name}: {before[name]}, asked for {asked[name]}"
            )
        for name in ("run", "sites", "unseen", "round", "rounds", "selected_round"):
            setattr(self, name, saved[name])
        self.state, self.selected_state = saved["model"], saved["selected_model"]
        self.payload, self.selected_payload = saved["payload"], saved["selected_payload"]
        self._once_payload = saved["once"]
        self._once_bytes, self._best = saved["once_bytes"], saved["best"]
        # Sites may have lost what they were sent once: they are sent it again.
        self._once_version, self._once_known = len(self.sites), {}
        for name, half in self._halves_by_name():
            if name in saved["methods"]:
                half.restore(saved["methods"][name])
        for exchange in self._once.values():
            self.statistics.update(exchange.channel_statistics())
        self._tell("resumed", round=self.round, rounds=self.config.rounds)

    def _halves_by_name(self) -> list[tuple[str, ServerExchange | Aggregator]]:
        groups: list[tuple[str, Mapping[str, ServerExchange | Aggregator]]] = [
            ("once", self._once),
            ("every_round", self._every_round),
            ("server", self._aggregators),
        ]
        return [(f"{group}/{name}", half) for group, halves in groups for name, half in halves.items()]

    def _score_request(self, task: str, round_: int, state: dict[str, Tensor], payload: Payload) -> Request:
        return Request(
            task,
            round_,
            weights={key: state[key] for key in self.shared},
            once=self._once_payload,
            payload=payload,
            selected_round=self.selected_round,
            run=self.run,
        )

    def _score(self, round_: int) -> None:
        entry = self.rounds[round_ - 1]
        scores = [s.get(f"val_{self.metric}") for s in entry["sites"].values()]
        known = [score for score in scores if score is not None]
        if not known:
            return
        mean = sum(known) / len(known)
        entry[f"val_{self.metric}"] = mean
        self._tell("validated", round=round_, **{f"val_{self.metric}": mean})
        if mean > self._best:
            self._best, self.selected_round = mean, round_
            # `self.state` is still the model of `round_`, and the payload that which it made: both are
            # replaced after this.
            self.selected_state = {key: value.clone() for key, value in self.state.items()}
            self.selected_payload = dict(self.payload)


def _score_of(value: Any) -> float | None:
    """A score as a metric gives it; anything else would decide which model is best."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    return None


def _exchanges(found: dict[str, ServerExchange | None]) -> dict[str, ServerExchange]:
    return {name: exchange for name, exchange in found.items() if exchange is not None}


def _check_payload(site: str, payload: Payload, exchanges: dict[str, ServerExchange]) -> None:
    """Everything that could be refused is refused here, before the first exchange takes anything in."""
    shapes: dict[str, tuple[int | None, ...]] = {}
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
