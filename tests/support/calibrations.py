"""Recorded federations whose gains follow a law that a test knows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from calibration_table import COLUMNS
from judge_prospect import write_record as summarise

from medfedaug.data.quality.image_fingerprint import QUANTITIES, ImageFingerprint, entry_shapes

SITES = ("A", "B", "C")


def fingerprint(
    site: str, mean: float = 0.3, std: float = 0.1, spread: float = 0.02, **more
) -> ImageFingerprint:
    """A fingerprint with these statistics; ``more`` replaces entries, in their units."""
    values = {"noise": 0.01, "roughness": 0.2, "geometry": 1, "edge": 1, "thickness": 5, "extent": 200}
    values |= {"present": 1, "size": 0.01, "pieces": 1, "mean": mean, "std": std}
    counts = {key: more.pop(key) for key in ("patients", "test_patients", "noise_added") if key in more}
    values |= more
    entries = {}
    for name in entry_shapes("segmentation", 2, 1):
        if not name.endswith("_square"):
            scaled = QUANTITIES[name].scaled(torch.tensor([float(values[name])], dtype=torch.float64))
            entries[name] = scaled * values["present"] if QUANTITIES[name].present else scaled
            if QUANTITIES[name].squared:
                width = spread / (QUANTITIES[name].high - QUANTITIES[name].low)
                entries[f"{name}_square"] = scaled**2 + width**2
    return ImageFingerprint(
        site=site,
        task="segmentation",
        classes=("background", "lesion"),
        channels=1,
        cases=20,
        looked_at=20,
        patients=counts.get("patients", 20),
        test_patients=counts.get("test_patients", 10),
        entries=entries,
        noise=counts.get("noise_added", 0.0),
    )


def write_table(
    path: Path, families: int, each: int, seed: int, noise: float, *, seeds: int = 1, slope: float = 1.0
) -> Path:
    """Write federations in which averaging loses against training alone, and ``norm`` gives it back.

    FedAvg scores 0.6. Training alone is ahead of it by -0.1 to 0.1 and its noise, alike for all seeds of a
    federation. ``norm`` gains ``slope`` times what FedAvg lost, plus noise; ``fedfa`` gains noise alone.
    """
    R, rows = np.random.RandomState(seed), []
    for family in range(families):
        for number in range(each):
            ahead = R.uniform(-0.1, 0.1)
            for run in range(seeds):
                for site in SITES:
                    gains = {
                        "fedavg": 0.0,
                        "norm": slope * max(ahead, 0.0) + R.normal(0, noise),
                        "fedfa": R.normal(0, noise),
                        "single": ahead + R.normal(0, noise),
                    }
                    for methods, gain in gains.items():
                        row = dict.fromkeys(COLUMNS, "")
                        row |= {"federation": f"{family}_{number}", "family": f"family {family}"}
                        row |= {"site": site, "methods": methods, "norm": "batch", "metric": "dice"}
                        row |= {"seed": str(run), "score": f"{0.6 + gain:.5f}"}
                        row["patient_deviation"] = "0.1" * (methods != "fedavg")
                        if methods == "fedavg":
                            row["fingerprint"] = json.dumps(fingerprint(site).to_dict())
                        rows.append(row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_record(path: Path, **federations: Any) -> Path:
    """Write the record of a table (`write_table`)."""
    summarise([write_table(path.with_suffix(".csv"), **federations)], path)
    return path
