"""The server's half of an evaluation: models of finished runs, and the scores that sites give them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, RunFailed, UpdateRefused, first_line
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.messages import LEND, SCORE, Reply, Request, num_bytes
from medfedaug.federation.messages.refusal import raise_error, refusal
from medfedaug.federation.messages.scoring import Asked
from medfedaug.federation.messages.tensor_checks import check_tensors
from medfedaug.federation.server.reply_checks import accepted_scores, clean_metrics, is_count
from medfedaug.methods.base import Payload
from medfedaug.metrics.registry import GLOBAL, LOCAL, METRICS, PERSONAL, described, over_sites
from medfedaug.utils.event_text import OnEvent
from medfedaug.utils.validation import is_number

FEDERATION = "federation"
"""The name, in an evaluation, of the run that is evaluated; the others are of local models."""

_HEADER = 4 * 2**20  # bytes of names and shapes in a file, at most
_MOST_LENT = 4  # times the bytes of the network: what methods may keep for a model beside its weights
_MOST_READ = 16  # times the bytes of the network: weights and exchange of a run


@dataclass(frozen=True, eq=False)
class EvaluatedRun:
    """The model of a finished run.

    Args:
        config: the run's settings.
        run: its identity.
        round: the round that the model is of.
        weights: the shared entries of the network, or all of them in a model of a site's own.
        payload: what the methods' layers need besides, by method.
        owner: the site that trained it alone; empty for a run of a federation, or one in which every site
            trained for itself.
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
        """Return the run's description as JSON types, without its numbers."""
        told = {"run": self.run, "round": self.round, "sha256": self.sha256, "sites": list(self.sites)}
        return {**told, "owner": self.owner}

    def save(self, path: Path) -> None:
        """Write it for a job, without its settings, as safetensors, which hold numbers and no code."""
        tensors = {
            f"{kind}/{key}": value.contiguous()
            for kind, entries in (("weights", self.weights), ("payload", self.payload))
            for key, value in entries.items()
        }
        save_file(tensors, path, {"told": json.dumps(self.summary())})

    @classmethod
    def load(cls, path: Path, config: RunConfig) -> EvaluatedRun:
        """The inverse of `save`, at the server of a job.

        Raises:
            ConfigError: when the file is missing, too large, or not of such a run.
        """
        room = sum(value.nbytes for value in Composition(config).network.state_dict().values())
        try:
            if path.stat().st_size > _MOST_READ * room + _HEADER:
                raise ConfigError(f"{path.name}: larger than a model of its run's network")
            with safe_open(path, "pt") as file:
                entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                told = json.loads((file.metadata() or {})["told"])
            found: dict[str, dict[str, Tensor]] = {"weights": {}, "payload": {}}
            for name, value in entries.items():
                kind, _, key = name.partition("/")
                found[kind][key] = value
            return cls(config, **{**told, "sites": tuple(told["sites"]), **found})
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(f"{path.name}: cannot be read as a model ({first_line(error)})") from error


class Evaluation:
    """The server of an evaluation: makes every request to the sites, and handles every reply.

    `medfedaug.federation.protocol.evaluate` defines the order of the calls. A site scores the global model
    with nothing of its own but the statistics of its images, its personal model where the run leaves
    something at the sites, and the local model that it trained alone. It compares them on its own cases, so
    that an interval of the difference leaves it also where no score of a case does.

    Args:
        runs: by name: the evaluated one under `FEDERATION`, and runs of local models.
        cross_site: whether the personal and the local model of each site are also scored at all others. A
            site lends them only if its own settings say so.
        on_event: called with a small dictionary whenever something happened that a user may want to see.

    Attributes:
        silent: the sites that did not answer the last request that they were sent.
    """

    def __init__(
        self,
        runs: Mapping[str, EvaluatedRun],
        *,
        cross_site: bool = False,
        on_event: OnEvent | None = None,
    ) -> None:
        self.runs, self.cross_site, self.silent = dict(runs), cross_site, set[str]()
        self._tell = on_event or (lambda event: None)
        self.compositions = {key: Composition(run.config) for key, run in self.runs.items()}
        federation = self.compositions[FEDERATION]
        self.task = federation.task()
        for key, composition in self.compositions.items():
            composition.check_apart("an evaluation")
            self._check(key, composition)
        # The model of a run without exchange is whole in the eyes of sites only with what they keep.
        self.personal = federation.scored["test"] != GLOBAL
        self.scored: dict[str, dict[str, dict[str, Any]]] = {}
        self.matrix: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
        self.missing: dict[str, dict[str, str]] = {}
        self.kept: dict[str, dict[str, str]] = {}
        self._lent: dict[tuple[str, str, str], tuple[dict[str, Tensor], Payload]] = {}
        self._asked, self._source = Asked(FEDERATION), ("", "")

    def _check(self, key: str, composition: Composition) -> None:
        run, first = self.runs[key], self.runs[FEDERATION]
        for name in ("task", "classes"):
            ours, theirs = getattr(run.config, name), getattr(first.config, name)
            if ours != theirs:
                raise ConfigError(
                    f"the local models have another {name} than the federation: {ours}, {theirs}"
                )
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

    # ------------------------------------------------------------------ requests

    def loans(self, connected: Sequence[str]) -> Iterator[tuple[Request, list[str]]]:
        """Ask sites for the models of their own, if they are to be scored elsewhere."""
        if not self.cross_site:
            return
        for kind, key in self._of_sites():
            self._asked, self._source = Asked(key, kind), (kind, key)
            yield self._request(LEND, self._asked), sorted(connected)

    def _of_sites(self) -> Iterator[tuple[str, str]]:
        """The kinds of models that sites keep, each with its run."""
        if self.personal:
            yield PERSONAL, FEDERATION
        for key, run in self.runs.items():
            if key != FEDERATION and not run.owner:
                yield LOCAL, key

    def scores(self, connected: Sequence[str]) -> Iterator[tuple[Request, list[str]]]:
        """Ask sites to score one model after another, first the local ones, with which others compare."""
        everybody = sorted(connected)
        for key, run in self.runs.items():
            if key == FEDERATION:
                continue
            sites = [site for site in everybody if run.owner in ("", site)]
            if sites:
                yield self._score(Asked(key, LOCAL, own=not run.owner)), sites
        yield self._score(Asked(FEDERATION, GLOBAL, own=False, against=(LOCAL,))), everybody
        if self.personal:
            yield self._score(Asked(FEDERATION, PERSONAL, against=(LOCAL, GLOBAL))), everybody
        for (kind, key, source), (weights, states) in sorted(self._models_of_sites().items()):
            others = [site for site in everybody if site != source]
            if others:
                asked = Asked(key, f"{kind} of {source}", own=False)
                yield self._score(asked, (kind, source), weights, states), others

    def _models_of_sites(self) -> dict[tuple[str, str, str], tuple[dict[str, Tensor], Payload]]:
        if not self.cross_site:
            return {}
        given = {
            (LOCAL, key, run.owner): (run.weights, Payload()) for key, run in self.runs.items() if run.owner
        }
        return {**self._lent, **given}

    def _score(
        self,
        asked: Asked,
        source: tuple[str, str] = ("", ""),
        weights: dict[str, Tensor] | None = None,
        states: Payload | None = None,
    ) -> Request:
        self._asked, self._source = asked, source
        self._tell({"event": "scoring", "model": asked.model})
        return self._request(SCORE, asked, weights, states)

    def _request(
        self,
        task: str,
        asked: Asked,
        weights: dict[str, Tensor] | None = None,
        states: Payload | None = None,
    ) -> Request:
        run = self.runs[asked.run]
        return Request(
            task,
            run.round,
            weights=run.weights if weights is None else weights,
            once=run.payload,
            payload=run.payload,
            selected_round=run.round,
            run=run.run,
            scoring={**asdict(asked), "against": list(asked.against)},
            method_states=states or {},
        )

    # ------------------------------------------------------------------ replies

    def no_answer(self, task: str, site: str, reason: str) -> None:
        """Record that a site did not answer a request, or not with a usable reply."""
        if task == LEND:
            self.kept.setdefault(self._asked.model, {})[site] = reason
        else:
            self.missing.setdefault(site, {})[self._asked.model] = reason
        self._tell({"event": "not_scored", "site": site, "model": self._asked.model, "reason": reason})
        self.silent.add(site)

    def accept_loan(self, site: str, reply: Reply) -> bool:
        """Accept a model of a site's own.

        Returns:
            Whether it can be scored elsewhere.
        """
        kind, key = self._source
        composition = self.compositions[key]

        def use() -> None:
            raise_error(reply)
            state = composition.network.state_dict()
            shapes = {name: tuple(v.shape) for name, v in state.items() if v.is_floating_point()}
            check_tensors(site, reply.weights, shapes)
            self._check_states(site, reply.payload, composition)
            self._lent[kind, key, site] = (reply.weights, reply.payload)

        return self._used(LEND, site, refusal(site, use))

    def _check_states(self, site: str, states: Payload, composition: Composition) -> None:
        """Check the state that methods keep for a model; shapes are free, and sites check it again."""
        for name, value in states.items():
            if not isinstance(value, Tensor) or name.split("/", 1)[0] not in composition.personalising:
                raise UpdateRefused(site, repr(name)[:80], expected="no such entry", got="one")
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise UpdateRefused(site, name, expected="finite values", got="others")
        most = _MOST_LENT * num_bytes(composition.network.state_dict())
        if num_bytes(states) > most:
            raise UpdateRefused(
                site, "model", expected=f"at most {most} bytes beside it", got=str(num_bytes(states))
            )

    def accept_scores(self, site: str, reply: Reply) -> bool:
        """Accept a site's scores of the model that was asked for last.

        Returns:
            Whether they could be used.
        """
        asked, (kind, source) = self._asked, self._source

        def use() -> None:
            raise_error(reply)
            metrics = clean_metrics(reply.metrics, depth=2)
            found = accepted_scores(metrics, self.task.metrics, self.task.scored_classes)
            against = metrics.get("against")
            if isinstance(against, Mapping):
                told = {other: _difference(self.task.metric, against.get(other)) for other in asked.against}
                found["against"] = {other: difference for other, difference in told.items() if difference}
            if source:
                self.matrix.setdefault(kind, {}).setdefault(source, {})[site] = found
            else:
                self.scored.setdefault(site, {})[asked.model] = found
            self._tell(
                {
                    "event": "scored",
                    "site": site,
                    "model": asked.model,
                    "score": found[self.task.metric],
                    "metric": self.task.metric,
                }
            )

        return self._used(SCORE, site, refusal(site, use))

    def _used(self, task: str, site: str, reason: str | None) -> bool:
        if reason is not None:
            self.no_answer(task, site, reason)
        self.silent.discard(site)  # it has answered
        return reason is None

    # ------------------------------------------------------------------ results

    def finish(self) -> None:
        """Check that there is anything to report."""
        if not self.scored:
            reasons = sorted({reason for found in self.missing.values() for reason in found.values()})
            raise RunFailed("no site has scored a model" + (f" ({'; '.join(reasons)})" if reasons else ""))

    def results(self) -> dict[str, Any]:
        """The record of the evaluation, ready for JSON: ``evaluation.json``."""
        federation = self.runs[FEDERATION]
        unseen = sorted(self.scored.keys() - set(federation.sites)) if federation.sites else []
        found: dict[str, Any] = {
            "split": "test",
            "metric": self.task.metric,
            **described(self.task.metrics),
            "models": self._models(),
            "unseen": unseen,
            "sites": {site: self.scored[site] for site in sorted(self.scored)},
            "mean": {
                model: over_sites(
                    {site: by[model] for site, by in self.scored.items() if model in by}, self.task.metrics
                )["mean"]
                for model in self._models()
            },
            "missing": self._missing(),
        }
        if self.cross_site:
            found["cross_site"] = {kind: self._rows(kind) for kind in (LOCAL, PERSONAL) if self._rows(kind)}
            found["kept"] = self.kept
        return found

    def _missing(self) -> dict[str, dict[str, str]]:
        """Return the reasons why sites lack a score of a model, also of sites that are not connected."""
        absent = {*self.runs[FEDERATION].sites} - self.scored.keys() - self.missing.keys()
        missing = {**self.missing, **{site: {GLOBAL: f"site {site} is not connected"} for site in absent}}
        return {site: missing[site] for site in sorted(missing)}

    def _models(self) -> dict[str, Any]:
        told = {GLOBAL: FEDERATION}
        if self.personal:
            told[PERSONAL] = FEDERATION
        if local := [key for key in self.runs if key != FEDERATION]:
            told[LOCAL] = local[0]
        models: dict[str, Any] = {}
        for model, key in told.items():
            scored = self.compositions[key].scored["test"]
            runs = [run for name, run in self.runs.items() if (name == FEDERATION) == (key == FEDERATION)]
            models[model] = {
                "scored": scored if model == PERSONAL else model,
                "methods": [method["name"] for method in self.runs[key].config.methods],
                "runs": [run.summary() for run in runs],
            }
        return models

    def _rows(self, kind: str) -> dict[str, dict[str, Any]]:
        """The scores of each site's model by the site that tested it; its own are on the diagonal."""
        elsewhere, rows = self.matrix.get(kind, {}), {}
        for site in sorted(self.scored):
            own = {site: self.scored[site][kind]} if kind in self.scored[site] else {}
            row = {**elsewhere.get(site, {}), **own}
            if row:
                rows[site] = {target: row[target] for target in sorted(row)}
        return rows


def _difference(metric: str, found: Any) -> dict[str, Any]:
    """Return a site's difference, if its numbers are possible ones."""
    if not isinstance(found, Mapping):
        return {}
    largest = METRICS[metric].largest
    known: dict[str, Any] = {
        name: found.get(name) if is_number(found.get(name)) and abs(found[name]) <= largest else None
        for name in ("difference", "low", "high")
    }
    p = found.get("p")
    known["p"] = float(p) if p is not None and is_number(p) and 0 <= p <= 1 else None
    unit = "patients" if "patients" in found else "cases"
    return {**known, unit: found[unit] if is_count(found.get(unit)) else None}
