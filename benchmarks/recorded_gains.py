"""The gains of `medfedaug/analysis/recorded_gains.csv` that have a verdict, computed from committed runs.

    python benchmarks/recorded_gains.py            # compares; exits with 1 where a number differs
    python benchmarks/recorded_gains.py --write    # writes them to the table

The report compares the same runs in the same way: `medfedaug report FOLDER` on an unpacked archive.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from medfedaug.analysis.comparison import Comparison, compare_groups
from medfedaug.analysis.grouping import group_runs
from medfedaug.runs.load_results import find_runs, load_run

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "medfedaug/analysis/recorded_gains.csv"
RECORDS = {"retina, five cameras": ROOT / "docs/results/retina/runs.tar.xz"}
OVER = "trainings and patients, five seeds"


def compared(archive: Path) -> list[Comparison]:
    """Compare the runs of an archive as the report does."""
    with TemporaryDirectory() as folder, tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
        return compare_groups(group_runs([load_run(run) for run in find_runs([Path(folder)])]))


def rows(experiment: str, archive: Path) -> Iterator[dict[str, str]]:
    """Return the rows of an experiment, as the table has them."""
    for one in compared(archive):
        if one.crossed is None or one.verdict is None:
            raise SystemExit(f"{archive}: {one.label} cannot be compared")
        yield {
            "experiment": experiment,
            "over": OVER,
            "trainings": str(one.num_seeds),
            "cases": str(one.num_patients),
            "methods": one.label.replace("fedfa + fedfa_h", "fedfa+").replace(" + ", ","),
            "gain": f"{one.crossed.difference:+.3f}",
            "low": f"{one.crossed.low:+.3f}",
            "high": f"{one.crossed.high:+.3f}",
            "verdict": str(one.verdict),
        }


def table() -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and the rows of the table, those of the records computed anew, in its order."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns, found = list(reader.fieldnames or ()), list(reader)
    computed = {
        (row["experiment"], row["methods"]): row for name, path in RECORDS.items() for row in rows(name, path)
    }
    kept = [computed.pop((row["experiment"], row["methods"]), row) for row in found]
    return columns, [*kept, *computed.values()]


def text() -> str:
    """Return the content of the table."""
    columns, found = table()
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return out.getvalue()


def main() -> None:
    """Write the table, or compare it with what the records say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table")
    found = text()
    if parser.parse_args().write:
        TABLE.write_text(found, encoding="utf-8")
    elif found != TABLE.read_text(encoding="utf-8"):
        sys.exit(f"{TABLE}: differs from the records; --write writes it")


if __name__ == "__main__":
    main()
