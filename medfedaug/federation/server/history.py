"""Records a run: the content of ``results.json``, and the events during the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from medfedaug.config.run import SCALING
from medfedaug.config.site_description import DESCRIPTION
from medfedaug.data.dataset_json import LABELLED
from medfedaug.federation.job_folder import SPACING
from medfedaug.federation.messages.messages import UNSCORED, Reply, Request, by_method, num_bytes
from medfedaug.federation.planning.fingerprint import accepted_spacing
from medfedaug.federation.server.reply_checks import accepted_scores, clean_metrics
from medfedaug.federation.server.step_comparison import ComparedStep, suspicion
from medfedaug.methods.base import Payload
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.registry import METRICS, described, over_sites, score_of
from medfedaug.utils.event_text import OnEvent

__all__ = ["RunHistory"]

_SETTLED = ("none", "bundle")
"""Scalings that are the run's, whatever the images of a site are."""

_AND = " and "  # between the scalings of sites that differ


class RunHistory:
    """Rounds, refusals, scores and bytes of a run.

    Args:
        metrics: the names of the task's metrics; the first one chooses the best round.
        seen: the network's input (`medfedaug.federation.composition.Composition.input`).
        classes: the classes that have scores of their own.
        on_event: called with a small dictionary for every event that a user may want to see.
        travels: whether anything is sent between sites and server, so that bytes are counted.

    Attributes:
        input: the network's input, and what the sites report about their images.
        spacing: the edges of the voxels of the sites' training images, by site, as far as they say.
        descriptions: the sites' descriptions of themselves (`SiteDescription`), by site.
        init: a report on the given weights that the network started from; empty if there were none.
        shares: the sites whose share of the mean is lowered (``max_share``), with both shares.
        rounds: an entry for each round, as in ``results.json``.
        once_bytes: bytes that the sites sent before training, by method.
        test: the test scores, by site.
        untested: sites without test scores, with the reason.
        unvalidated: sites that sent no validation score of a model, with the last reason that they gave.
    """

    def __init__(
        self,
        metrics: Sequence[str],
        seen: Mapping[str, Any],
        classes: Sequence[str] = (),
        on_event: OnEvent | None = None,
        *,
        travels: bool = True,
    ) -> None:
        self.metrics, self.classes, self.counts_bytes = tuple(metrics), tuple(classes), travels
        self.metric = self.metrics[0]
        self.input: dict[str, Any] = dict(seen)
        self.init: dict[str, Any] = {}
        self.spacing: dict[str, dict[str, list[float]]] = {}
        self.descriptions: dict[str, dict[str, Any]] = {}
        self.shares: dict[str, dict[str, float]] = {}
        self.labelled: dict[str, list[str]] = {}
        self._scalings: set[str] = set()
        self.rounds: list[dict[str, Any]] = []
        self.once_bytes: dict[str, int] = {}
        self.test: dict[str, dict[str, Any]] = {}
        self.untested: dict[str, str] = {}
        self.unvalidated: dict[str, str] = {}
        self._on_event = on_event or (lambda event: None)

    def tell(self, event: str, details: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Report an event. A site's ``details`` can change neither the event's name nor that of the site."""
        self._on_event({**(details or {}), **more, "event": event})

    def described(self, site: str, metrics: Mapping[str, Any]) -> None:
        """Record the report of a site on its images, made when it is prepared."""
        if spacing := accepted_spacing(metrics.get(SPACING)):
            self.spacing[site] = spacing
        if metrics.get(DESCRIPTION):
            self.descriptions[site] = metrics[DESCRIPTION]
        told = clean_metrics(metrics).get("input")
        told = told if isinstance(told, Mapping) else {}
        # The task knows how such images usually are scaled, and a site knows about its own images.
        if told.get("scaling") in SCALING.values() and self.input["scaling"] not in _SETTLED:
            self._scalings.add(told["scaling"])
            self.input["scaling"] = _AND.join(sorted(self._scalings))
        if isinstance(told.get(LABELLED), str):
            known = {*told[LABELLED].split(", ")}
            self.labelled[site] = [name for name in self.classes if name in known]
            self.tell(LABELLED, site=site, classes=", ".join(self.labelled[site]))
        for key in ("missing_channels", "constant_channels"):
            if isinstance(told.get(key), str):
                self.input.setdefault(key, {})[site] = told[key]
                self.tell(key, site=site, channels=told[key])

    def started_from(self, report: Mapping[str, Any]) -> None:
        """The network starts from given weights."""
        self.init = dict(report)
        self.tell("init", self.init)

    def shares_lowered(self, lowered: Mapping[str, tuple[float, float]]) -> None:
        """Record the sites that count for less than the share of their samples."""
        for site, (before, after) in sorted(lowered.items()):
            self.shares[site] = {"by_samples": before, "used": after}
            self.tell("share_lowered", site=site, before=before, after=after)

    def prepared(self, site: str, samples: int, payload: Payload) -> None:
        """Record that a site takes part."""
        for name, entries in by_method(payload).items():
            self.once_bytes[name] = self.once_bytes.get(name, 0) + num_bytes(entries)
        self.tell("prepared", site=site, samples=samples)

    def start_round(self, request: Request, sites: Iterable[str], rounds: int) -> None:
        """Record that a round begins, with a request to these sites."""
        asked, down = len(list(sites)), self._sizes(request)
        self.rounds.append(
            {
                "round": request.round,
                "sites": {},
                "bytes_up": 0,
                "bytes_down": asked * sum(down.values()),
                "bytes": {name: {"up": 0, "down": asked * n} for name, n in down.items()},
                "methods": {},
                "refused": [],
                "missing": [],
            }
        )
        self.tell("round_started", round=request.round, rounds=rounds)

    def trained(self, site: str, reply: Reply, *, scored: bool, **more: int) -> None:
        """Record an update that was used, and the score of the model that it began with if one was asked for.

        Args:
            site: who sent it.
            reply: the update.
            scored: whether a score was asked for.
            **more: numbers about the update that the server knows.
        """
        entry, metrics = self.rounds[-1], dict(reply.metrics)
        score, without = metrics.pop(f"val_{self.metric}", None), metrics.pop(UNSCORED, None)
        if scored:
            self.scored(site, "val", score, reply.round - 2)
            self.unscored(site, without)
        entry["sites"][site] = {**metrics, "samples": reply.num_samples, **more}
        up = self._sizes(reply)
        for name, size in up.items():
            entry["bytes"].setdefault(name, {"up": 0, "down": 0})["up"] += size
        entry["bytes_up"] += sum(up.values())
        self.tell("trained", entry["sites"][site], round=entry["round"], site=site)

    def refused(self, site: str, reason: str) -> None:
        """Record an update that was not used."""
        self.rounds[-1]["refused"].append({"site": site, "reason": reason})
        self.tell("refused", round=self.rounds[-1]["round"], site=site, reason=reason)

    def withdrawn(self, site: str, reason: str) -> None:
        """Record that an update is left out after all, since the updates of the other sites speak against it.

        Nor is the score that came with it, of the model that it began with.
        """
        before = len(self.rounds) - 1 - self.rounds[-1]["sites"].pop(site).get("staleness", 0)
        for entry in self.rounds[:before][-1:]:
            told = entry["sites"].get(site, {})
            told.pop(f"val_{self.metric}", None)
            if not told:  # it was not in that round
                entry["sites"].pop(site, None)
        self.refused(site, reason)

    def suspect(self, round_: int, scores: Mapping[str, float]) -> None:
        """Record the sites whose step in a round stood apart and did the others no good."""
        entry = self.rounds[round_ - 1]
        earlier = [self.scores_of(one) for one in self.rounds[: round_ - 1]]
        higher = METRICS[self.metric].higher_is_better
        for site, step in entry.get("steps", {}).items():
            reason = suspicion(site, step, scores, earlier, higher_is_better=higher)
            if reason is not None:
                entry.setdefault("suspected", []).append({"site": site, "reason": reason})
                self.tell("suspected", round=round_, site=site, reason=reason)

    def missing(self, task: str, site: str, reason: str) -> None:
        """Record that a site did not answer, or not with a usable reply."""
        entry = self.rounds[-1]
        entry["missing"].append({"site": site, "task": task, "reason": reason})
        self.tell("missing", round=entry["round"], task=task, site=site, reason=reason)

    def not_tested(self, task: str, site: str, reason: str) -> None:
        """Record that a site gave no test scores."""
        self.untested[site] = reason
        self.tell("missing", round=len(self.rounds), task=task, site=site, reason=reason)

    def scored(self, site: str, split: str, score: Any, index: int = -1) -> None:
        """Record a site's score of the model of a round, by default of the last round."""
        known = score_of(self.metric, score)
        self.rounds[index]["sites"].setdefault(site, {})[f"{split}_{self.metric}"] = known

    def unscored(self, site: str, reason: Any) -> None:
        """Record the reason of a site that gives a model no validation score; each reason once."""
        if isinstance(reason, str) and self.unvalidated.get(site) != reason:
            self.unvalidated[site] = reason
            self.tell("unscored", site=site, reason=reason)

    def validation(self, round_: int) -> dict[str, float]:
        """The validation scores of a round's model by site, where there is one; records their mean."""
        entry, name = self.rounds[round_ - 1], f"val_{self.metric}"
        scores = self.scores_of(entry)
        mean = mean_score(scores.values())
        if mean is not None:
            entry[name] = mean
            self.tell("validated", {name: mean}, round=round_)
        return scores

    @property
    def means(self) -> list[float]:
        """The mean validation scores of the rounds that have one."""
        return [entry[name] for entry in self.rounds if (name := f"val_{self.metric}") in entry]

    def scores_of(self, entry: Mapping[str, Any]) -> dict[str, float]:
        """The validation scores in the entry of a round, by site."""
        found = {site: scores.get(f"val_{self.metric}") for site, scores in entry["sites"].items()}
        return {site: score for site, score in found.items() if score is not None}

    def finish_round(
        self,
        summaries: Mapping[str, dict[str, Any]],
        seconds: float,
        lowered: Mapping[str, tuple[float, float]] | None = None,
        steps: Mapping[str, ComparedStep] | None = None,
    ) -> None:
        """Record that a round is over."""
        entry = self.rounds[-1]
        for site, step in sorted((steps or {}).items()):
            found = step.to_results()
            if step.shortened or found["cosine"] < 0:
                entry.setdefault("steps", {})[site] = found
            if step.shortened:
                self.tell("step_shortened", found, round=entry["round"], site=site)
        if lowered:
            entry["shares"] = {site: after for site, (_, after) in sorted(lowered.items())}
        for name, summary in summaries.items():
            told = dict(summary)
            if size := told.pop("bytes", None):  # of what is in no update, such as keys
                entry["bytes"][name] = size
                entry["bytes_up"] += size["up"]
                entry["bytes_down"] += size["down"]
            entry["methods"].setdefault(name, {}).update(told)
        entry["seconds"] = seconds
        samples = sum(told.get("samples", 0) for told in entry["sites"].values())
        more = {"samples": samples, "bytes": entry["bytes"]}
        self.tell("round_finished", more, round=entry["round"], seconds=seconds)

    def tested(self, site: str, reply: Reply) -> None:
        """Record a site's test scores."""
        found = self.test[site] = accepted_scores(reply.metrics, self.metrics, self.classes)
        without = {"reason": found["note"]} if found[self.metric] is None and "note" in found else {}
        self.tell("tested", {self.metric: found[self.metric], **without}, site=site)

    def reasons(self) -> list[str]:
        """The reasons why sites are missing from the last round."""
        entry = self.rounds[-1]
        return [trouble["reason"] for trouble in (*entry["refused"], *entry["missing"])]

    def scores(self, sites: Iterable[str], unseen: Iterable[str]) -> dict[str, Any]:
        """The test results, as in ``results.json``."""
        groups = {
            name: {site: self.test[site] for site in sorted(members) if site in self.test}
            for name, members in (("sites", sites), ("unseen", unseen))
        }
        missing = {"missing": dict(sorted(self.untested.items()))} if self.untested else {}
        return {**groups, **over_sites(groups["sites"], self.metrics), **missing}

    def to_results(self) -> dict[str, Any]:
        """Everything before the test, as in ``results.json``."""
        return {
            "input": self.input,
            **({SPACING: dict(sorted(self.spacing.items()))} if self.spacing else {}),
            **({"descriptions": dict(sorted(self.descriptions.items()))} if self.descriptions else {}),
            **({"init": self.init} if self.init else {}),
            **({"shares": self.shares} if self.shares else {}),
            **({LABELLED: dict(sorted(self.labelled.items()))} if self.labelled else {}),
            **described(self.metrics),
            "bytes_up_before_training": self.once_bytes,
            "rounds": self.rounds,
            **({"unvalidated": dict(sorted(self.unvalidated.items()))} if self.unvalidated else {}),
        }

    def saved(self) -> dict[str, Any]:
        """The part of the record that the server's checkpoint keeps."""
        told = {"input": self.input, SPACING: self.spacing, "init": self.init, "shares": self.shares}
        told |= {"descriptions": self.descriptions, LABELLED: self.labelled}
        return {**told, "rounds": self.rounds, "once_bytes": self.once_bytes}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """The inverse of `saved`."""
        self.rounds, self.once_bytes = saved["rounds"], saved["once_bytes"]
        self.input.update(saved.get("input", {}))
        self.spacing = dict(saved.get(SPACING, {}))
        self.descriptions = dict(saved.get("descriptions", {}))
        self._scalings = set(SCALING.values()) & set(self.input["scaling"].split(_AND))
        self.init, self.shares = saved.get("init", {}), saved.get("shares", {})
        self.labelled = dict(saved.get(LABELLED, {}))

    def _sizes(self, message: Request | Reply) -> dict[str, int]:
        """The bytes of a message by method; those of the model under ``"model"``."""
        if not self.counts_bytes:
            return {}
        once = message.once if isinstance(message, Request) else {}
        # What comes under masks is model and statistics in one.
        masked = {key: value for key, value in message.masks.items() if isinstance(value, Tensor)}
        sizes = {"model": num_bytes(message.weights) + num_bytes(masked)}
        for payload in (message.payload, once):
            for name, entries in by_method(payload).items():
                sizes[name] = sizes.get(name, 0) + num_bytes(entries)
        return sizes
