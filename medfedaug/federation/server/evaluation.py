"""The server's half of an evaluation: models of finished runs, and their scores from the sites."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, RunFailed, first_line
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.messages import SCORE, Reply, Request
from medfedaug.federation.messages.refusal import raise_error, refusal
from medfedaug.federation.messages.scoring import ScoringSpec
from medfedaug.federation.messages.tensor_checks import check_tensors
from medfedaug.federation.server.reply_checks import accepted_scores, clean_metrics, is_count
from medfedaug.methods.base import Payload
from medfedaug.metrics.registry import GLOBAL, LOCAL, METRICS, PERSONAL, described, over_sites
from medfedaug.utils.event_text import OnEvent
from medfedaug.utils.validation import is_number

FEDERATION = "federation"
"""The evaluated run's name in an evaluation; the other runs hold local models."""

_HEADER = 4 * 2**20  # bytes of names and shapes in a file, at most
_MOST_READ = 16  # multiple of the network's bytes: weights and exchange of a run


@dataclass(frozen=True, eq=False)
class EvaluatedRun:
    """The model of a finished run.

    Args:
        run: its identity.
        round: the round of the model.
        weights: the shared entries of the network; all entries in a local model.
        payload: the exchange that the methods' layers need, by method.
        owner: the site that trained alone; empty if several sites trained.
        sites: the sites that trained.
        sha256: the hash of the model's file.
    """

    config: RunConfig
    run: str
    round: int
    weights: dict[str, Tensor] = field(default_factory=dict)
    payload: Payload = field(default_factory=dict)
    owner: str = ""
    sites: tuple[str, ...] = ()
    sha256: str = ""

    def summary(self) -> dict[str, Any]:
        """Return the run's description as JSON types, without tensors."""
        names = ("run", "round", "sha256", "sites", "owner")
        return {name: getattr(self, name) for name in names} | {"sites": list(self.sites)}

    def save(self, path: Path) -> None:
        """Write the model for a job, without its settings, as safetensors, which hold no code."""
        tensors = {
            f"{kind}/{key}": value.contiguous()
            for kind, entries in (("weights", self.weights), ("payload", self.payload))
            for key, value in entries.items()
        }
        save_file(tensors, path, {"told": json.dumps(self.summary())})

    @classmethod
    def load(cls, path: Path, config: RunConfig) -> EvaluatedRun:
        """Read a file of `save` at the server of a job."""
        size = sum(value.nbytes for value in Composition(config).network.state_dict().values())
        try:
            if path.stat().st_size > _MOST_READ * size + _HEADER:
                raise ConfigError(f"{path.name}: larger than a model of its run's network")
            with safe_open(path, "pt") as file:
                entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                summary = json.loads((file.metadata() or {})["told"])
            tensors: dict[str, dict[str, Tensor]] = {"weights": {}, "payload": {}}
            for name, value in entries.items():
                kind, _, key = name.partition("/")
                tensors[kind][key] = value
            return cls(config, **{**summary, "sites": tuple(summary["sites"]), **tensors})
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(f"{path.name}: cannot be read as a model ({first_line(error)})") from error


class Evaluation:
    """The server of an evaluation: makes every request to the sites, and handles every reply.

    `medfedaug.federation.protocol.evaluate` defines the order of the calls. A site scores the global model
    with the statistics of its images alone, its personal model if sites keep entries or state of the run, and
    its local model. It compares them on its own cases, so that an interval of the difference may leave the
    site even if no score of a case does.

    Args:
        runs: by name: the evaluated run under `FEDERATION`, and runs of local models.
        on_event: called with a small dictionary for every event that a user may want to see.

    Attributes:
        silent: the sites that did not answer their last request.
    """

    def __init__(self, runs: Mapping[str, EvaluatedRun], *, on_event: OnEvent | None = None) -> None:
        self.runs, self.silent = dict(runs), set[str]()
        self._tell = on_event or (lambda event: None)
        self.compositions = {key: Composition(run.config) for key, run in self.runs.items()}
        federation = self.compositions[FEDERATION]
        self.task = federation.task()
        for key, composition in self.compositions.items():
            composition.check_apart("an evaluation")
            self._check(key, composition)
        # Without an exchange, the model is complete only with the entries that sites keep.
        self.personal = federation.scored["test"] != GLOBAL
        self.scored: dict[str, dict[str, dict[str, Any]]] = {}
        self.missing: dict[str, dict[str, str]] = {}
        self._spec = ScoringSpec(FEDERATION)

    def _check(self, key: str, composition: Composition) -> None:
        run, first = self.runs[key], self.runs[FEDERATION]
        for name in ("task", "classes"):
            ours, theirs = getattr(run.config, name), getattr(first.config, name)
            if ours != theirs:
                raise ConfigError(f"the local models differ from the federation in {name}: {ours}, {theirs}")
        if key == FEDERATION:
            if not composition.shared:
                raise ConfigError("the sites of this run share no model: give it as --local")
        elif composition.shared and not run.owner:
            raise ConfigError(
                "the sites of a run of local models share some of the network: give a run with --methods "
                "single, or SITE=RUN for each site"
            )
        expected = composition.network.state_dict()
        lacking = [name for name in composition.shared if name not in run.weights]
        if lacking:
            raise ConfigError(f"a model lacks {lacking[0]}, which its run's network shares")
        shapes = {name: tuple(expected[name].shape) for name in run.weights if name in expected}
        check_tensors("of the model", run.weights, shapes)

    def scores(self, connected: Sequence[str]) -> Iterator[tuple[Request, list[str]]]:
        """Yield scoring requests: first the local models, with which the others are compared."""
        everybody = sorted(connected)
        for key, run in self.runs.items():
            if key == FEDERATION:
                continue
            if sites := [site for site in everybody if run.owner in ("", site)]:
                yield self._request(ScoringSpec(key, LOCAL, own=not run.owner)), sites
        yield self._request(ScoringSpec(FEDERATION, GLOBAL, own=False, against=(LOCAL,))), everybody
        if self.personal:
            yield self._request(ScoringSpec(FEDERATION, PERSONAL, against=(LOCAL, GLOBAL))), everybody

    def _request(self, spec: ScoringSpec) -> Request:
        self._spec = spec
        self._tell({"event": "scoring", "model": spec.model})
        run = self.runs[spec.run]
        return Request(
            SCORE,
            run.round,
            weights=run.weights,
            once=run.payload,
            payload=run.payload,
            selected_round=run.round,
            run=run.run,
            scoring={**asdict(spec), "against": list(spec.against)},
        )

    def no_answer(self, task: str, site: str, reason: str) -> None:
        """Record that a site gave no usable reply to a request."""
        self.missing.setdefault(site, {})[self._spec.model] = reason
        self._tell({"event": "not_scored", "site": site, "model": self._spec.model, "reason": reason})
        self.silent.add(site)

    def accept_scores(self, site: str, reply: Reply) -> bool:
        """Accept a site's scores of the last requested model; return whether they could be used."""
        spec = self._spec

        def use() -> None:
            raise_error(reply)
            metrics = clean_metrics(reply.metrics, depth=2)
            scores = accepted_scores(metrics, self.task.metrics, self.task.scored_classes)
            against = metrics.get("against")
            if isinstance(against, Mapping):
                metric = self.task.metric
                pairs = {other: accepted_difference(metric, against.get(other)) for other in spec.against}
                scores["against"] = {other: difference for other, difference in pairs.items() if difference}
            self.scored.setdefault(site, {})[spec.model] = scores
            event = {"event": "scored", "site": site, "model": spec.model}
            self._tell({**event, "score": scores[self.task.metric], "metric": self.task.metric})

        reason = refusal(site, use)
        if reason is not None:
            self.no_answer(SCORE, site, reason)
        self.silent.discard(site)
        return reason is None

    def finish(self) -> None:
        """Check that a site has scored a model."""
        if not self.scored:
            reasons = sorted({reason for models in self.missing.values() for reason in models.values()})
            raise RunFailed("no site has scored a model" + (f" ({'; '.join(reasons)})" if reasons else ""))

    def results(self) -> dict[str, Any]:
        """Return the record of the evaluation for ``evaluation.json``."""
        federation = self.runs[FEDERATION]
        unseen = sorted(self.scored.keys() - set(federation.sites)) if federation.sites else []
        return {
            "split": "test",
            "metric": self.task.metric,
            **described(self.task.metrics),
            "models": self._models(),
            "unseen": unseen,
            "sites": dict(sorted(self.scored.items())),
            "mean": {
                model: over_sites(
                    {site: by[model] for site, by in self.scored.items() if model in by}, self.task.metrics
                )["mean"]
                for model in self._models()
            },
            "missing": self._missing(),
        }

    def _missing(self) -> dict[str, dict[str, str]]:
        """Return the reasons for missing scores, also of sites that are not connected."""
        absent = {*self.runs[FEDERATION].sites} - self.scored.keys() - self.missing.keys()
        missing = {**self.missing, **{site: {GLOBAL: f"site {site} is not connected"} for site in absent}}
        return dict(sorted(missing.items()))

    def _models(self) -> dict[str, Any]:
        keys = {GLOBAL: FEDERATION}
        if self.personal:
            keys[PERSONAL] = FEDERATION
        if local := [key for key in self.runs if key != FEDERATION]:
            keys[LOCAL] = local[0]
        models: dict[str, Any] = {}
        for model, key in keys.items():
            scored = self.compositions[key].scored["test"]
            runs = [run for name, run in self.runs.items() if (name == FEDERATION) == (key == FEDERATION)]
            models[model] = {
                "scored": scored if model == PERSONAL else model,
                "methods": [method["name"] for method in self.runs[key].config.methods],
                "runs": [run.summary() for run in runs],
            }
        return models


def accepted_difference(metric: str, values: Any) -> dict[str, Any]:
    """Return a site's difference of two models, with ``None`` for impossible numbers; empty without one."""
    if not isinstance(values, Mapping):
        return {}
    largest = METRICS[metric].largest
    known: dict[str, Any] = {
        name: values.get(name) if is_number(values.get(name)) and abs(values[name]) <= largest else None
        for name in ("difference", "low", "high")
    }
    p = values.get("p")
    known["p"] = float(p) if p is not None and is_number(p) and 0 <= p <= 1 else None
    unit = "patients" if "patients" in values else "cases"
    return {**known, unit: values[unit] if is_count(values.get(unit)) else None}
