r"""Judge the predictions of `medfedaug prospect --pilot`: each family of federations from all others.

    python benchmarks/judge_prospect.py --real docs/results/retina/runs.tar.xz --simulate 200 \
        --out docs/results/prospect/judged.md
    python benchmarks/judge_prospect.py --json medfedaug/analysis/gain_record.json
    python benchmarks/judge_prospect.py --calibration own.csv --json own.json

The pilot of a gain is training alone minus FedAvg of another seed of the same federation. A claim holds if,
with whole families left out, 70% of the gains lie in the 80% interval and 90% in the 95% one in the mean of
the families, and half in each family. It beats the yardstick, 0 plus and minus the quantile of the gains of
the other families, if its intervals are narrower and have the smaller interval score, also without any
family. `--real` predicts runs of several seeds from the whole table. `--simulate` draws tables of the same
size, in which gains follow the pilot or do not. `--json` writes the record of `medfedaug prospect`, with all
norms and metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from statistics import fmean

import numpy as np
from calibration_table import REAL, TABLE, Calibration
from gain_model import GainModel, GainRows, gain_rows
from measure import parser
from prediction_judge import Judgement, judge_rows, judge_table, record_of
from pydantic import TypeAdapter
from recorded_federations import parts_of

from medfedaug.analysis.gain_record import FEDAVG, SINGLE, GainRecord

CLAIMS = (
    *("method", "over", "level", "said", "holds", "beats", "in 80%", "worst family", "width of 80%"),
    *("width of yardstick", "score of 80%", "of yardstick", "error", "error of 0", "federations", "families"),
)
FAMILIES = ("method", "level", "family", "in 80%", "in 80% of yardstick", "in 95%", "in 95% of yardstick")
REAL_SETS = ("method", "gains", "pilots", "predicted", "80%", "in 80%", "0 ± yardstick", "in yardstick")


def claims(judged: Sequence[Judgement]) -> Iterator[list[str]]:
    """Yield a line for each claim."""
    for one in judged:
        if not one.pilot:
            continue
        pilot, yardstick = one.pilot[0], one.yardstick[0]
        yield [
            *(f"`{one.methods}`", f"`{one.over}`", one.level),
            *("yes" if answer else "no" for answer in (one.is_said, one.holds, one.beats)),
            *(f"{pilot.coverage:.0%}", f"{pilot.worst} {pilot.inside[pilot.worst]:.0%}"),
            *(f"{fmean(record.width.values()):.3f}" for record in (pilot, yardstick)),
            *(f"{fmean(record.loss.values()):.3f}" for record in (pilot, yardstick)),
            *(f"{one.error:.4f}", f"{one.error_of_zero:.4f}", str(one.federations), str(one.families)),
        ]


def by_family(judged: Sequence[Judgement]) -> Iterator[list[str]]:
    """Yield a line for each family of the claims about the mean of the sites."""
    for one in judged:
        if one.pilot and one.level == "mean":
            for family in one.pilot[0].inside:
                shares = [
                    f"{of[place].inside[family]:.0%}" for place in (0, 1) for of in (one.pilot, one.yardstick)
                ]
                yield [f"`{one.methods}`", one.level, family, *shares]


def real_sets(table: Calibration, archive: Path) -> Iterator[list[str]]:
    """Yield a line for each method of a real record: its gains, predicted with the pilot of another seed."""
    cases: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for part in parts_of(str(archive)):
        for site, scores in part.scores.items():
            cases[part.seed, part.methods][site] += [score for score in scores.values() if score is not None]
    means: dict[int, dict[str, float]] = defaultdict(dict)
    for (seed, name), sites in cases.items():
        means[seed][name] = fmean(fmean(scores) for scores in sites.values())
    for methods in table.methods:
        rows = gain_rows(table, methods)
        pairs = [
            (means[ours][methods] - means[ours][FEDAVG], means[other][SINGLE] - means[other][FEDAVG])
            for ours, other in permutations(means, 2)
            if methods in means[ours] and SINGLE in means[other]
        ]
        if rows is None or not pairs or methods == SINGLE:
            continue
        model, flat = GainModel(rows), GainModel(rows, yardstick=True).half_width(0.8)
        half = model.half_width(0.8)
        assert half is not None
        assert flat is not None
        gains, pilots = (np.array(column) for column in zip(*pairs, strict=True))
        predicted = np.array([model.mean_at(pilot) for pilot in pilots])
        yield [
            *(f"`{methods}`", f"{gains.min():+.3f} to {gains.max():+.3f}"),
            *(f"{column.min():+.3f} to {column.max():+.3f}" for column in (pilots, predicted)),
            *(f"± {half:.3f}", f"{(np.abs(gains - predicted) <= half).mean():.0%}"),
            *(f"{flat:.3f}", f"{(np.abs(gains) <= flat).mean():.0%}"),
        ]


def simulated(tables: int) -> Iterator[list[str]]:
    """Yield the share of predictions for drawn tables of eleven families, each with two federations."""
    families, federations = np.repeat(np.arange(11), 4).astype(str), np.repeat(np.arange(22), 2).astype(str)
    for law in (True, False):
        usable = []
        for seed in range(tables):
            R = np.random.RandomState(seed)
            ahead = np.repeat(np.clip(R.normal(0, 0.15, 22), -0.3, 0.5), 2)
            own = np.repeat(R.normal(0, 0.03 if law else 0.1, 22), 2)
            pilot, noise = ahead + R.normal(0, 0.03, 44), R.normal(0, 0.03, 44)
            gains = law * np.maximum(ahead, 0) + own + noise
            rows = GainRows(pilot, gains, families, federations, falls=False)
            usable.append(judge_rows(rows, "drawn", FEDAVG, "mean").is_said)
        yield ["follow the pilot" if law else "do not", str(tables), f"{np.mean(usable):.1%}"]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    rows = (header, ["---"] * len(header), *lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in rows)


def description(table: Calibration) -> str:
    """Describe the table."""
    trainings = sum(len(one.scores) for one in table.federations)
    missed = sum(len(one.unconverged) for one in table.federations)
    return (
        f"{table.number} federations of {len(table.families)} families ({', '.join(table.families)}), "
        f"{len(table.federations)} with their seeds, at most {table.seeds} of a federation. "
        f"{table.of_origin(REAL).number} are of real data sets. Of {trainings} trainings {missed} had not "
        "converged.\n"
    )


def write_record(paths: Sequence[Path], out: Path) -> None:
    """Write the record of tables, by norm and metric."""
    records: dict[str, dict[str, GainRecord]] = defaultdict(dict)
    for norm in ("batch", "group", "instance", "layer"):
        table = Calibration.load(paths, norm)
        for metric in dict.fromkeys(one.metric for one in table.federations):
            records[norm][metric] = record_of(table.scored_by(metric))
    text = TypeAdapter(dict[str, dict[str, GainRecord]]).dump_json(records, indent=1)
    out.write_bytes(text + b"\n")


def main() -> None:
    """Print the tables, and write them on request."""
    arguments = parser(__doc__)
    arguments.add_argument("--calibration", type=Path, nargs="*", default=[], help="further tables")
    arguments.add_argument("--norm", default="batch", help="normalisation of the networks")
    arguments.add_argument(
        "--real", type=Path, help="archive of runs with several seeds, with single and FedAvg"
    )
    arguments.add_argument("--simulate", type=int, default=0, metavar="N", help="also judge N drawn tables")
    arguments.add_argument("--out", type=Path, help="Markdown file")
    arguments.add_argument("--json", type=Path, help="record for `medfedaug prospect --calibration`")
    options = arguments.parse_args()
    paths = (TABLE, *options.calibration)
    table = Calibration.load(paths, options.norm).scored_by("dice")
    judged = judge_table(table)
    parts = [description(table), "### Each family from all others\n", markdown(CLAIMS, claims(judged))]
    parts += ["### By family, of the mean of the sites\n", markdown(FAMILIES, by_family(judged))]
    if options.real:
        parts += ["### A real data set\n", markdown(REAL_SETS, real_sets(table, options.real))]
    if options.simulate:
        header = ("gains", "tables", "a prediction is said")
        parts += ["### Drawn tables\n", markdown(header, simulated(options.simulate))]
    text = "\n".join(parts)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        write_record(paths, options.json)


if __name__ == "__main__":
    main()
