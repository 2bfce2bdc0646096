"""Small sweeps over Office-Caltech 10, and what they left."""

import csv
import json
from pathlib import Path

from medfedaug.research.papers.axes import parse_axis
from medfedaug.research.papers.presets import PRESETS
from medfedaug.research.sweeps.run_list import parse_methods_list, plan

OFFICE_PRESET = PRESETS["office_caltech_10"]

TINY = ("network=lenet5", "image_size=32", "batch_size=4")


def planned(root: Path, methods="fedavg fedrdn", axes=(), preset=OFFICE_PRESET, **options):
    options = {"seeds": 2, "scale": 0.005, **options}
    axes = [parse_axis(text) for text in (*TINY, *axes)]
    return plan(preset, root, parse_methods_list([methods]), axes=axes, **options)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def scores(folder: Path):
    results = json.loads((folder / "results.json").read_text())
    return results["test"], [entry["sites"]["dslr"]["train_loss"] for entry in results["rounds"]]


def read_csv(path: Path) -> dict[str, dict[str, str]]:
    return {row["method"]: row for row in csv.DictReader(path.open())}
