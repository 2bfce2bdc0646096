"""Search of settings with Optuna: each trial is a run with a score on validation cases only.

The file of a search names settings and the choices of each::

    learning_rate: {low: 0.0001, high: 0.01, log: true}
    fedfa.prob: {low: 0, high: 1}
    rounds: {low: 10, high: 50, step: 10}
    methods: [fedrdn, "fedrdn,fedfa"]
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from medfedaug.config.run import Execution
from medfedaug.data.sites import federation_settings
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation.job_folder import RESULTS
from medfedaug.methods.registry import parse_methods
from medfedaug.metrics.registry import METRICS, metric_names
from medfedaug.research.datasets.benchmarks import open_benchmark
from medfedaug.research.sweeps.experiment import Experiment
from medfedaug.research.sweeps.run_list import PlannedRun
from medfedaug.research.sweeps.sweep import run_all
from medfedaug.research.sweeps.workers import ThisProcess, Workers
from medfedaug.utils.files import read_mapping
from medfedaug.utils.plugins import import_extra
from medfedaug.utils.validation import check_keys, is_number

SEARCH = "search"  # folder of the trials in the experiment's folder, with Optuna's record `trials.db`
_RECORD = "trials.db"
_METHODS = "methods"
_FIRST = 5  # trials before Optuna's sampler learns from them

Choices = Mapping[str, Any]  # a list of values for each setting, or `low`, `high` and `log` or `step`


@dataclass(frozen=True)
class Searched:
    """Result of a search."""

    experiment: Experiment  # the winner, ready for all seeds and the test
    chosen: dict[str, Any]  # its settings
    score: float  # its validation score
    metric: str
    trials: int

    def sentences(self) -> list[str]:
        """Describe the search for a reader of the winner's test scores."""
        chosen = ", ".join(f"{name}={value}" for name, value in self.chosen.items())
        return [
            f"Chosen among {self.trials} configurations by the validation score of one seed ({self.metric} "
            f"{self.score:.4f}): {chosen}. No test case was read before.",
            "No verdict is given: a method whose settings were searched is not comparable with one whose "
            f"settings were not, and the best of {self.trials} validation scores is too high by chance.",
        ]


def read_choices(path: str | Path) -> Choices:
    """Read the choices of settings."""
    content = read_mapping(path, "fedfa.prob: [0.1, 0.5]")
    for name, choice in content.items():
        if isinstance(choice, dict):
            check_keys(f"{path}: {name}: unknown keys", choice, ("low", "high", "log", "step"))
            low: Any = choice.get("low")
            high: Any = choice.get("high")
            possible = is_number(low) and is_number(high) and low < high
            possible = possible and (low > 0 or not choice.get("log"))
        else:
            possible = isinstance(choice, list) and len(choice) > 1
        if not possible:
            needed = "two values or more, or low below high, and low above 0 with log"
            raise ConfigError(f"{path}: {name}: needs {needed}")
    return {str(name): choice for name, choice in content.items()}


def search(
    experiment: Experiment,
    choices: Choices,
    trials: int,
    *,
    device: str = "auto",
    workers: Workers | None = None,
    threads: int = 0,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Searched:
    """Try configurations, each by one run of seed 0, and return the one with the best validation score.

    Optuna's tree-structured Parzen estimator proposes them. A later call continues an interrupted search from
    its record.

    Args:
        trials: number of configurations, with those of an earlier call.
        workers: as many trials are proposed at a time.
        on_event: see `run_all`, for trials instead of runs.
    """
    optuna = import_extra("optuna", "search", "--search")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _check(experiment, choices)
    folder = experiment.out / SEARCH
    workers = workers or ThisProcess()
    folder.mkdir(parents=True, exist_ok=True)
    base = replace(experiment, out=folder, seeds=1)
    preset = base.preset()
    sites = open_benchmark(preset.benchmark, base.root, limit=base.limit, **preset.data)
    metric = metric_names(federation_settings(sites)["task"])[0]
    study = _open_study(optuna, folder, METRICS[metric].higher_is_better)
    while (missing := trials - len(_tried(study))) > 0:
        batch: list[tuple[Path, Any]] = []
        runs: dict[Path, PlannedRun] = {}
        for trial in [study.ask() for _ in range(min(workers.number, missing))]:
            settings = _propose(trial, choices, experiment.methods)
            trial.set_user_attr("settings", settings)
            methods = (settings[_METHODS],) if _METHODS in settings else base.methods
            fixed = {name: (value,) for name, value in settings.items() if name != _METHODS}
            # In `vary`, so that a trial's folder has the name of its settings.
            configured = replace(base, methods=methods, vary={**base.vary, **fixed})
            preset = configured.preset()
            (run,) = configured.runs(preset)
            runs[run.folder] = run
            batch.append((run.folder, trial))
        failed = run_all(
            list(runs.values()),
            preset,
            base.root,
            folder,
            workers=workers,
            device=device,
            execution=Execution(threads=threads, tested=False),
            on_event=_counted(on_event, len(_tried(study)), trials),
            init=experiment.init,
        )
        for path, trial in batch:
            score = None if path in failed else _validation(folder / path / RESULTS, metric)
            if score is None:
                trial.set_user_attr("reason", failed.get(path, "no site has a validation score"))
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, score)
    return _winner(study, experiment, metric)


def _open_study(optuna: Any, folder: Path, higher_is_better: bool) -> Any:
    """Open the record of a search, and queue the unfinished trials of an earlier process again."""
    study = optuna.create_study(
        study_name=SEARCH,
        storage=f"sqlite:///{folder.absolute() / _RECORD}",
        load_if_exists=True,
        direction="maximize" if higher_is_better else "minimize",
    )
    # Seeded by the number of trials, or a continued search would draw the same again.
    drawn = len(study.get_trials())
    study.sampler = optuna.samplers.TPESampler(seed=drawn, n_startup_trials=_FIRST, constant_liar=True)
    for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params)
    return study


def _winner(study: Any, experiment: Experiment, metric: str) -> Searched:
    tried = _tried(study)
    if not any(trial.state.name == "COMPLETE" for trial in tried):
        raise RunFailed(
            f"{experiment.out}: no trial has a validation score ({tried[0].user_attrs['reason']})"
        )
    chosen = study.best_trial.user_attrs["settings"]
    settings = {name: value for name, value in chosen.items() if name != _METHODS}
    methods = (chosen[_METHODS],) if _METHODS in chosen else experiment.methods
    winner = replace(experiment, methods=methods, settings={**experiment.settings, **settings})
    return Searched(winner, chosen, study.best_value, metric, len(tried))


def _counted(
    on_event: Callable[[dict[str, Any]], None] | None, before: int, trials: int
) -> Callable[[dict[str, Any]], None]:
    """Number the events of a batch among all trials."""
    numbers = count(before + 1)

    def tell(event: dict[str, Any]) -> None:
        if on_event is None:
            return
        if event["event"] in ("run", "failed"):
            event = {**event, "number": next(numbers), "of": trials}
        on_event(event)

    return tell


def _check(experiment: Experiment, choices: Choices) -> None:
    if experiment.entry:
        raise ConfigError(
            "a search needs a protocol or your own data; an entry of a paper has fixed settings"
        )
    for name in ("folds", "holdout"):
        if getattr(experiment, name):
            raise ConfigError(
                f"a search cannot have --{name}: its trials train and validate on all sites and patients, so "
                "that none would be unseen in the test; search and test on the sites' own splits"
            )
    several = [name for name, values in experiment.vary.items() if len(values) > 1]
    several += [_METHODS] if len(experiment.methods) > 1 and _METHODS not in choices else []
    if several:
        raise ConfigError(
            f"{', '.join(several)}: a search takes one value; put several into the search's file"
        )


def _tried(study: Any) -> list[Any]:
    """Return the trials that have ended, without the unfinished trials of an earlier process."""
    return [
        trial
        for trial in study.get_trials()
        if trial.state.name == "COMPLETE" or "reason" in trial.user_attrs
    ]


def _propose(trial: Any, choices: Choices, methods: Sequence[str]) -> dict[str, Any]:
    """Let Optuna choose settings, without arguments of methods outside the combination."""
    settings: dict[str, Any] = {}
    names = {spec["name"] for spec in parse_methods(methods[0])}
    for name in sorted(choices, key=lambda name: name != _METHODS):
        method = name.rpartition(".")[0]
        if method and method not in names:
            continue
        choice = choices[name]
        if isinstance(choice, list):  # as text, since Optuna takes no lists
            value = json.loads(trial.suggest_categorical(name, list(map(json.dumps, choice))))
        elif all(isinstance(choice[end], int) for end in ("low", "high")) and "step" in choice:
            value = trial.suggest_int(name, choice["low"], choice["high"], step=choice["step"])
        else:
            number = trial.suggest_float(name, choice["low"], choice["high"], log=bool(choice.get("log")))
            value = float(f"{number:.3g}")  # as on a page and in the name of a folder
        settings[name] = value
        if name == _METHODS:
            names = {spec["name"] for spec in parse_methods(value)}
    return settings


def _validation(results: Path, metric: str) -> float | None:
    record = json.loads(results.read_text())
    score: float | None = record["rounds"][record["selected_round"] - 1].get(f"val_{metric}")
    return score
