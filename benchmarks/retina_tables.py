"""Compute the gains over FedAvg on the retinal photographs from the committed runs.

    python benchmarks/retina_tables.py

Prints the rows of the tables of README and `docs/results`. `medfedaug report FOLDER` on an unpacked archive
compares the same runs in the same way.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from medfedaug.analysis.grouping import group_runs, pool_runs
from medfedaug.research.comparison.comparison import compare_groups
from medfedaug.research.comparison.paired_tests import PatientTest
from medfedaug.runs.load_results import find_runs, load_run
from medfedaug.runs.run import BASELINE, Run

RESULTS = Path(__file__).parents[1] / "docs/results/retina"
SHORT, LONG = "runs.tar.xz", "converged.tar.xz"
"""Archives of five trainings of 20 rounds, and of one training of 60 rounds."""


@cache
def recorded(archive: str) -> list[Run]:
    """Load the runs of an archive.

    Ditto trains twice in a round. With half of the local epochs it has as many steps as the others, and
    counts as comparable.
    """
    with TemporaryDirectory() as folder, tarfile.open(RESULTS / archive) as packed:
        packed.extractall(folder, filter="data")
        runs = [load_run(run) for run in find_runs([Path(folder)])]
    epochs = next(run.config["local_epochs"] for run in runs if run.methods == (BASELINE,))
    return [replace(run, config={**run.config, "local_epochs": epochs}) for run in runs]


def named(label: str) -> str:
    """Return a method's name in the tables."""
    return label.replace("fedfa + fedfa_h", "fedfa+").replace(" + ", ",")


def gains(archive: str) -> Iterator[dict[str, str]]:
    """Yield the gain of each method over FedAvg, with its interval and verdict."""
    for one in compare_groups(group_runs(recorded(archive))):
        opened = one.verdict is not None and bool(one.verdict.lacking)
        test = one.patients if opened else one.crossed
        assert one.verdict is not None
        assert test is not None
        yield {
            "methods": named(one.label),
            "trainings": str(one.run_seeds),
            "patients": str(one.num_patients),
            "gain": f"{test.difference:+.3f}",
            "interval": f"{test.low:+.3f} to {test.high:+.3f}",
            "verdict": one.verdict.word if opened else str(one.verdict),
        }


def longer_trainings() -> list[str]:
    """Return the rows of the two tables of the longer trainings, each over the folds of a method.

    The first compares each method with its shorter trainings with the same seeds and folds, the second has
    the differences by camera, after the scores of FedAvg.
    """
    long, compared, by_camera = group_runs(recorded(LONG)), list[str](), list[str]()
    tests = {one.label: one.patients for one in compare_groups(long) if one.patients}
    for label in (BASELINE, *sorted(tests, key=lambda label: -tests[label].difference)):
        members, tested = long[label], tests.get(label)
        parts = {run.repetition for run in members}
        short = [run for run in recorded(SHORT) if run.repetition in parts]
        same = group_runs([run for run in short if run.methods in (members[0].methods, (BASELINE,))])
        (after,) = pool_runs(members)
        (plain,) = pool_runs([run for run in long[BASELINE] if run.repetition in parts])
        cells = [
            f"{len(members)}",
            _gain(tested),
            _gain(*(one.patients for one in compare_groups(same))),
        ]
        compared.append(_row(label, *cells))
        scores = [(score or 0.0, plain.sites[site] or 0.0) for site, score in after.sites.items()]
        by_camera.append(
            _row(label, *(f"{one - other:+.3f}" if tested else f"{one:.3f}" for one, other in scores))
        )
    return [*compared, *by_camera]


def _gain(test: PatientTest | None = None) -> str:
    return f"{test.difference:+.3f} ({test.low:+.3f} to {test.high:+.3f})" if test else ""


def _row(label: str, *cells: str) -> str:
    return f"| `{named(label)}` | {' | '.join(cells)} |".replace("-", "\N{MINUS SIGN}")


if __name__ == "__main__":
    for name in (SHORT, LONG):
        for row in gains(name):
            print(_row(*row.values()))
    print("\n".join(longer_trainings()))
