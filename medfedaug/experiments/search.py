"""Search of settings, with Optuna: each trial is a run that is scored on validation cases alone.

The file of a search names settings and what each may be::

    learning_rate: {low: 0.0001, high: 0.01, log: true}
    fedfa.prob: {low: 0, high: 1}
    rounds: {low: 10, high: 50, step: 10}
    methods: [fedrdn, "fedrdn,fedfa"]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from medfedaug.config.run import Execution
from medfedaug.data.benchmarks import open_benchmark
from medfedaug.data.sites import federation_settings
from medfedaug.errors import ConfigError, RunFailed, first_line
from medfedaug.experiments.experiment import Experiment
from medfedaug.experiments.planned import PlannedRun
from medfedaug.experiments.sweep import RunStopped, run_all
from medfedaug.experiments.workers import ThisProcess, Workers
from medfedaug.federation.job_folder import RESULTS
from medfedaug.methods.registry import parse_methods
from medfedaug.metrics.registry import METRICS, metric_names
from medfedaug.utils.validation import check_keys, is_number

SEARCH = "search"
"""The folder of the trials in that of the experiment, with Optuna's record ``trials.db``."""
_RECORD = "trials.db"
_METHODS = "methods"
_FIRST = 5  # trials before any is ended early, and before Optuna's sampler learns from them
_PRUNED = "ended early: its validation scores were below the median of earlier trials"

Choices = Mapping[str, Any]
"""By setting a list of values, or ``low``, ``high`` and ``log`` or ``step``."""


@dataclass(frozen=True)
class Searched:
    """Result of a search.

    Args:
        experiment: the winner, ready to be run with all seeds and tested.
        chosen: its settings.
        score: its validation score.
        metric: the name of the score.
        trials: number of configurations that were tried.
        ended_early: how many of them were not trained to the end.
    """

    experiment: Experiment
    chosen: dict[str, Any]
    score: float
    metric: str
    trials: int
    ended_early: int

    def sentences(self) -> list[str]:
        """State how the settings were chosen, for a reader of the winner's test scores."""
        chosen = ", ".join(f"{name}={value}" for name, value in self.chosen.items())
        return [
            f"Chosen among {self.trials} configurations ({self.ended_early} ended early) by the validation "
            f"score of one seed ({self.metric} {self.score:.4f}): {chosen}. No test case was read before.",
            "No verdict is given: a method whose settings were searched is not comparable with one whose "
            f"settings were not, and the best of {self.trials} validation scores is too high by chance.",
        ]


def read_choices(path: str | Path) -> Choices:
    """Read what the settings may be.

    Raises:
        ConfigError: naming the file and the setting.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not readable as YAML ({first_line(error)})") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path}: settings with choices are needed, such as fedfa.prob: [0.1, 0.5]")
    for name, choice in content.items():
        if isinstance(choice, list) and len(choice) > 1:
            continue
        if not isinstance(choice, dict):
            raise ConfigError(f"{path}: {name}: needs two values or more, or low and high")
        check_keys(f"{path}: {name}: unknown keys", choice, ("low", "high", "log", "step"))
        low, high = choice.get("low"), choice.get("high")
        if low is None or high is None or not (is_number(low) and is_number(high) and low < high):
            raise ConfigError(f"{path}: {name}: low must be below high")
        if choice.get("log") and low <= 0:
            raise ConfigError(f"{path}: {name}: low must be above 0 with log")
    return {str(name): choice for name, choice in content.items()}


def search(
    asked: Experiment,
    choices: Choices,
    trials: int,
    *,
    device: str = "auto",
    workers: Workers | None = None,
    threads: int = 0,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Searched:
    """Try configurations, each by one run of seed 0, and return the one with the best validation score.

    Optuna's tree-structured Parzen estimator proposes them. Its median rule ends a trial whose best score
    after some round is below the median of the earlier trials at that round. A search that was interrupted is
    continued: its record lies beside the trials.

    Args:
        asked: the experiment; a setting that is searched must not be in it.
        choices: `read_choices`.
        trials: number of configurations, with those of an earlier call.
        device: see `run_all`.
        workers: see there; as many trials are proposed at a time.
        threads: of each run's sites.
        on_event: see there, for trials instead of runs.

    Raises:
        ConfigError: for settings that do not go together; where Optuna is not installed.
        RunFailed: where no trial has a validation score.
    """
    optuna = _optuna()
    _check(asked, choices)
    folder = asked.out / SEARCH
    workers = workers or ThisProcess()
    folder.mkdir(parents=True, exist_ok=True)
    one = replace(asked, out=folder, seeds=1, folds=0, holdout=())
    preset = one.preset()
    sites = open_benchmark(preset.benchmark, one.root, limit=one.limit, **preset.data)
    metric = metric_names(federation_settings(sites)["task"])[0]
    study = _open_study(optuna, folder, METRICS[metric].higher_is_better)
    while (missing := trials - len(_tried(study))) > 0:
        batch: dict[Path, list[Any]] = {}
        runs: dict[Path, PlannedRun] = {}
        for trial in [study.ask() for _ in range(min(workers.number, missing))]:
            settings = _propose(trial, choices, asked.methods)
            trial.set_user_attr("settings", settings)
            configured = _configured(one, settings)
            preset = configured.preset()
            (run,) = configured.runs(preset)
            runs[run.folder] = run
            batch.setdefault(run.folder, []).append(trial)
        failed = run_all(
            list(runs.values()),
            preset,
            one.root,
            folder,
            workers=workers,
            device=device,
            execution=Execution(threads=threads, tested=False),
            watch=_Reports({path: same[0] for path, same in batch.items()}, metric),
            on_event=_counted(on_event, len(_tried(study)), trials),
            init=asked.init,
        )
        for path, same in batch.items():
            reason = failed.get(path, "")
            score = None if reason else _validation(folder / path / RESULTS, metric)
            for trial in same:
                _end(optuna, study, trial, score, reason)
    return _winner(study, asked, metric)


def _open_study(optuna: Any, folder: Path, higher_is_better: bool) -> Any:
    """Open the record of a search, and put the trials of a process that ended first in the queue again."""
    study = optuna.create_study(
        study_name=SEARCH,
        storage=f"sqlite:///{folder.absolute() / _RECORD}",
        load_if_exists=True,
        direction="maximize" if higher_is_better else "minimize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=_FIRST),
    )
    # Seeded by what was drawn before, or a search that goes on would draw the same again.
    drawn = len(study.get_trials())
    study.sampler = optuna.samplers.TPESampler(seed=drawn, n_startup_trials=_FIRST, constant_liar=True)
    for left in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(left.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(left.params)
    return study


def _end(optuna: Any, study: Any, trial: Any, score: float | None, reason: str) -> None:
    """Enter the score of a trial, or why it has none."""
    if score is not None:
        study.tell(trial, score)
        return
    trial.set_user_attr("reason", reason or "no site has a validation score")
    states = optuna.trial.TrialState
    study.tell(trial, state=states.PRUNED if reason == _PRUNED else states.FAIL)


def _winner(study: Any, asked: Experiment, metric: str) -> Searched:
    tried = _tried(study)
    if not any(trial.state.name == "COMPLETE" for trial in tried):
        raise RunFailed(f"{asked.out}: no trial has a validation score ({tried[0].user_attrs['reason']})")
    chosen = study.best_trial.user_attrs["settings"]
    settings = {name: value for name, value in chosen.items() if name != _METHODS}
    methods = (chosen[_METHODS],) if _METHODS in chosen else asked.methods
    winner = replace(asked, methods=methods, settings={**asked.settings, **settings})
    early = sum(trial.state.name == "PRUNED" for trial in tried)
    return Searched(winner, chosen, study.best_value, metric, len(tried), early)


@dataclass(frozen=True)
class _Reports:
    """Tells Optuna the validation scores of a run, wherever it is made, and ends it where Optuna says so."""

    trials: Mapping[Path, Any]
    metric: str

    def __call__(self, run: PlannedRun, event: dict[str, Any]) -> None:
        score = event.get(f"val_{self.metric}") if event["event"] == "validated" else None
        if score is not None:
            trial = self.trials[run.folder]
            trial.report(score, event["round"])
            if trial.should_prune():
                raise RunStopped(_PRUNED)


def _counted(
    on_event: Callable[[dict[str, Any]], None] | None, before: int, trials: int
) -> Callable[[dict[str, Any]], None]:
    """Let the events of a batch count among all trials."""
    numbers = count(before + 1)

    def tell(event: dict[str, Any]) -> None:
        if on_event is None:
            return
        if event["event"] in ("run", "failed"):
            early = event.get("reason") == _PRUNED
            event = {**event, "number": next(numbers), "of": trials, **({"event": "run"} if early else {})}
        on_event(event)

    return tell


def _check(asked: Experiment, choices: Choices) -> None:
    if asked.entry:
        raise ConfigError(
            "a search is of a protocol or of your own data; an entry of a paper has its settings"
        )
    for name, values in asked.vary.items():
        if len(values) > 1:
            raise ConfigError(f"{name} has several values; put them into the search's file")
        if name in choices:
            raise ConfigError(f"{name} is set, and is in the search's file; leave it out of one")
    if len(asked.methods) > 1 and _METHODS not in choices:
        raise ConfigError("a search has one combination of methods, or chooses it: put methods into its file")


def _tried(study: Any) -> list[Any]:
    """The trials that have ended, without those of a process that ended before them."""
    return [
        trial
        for trial in study.get_trials()
        if trial.state.name in ("COMPLETE", "PRUNED") or "reason" in trial.user_attrs
    ]


def _propose(trial: Any, choices: Choices, methods: Sequence[str]) -> dict[str, Any]:
    """Let Optuna choose; arguments of methods that are not in the combination are not chosen."""
    settings: dict[str, Any] = {}
    names = {spec["name"] for spec in parse_methods(methods[0])}
    for name in sorted(choices, key=lambda name: name != _METHODS):
        method = name.rpartition(".")[0]
        if method and method not in names:
            continue
        choice = choices[name]
        if isinstance(choice, list):  # as text, since Optuna takes no lists
            value = json.loads(trial.suggest_categorical(name, [json.dumps(one) for one in choice]))
        elif all(isinstance(choice[end], int) for end in ("low", "high")) and "step" in choice:
            value = trial.suggest_int(name, choice["low"], choice["high"], step=choice["step"])
        else:
            found = trial.suggest_float(name, choice["low"], choice["high"], log=bool(choice.get("log")))
            value = float(f"{found:.3g}")  # as a page and the name of a folder have it
        settings[name] = value
        if name == _METHODS:
            names = {spec["name"] for spec in parse_methods(value)}
    return settings


def _configured(asked: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """The experiment of one trial, whose folder is named by its settings."""
    methods = (settings[_METHODS],) if _METHODS in settings else asked.methods
    found = {name: (value,) for name, value in settings.items() if name != _METHODS}
    return replace(asked, methods=methods, vary={**asked.vary, **found})


def _validation(results: Path, metric: str) -> float | None:
    record = json.loads(results.read_text())
    score: float | None = record["rounds"][record["selected_round"] - 1].get(f"val_{metric}")
    return score


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("a search needs Optuna: pip install 'medfedaug[search]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
