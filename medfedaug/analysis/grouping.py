"""`group_runs` collects the runs of one row of a table; `pool_runs` pools the scores of a seed's runs."""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from medfedaug.config.run import Execution
from medfedaug.errors import ConfigError
from medfedaug.metrics.registry import find_metric
from medfedaug.runs.run import BASELINE, Run

Groups = Mapping[str, Sequence[Run]]  # runs by label (`group_runs`)

# Runs that differ only in these settings are repetitions of one experiment.
_REPETITION = ("seed", "purpose", *(entry.name for entry in fields(Execution)))
_REPETITION_OF_DATA = ("fold", "fold_seed")


def group_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group the runs that differ only in seed, fold or held-out site, FedAvg first.

    Runs that each leave out one site, and not all the same one, describe the sites that they left out. If two
    groups use the same methods, their labels name the settings that differ.

    Returns:
        The runs of each label, sorted by seed, fold and held-out site.

    Raises:
        ConfigError: when metrics differ, or an experiment or a test case of a seed is given twice.
    """
    first = runs[0]
    for run in runs:
        if run.metric != first.metric:
            raise ConfigError(f"{first.path} scores {first.metric}, {run.path} scores {run.metric}")
    groups: dict[str, list[Run]] = {}
    for run in _in_turn(runs):
        groups.setdefault(_exact(_settings(run)), []).append(run)
    labelled: dict[str, list[Run]] = {}
    for members in groups.values():
        # Fold 10 comes after fold 2.
        members.sort(key=lambda run: (run.seed, len(run.fold or ""), run.fold or "", run.held_out))
        for one, other in pairwise(members):
            if one.repetition == other.repetition:
                raise ConfigError(f"{one.path} and {other.path} are one experiment with the same {one.name}")
        _check_folds(members)
        examples = [group[0] for group in groups.values()]
        alike = [run for run in examples if run.methods == members[0].methods]
        mixed = len({run.in_turn for run in examples}) > 1  # the same column has two different meanings
        labelled[_label(members[0], alike, ["holdout"] if mixed else [])] = members
    order = sorted(labelled, key=lambda label: labelled[label][0].methods != (BASELINE,))
    return {label: labelled[label] for label in order}


def _in_turn(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, with a mark on runs that leave out one site if different sites are left out."""
    alone = [run for run in runs if len(run.held_out) == 1]
    if not any(run.in_turn for run in alone):
        turns: dict[str, set[str]] = {}
        for run in alone:
            alike = _exact(_settings(replace(run, in_turn=True)))
            turns.setdefault(alike, set()).add(run.held_out[0])
        if not any(len(sites) > 1 for sites in turns.values()):
            return list(runs)
    return [replace(run, in_turn=True) if len(run.held_out) == 1 else run for run in runs]


def _check_folds(members: Sequence[Run]) -> None:
    tested: dict[tuple[int, str, str], Run] = {}
    for run in members:
        if run.in_turn and run.options.get("unseen"):
            continue  # every fold tests the whole site
        for site in run.tested:
            for case in run.case_scores.get(site, {}):
                other = tested.setdefault((run.seed, site, case), run)
                if other is not run:
                    problem = f"{other.path} and {run.path} both test case {case} of site {site}"
                    raise ConfigError(f"{problem}: folds test every case once")


@dataclass(frozen=True)
class Tested:
    """Test scores of one seed: of its single run, or of its runs with different folds and held-out sites."""

    seed: int
    #: Fold and held-out site of each run; `{(None, "")}` for a single run.
    parts: frozenset[tuple[str | None, str]]
    #: Score of each training site over the cases of all folds, each tested once; or of each site when it was
    #: left out, with all its cases in every fold if the data have it so.
    sites: dict[str, float | None]
    #: Score of each unseen site; a case of several runs counts with the mean of its scores.
    unseen: dict[str, float | None]
    mean: float | None  #: mean over `sites`, unweighted
    untested: dict[str, str]  #: sites of `sites` that could not be tested in some run, with the reason
    whole: bool = True  #: has all folds and held-out sites (`whole_seeds`); otherwise `mean` is `None`


def pool_runs(runs: Sequence[Run]) -> list[Tested]:
    """Return the test scores by seed of a label of `group_runs`, pooled over folds and held-out sites."""
    seeds = sorted({run.seed for run in runs})
    return [_pool(seed, [run for run in runs if run.seed == seed]) for seed in seeds]


def _pool(seed: int, members: Sequence[Run]) -> Tested:
    parts = frozenset(run.part for run in members)
    untested = {
        site: reason for run in members for site, reason in run.untested.items() if site in run.tested
    }
    tested = sorted({site for run in members for site in run.tested})
    sites = {site: _score([run for run in members if site in run.tested], site) for site in tested}
    others = sorted({site for run in members for site in run.unseen} - {*tested})
    unseen = {site: _score([run for run in members if site in run.unseen], site) for site in others}
    known = [score for score in sites.values() if score is not None]
    in_turn = members[0].in_turn
    if units_differ(members, {site for site, score in sites.items() if score is not None}):
        mean = None
    elif len(members) == 1 and not in_turn:
        mean = members[0].mean
    else:  # other means include this held-out site, so that its missing score leaves no mean
        mean = fmean(known) if known and not (in_turn and len(known) < len(sites)) else None
    return Tested(seed, parts, sites, unseen, mean, untested)


def _score(runs: Sequence[Run], site: str) -> float | None:
    """Return a site's score over the cases of several runs, every case once."""
    if len(runs) == 1:
        return {**runs[0].unseen, **runs[0].sites}.get(site)
    by_case: dict[str, list[float | None]] = {}
    for run in runs:
        unnamed = {f"of {run.name}": {**run.unseen, **run.sites}.get(site)}
        for case, score in (run.case_scores.get(site) or unnamed).items():
            by_case.setdefault(case, []).append(score)
    known = [[score for score in scores if score is not None] for scores in by_case.values()]
    means = [fmean(scores) for scores in known if scores]
    return fmean(means) if means else None


def units_differ(runs: Iterable[Run], sites: Set[str]) -> bool:
    """Return whether some sites measure the runs' metric in mm and others in pixels, which have no mean."""
    measured = [run for run in runs if find_metric(run.metric).has_unit]
    return len({unit for run in measured for site, unit in run.units.items() if site in sites}) > 1


def whole_seeds(groups: Mapping[str, Sequence[Run]]) -> tuple[dict[str, list[Tested]], list[str]]:
    """Return the seeds of each label that have all folds and held-out sites, and notes on the others.

    Returns:
        The pooled scores (`pool_runs`) by label, and a note on each incomplete seed. If no seed is whole, or
        some sites were never left out, all seeds are returned, without a mean.
    """
    pooled = {label: pool_runs(members) for label, members in groups.items()}
    turns = {run.held_out for members in groups.values() for run in members if run.in_turn}
    notes: list[str] = []
    for label, seeds in pooled.items():
        parts = {part for seed in seeds for part in seed.parts}
        whole = [seed for seed in seeds if seed.parts == parts]
        for seed in seeds:
            lacking = f"{label}, seed {seed.seed}"
            if seed.parts != parts:
                lacking += f", has {len(seed.parts)} of {len(parts)} {_parts(parts)}"
                notes.append(f"{lacking} and {'is left out' if whole else 'no mean'}.")
            elif seed.untested:
                names = ", ".join(sorted(seed.untested))
                notes.append(f"{lacking}: {names} could not be tested; it does not enter the mean.")
        # Seeds that lack different parts are not comparable: none gets a mean.
        pooled[label] = whole or _without_mean(seeds)
    for label, seeds in pooled.items():
        folds, turn = ({part[k] for seed in seeds for part in seed.parts} for k in (0, 1))
        planned = groups[label][0].options.get("folds")
        if isinstance(planned, int) and planned is not True and len(folds) < planned:
            notes.append(f"{label}: {len(folds)} of {planned} folds; it lacks the patients of the others.")
        if groups[label][0].in_turn and len(turn) < len(turns):
            notes.append(f"{label}: only {len(turn)} of {len(turns)} sites were left out; it has no mean.")
            pooled[label] = _without_mean(seeds)
    return pooled, notes


def _without_mean(seeds: Sequence[Tested]) -> list[Tested]:
    return [replace(seed, mean=None, whole=False) for seed in seeds]


def unscored_notes(pooled: Mapping[str, Sequence[Tested]], reference: str = BASELINE) -> list[str]:
    """Return notes on means that lack a site which has a score in other rows or seeds."""
    scored = {
        s for seeds in pooled.values() for seed in seeds for s, v in seed.sites.items() if v is not None
    }
    lacking: dict[tuple[str, str], list[int]] = {}
    for label, seeds in pooled.items():
        for seed in seeds:
            names = [s for s in sorted(scored - seed.untested.keys()) if seed.sites.get(s, 0.0) is None]
            if names and seed.mean is not None:
                lacking.setdefault((label, ", ".join(names)), []).append(seed.seed)
    return [
        f"{label}, seed {', '.join(map(str, numbers))}: no score at {names}; its mean is over the other "
        f"sites, and a difference to {reference} over the sites that both have a score of."
        for (label, names), numbers in lacking.items()
    ]


def _parts(parts: Set[tuple[str | None, str]]) -> str:
    folds, sites = ({part[k] for part in parts} for k in (0, 1))
    if len(folds) > 1 and len(sites) > 1:
        return "folds and held-out sites"
    return "folds" if len(folds) > 1 else "held-out sites"


def experiment(run: Run) -> dict[str, Any]:
    """Return the settings, except for the methods, that make two runs different experiments.

    Settings that the sites' fingerprints decide may differ between folds and held-out sites of an experiment.
    """
    config = {key: value for key, value in run.asked.items() if key not in (*_REPETITION, "methods")}
    options = {f"data.{k}": v for k, v in run.options.items() if k not in _REPETITION_OF_DATA}
    if run.in_turn:
        config["holdout"] = "each site in turn"
        options.pop("data.unseen", None)  # the held-out site with all its cases
    return {**config, **options, "data": run.data}


def _settings(run: Run) -> dict[str, Any]:
    """Return all settings that make two runs different experiments, as a flat mapping."""
    settings = {**experiment(run), "engine": run.context.get("engine")}
    for method in run.config["methods"]:
        if method["name"] in run.methods:
            settings[method["name"]] = True
            settings.update({f"{method['name']}.{k}": v for k, v in (method.get("args") or {}).items()})
    return settings


def _label(run: Run, alike: Sequence[Run], always: Sequence[str] = ()) -> str:
    own, others = _settings(run), [_settings(other) for other in alike]
    parts = []
    for key in sorted({key for other in others for key in other}):
        values = {_exact(value): value for other in others for value in [other.get(key, "default")]}
        if len(values) > 1 or key in always:
            # In full where two values would look the same: a label is of one group alone.
            short = len(set(map(_short, values.values()))) == len(values)
            parts.append(f"{key}={(_short if short else _exact)(own.get(key, 'default'))}")
    return f"{run.label} ({', '.join(parts)})" if parts else run.label


def _exact(value: Any) -> str:
    """Return a value as a unique text; 1 and 1.0 are one value."""
    return json.dumps(_without_point(value), sort_keys=True)


def _without_point(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_point(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_point(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(value: Any) -> str:
    if value in ([], {}, None):
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
