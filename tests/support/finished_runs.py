"""Finished runs of seconds, whose models say something of an image that can be compared."""

import json
from pathlib import Path

import numpy as np
import torch
from monai.utils import CommonKeys as Keys
from running import TINY_OPTIONS, command

from medfedaug.federation.job_folder import file_hashes
from medfedaug.runs.finished_run import FinishedRun

FEW = ("--limit", 1)  # cases of each split and site


def simulated(data: Path, out: Path, methods: str, *options) -> Path:
    """A run of one round over the sites in a folder."""
    network = [] if "--network" in options else [*TINY_OPTIONS]
    code, _, err = command(
        *("simulate", "--data", data, "--methods", methods, "--out", out, "--engine", "inprocess"),
        *("--rounds", 1, "--threads", 1, "--batch-size", 4, "--no-report", *network, *options),
    )
    assert code == 0, err
    return out


def balanced(run: Path, data: Path, site: str) -> Path:
    """Shift the model's last bias so that the classes are near each other: one round gives one class alone.

    Args:
        run: its folder; the model in it is replaced.
        data: the sites' folder.
        site: the one whose first test image it is balanced for.
    """
    finished = FinishedRun.open(run)
    trainer = finished.trainer(site, data / site, "cpu")
    assert trainer.recall_round(finished.round)
    trainer.network.eval()
    case = trainer.task.evaluation_case(trainer.folder, trainer.folder.cases["test"][0], labelled=False)
    image = trainer.evaluation_transform()({Keys.IMAGE: case.image})[Keys.IMAGE]
    logits = trainer.task.logits(trainer.network, image, 4, case.placement)
    weights = torch.load(run / "global_model.pt", weights_only=True)
    *_, key = (name for name in weights if name.endswith("bias"))
    # Some voxels of each class, but for those that are near the border of two by rounding.
    for index in range(1, len(logits)):
        apart = (logits[index] - logits[0]).flatten().double().sort().values
        middle = apart[int(0.7 * len(apart)) : int(0.9 * len(apart))]
        widest = int(middle.diff().argmax())
        weights[key][index] -= (middle[widest : widest + 2].mean()).float()
    torch.save(weights, run / "global_model.pt")
    return rehashed(run)


def with_scores(run: Path, dice: float | None) -> Path:
    """Write other test scores, the same at all sites, into a record; ``None`` for a run without a test."""
    record = json.loads((run / "results.json").read_text())
    if dice is None:
        record["test"] = {"sites": {}, "mean": {}}
    else:
        for entry in (*record["test"]["sites"].values(), *record["test"].get("unseen", {}).values()):
            entry["dice"] = dice
            entry["undivided"] = 0
            for scores in entry["classes"].values():
                scores["dice"] = dice
        record["test"]["mean"]["dice"] = dice
    (run / "results.json").write_text(json.dumps(record))
    return run


def rehashed(run: Path) -> Path:
    """Write down that what is in the folder is what the run wrote, after a test has changed it."""
    record = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**record, "sha256": file_hashes(run)}))
    return run


def dice_of(predicted: np.ndarray, truth: np.ndarray) -> float | None:
    """Dice of class 1, ``None`` where the truth has nothing of it."""
    a, b = predicted == 1, truth == 1
    return float(2 * (a & b).sum() / (a.sum() + b.sum())) if b.any() else None
