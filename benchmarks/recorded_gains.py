"""Compute the gains of `medfedaug/analysis/recorded_gains.csv` from the committed runs.

    python benchmarks/recorded_gains.py            # compares; exits with 1 on a difference
    python benchmarks/recorded_gains.py --write    # writes them to the table
    python benchmarks/recorded_gains.py --page     # prints the tables of the longer trainings for their page

The report compares the same runs in the same way: `medfedaug report FOLDER` on an unpacked archive.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from medfedaug.analysis.comparison import compare_groups
from medfedaug.analysis.grouping import group_runs, pool_runs
from medfedaug.metrics.significance import PatientTest
from medfedaug.runs.load_results import find_runs, load_run
from medfedaug.runs.run import BASELINE, Run

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "medfedaug/analysis/recorded_gains.csv"
SHORT, LONG = "retina, five cameras", "retina, five cameras, 60 rounds"
RECORDS = {
    SHORT: ("docs/results/retina/runs.tar.xz", "trainings and patients, five seeds"),
    LONG: ("docs/results/retina/converged.tar.xz", "patients, one seed"),
}


@cache
def recorded(experiment: str) -> list[Run]:
    """Load the runs of an experiment.

    Ditto trains twice in a round. With half of the local epochs it has as many steps as the others, and
    counts as comparable.
    """
    with TemporaryDirectory() as folder, tarfile.open(ROOT / RECORDS[experiment][0]) as packed:
        packed.extractall(folder, filter="data")
        runs = [load_run(run) for run in find_runs([Path(folder)])]
    epochs = next(run.config["local_epochs"] for run in runs if run.methods == (BASELINE,))
    return [replace(run, config={**run.config, "local_epochs": epochs}) for run in runs]


def named(label: str) -> str:
    """Return a row's name in the table of gains."""
    return label.replace("fedfa + fedfa_h", "fedfa+").replace(" + ", ",")


def rows(experiment: str) -> Iterator[dict[str, str]]:
    """Yield the rows of an experiment for the table."""
    for one in compare_groups(group_runs(recorded(experiment))):
        opened = one.verdict is not None and bool(one.verdict.lacking)
        test = one.patients if opened else one.crossed
        if one.verdict is None or test is None:
            raise SystemExit(f"{experiment}: {one.label} cannot be compared")
        yield {
            "experiment": experiment,
            "over": RECORDS[experiment][1],
            "trainings": str(one.run_seeds),
            "cases": str(one.num_patients),
            "methods": named(one.label),
            "gain": f"{test.difference:+.3f}",
            "low": f"{test.low:+.3f}",
            "high": f"{test.high:+.3f}",
            "verdict": one.verdict.word if opened else str(one.verdict),
        }


def table() -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and rows of the table in its order, the records' rows computed anew."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns, before = list(reader.fieldnames or ()), list(reader)
    computed = {(row["experiment"], row["methods"]): row for name in RECORDS for row in rows(name)}
    kept = [computed.pop((row["experiment"], row["methods"]), row) for row in before]
    return columns, [*kept, *computed.values()]


def text() -> str:
    """Return the content of the table."""
    columns, lines = table()
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def page() -> list[str]:
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
        (after,), (before,) = pool_runs(members), pool_runs(same[label])
        (plain,) = pool_runs([run for run in long[BASELINE] if run.repetition in parts])
        better = f"{tested.better} / {tested.worse}" if tested else ""
        best = ", ".join(str(run.selected_round) for run in members)
        cells = [
            f"{len(members)}",
            _gain(tested),
            better,
            _gain(*(one.patients for one in compare_groups(same))),
        ]
        compared.append(_row(label, *cells, f"{after.mean:.3f} ({before.mean:.3f})", best))
        scores = [(score or 0.0, plain.sites[site] or 0.0) for site, score in after.sites.items()]
        by_camera.append(
            _row(label, *(f"{one - other:+.3f}" if tested else f"{one:.3f}" for one, other in scores))
        )
    return [*compared, *by_camera]


def _gain(test: PatientTest | None = None) -> str:
    return f"{test.difference:+.3f} ({test.low:+.3f} to {test.high:+.3f})" if test else ""


def _row(label: str, *cells: str) -> str:
    return f"| `{named(label)}` | {' | '.join(cells)} |".replace("-", "\N{MINUS SIGN}")


def main() -> None:
    """Write the table, or compare it with the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--page", action="store_true", help="print the rows of the page's tables")
    options, content = parser.parse_args(), text()
    if options.page:
        print("\n".join(page()))
    elif options.write:
        TABLE.write_text(content, encoding="utf-8")
    elif content != TABLE.read_text(encoding="utf-8"):
        sys.exit(f"{TABLE}: differs from the records; --write writes it")


if __name__ == "__main__":
    main()
