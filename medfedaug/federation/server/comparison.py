"""The server's half of a comparison: short trainings of several methods within a budget."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from medfedaug.config.comparison import REFERENCE, ComparisonConfig, Training
from medfedaug.config.run import Execution
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation.composition import Composition
from medfedaug.federation.job_folder import server_checkpoint
from medfedaug.federation.messages.messages import SCORE, Reply, Request, raise_error, refusal
from medfedaug.federation.server.reply_checks import accepted_scores, clean_metrics, is_count
from medfedaug.federation.server.server import FederationServer
from medfedaug.metrics.registry import METRICS, nothing_learned_at, nothing_learned_in
from medfedaug.metrics.significance import Difference, Gain, is_converged, mean_gain, t_quantile
from medfedaug.utils.event_text import OnEvent
from medfedaug.utils.files import parse_versioned, write_versioned
from medfedaug.utils.validation import is_number

_RECORD, _KIND, _VERSION = "comparison.json", "comparison", 1


@dataclass
class Turn:
    """One training up to a round."""

    training: Training
    rounds: int
    server: FederationServer  # its server, restored if the training has begun before
    checkpoint: Path
    # The sites' scores of its best model so far, by site.
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)


class Comparison:
    """The server of a comparison: makes the trainings, and compares them.

    `medfedaug.federation.protocol.compare` defines the order of the calls. All trainings reach the first of
    `ComparisonConfig.stages`, then the next one. After each stage the sites score the best model of each
    training on their validation cases, and compare it patient by patient with the model of FedAvg of the same
    seed. Test cases are not read.

    A later stage is shortened for all methods alike, or left out, if the budget does not suffice for it. No
    method stops early for its scores: FedBN learns slowly, and overtakes others at the end.

    A new object with the same folder continues: a training from its last round, with the same results.

    Args:
        folder: receives the record and the state of each training, beside the sites' folders.
    """

    def __init__(
        self,
        config: ComparisonConfig,
        folder: Path,
        execution: Execution | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.config, self.folder = config, folder
        self.file = server_checkpoint(folder).with_name(_RECORD)
        self.execution = replace(execution or Execution(), tested=False)
        self._tell = on_event or (lambda event: None)
        for name in config.order:
            composition = Composition(config.config(Training(name, 0)))
            composition.check_apart("a comparison")
        self.task = composition.task()
        self._sign = 1 if METRICS[self.task.metric].higher_is_better else -1
        self.record: dict[str, Any] = {
            "config": config.to_dict(),
            "stages": [],
            "seconds": 0.0,
            "failed": {},
            "trainings": {},
        }
        if self.file.exists():
            saved = parse_versioned(self.file.read_text(encoding="utf-8"), _KIND, _VERSION)
            if saved["config"] != self.record["config"]:
                raise ConfigError(f"{folder} holds a comparison with other settings; choose another folder")
            self.record = {name: saved[name] for name in self.record}

    def turns(self) -> Iterator[Turn]:
        """Yield the trainings in turn, each with the round to reach."""
        for index, last in enumerate(self.config.stages()):
            rounds = self._rounds_of_stage(index, last)
            if rounds is None:
                return
            for training in self.config.trainings():
                if training.method in self.record["failed"] or str(rounds) in self._stages_of(training):
                    continue
                self._tell({"event": "stage", "text": f"{training}: to round {rounds}"})
                yield self._open(training, rounds)
            if rounds < last:
                return

    def _rounds_of_stage(self, index: int, last: int) -> int | None:
        """Return the round of a stage, as far as the budget allows; ``None`` if it allows no round more."""
        stages = self.record["stages"]
        if index == len(stages):
            rounds = last
            if stages and self.config.budget:
                done = stages[-1]
                left = [t for t in self.config.trainings() if t.method not in self.record["failed"]]
                each = sum(self._entry(t)["seconds"] / max(1, self._entry(t)["rounds"]) for t in left)
                room = max(0.0, self.config.budget - self.record["seconds"])
                rounds = min(last, done + int(room / max(each, 1e-9)))
                if rounds == done:
                    return None
            stages.append(rounds)
            self._save()
        return int(stages[index])

    def _open(self, training: Training, rounds: int) -> Turn:
        checkpoint = server_checkpoint(self.folder, f"{training.method}-{training.seed}")
        server = FederationServer(self.config.config(training), self._tell, self.execution)
        if checkpoint.exists():
            server.restore(checkpoint)
        return Turn(training, rounds, server, checkpoint)

    def scoring(self, turn: Turn) -> Request:
        """Ask the sites to score a training's best model, which they compare with FedAvg's."""
        return replace(turn.server.test(), task=SCORE)

    def accept(self, turn: Turn, site: str, reply: Reply) -> bool:
        """Accept a site's scores; return whether they could be used."""

        def use() -> None:
            raise_error(reply)
            metrics = clean_metrics(reply.metrics, depth=2)
            scores = accepted_scores(metrics, self.task.metrics, self.task.scored_classes)
            compared = accepted_difference(self.task.metric, metrics.get("against"))
            turn.scores[site] = {**scores, "compared": compared}

        reason = refusal(site, use)
        if reason is not None:
            self.no_answer(turn, site, reason)
        return reason is None

    def no_answer(self, turn: Turn, site: str, reason: str) -> None:
        """Report that a site gave no scores."""
        entry = {"event": "missing", "round": turn.server.round, "task": SCORE, "site": site}
        self._tell({**entry, "reason": reason})

    def finish(self, turn: Turn) -> None:
        """Record the scores of a training at the end of its turn."""
        metric, entry = self.task.metric, self._entry(turn.training)
        entry["stages"][str(turn.rounds)] = {
            site: {"score": scores[metric], **scores["compared"]} for site, scores in turn.scores.items()
        }
        known = {site: scores for site, scores in turn.scores.items() if scores[metric] is not None}
        mean = {metric: fmean(scores[metric] for scores in known.values())} if known else {}
        entry["nothing_learned"] = nothing_learned_in({"mean": mean, "sites": known})
        entry["validation"] = turn.server.record.means
        entry["rounds"] = turn.server.round
        self._end(turn)

    def fail(self, turn: Turn, error: MedFedAugError) -> None:
        """Leave out a method whose training failed."""
        if turn.training.method == REFERENCE:
            raise error
        name, rounds = turn.training.method, turn.server.round
        self.record["failed"][name] = {"rounds": rounds, "reason": str(error)}
        self._tell({"event": "stage", "text": f"{name} failed in round {rounds + 1}: {error}"})
        self._end(turn)

    def _end(self, turn: Turn) -> None:
        seconds = time.monotonic() - turn.started
        self._entry(turn.training)["seconds"] += seconds
        self.record["seconds"] += seconds
        self._save()

    def _entry(self, training: Training) -> dict[str, Any]:
        empty = {"rounds": 0, "seconds": 0.0, "stages": {}, "validation": [], "nothing_learned": ""}
        entry: dict[str, Any] = self.record["trainings"].setdefault(str(training), empty)
        return entry

    def _stages_of(self, training: Training) -> dict[str, Any]:
        stages: dict[str, Any] = self._entry(training)["stages"]
        return stages

    def _save(self) -> None:
        write_versioned(self.file, _KIND, _VERSION, self.record)

    def _differences(self, method: str, rounds: int) -> list[dict[str, Difference]]:
        """Return the differences of a method by seed, at the sites that scored both models after a round."""
        by_seed = []
        for seed in range(self.config.seeds):
            training = Training(method, seed)
            ours = self._stages_of(training).get(str(rounds), {})
            theirs = self._stages_of(training.reference).get(str(rounds), {})
            found = {}
            for site in sorted(ours.keys() & theirs.keys()):
                one, other = ours[site], theirs[site]
                if one["score"] is None or other["score"] is None:
                    continue
                # A site with one patient, or with noise, sends scores only.
                mean = one.get("difference")
                if mean is None:
                    found[site] = Difference(self._sign * (one["score"] - other["score"]))
                    continue
                patients, (low, high) = one.get("patients", one.get("cases")), (one["low"], one["high"])
                known = patients is not None and patients > 1 and low is not None and high is not None
                error = (high - low) / 2 / t_quantile(0.95, patients - 1) if known else None
                found[site] = Difference(self._sign * mean, error, patients or 1)
            by_seed.append(found)
        return by_seed

    def _compared(self, rounds: int) -> dict[str, list[dict[str, Difference]]]:
        """Return the differences of all methods that have some for every seed after a round."""
        methods = {name: self._differences(name, rounds) for name in self.config.order if name != REFERENCE}
        return {name: by_seed for name, by_seed in methods.items() if all(by_seed)}

    def _gains(self, rounds: int) -> dict[str, Gain]:
        compared = self._compared(rounds)
        return {
            name: mean_gain(by_seed, [other for key, other in compared.items() if key != name])
            for name, by_seed in compared.items()
        }

    @property
    def nothing_learned(self) -> str:
        """The reason why no method learned anything in any training; empty if some did."""
        reasons = [self._entry(t)["nothing_learned"] for t in self.config.trainings()]
        return str(reasons[0]) if all(reasons) else ""

    def results(self) -> dict[str, Any]:
        """Return the content of ``compare.json``.

        ``gains`` has the mean gain of each method over FedAvg after the last stage, with its 90% interval,
        positive where the method is better; ``recommended`` the methods whose interval lies above 0, the best
        first, or FedAvg (`recommended`). Both are empty if no method learned anything.
        """
        nothing, stages = self.nothing_learned, self.record["stages"]
        gains = {} if nothing or not stages else self._gains(stages[-1])
        reference = [self._entry(Training(REFERENCE, seed)) for seed in range(self.config.seeds)]
        curves = [entry["validation"] for entry in reference]
        return {
            "metric": self.task.metric,
            "methods": self.config.order,
            "recommended": recommended(gains),
            "gains": {name: asdict(gain) for name, gain in gains.items()},
            "sites": self._of_sites(stages[-1]) if gains else {},
            "budget": {
                "seconds": self.config.budget,
                "spent": round(self.record["seconds"], 1),
                "rounds": self.config.run.rounds,
                "seeds": self.config.seeds,
                "stages": stages,
            },
            "trainings": [self._of_training(training) for training in self.config.trainings()],
            "failed": self.record["failed"],
            "nothing_learned": nothing,
            "rising": not is_converged([fmean(scores) for scores in zip(*curves, strict=False)]),
        }

    def _of_training(self, training: Training) -> dict[str, Any]:
        entry = self._entry(training)
        last = max(map(int, entry["stages"]), default=0)
        scores = {site: found["score"] for site, found in entry["stages"].get(str(last), {}).items()}
        known = [score for score in scores.values() if score is not None]
        return {
            "method": training.method,
            "seed": self.config.config(training).seed,
            "rounds": entry["rounds"],
            "seconds": round(entry["seconds"], 1),
            "score": fmean(known) if known else None,
            "sites": scores,
            "validation": entry["validation"],
        }

    def _of_sites(self, rounds: int) -> dict[str, Any]:
        """Return the gains at each site, and the sites at which FedAvg learned nothing."""
        sites: dict[str, dict[str, Any]] = {}
        compared = self._compared(rounds)
        for site in sorted({site for seeds in compared.values() for found in seeds for site in found}):
            by_method = {
                name: [{site: found[site]} for found in by_seed if site in found]
                for name, by_seed in compared.items()
            }
            alone = {name: only for name, only in by_method.items() if len(only) > 1}
            scores = self._stages_of(Training(REFERENCE, 0)).get(str(rounds), {})
            nothing = nothing_learned_at(self.task.metric, {site: scores.get(site, {}).get("score")})
            entry: dict[str, Any] = {"patients": 0, "gains": {}, "nothing_learned": bool(nothing)}
            for name, only in alone.items():
                gain = mean_gain(only, [other for key, other in alone.items() if key != name])
                if all(found[site].error is None for found in only):
                    gain = Gain(gain.mean)  # nothing shows the chance of its patients
                entry["gains"][name] = asdict(gain)
                entry["patients"] = max(entry["patients"], *(found[site].patients for found in only))
            if entry["gains"]:
                sites[site] = entry
        return sites


def recommended(gains: Mapping[str, Gain]) -> list[str]:
    """Return the methods with a gain over FedAvg, the best first; FedAvg if none has any and some lose.

    A gain or loss counts if its interval lies above or below 0.

    Example:
        >>> recommended({"ditto": Gain(0.1, 0.02, 0.2), "single": Gain(-0.2, -0.3, -0.1)})
        ['ditto']
        >>> recommended({"single": Gain(-0.2, -0.3, -0.1)}), recommended({"single": Gain(-0.2, -0.5, 0.1)})
        (['fedavg'], [])
        >>> recommended({"single": Gain(-0.2, -0.3, -0.1), "ditto": Gain(0.1, -0.1, 0.3)})
        []
    """
    better = [name for name, gain in gains.items() if gain.low is not None and gain.low > 0]
    loses = any(gain.high is not None and gain.high < 0 for gain in gains.values())
    if loses and all(gain.mean <= 0 for gain in gains.values()):
        return [REFERENCE]
    return sorted(better, key=lambda name: -gains[name].mean)


def accepted_difference(metric: str, values: Any) -> dict[str, Any]:
    """Return a site's difference of two models, with ``None`` for impossible numbers; empty without one."""
    if not isinstance(values, Mapping) or not values:
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
