r"""Judge the predictions of `medfedaug prospect`: each family of federations is predicted from all others.

    python benchmarks/judge_prospect.py --out docs/results/prospect/judged.md
    python benchmarks/judge_prospect.py --calibration own.csv

The table has, for each method and level, the share of measured gains within the 80% and 95% intervals, the
mean width of the 80% interval, and the mean absolute error beside that of always saying 0 and of the gain by
distance that `medfedaug inspect` has. A claim holds where 70 to 90% lie in the 80% interval and 90% or more
in the 95% one, of 20 federations or more. Nothing is trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from medfedaug.analysis.calibration_table import FEDAVG, SINGLE, Calibration
from medfedaug.analysis.gain_prediction import LEVELS, Judgement, judge_predictions

HEADER = (
    *("method", "over", "level", "federations", "families", "in 80%", "in 95%", "width of 80%", "error"),
    *("error of 0", "error of the distance", "skill", "holds"),
)


def judged(table: Calibration) -> Iterator[Judgement]:
    """All claims that the table can be judged by."""
    for methods in (FEDAVG, *table.methods):
        for level in LEVELS:
            found = judge_predictions(table, methods, SINGLE if methods == FEDAVG else FEDAVG, level)
            if found is not None:
                yield found


def cells(one: Judgement) -> list[str]:
    """The cells of a claim, in the order of `HEADER`."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return [
        *(f"`{one.methods}`", f"`{one.over}`", one.level, str(one.federations), str(one.families)),
        *(number(one.coverage80, ".0%"), number(one.coverage95, ".0%"), number(one.width80, ".3f")),
        *(f"{one.error:.4f}", f"{one.error_of_zero:.4f}", number(one.error_of_shift, ".4f")),
        *("yes" if one.has_skill else "no", "yes" if one.holds else "no"),
    ]


def main() -> None:
    """Print the table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calibration", type=Path, nargs="*", default=[], help="tables of your own besides")
    parser.add_argument("--norm", default="batch", help="normalisation of the networks")
    parser.add_argument("--out", type=Path, help="Markdown file")
    options = parser.parse_args()
    table = Calibration.load(options.calibration, options.norm)
    told = (
        f"{table.number} federations of {len(table.families)} families ({', '.join(table.families)}), "
        f"{len(table.federations)} with their seeds, of which a federation has {table.seeds} at most."
    )
    lines = [HEADER, ["---"] * 3 + ["---:"] * 8 + ["---"] * 2, *map(cells, judged(table))]
    text = told + "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
