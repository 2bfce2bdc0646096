"""The server of a federation, for every engine."""

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfedaug._version import software_versions
from medfedaug.config.run import Execution, RunConfig
from medfedaug.errors import ConfigError, RunFailed, UpdateRefused
from medfedaug.federation.composition import Composition, masking
from medfedaug.federation.messages.checkpoint import check_same_run, load_checkpoint, save_checkpoint
from medfedaug.federation.messages.initial_weights import INITIAL, InitialWeights
from medfedaug.federation.messages.messages import (
    FINGERPRINT,
    FROZEN,
    PREPARE,
    TEST,
    TRAIN,
    VALIDATE,
    Reply,
    Request,
    entries_hash,
    namespaced,
    packed,
    refusal,
    split_frozen,
)
from medfedaug.federation.messages.participation import LEAST_SITES, Participation
from medfedaug.federation.messages.tensor_checks import StateDictValidator
from medfedaug.federation.planning.plan_request import Planning
from medfedaug.federation.server.aggregation import Aggregation
from medfedaug.federation.server.history import RunHistory, Selection
from medfedaug.federation.server.reply_checks import ReplyChecks
from medfedaug.methods.base import Payload
from medfedaug.metrics.registry import METRICS
from medfedaug.metrics.significance import has_stalled
from medfedaug.models.entries import shared_by_name
from medfedaug.statistics import ChannelStatistics
from medfedaug.utils.event_text import OnEvent


class FederationServer:
    """The server: makes every request to the sites, and handles every reply.

    `medfedaug.federation.protocol.run` defines the order of the calls. `ReplyChecks` checks replies,
    `Aggregation` computes the next model, `Selection` keeps the best model, and `RunHistory` records the run.

    The server leaves a failed site out of the round or test, records its name and the reason, and asks it
    again in the next round. A round needs `needed` good updates.

    The sites score the model of a round when they receive it with the request of the next round. A separate
    request scores the last model.

    Args:
        on_event: called with a small dictionary for every event that a user may want to see.
        travels: whether sites and server exchange messages; false if all images are in one place.
        initial: the weights to start from, for a run that was configured with initial weights.

    Attributes:
        run: the identity of the run; a resumed run keeps it.
        sites: the sites that train, with their number of samples.
        left_out: sites that could not be prepared, with the reason.
        stalled: the reason to end before the last round; empty for none.
        statistics: the sites' channel statistics, if a method exchanged them.
        once: the exchange before training.
        carried: the carrier's part of the checkpoint of a resumed run.
    """

    def __init__(
        self,
        config: RunConfig,
        on_event: OnEvent | None = None,
        execution: Execution | None = None,
        *,
        travels: bool = True,
        initial: InitialWeights | None = None,
    ) -> None:
        self.execution, self.travels = execution or Execution(), travels
        self.participation = Participation(config, self.execution)
        self.run, self._on_event = uuid.uuid4().hex, on_event
        self.planning = Planning(config, self.run)
        self.sites: dict[str, int] = {}
        self.unseen: list[str] = []
        self.left_out: dict[str, str] = {}
        self.round, self.stalled = 0, ""
        self.payload: Payload = {}
        self.statistics: dict[str, ChannelStatistics] = {}
        self.carried: dict[str, Any] = {}
        self._starts = StartingModels()
        self.once, self._initial, self._initial_kept = InitialExchange(), initial, Payload()
        self._started = time.perf_counter()
        self._selected = False  # True once the last round is validated
        # By the current round; sites that join during a round wait for the next.
        self._needed_now = self._expected = 0
        self._lock = threading.Lock()  # sites answer in separate threads
        self._compose(config)

    def _compose(self, config: RunConfig) -> None:
        """Build the network, the methods and the checks of a configuration."""
        self.config = config
        composition = Composition(config)
        if self.travels:
            composition.check_apart("a federation")
        self.intensity = composition.intensity
        task = composition.task()
        self.state: dict[str, Tensor] = {k: v.clone() for k, v in composition.network.state_dict().items()}
        self.shared, self.scored, self.sent = composition.shared, composition.scored, composition.sent
        context = composition.server_context(lambda: self.participation.weights(dict(self.sites)))
        masks = masking(config)
        self.participation.capped = masks is None
        if masks is not None:
            self.aggregation: Aggregation = masks.MaskedAggregation(composition, context, config)
        else:
            model = StateDictValidator(composition.network, composition.sent)
            self.aggregation = Aggregation(
                composition,
                context,
                lambda: self.participation.largest_share(len(self.sites)),
                model.norm(self.state),
            )
        self.participation.least = self.aggregation.min_updates
        self.reply_checks = ReplyChecks(composition.network, composition.sent, self.aggregation)
        self.selection = Selection(higher_is_better=METRICS[task.metric].higher_is_better)
        self.record = RunHistory(
            task.metrics, composition.input, task.scored_classes, self._on_event, travels=self.travels
        )
        if self._initial is not None:
            self.state = shared_by_name(composition.network, self._initial.put_into(self.state, config.init))
            self._initial_kept = self._initial.kept(composition.kept_keys)
            self.record.started_from(self._initial.report)
        self._find_frozen()

    def _find_frozen(self) -> None:
        """Separate the entries that no site trains, which the server sends once."""
        sent = {*self.sent}
        self._frozen = namespaced({k: self.state[k] for k in self.shared if k not in sent}, FROZEN)
        self._frozen_hash = entries_hash(self._frozen)

    def adopt_plan(self) -> None:
        """Continue with the planned run, after all sites have sent their fingerprints."""
        self.planning.finish(self.execution.min_sites)
        self._compose(self.planning.configured())
        self.record.tell("planned", reasons=self.planning.to_results()["planned"]["reasons"])

    @property
    def known(self) -> set[str]:
        """The prepared sites: training sites and sites that are only tested."""
        return {*self.sites, *self.unseen}

    @property
    def needed(self) -> int:
        """The number of good updates that the next round needs: ``min_sites``, or all of a round."""
        return self.participation.needed(len(self.sites))

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The rounds so far, as in ``results.json``."""
        return self.record.rounds

    @property
    def trained(self) -> bool:
        """Return whether all rounds are done, or validation no longer rises (``patience``)."""
        return self.round >= self.config.rounds or bool(self.stalled)

    def _find_stalled(self) -> str:
        """Return the reason to end after this round, before the last one; empty for none."""
        n = self.config.patience
        if not n or self.round >= self.config.rounds or not self.config.validates(self.round):
            return ""
        if not has_stalled(self.record.means, n, higher_is_better=self.selection.higher_is_better):
            return ""
        return f"the last {n} validation scores are not better than the {n} before (patience)"

    @property
    def selected_round(self) -> int:
        """The round of the best model, 0 if there is none yet."""
        return self.selection.round

    def missing(self) -> set[str]:
        """The sites that did not answer in the last round, or when its model was validated."""
        return {trouble["site"] for trouble in self.rounds[-1]["missing"]}

    def no_answer(self, task: str, site: str, reason: str) -> None:
        """Record that a site gave no usable reply to a request, with the reason."""
        with self._lock:
            if task == TRAIN:
                self._starts.answered(site)
            if task == FINGERPRINT:
                self.planning.refused[site] = reason
            elif task == PREPARE:
                self._leave_out(site, reason)
            elif task == TEST and self._selected:
                self.record.not_tested(task, site, reason)
            else:
                self.record.missing(task, site, reason)

    def _leave_out(self, site: str, reason: str) -> None:
        if self.left_out.get(site) != reason:
            self.record.tell("left_out", site=site, reason=reason)
        self.left_out[site] = reason

    def prepare(self) -> Request:
        """Ask a site how much data it has and what the methods exchange before training."""
        if self.config.init and not self.record.init:
            raise ConfigError("the run starts from given weights, and none were given: --init FILE")
        return Request(PREPARE, run=self.run, planned=self.planning.planned())

    def accept_preparation(self, site: str, reply: Reply) -> bool:
        """Accept a site's answer to `prepare`, before the first round or during a later one."""
        with self._lock:
            if site in self.known:
                return False

            def use() -> None:
                self.reply_checks.preparation(site, reply)
                if reply.num_samples:
                    self.aggregation.prepare(site, reply, self.participation.weight(reply.num_samples))

            reason = refusal(site, use)
            if reason is not None:
                self._leave_out(site, reason)
                return False
            self.left_out.pop(site, None)
            self.record.described(site, reply.metrics)
            if not reply.num_samples:
                self.unseen = sorted({*self.unseen, site})
                self.record.tell("unseen", site=site)
                return True
            self.sites[site] = reply.num_samples
            self.once.site_joined()
            self.record.prepared(site, reply.num_samples, reply.payload)
            if self.once.ready:
                self._share_once()
            return True

    def finish_preparation(self) -> None:
        """Check, after all sites have answered, that enough of them can train."""
        with self._lock:
            for site, reason in self.aggregation.compare_before().items():
                del self.sites[site]
                self._leave_out(site, reason)
            self.participation.check(self.sites, self.left_out)
            self._share_once()
            self.once.ready = True
            self.record.shares_lowered(self.participation.lowered(self.sites))

    def _share_once(self) -> None:
        self.once.payload = {**self.aggregation.once_result(), **self._initial_kept, **self._frozen}
        self.statistics.update(self.aggregation.channel_statistics())

    def start_round(self, targets: Iterable[str] | None = None) -> Request:
        """Begin the next round with a request to some training sites, by default to all."""
        targets = sorted(self.sites if targets is None else targets)
        self.round += 1
        self._started, self._needed_now = time.perf_counter(), self.needed
        self._expected = self.config.buffer or len(targets)
        self.aggregation.start_round()
        request = self._request(TRAIN, self.round, self.state, self.payload, self.once.due(targets))
        if self.config.buffer:
            self._starts.add(targets, self.round, request.weights)
        self.record.start_round(request, targets, self.config.rounds)
        return request

    def accept(self, site: str, reply: Reply) -> bool:
        """Accept a site's update of the current round, or refuse it and record the reason.

        In buffered rounds the update may have begun in an earlier round. Its step is then carried over to the
        present model.

        Returns:
            Whether the update was used.
        """
        with self._lock:
            round_, start = self._starts.of(site) or (self.round, self.state)
            self._starts.answered(site)
            late = self.round - round_

            def use() -> None:
                if site in self.aggregation.weights:
                    raise UpdateRefused(site, "update", expected="one update a round", got="a second one")
                compared = self._expected >= LEAST_SITES
                samples, model = self.sites.get(site), self.reply_checks.model
                steps = self.reply_checks.update(site, reply, round_, samples, start, compared=compared)
                if late:
                    factor = (1 + late) ** -self.config.staleness
                    reply.weights = model.carried(reply.weights, start, self.state, factor)
                    steps = model.steps(reply.weights, self.state)
                weight = self.participation.weight(reply.num_samples)
                self.aggregation.add(site, reply, weight, steps)

            reason = refusal(site, use)
            if reason is None:
                self.once.answered(site)
                staleness = {"staleness": late} if self.config.buffer else {}
                self.record.trained(site, reply, scored=self.config.validates(round_ - 1), **staleness)
            else:
                self.record.refused(site, reason)
            return reason is None

    def finish_round(self) -> dict[str, Tensor]:
        """Compare the previous round's model with the best so far, and average the accepted updates."""
        for site, reason in self.aggregation.compare(self.state).items():
            self.record.withdrawn(site, reason)
        accepted = len(self.aggregation.weights)
        if accepted < self._needed_now:
            reasons = "; ".join(self.record.reasons())
            raise RunFailed(
                f"round {self.round}: {accepted} of {self._needed_now} needed updates could be used"
                + (f" ({reasons})" if reasons else "")
            )
        if self.config.validates(self.round - 1):
            self._select(self.round - 1)
        self.state, self.payload = self.aggregation.finish_round(self.round, self.state)
        self.record.finish_round(
            self.aggregation.summaries(),
            time.perf_counter() - self._started,
            self.aggregation.lowered,
            self.aggregation.cosines,
        )
        self.stalled = self._find_stalled()
        if self.stalled:
            self.record.tell("stalled", round=self.round, reason=self.stalled)
        return self.state

    def _select(self, round_: int) -> None:
        """Compare the global model, which is the model of this round, with the best so far."""
        scores = self.record.validation(round_)
        self.selection.offer(round_, scores, self.state, self.payload)

    def validate(self) -> Request:
        """Ask the training sites to score the last model."""
        return self._request(VALIDATE, self.round, self.state, self.payload, self.once.payload)

    def accept_validation(self, site: str, reply: Reply) -> bool:
        """Accept a site's score of the last model; return whether it could be used."""

        def record() -> None:
            score = reply.metrics.get(self.record.metric)
            self.record.scored(site, "val", score)
            if score is None:
                self.record.unscored(site, reply.metrics.get("note"))

        return self._accept_scores(VALIDATE, site, reply, self.sites, record)

    def finish_validation(self) -> None:
        """Select the best round."""
        self._select(self.round)
        self._selected = True
        if not self.selection.round:
            # No validation case has foreground, so no round is better than another.
            self.selection.take(self.round, self.state, self.payload)

    def test(self) -> Request:
        """Ask all sites, including unseen ones, to score the selected model on their test cases."""
        chosen = self.selection
        return self._request(TEST, chosen.round, chosen.state, chosen.payload, self.once.payload)

    def accept_test(self, site: str, reply: Reply) -> bool:
        """Accept a site's test scores; return whether they could be used."""
        return self._accept_scores(TEST, site, reply, self.known, lambda: self.record.tested(site, reply))

    def _accept_scores(
        self, task: str, site: str, reply: Reply, sites: Collection[str], record: Callable[[], None]
    ) -> bool:
        reason = refusal(site, lambda: self.reply_checks.scores(site, reply, sites))
        if reason is not None:
            self.no_answer(task, site, reason)
            return False
        with self._lock:
            record()
        return True

    def _request(
        self, task: str, round_: int, state: dict[str, Tensor], payload: Payload, once: Payload
    ) -> Request:
        weights = {key: state[key] for key in self.sent}
        if self.config.wire != "float32":
            weights = packed(weights, self.config.wire)
        return Request(
            task,
            round_,
            weights=weights,
            frozen=self._frozen_hash,
            once=once,
            payload=payload,
            selected_round=self.selection.round,
            run=self.run,
            planned=self.planning.planned(),
        )

    def results(self) -> dict[str, Any]:
        """The record of the run, ready for JSON."""
        return {
            "config": self.config.to_dict(),
            "execution": self.execution.to_dict(),
            "run": self.run,
            "versions": software_versions(),
            "sites": dict(sorted(self.sites.items())),
            "unseen": self.unseen,
            "left_out": dict(sorted(self.left_out.items())),
            **self.record.to_results(),
            **self.planning.to_results(),
            "selected_round": self.selection.round,
            **({"stalled": {"round": self.round, "reason": self.stalled}} if self.stalled else {}),
            "scored": self.scored,
            "test": self.record.scores(self.sites, self.unseen),
        }

    def move_models(self, device: torch.device) -> None:
        """Keep the models on this device, where updates must then be too."""
        self.state = {key: value.to(device) for key, value in self.state.items()}
        self.selection.state = {key: value.to(device) for key, value in self.selection.state.items()}
        self._starts.move(device)

    def save(self, path: Path, carried: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint between two rounds, with the carrier's part ``carried``."""
        save_checkpoint(
            path,
            {
                "config": self.planning.config.to_dict(),
                "planning": self.planning.saved(),
                "run": self.run,
                "sites": dict(self.sites),
                "unseen": self.unseen,
                "round": self.round,
                "model": self.state,
                "payload": self.payload,
                "once": split_frozen(self.once.payload)[1],  # frozen entries are in the model
                **self.record.saved(),
                **self.selection.saved(),
                "methods": self.aggregation.state(),
                **self._starts.state(),
                **({"carried": dict(carried)} if carried else {}),
            },
        )

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint, in a new server."""
        saved = load_checkpoint(path)
        check_same_run(path, saved, self.planning.config)
        self.planning.restore(saved.get("planning", {}))
        if self.planning.result is not None:
            self._compose(self.planning.configured())
        for name in ("run", "sites", "unseen", "round", "payload"):
            setattr(self, name, saved[name])
        self.state = saved["model"]
        self._find_frozen()
        self.once.restore({**saved["once"], **self._frozen})
        self._initial_kept = {k: v for k, v in saved["once"].items() if k.startswith(f"{INITIAL}/")}
        self.record.restore(saved)
        self.selection.restore(saved)
        self.aggregation.restore(saved["methods"])
        self.statistics.update(self.aggregation.channel_statistics())
        self._starts.restore(saved)
        self.carried = saved.get("carried", {})
        self.stalled = self._find_stalled()
        self.record.tell("resumed", round=self.round, rounds=self.config.rounds)


class InitialExchange:
    """Sends the result of the exchange before training to each site once.

    It is sent again after another site has joined and changed it. A site has the result once it has answered
    a request with it: a request may be lost, and a process may end before it has written the result.
    """

    def __init__(self) -> None:
        self.payload: Payload = {}
        self.ready = False
        self._version = 0
        self._sent: dict[str, int] = {}
        self._known: dict[str, int] = {}

    def site_joined(self) -> None:
        """Mark every earlier result as out of date."""
        self._version += 1

    def due(self, sites: Iterable[str]) -> Payload:
        """Return the result for a request to these sites; empty if all of them have it."""
        sites = list(sites)
        self._sent.update(dict.fromkeys(sites, self._version))
        # Popped: until they answer, the server does not know which result they have.
        outdated = [site for site in sites if self._known.pop(site, None) != self._version]
        return self.payload if outdated else {}

    def answered(self, site: str) -> None:
        """Record that a site has answered its last request."""
        self._known[site] = self._sent.get(site, 0)

    def restore(self, payload: Payload) -> None:
        """Continue after a restart, and send the result again: sites may have lost it."""
        self.payload, self.ready, self._known = payload, True, {}


class StartingModels:
    """Keeps the global model of each unanswered training request, for buffered rounds."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}
        self._models: dict[int, Mapping[str, Tensor]] = {}

    def add(self, sites: Iterable[str], round_: int, model: Mapping[str, Tensor]) -> None:
        """Keep the model from which sites train, and drop models that no site needs."""
        self.rounds.update(dict.fromkeys(sites, round_))
        needed = {*self.rounds.values()}
        self._models = {r: kept for r, kept in {**self._models, round_: model}.items() if r in needed}

    def answered(self, site: str) -> None:
        """Note that a site has answered, or never will."""
        self.rounds.pop(site, None)

    def of(self, site: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Return the round and the model of a site's request; ``None`` without a request."""
        round_ = self.rounds.get(site)
        return None if round_ is None else (round_, self._models[round_])

    def move(self, device: torch.device) -> None:
        """Keep the models on a device."""
        for round_, model in self._models.items():
            self._models[round_] = {key: value.to(device) for key, value in model.items()}

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint; empty without an unanswered request."""
        models = {round_: dict(model) for round_, model in self._models.items()}
        return {"starts": {"rounds": self.rounds, "models": models}} if self.rounds else {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        starts = saved.get("starts", {"rounds": {}, "models": {}})
        self.rounds, self._models = dict(starts["rounds"]), dict(starts["models"])
