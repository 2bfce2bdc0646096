r"""Judge the predictions of `medfedaug prospect`: each family of federations is predicted from all others.

    python benchmarks/judge_prospect.py --out docs/results/prospect/judged.md \
        --json medfedaug/analysis/judged.json
    python benchmarks/judge_prospect.py --calibration own.csv

The first table has, for each method and level, the share of measured gains within the 80% and 95% intervals,
the mean width of the 80% interval, and the mean absolute error beside that of always saying 0 and of the gain
by distance of `shift_gain.py`. A claim holds where 70 to 90% lie in the 80% interval and 90% or more in the
95% one, of 20 federations or more; it has skill where the error is below that of 0 by two standard errors.
The tables of real data sets have their gains as they are predicted from phantoms. Nothing is trained.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from medfedaug.analysis.calibration_table import FEDAVG, PHANTOM, REAL, SINGLE, Calibration
from medfedaug.analysis.fingerprint_distance import appearance, distances
from medfedaug.analysis.gain_prediction import LEVELS, GainModel
from medfedaug.analysis.prediction_judge import (
    Judgement,
    Prediction,
    judge_anew,
    judge_predictions,
    judged_over,
    left_out,
    predictions,
    write_judgements,
)

DISTANCE_TABLE = Path(__file__).parents[1] / "docs/results/shift/gain_by_distance.csv"
"""Mean gains by distance, which `shift_gain.py --csv` writes."""

CLAIMS = (
    *("method", "over", "level", "holds", "skill", "in 80%", "in 95%", "width of 80%", "error", "error of 0"),
    *("error of the distance", "federations", "families"),
)
REAL_SETS = (
    *("federation", "seeds", "method", "over", "measured", "from phantoms", "80%", "in 80%", "unlike"),
)
TOGETHER = ("method", "over", "gains of real sets", "in 80%", "error", "error of 0")
RESTS = ("method", "over", "level", "predicted by")


def by_distance(one: Prediction, methods: str, level: str) -> float | None:
    """The gain that the table by distance has for a federation as far apart; ``None`` where it has none."""
    rows = [line for line in distance_table() if line["methods"] == methods and line["at"] == "mean"]
    if methods == FEDAVG or level == "worst" or not rows:
        return None
    apart = fmean(appearance(kinds) for kinds in distances(one.federation.sites).values())
    there = (row for row in rows if float(row["nearest"]) <= apart < float(row["farthest"]))
    return next((float(row["mean"]) for row in there), 0.0)


@cache
def distance_table() -> list[dict[str, str]]:
    """Read `DISTANCE_TABLE`."""
    return list(csv.DictReader(DISTANCE_TABLE.read_text(encoding="utf-8").splitlines()))


def number(value: float | None, form: str) -> str:
    """Format a number that may be missing."""
    return "–" if value is None else format(value, form)


def claims(table: Calibration, judged: Sequence[Judgement]) -> Iterator[list[str]]:
    """A line for each claim of two federations or more; training alone over FedAvg is FedAvg's mirror."""
    for one in judged:
        if one.methods == SINGLE or one.federations < 2:
            continue
        found = left_out(table, one.methods, one.over, one.level)
        known = [(by_distance(gain, one.methods, one.level), gain.gain) for gain in found]
        apart = [abs(value - gain) for value, gain in known if value is not None]
        yield cells(one, fmean(apart) if len(apart) == len(found) else None)


def cells(one: Judgement, of_distance: float | None) -> list[str]:
    """The cells of a claim, in the order of `CLAIMS`."""
    return [
        *(f"`{one.methods}`", f"`{one.over}`", one.level),
        *("yes" if one.holds else "no", "yes" if one.has_skill else "no"),
        *(number(one.coverage80, ".0%"), number(one.coverage95, ".0%"), number(one.width80, ".3f")),
        *(f"{one.error:.4f}", f"{one.error_of_zero:.4f}", number(of_distance, ".4f")),
        *(str(one.federations), str(one.families)),
    ]


def from_phantoms(table: Calibration) -> dict[str, list[Prediction]]:
    """Predictions of the mean gain of real data sets from phantoms alone, by methods."""
    phantoms, real = table.of_origin(PHANTOM), table.of_origin(REAL)
    asked = [FEDAVG, *(methods for methods in table.methods if methods != SINGLE)]
    found = {m: predictions(phantoms, real, m, judged_over(m), "mean") for m in asked}
    return {methods: of for methods, of in found.items() if of}


def real_sets(found: dict[str, list[Prediction]]) -> Iterator[list[str]]:
    """A line for each real federation and method, in the mean of its seeds."""
    for methods, of in found.items():
        for name in dict.fromkeys(one.federation.name for one in of):
            seeds = [one for one in of if one.federation.name == name]
            ends = [one.expected.interval80 for one in seeds if one.expected.interval80 is not None]
            low, high = (fmean(end) for end in zip(*ends, strict=True)) if ends else (None, None)
            gain = fmean(one.gain for one in seeds)
            inside = "–" if low is None or high is None else "yes" if low <= gain <= high else "no"
            yield [
                *(f"`{name}`", str(len(seeds)), f"`{methods}`", f"`{judged_over(methods)}`", f"{gain:+.3f}"),
                f"{fmean(one.expected.mean for one in seeds):+.3f}",
                "–" if low is None else f"{low:+.3f} to {high:+.3f}",
                inside,
                "yes" if any(one.expected.is_unlike for one in seeds) else "no",
            ]


def together(found: dict[str, list[Prediction]]) -> Iterator[list[str]]:
    """A line for each method: how far predictions from phantoms are from real data sets."""
    for methods, of in found.items():
        judged = judge_predictions(of, methods, judged_over(methods), "mean")
        if judged is not None:
            inside = number(judged.coverage80, ".0%")
            errors = f"{judged.error:.4f}", f"{judged.error_of_zero:.4f}"
            yield [f"`{methods}`", f"`{judged_over(methods)}`", str(judged.rows), inside, *errors]


def rests_on(table: Calibration) -> Iterator[list[str]]:
    """A line for each claim: of what the prediction from the whole table is made."""
    for methods in (FEDAVG, *table.methods):
        for level in LEVELS if methods != SINGLE else ():
            try:
                model = GainModel(table, methods, judged_over(methods), level)
            except ValueError:
                continue
            yield [f"`{methods}`", f"`{judged_over(methods)}`", level, model.explanation]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], words: Sequence[int]) -> str:
    """A table; columns that are not of words stand at the right."""
    rule = ["---" if place in words else "---:" for place in range(len(header))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def told(table: Calibration) -> str:
    """Describe the table."""
    trainings = sum(len(one.scores) for one in table.federations)
    missed = sum(len(one.unconverged) for one in table.federations)
    return (
        f"{table.number} federations of {len(table.families)} families ({', '.join(table.families)}), "
        f"{len(table.federations)} with their seeds, of which a federation has {table.seeds} at most. "
        f"{table.of_origin(REAL).number} are of real data sets. Of {trainings} trainings {missed} had not "
        "converged.\n"
    )


def main() -> None:
    """Print the tables, and write them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calibration", type=Path, nargs="*", default=[], help="tables of your own besides")
    parser.add_argument("--norm", default="batch", help="normalisation of the networks")
    parser.add_argument("--out", type=Path, help="Markdown file")
    parser.add_argument("--json", type=Path, help="record of the first table, of which pages are made")
    options = parser.parse_args()
    table = Calibration.load(options.calibration, options.norm).scored_by("dice")
    found, judged = from_phantoms(table), judge_anew(table)
    if options.json:
        write_judgements(table, judged, options.json)
    parts = [
        told(table),
        "### Each family from all others\n",
        markdown(CLAIMS, claims(table, judged), words=(0, 1, 2, 3, 4)),
    ]
    if found:
        parts += [
            "### Real data sets from phantoms alone\n",
            markdown(TOGETHER, together(found), words=(0, 1)),
            markdown(REAL_SETS, real_sets(found), words=(0, 2, 3, 7, 8)),
        ]
    parts += [
        "### What the predictions of the whole table rest on\n",
        markdown(RESTS, rests_on(table), words=range(4)),
    ]
    text = "\n".join(parts)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
