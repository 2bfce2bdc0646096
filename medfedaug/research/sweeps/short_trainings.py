"""`medfedaug compare`: short trainings on the folders of all sites, within a budget."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medfedaug.analysis.gain_page import conclusions, write_gain_page
from medfedaug.config.comparison import (
    ALONE,
    REFERENCE,
    REMEDIES,
    SCORED_AT,
    SEEDS,
    ComparisonConfig,
    choose_methods,
)
from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.data.checks import check_same_files, fingerprint_sites
from medfedaug.data.preparation.cache import keep_decoded
from medfedaug.data.sites import federation_settings
from medfedaug.errors import ConfigError, config_errors
from medfedaug.federation.composition import FOR_OPEN_CLASSES, Composition
from medfedaug.federation.in_process import compare_in_process, run_in_process
from medfedaug.federation.job_folder import COMPARED, STATE
from medfedaug.methods.registry import parse_methods
from medfedaug.research.datasets.benchmarks import open_benchmark
from medfedaug.research.sweeps.experiment import make_experiment
from medfedaug.research.sweeps.run_list import parse_methods_list
from medfedaug.runs.folder import only_process
from medfedaug.utils.event_text import OnEvent
from medfedaug.utils.files import parse_versioned, write_json, write_versioned

PAGE = "compare.html"
FEWEST_ROUNDS, MOST_ROUNDS = 4, 100

_LACKING = ",".join(FOR_OPEN_CLASSES)
_COST = 1.5  # of a method's round, in rounds of FedAvg; Ditto's costs 2
_MEMORY = 4 * 2**30  # bytes of decoded images
_FILE, _KIND, _VERSION = "trainings.json", "trainings", 1


@dataclass(frozen=True)
class Request:
    """A comparison as a user asks for it."""

    data: Path
    out: Path
    # Combinations of methods besides `REFERENCE` and `ALONE`; empty for `REMEDIES`.
    methods: tuple[str, ...] = ()
    budget: float = 600.0  # seconds for all trainings
    settings: tuple[str, ...] = ()  # `NAME=VALUE`, as in a benchmark; `rounds` limits the number of rounds
    limit: int | None = None  # largest number of cases per split and site


@dataclass(frozen=True)
class Trainings:
    """The trainings of a comparison, before their number of rounds is known."""

    config: ComparisonConfig  # the trainings, with the largest number of rounds
    sites: Sequence[SiteFolder]  # the sites' data
    # Methods of `REMEDIES` that do not go with the data or settings, with the reason.
    left_out: Mapping[str, str]

    @property
    def number(self) -> int:
        """The number of trainings."""
        return len(self.config.methods) * self.config.seeds


@dataclass(frozen=True)
class Timing:
    """Seconds to open a training, seconds of a round of FedAvg, and seconds that measuring them took."""

    opening: float
    round: float
    spent: float

    def rounds(self, budget: float, trainings: int) -> int:
        """Return the number of rounds of each training that a budget suffices for.

        Example:
            >>> Timing(opening=1, round=2, spent=10).rounds(600, trainings=12)
            15
        """
        each = (budget - self.spent) / trainings - len(SCORED_AT) * self.opening
        return max(0, int(each / (_COST * self.round)))

    def needed(self, rounds: int, trainings: int) -> float:
        """Return the budget that suffices for a number of rounds."""
        return self.spent + trainings * (len(SCORED_AT) * self.opening + rounds * _COST * self.round)


def make_trainings(request: Request) -> Trainings:
    """Open the sites, and choose the methods that go with them."""
    asked = parse_methods_list(request.methods) if request.methods else list(REMEDIES)
    given = {"data": request.data, "out": request.out, "seeds": 1, "limit": request.limit}
    several = [*asked, *([] if request.methods else [_LACKING])]
    experiment = make_experiment(
        None, {**given, "methods": list(dict.fromkeys([REFERENCE, ALONE, *several]))}, request.settings
    )
    if experiment.vary:
        name = next(iter(experiment.vary))
        raise ConfigError(f"--set {name}: give one value; medfedaug benchmark compares several")
    preset = experiment.preset()
    (run,) = replace(experiment, methods=(REFERENCE,)).runs(preset)
    sites = open_benchmark(preset.benchmark, experiment.root, limit=request.limit, **run.data)
    if not any(site.cases["validation"] for site in sites):
        raise ConfigError(f"{request.data}: no site has validation cases, on which methods are compared")
    if not request.methods and any(site.partial for site in sites):
        asked.append(_LACKING)
    base = replace(run.config, **federation_settings(sites))
    if "rounds" not in experiment.settings:
        base = replace(base, rounds=MOST_ROUNDS)

    def configure(name: str) -> RunConfig:
        parts = [part["name"] for part in parse_methods(name)]
        arguments = {part: preset.arguments_of(part, held_out=False) for part in parts}
        config = replace(base, methods=tuple(parse_methods(name, arguments)))
        _check(config, sites)
        return config

    configs, left_out = choose_methods(asked, configure, needed=bool(request.methods))
    methods = {name: list(config.methods) for name, config in configs.items()}
    return Trainings(ComparisonConfig(run=base, methods=methods, seeds=SEEDS), sites, left_out)


def _check(config: RunConfig, sites: Sequence[SiteFolder]) -> None:
    """Check that methods go with the network, the settings and the sites' annotations."""
    composition = Composition(config)
    composition.check_apart("a comparison")
    for site in sites:
        labelled = site if config.unlabelled_weight else site.without_unlabelled()
        if labelled.trains:
            composition.check_annotated(labelled)


def time_rounds(trainings: Trainings, device: str, execution: Execution) -> Timing:
    """Measure a round of FedAvg, after a round in which all images are read."""
    run, execution = trainings.config.run, replace(execution, tested=False)
    begun = started = time.monotonic()
    for rounds in (1, 2):
        started = time.monotonic()
        config = replace(run, rounds=rounds, init=None)
        server = run_in_process(config, "", trainings.sites, device, execution=execution)
    seconds = float(server.rounds[-1]["seconds"])
    whole = time.monotonic() - started
    return Timing(max(0.0, whole - 2 * seconds), seconds, time.monotonic() - begun)


def planned_rounds(timing: Timing, trainings: Trainings, budget: float) -> int:
    """Return the rounds of each training."""
    most = trainings.config.run.rounds
    rounds = min(most, timing.rounds(budget, trainings.number))
    least = min(FEWEST_ROUNDS, most)
    if rounds < least:
        minutes = timing.needed(least, trainings.number) / 60
        raise ConfigError(
            f"--budget: {trainings.number} trainings of {least} rounds take about {minutes:.0f} min, since a "
            f"round of {REFERENCE} takes {timing.round:.1f} s: give --budget {minutes + 1:.0f}min, fewer "
            "--methods, or smaller images (--set image_size=64)"
        )
    return rounds


def compare_methods(
    request: Request,
    *,
    device: str,
    execution: Execution,
    on_event: OnEvent,
) -> dict[str, Any]:
    """Compare methods by short trainings, or continue; write ``compare.json`` and a page.

    Args:
        on_event: see `medfedaug.federation.FederationServer`; also called with
            ``{"event": "stage", "text": ...}`` before the trainings.

    Returns:
        The content of ``compare.json``: that of
        `medfedaug.federation.server.comparison.Comparison.results`, with ``left_out`` and ``conclusions``.
    """
    trainings = make_trainings(request)
    out, state = request.out, request.out / STATE
    with only_process(out), keep_decoded(_MEMORY):
        plan = _earlier_plan(out, trainings, request)
        for name, reason in trainings.left_out.items():
            on_event({"event": "stage", "text": f"without {name}: {reason}"})
        if plan is None:
            on_event({"event": "stage", "text": f"measuring a round of {REFERENCE}"})
            timing = time_rounds(trainings, device, execution)
            rounds = planned_rounds(timing, trainings, request.budget)
            plan = {"rounds": rounds, "budget": request.budget - timing.spent, "round": timing.round}
            files = {"files": fingerprint_sites(trainings.sites), "asked": _asked(trainings, request)}
            write_versioned(out / _FILE, _KIND, _VERSION, {**plan, **files})
        config = replace(
            trainings.config, run=replace(trainings.config.run, rounds=plan["rounds"]), budget=plan["budget"]
        )
        names = ", ".join(config.order)
        text = (
            f"budget {request.budget / 60:.3g} min: {trainings.number} trainings ({names}; "
            f"{config.seeds} seeds) of up to {plan['rounds']} rounds; a round of {REFERENCE} took "
            f"{plan['round']:.2g} s"
        )
        on_event({"event": "stage", "text": text})
        results = compare_in_process(config, trainings.sites, state, device, on_event, execution)
        budget = results["budget"]
        budget["spent"] = round(budget["spent"] + request.budget - plan["budget"], 1)
        budget["seconds"] = request.budget
        results["left_out"] = dict(trainings.left_out)
        results["conclusions"] = conclusions(results, str(request.data), request.settings)
        write_json(out / COMPARED, results)
        write_gain_page(results, out / PAGE, results["conclusions"])
        for model in state.glob("*/*.pt"):  # the record suffices to show the result again
            model.unlink()
    return results


def _asked(trainings: Trainings, request: Request) -> dict[str, Any]:
    return {"config": trainings.config.to_dict(), "budget": request.budget}


def _earlier_plan(out: Path, trainings: Trainings, request: Request) -> dict[str, Any] | None:
    """Return the plan of an interrupted or finished comparison in this folder."""
    file = out / _FILE
    if not file.exists():
        if (out / COMPARED).exists():
            raise ConfigError(f"{out} holds another comparison; choose another folder")
        return None
    with config_errors(f"{file}: cannot be read", OSError, ValueError, remedy="; choose another folder"):
        plan = parse_versioned(file.read_text(encoding="utf-8"), _KIND, _VERSION)
    if plan["asked"] != _asked(trainings, request):
        raise ConfigError(f"{out} holds a comparison with other settings; choose another folder")
    made = f"the comparison in {out} was made"
    check_same_files(plan["files"], fingerprint_sites(trainings.sites), made, request.data)
    return plan
