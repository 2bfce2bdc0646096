"""Measure whether scores without a reference find the worst tenth of the predictions.

    python benchmarks/look_first.py --data DIR RUN [RUN ...] --record FILE.jsonl
    python benchmarks/look_first.py --record FILE.jsonl

The first call predicts the validation and test cases of finished runs, each at its own site, and writes a
line for each case: its Dice, and scores without a reference. The second prints, for each split and score, the
share of the worst tenth of the cases in the first tenth and the first quarter of its list, and the rank
correlation with Dice, with 95 % intervals by bootstrap over patients. Each run has its own list, since a user
has one model; its worst tenth has at least one case. Validation cases choose a score, by its rank
correlation, and test cases judge it.

Flips are those of `predict --flips`. The script counts the cases whose size or number of pieces is outside
the range of their site's training cases, as `predict --data` does. The scores of volume and components use
the range over the label maps of all sites, which no run has: an upper bound.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import hardware, parser
from scipy import stats

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.volumes import VolumeFolder
from medfedaug.functional.soft_dice_confidence import soft_dice_confidence
from medfedaug.research.datasets.benchmarks import OWN_DATA, open_benchmark
from medfedaug.research.datasets.published import FOLDS
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.input_statistics import Origin
from medfedaug.runs.prediction.case_quality import connected_pieces, count_components
from medfedaug.runs.prediction.input_drift import DriftReference
from medfedaug.runs.prediction.pass_agreement import PassAgreement
from medfedaug.runs.prediction.predictor import Predictor, flips_of
from medfedaug.runs.prediction.training_range import TrainingRange, volumes_in_millilitres
from medfedaug.tasks import Prediction

SCORES = {
    "soft Dice confidence": "confidence",
    "agreement of the passes": "agreement",
    "both, averaged": "both",
    "soft Dice confidence of the mean over the passes": "mean_confidence",
    "variation of the volume over the passes, large first": "variation",
    "volume against the training range": "volume",
    "components against the training range": "components",
    "predicted volume, small first": "small",
    "intensity and spacing, as warned": "unlike",
}
"""Scores by name; a list begins with the lowest."""

SPLITS = ("validation", "test")


def training_range(sites: Sequence[SiteFolder]) -> dict[str, tuple[float, float]]:
    """Return mean and deviation of the logarithms of volumes and components of the training cases."""
    volumes, counts = [], []
    for site in sites:
        assert isinstance(site, VolumeFolder)
        for case in site.cases["training"]:
            mask = site.load_case(case)[1][0].numpy() > 0
            volumes.append(np.log1p(mask.mean() * 1e6))
            counts.append(np.log1p(connected_pieces(mask)))
    return {
        name: (float(np.mean(values)), max(float(np.std(values)), 1e-6))
        for name, values in (("volume", volumes), ("components", counts))
    }


def score_run(folder: Path, data: Path) -> Iterator[dict[str, Any]]:
    run = FinishedRun.open(folder)
    options = run.record.get("data_options", {})
    sites = open_benchmark(OWN_DATA, data, **{name: options[name] for name in FOLDS if name in options})
    expected, usual = training_range([s for s in sites if s.cases["training"]]), DriftReference.of([run])
    recorded = {**run.record["test"]["sites"], **run.record["test"].get("unseen", {})}
    for site in sites:
        if site.name not in recorded:
            continue
        assert isinstance(site, VolumeFolder)
        own = site.name if site.name in run.record["test"]["sites"] else None  # an unseen site has none
        predictor = Predictor.prepare(run, Origin.of(run, own, None), site, "cpu")
        with predictor.model.scoring():
            predictor.model.network.eval()
            range_ = TrainingRange.of_folder(site, run.config.classes) if site.cases["training"] else None
            for split in SPLITS:
                for case in site.cases[split]:
                    row = score_case(run, site, case, predictor, expected, usual, range_)
                    known = recorded[site.name]["cases"].get(case.name) if split == "test" else None
                    assert known is None or abs(known - row["dice"]) < 1e-4, (case.name, known, row)
                    yield {"run": str(folder), "split": split, **row}


def score_case(
    run: FinishedRun,
    site: VolumeFolder,
    case: Case,
    predictor: Predictor,
    expected: Mapping[str, tuple[float, float]],
    usual: DriftReference,
    range_: TrainingRange | None,
) -> dict[str, Any]:
    task, classes = predictor.model.task, run.config.num_classes
    seen, passes = task.evaluation_case(site, case), PassAgreement(classes)
    plain = predictor.predict(seen, probabilities=True)
    passes.add(plain)
    total = plain.probabilities.double()
    for axes in flips_of(task.mirrored):
        flipped = predictor.predict(seen, probabilities=True, flipped=axes)
        passes.add(flipped)
        total += flipped.probabilities
    truth, predicted = seen.label[0].numpy() > 0, plain.label[0].numpy() > 0
    of_mean = total.argmax(dim=0)
    image = site.prepared_image(case, run.composition.intensity, task.preparation)
    warnings = usual.intensity_warnings(task.preparation.moments(image, usual.over))
    warnings += usual.spacing_warnings(site.affine(case))
    confidence, agreement, mean_confidence = (
        float(values[0].nan_to_num(0))
        for values in (plain.confidence, passes.agreement(), soft_dice_confidence(total.log(), of_mean))
    )
    numbers = {"volume": predicted.mean() * 1e6, "components": connected_pieces(predicted)}
    sizes = {name: float(np.log1p(value)) for name, value in numbers.items()}
    return {
        "site": site.name,
        "case": case.name,
        "patient": " ".join([site.name, *map(str, case.owner)]),
        "dice": dice(truth, predicted),
        "dice_of_mean": dice(truth, of_mean.numpy() > 0),
        "confidence": confidence,
        "agreement": agreement,
        "both": (confidence + agreement) / 2,
        "mean_confidence": mean_confidence,
        "variation": -variation(passes),
        **{name: -abs(value - expected[name][0]) / expected[name][1] for name, value in sizes.items()},
        "small": sizes["volume"],
        "unlike": -float(len(warnings)),
        **outside(range_, plain, run.config.classes, site.affine(case)),
    }


def outside(
    range_: TrainingRange | None, plain: Prediction, classes: Sequence[str], affine: torch.Tensor | None
) -> dict[str, bool]:
    """Return whether size and number of pieces are outside the range of the site's training cases."""
    if range_ is None:
        return {}
    counts = torch.bincount(plain.label.flatten(), minlength=len(classes)).tolist()
    entry: dict[str, Any] = {"voxels": dict(zip(classes, counts, strict=True))}
    voxels = dict(zip(classes[1:], counts[1:], strict=True))
    if (volumes := volumes_in_millilitres(voxels, affine)) is not None:
        entry["volume_ml"] = volumes
    size = range_.warnings(entry)
    pieces = count_components(plain.label, classes)
    more = any(pieces[name] > most for name, (_, most) in range_.components.items())
    return {"size outside": bool(size), "pieces outside": more}


def dice(truth: np.ndarray, predicted: np.ndarray) -> float:
    return float(2 * (truth & predicted).sum() / max(1, truth.sum() + predicted.sum()))


def variation(passes: PassAgreement) -> float:
    """Return the largest volume of a pass over the smallest, as logarithm of 1 + voxels."""
    low, high = passes.voxels()[:, 0].tolist()
    return float(np.log1p(high) - np.log1p(low))


def found_share(rows: Sequence[dict[str, Any]], score: str, listed: float, random: Any) -> tuple[int, int]:
    """Count the worst tenth of a run's cases in the first part of its list, and the worst tenth."""
    most = max(1, round(len(rows) / 10))
    shuffled = random.permutation(len(rows))  # so that equal scores have no order
    dice = np.array([rows[index]["dice"] for index in shuffled])
    values = np.array([rows[index][score] for index in shuffled])
    worst = set(np.argsort(dice, kind="stable")[:most].tolist())
    first = np.argsort(values, kind="stable")[: max(1, round(listed * len(rows)))]
    return len(worst & set(first.tolist())), most


def summary(rows: Sequence[dict[str, Any]], draws: int) -> None:
    runs = sorted({row["run"] for row in rows})
    print(f"{len(rows)} cases of {len({row['patient'] for row in rows})} patients in {len(runs)} runs")
    by_run = [[row for row in rows if row["run"] == run] for run in runs]
    gain = _interval(by_run, draws, _gain_of_mean)
    print(f"Dice of the mean over the passes, above that of the plain image: {gain}")
    for name in ("size outside", "pieces outside"):
        named, others = ([row["dice"] for row in rows if row.get(name) is flag] for flag in (True, False))
        means = [f"{np.mean(values):.2f}" if values else "-" for values in (named, others)]
        total = len(named) + len(others)
        print(f"{name}: {len(named)} of {total} cases, mean Dice {means[0]}, of the others {means[1]}")
    print(
        "| score | worst tenth in the first tenth | in the first quarter | rank correlation | within a site |"
    )
    print("|---|---|---|---|---|")
    for name, score in SCORES.items():
        measures = [
            *(partial(_share, score, listed) for listed in (0.1, 0.25)),
            *(partial(_correlation, score, within) for within in (False, True)),
        ]
        cells = [_interval(by_run, draws, measure) for measure in measures]
        print(f"| {name} | {' | '.join(cells)} |")
    for other in ("agreement", "both"):
        for listed in (0.1, 0.25):
            measure = partial(_more, other, listed)
            print(f"{other} finds more in the first {listed:.0%}: {_interval(by_run, draws, measure)}")
        print(f"{other} ranks better: {_interval(by_run, draws, partial(_better, other))}")


def _gain_of_mean(by_run: Sequence[Sequence[dict[str, Any]]], random: Any) -> float:
    return float(np.mean([row["dice_of_mean"] - row["dice"] for rows in by_run for row in rows]))


def _more(score: str, listed: float, by_run: Sequence[Sequence[dict[str, Any]]], random: Any) -> float:
    """Return a score's share of the worst tenth, above that of the confidence of one pass."""
    return _share(score, listed, by_run, random) - _share("confidence", listed, by_run, random)


def _better(score: str, by_run: Sequence[Sequence[dict[str, Any]]], random: Any) -> float:
    """Return the rank correlation of a score, above that of the confidence of one pass."""
    return _correlation(score, False, by_run, random) - _correlation("confidence", False, by_run, random)


def _share(score: str, listed: float, by_run: Sequence[Sequence[dict[str, Any]]], random: Any) -> float:
    pairs = [found_share(rows, score, listed, random) for rows in by_run]
    return sum(hit for hit, _ in pairs) / sum(all_ for _, all_ in pairs)


def _correlation(score: str, within: bool, by_run: Sequence[Sequence[dict[str, Any]]], random: Any) -> float:
    """Return the mean rank correlation with Dice over runs, or over their sites with four cases or more."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in (row for rows in by_run for row in rows):
        groups.setdefault((row["run"], row["site"] if within else ""), []).append(row)
    values = [
        np.corrcoef(*(stats.rankdata([row[key] for row in rows]) for key in (score, "dice")))[0, 1]
        for rows in groups.values()
        if min(len({row[key] for row in rows}) for key in (score, "dice")) > (3 if score != "unlike" else 1)
    ]
    return float(np.mean(values)) if values else float("nan")


def _interval(by_run: Sequence[Sequence[dict[str, Any]]], draws: int, measure: Any) -> str:
    """Return the value with its 95 % interval over draws of patients, the same ones in all runs."""
    random = np.random.default_rng(0)
    value = float(np.mean([measure(by_run, random) for _ in range(20)]))
    patients = sorted({row["patient"] for rows in by_run for row in rows})
    values = []
    for _ in range(draws):
        drawn = random.choice(len(patients), len(patients))
        counts = dict(zip(*np.unique(drawn, return_counts=True), strict=True))
        often = {patients[index]: int(count) for index, count in counts.items()}
        some = [[row for row in rows for _ in range(often.get(row["patient"], 0))] for rows in by_run]
        if large := [rows for rows in some if len(rows) > 2]:
            values.append(measure(large, random))
    low, high = np.nanquantile(values or [np.nan], [0.025, 0.975])
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("runs", nargs="*", type=Path, help="folders of finished runs")
    arguments.add_argument("--data", type=Path, help="the sites' folder")
    arguments.add_argument("--record", type=Path, required=True, help="JSON lines, a case each")
    arguments.add_argument("--draws", type=int, default=1000, help="of the bootstrap (default 1000)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if options.runs:
        with options.record.open("a") as file:
            for folder in options.runs:
                for row in score_run(folder, options.data):
                    file.write(json.dumps(row) + "\n")
                    file.flush()
    print(hardware())
    rows = [json.loads(line) for line in options.record.read_text().splitlines()]
    for split in SPLITS:
        print(f"\n{split}: ", end="")
        summary([row for row in rows if row["split"] == split], options.draws)


if __name__ == "__main__":
    main()
