"""Record of a run: the content of ``results.json``, and the events during the run."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from medfedaug.config.run import SCALING
from medfedaug.data.dataset_json import LABELLED
from medfedaug.federation.job_folder import COUNTS, SPACING
from medfedaug.federation.messages.messages import UNSCORED, Reply, Request, by_method, num_bytes
from medfedaug.federation.planning.fingerprint import accepted_spacing
from medfedaug.federation.server.outlier_checks import suspects
from medfedaug.federation.server.reply_checks import accepted_scores, clean_metrics
from medfedaug.methods.base import Payload
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.registry import described, over_sites, score_of
from medfedaug.utils.event_text import OnEvent

_SETTLED = ("none", "bundle")  # scalings that do not depend on a site's images

_AND = " and "  # between different scalings of sites

_SAVED = ("input", SPACING, "init", "shares", COUNTS, LABELLED, "rounds", "once_bytes")
"""Attributes that the server's checkpoint keeps."""


class RunHistory:
    """Rounds, refusals, scores and bytes of a run.

    Attributes:
        input: the network's input, and the sites' reports on their images.
        shares: the sites whose share of the mean is lowered (``max_share``), with both shares.
        once_bytes: bytes that the sites sent before training, by method.
        unvalidated: sites without a validation score of a model, with their last reason.
    """

    def __init__(
        self,
        metrics: Sequence[str],
        network_input: Mapping[str, Any],
        classes: Sequence[str] = (),
        on_event: OnEvent | None = None,
        *,
        travels: bool = True,
    ) -> None:
        self.metrics, self.classes, self.counts_bytes = tuple(metrics), tuple(classes), travels
        self.metric = self.metrics[0]
        self.input: dict[str, Any] = dict(network_input)
        self.init: dict[str, Any] = {}
        self.spacing: dict[str, dict[str, list[float]]] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.shares: dict[str, dict[str, float]] = {}
        self.labelled: dict[str, list[str]] = {}
        self._scalings: set[str] = set()
        self._suspected: set[str] = set()  # those already named
        self.rounds: list[dict[str, Any]] = []
        self.once_bytes: dict[str, int] = {}
        self.test: dict[str, dict[str, Any]] = {}
        self.untested: dict[str, str] = {}
        self.unvalidated: dict[str, str] = {}
        self._on_event = on_event or (lambda event: None)

    def tell(self, event: str, details: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Report an event. A site's ``details`` cannot change the names of event and site."""
        self._on_event({**(details or {}), **more, "event": event})

    def described(self, site: str, metrics: Mapping[str, Any]) -> None:
        """Record a site's report on its images from its preparation."""
        if spacing := accepted_spacing(metrics.get(SPACING)):
            self.spacing[site] = spacing
        if metrics.get(COUNTS):
            self.counts[site] = metrics[COUNTS]
        report = clean_metrics(metrics).get("input")
        report = report if isinstance(report, Mapping) else {}
        # The task knows the usual scaling, and a site the scaling of its images.
        if report.get("scaling") in SCALING.values() and self.input["scaling"] not in _SETTLED:
            self._scalings.add(report["scaling"])
            self.input["scaling"] = _AND.join(sorted(self._scalings))
        if isinstance(report.get(LABELLED), str):
            known = {*report[LABELLED].split(", ")}
            self.labelled[site] = [name for name in self.classes if name in known]
            self.tell(LABELLED, site=site, classes=", ".join(self.labelled[site]))
        for key in ("missing_channels", "constant_channels"):
            if isinstance(report.get(key), str):
                self.input.setdefault(key, {})[site] = report[key]
                self.tell(key, site=site, channels=report[key])

    def started_from(self, report: Mapping[str, Any]) -> None:
        """Record the report on the initial weights of the user."""
        self.init = dict(report)
        self.tell("init", self.init)

    def shares_lowered(self, lowered: Mapping[str, tuple[float, float]]) -> None:
        """Record the sites that count less than the share of their samples."""
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
        count, down = len(list(sites)), self._sizes(request)
        self.rounds.append(
            {
                "round": request.round,
                "sites": {},
                "bytes_up": 0,
                "bytes_down": count * sum(down.values()),
                "bytes": {name: {"up": 0, "down": count * n} for name, n in down.items()},
                "methods": {},
                "refused": [],
                "missing": [],
            }
        )
        self.tell("round_started", round=request.round, rounds=rounds)

    def trained(self, site: str, reply: Reply, *, scored: bool, **more: int) -> None:
        """Record a used update with the server's numbers, and the requested score of its starting model."""
        entry, metrics = self.rounds[-1], dict(reply.metrics)
        score, reason = metrics.pop(f"val_{self.metric}", None), metrics.pop(UNSCORED, None)
        if scored:
            self.scored(site, "val", score, reply.round - 2)
            self.unscored(site, reason)
        entry["sites"][site] = {**metrics, "samples": reply.num_samples, **more}
        up = self._sizes(reply)
        for name, size in up.items():
            entry["bytes"].setdefault(name, {"up": 0, "down": 0})["up"] += size
        entry["bytes_up"] += sum(up.values())
        self.tell("trained", entry["sites"][site], round=entry["round"], site=site)

    def refused(self, site: str, reason: str) -> None:
        """Record a refused update."""
        self.rounds[-1]["refused"].append({"site": site, "reason": reason})
        self.tell("refused", round=self.rounds[-1]["round"], site=site, reason=reason)

    def withdrawn(self, site: str, reason: str) -> None:
        """Record an update as refused after a comparison with other sites, and drop its score."""
        before = len(self.rounds) - 1 - self.rounds[-1]["sites"].pop(site).get("staleness", 0)
        for entry in self.rounds[:before][-1:]:
            numbers = entry["sites"].get(site, {})
            numbers.pop(f"val_{self.metric}", None)
            if not numbers:  # the site was not in that round
                entry["sites"].pop(site, None)
        self.refused(site, reason)

    def missing(self, task: str, site: str, reason: str) -> None:
        """Record that a site gave no usable reply."""
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
        """Record a site's reason for a missing validation score; report each reason once."""
        if isinstance(reason, str) and self.unvalidated.get(site) != reason:
            self.unvalidated[site] = reason
            self.tell("unscored", site=site, reason=reason)

    def validation(self, round_: int) -> dict[str, float]:
        """Return the validation scores of a round's model by site, and record their mean."""
        entry, name = self.rounds[round_ - 1], f"val_{self.metric}"
        known = {site: numbers.get(name) for site, numbers in entry["sites"].items()}
        scores = {site: score for site, score in known.items() if score is not None}
        mean = mean_score(scores.values())
        if mean is not None:
            entry[name] = mean
            self.tell("validated", {name: mean}, round=round_)
        return scores

    @property
    def means(self) -> list[float]:
        """The mean validation scores of the validated rounds."""
        return [entry[name] for entry in self.rounds if (name := f"val_{self.metric}") in entry]

    def finish_round(
        self,
        summaries: Mapping[str, dict[str, Any]],
        seconds: float,
        lowered: Mapping[str, tuple[float, float]] | None = None,
        cosines: Mapping[str, float] | None = None,
    ) -> None:
        """Record that a round is over."""
        entry = self.rounds[-1]
        if cosines:
            entry["cosines"] = dict(sorted(cosines.items()))
        for site, reason in suspects(self.rounds).items():
            if site not in self._suspected:
                self._suspected.add(site)
                self.tell("suspected", round=entry["round"], site=site, reason=reason)
        if lowered:
            entry["shares"] = {site: after for site, (_, after) in sorted(lowered.items())}
        for name, summary in summaries.items():
            values = dict(summary)
            if size := values.pop("bytes", None):  # of other messages than updates, such as keys
                entry["bytes"][name] = size
                entry["bytes_up"] += size["up"]
                entry["bytes_down"] += size["down"]
            entry["methods"].setdefault(name, {}).update(values)
        entry["seconds"] = seconds
        samples = sum(numbers.get("samples", 0) for numbers in entry["sites"].values())
        more = {"samples": samples, "bytes": entry["bytes"]}
        self.tell("round_finished", more, round=entry["round"], seconds=seconds)

    def tested(self, site: str, reply: Reply) -> None:
        """Record a site's test scores."""
        scores = self.test[site] = accepted_scores(reply.metrics, self.metrics, self.classes)
        note = {"reason": scores["note"]} if scores[self.metric] is None and "note" in scores else {}
        self.tell("tested", {self.metric: scores[self.metric], **note}, site=site)

    def reasons(self) -> list[str]:
        """Return the reasons of the sites that are missing from the last round."""
        entry = self.rounds[-1]
        return [trouble["reason"] for trouble in (*entry["refused"], *entry["missing"])]

    def scores(self, sites: Iterable[str], unseen: Iterable[str]) -> dict[str, Any]:
        """Return the test results, as in ``results.json``."""
        groups = {
            name: {site: self.test[site] for site in sorted(members) if site in self.test}
            for name, members in (("sites", sites), ("unseen", unseen))
        }
        missing = {"missing": dict(sorted(self.untested.items()))} if self.untested else {}
        return {**groups, **over_sites(groups["sites"], self.metrics), **missing}

    def to_results(self) -> dict[str, Any]:
        """Return the record before the test, as in ``results.json``."""
        optional = {
            SPACING: dict(sorted(self.spacing.items())),
            COUNTS: dict(sorted(self.counts.items())),
            "init": self.init,
            "shares": self.shares,
            LABELLED: dict(sorted(self.labelled.items())),
            "suspected": suspects(self.rounds),
        }
        return {
            "input": self.input,
            **{name: value for name, value in optional.items() if value},
            **described(self.metrics),
            "bytes_up_before_training": self.once_bytes,
            "rounds": self.rounds,
            **({"unvalidated": dict(sorted(self.unvalidated.items()))} if self.unvalidated else {}),
        }

    def saved(self) -> dict[str, Any]:
        """Return the record's part of a checkpoint."""
        return {name: getattr(self, name) for name in _SAVED}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `saved`."""
        for name in _SAVED:
            setattr(self, name, saved[name])
        self._suspected = {*suspects(self.rounds)}
        self._scalings = set(SCALING.values()) & set(self.input["scaling"].split(_AND))

    def _sizes(self, message: Request | Reply) -> dict[str, int]:
        """Return the bytes of a message by method, and of the model under ``"model"``."""
        if not self.counts_bytes:
            return {}
        once = message.once if isinstance(message, Request) else {}
        # Masked numbers hold model and statistics together.
        masked = {key: value for key, value in message.masks.items() if isinstance(value, Tensor)}
        sizes = {"model": num_bytes(message.weights) + num_bytes(masked)}
        for payload in (message.payload, once):
            for name, entries in by_method(payload).items():
                sizes[name] = sizes.get(name, 0) + num_bytes(entries)
        return sizes


class Selection:
    """The first global model with the best unweighted mean of the sites' validation scores.

    Two models are compared over the sites that scored both: a round without the score of a hard site must
    not gain from that. If no site scored both, their means are compared.
    """

    def __init__(self, *, higher_is_better: bool = True) -> None:
        self.higher_is_better, self._sign = higher_is_better, 1 if higher_is_better else -1
        self.round = 0
        self.state: dict[str, Tensor] = {}
        self.payload: Payload = {}
        self._scores: dict[str, float] = {}

    def offer(
        self, round_: int, scores: Mapping[str, float], state: Mapping[str, Tensor], payload: Payload
    ) -> None:
        """Select a model if it is better than the best so far."""
        if scores and (not self._scores or self._better(scores)):
            self._scores = dict(scores)
            self.take(round_, state, payload)

    def _better(self, scores: Mapping[str, float]) -> bool:
        both = [site for site in scores if site in self._scores]
        new = [scores[site] for site in both] or list(scores.values())
        best = [self._scores[site] for site in both] or list(self._scores.values())
        return self._sign * fmean(new) > self._sign * fmean(best)

    def take(self, round_: int, state: Mapping[str, Tensor], payload: Payload) -> None:
        """Select a model without a score."""
        self.round = round_
        self.state = {key: value.clone() for key, value in state.items()}
        self.payload = dict(payload)

    def saved(self) -> dict[str, Any]:
        """Return the selection's part of a checkpoint."""
        return {
            "selected_round": self.round,
            "selected_model": self.state,
            "selected_payload": self.payload,
            "selected_scores": self._scores,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `saved` returned."""
        self.round = saved["selected_round"]
        self._scores = saved["selected_scores"]
        self.state, self.payload = saved["selected_model"], saved["selected_payload"]
