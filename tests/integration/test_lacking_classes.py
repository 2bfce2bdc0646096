"""Several classes, sites that have no case of one, and sites whose label maps leave one out."""

import json

import numpy as np
import pytest
from benchmark_files import write_volume
from running import TINY_OPTIONS


@pytest.fixture
def three_classes(make_site):
    """A has tumour and edema, B has no edema in any case, and says so."""
    for name in "AB":
        folder = make_site(name, cases=(2, 1, 2))
        content = json.loads((folder / "dataset.json").read_text())
        content["labels"] = {"0": "background", "1": "tumour", "2": "edema"}
        (folder / "dataset.json").write_text(json.dumps(content))
        for path in (folder / "labels").iterdir() if name == "A" else ():
            label = np.zeros((16, 16, 4), np.uint8)
            label[4:9, 4:9, 1:3], label[10:14, 4:12, 1:3] = 1, 2
            write_volume(path, label)
    return folder.parent


def simulate(run, data, out, *extra):
    return run(
        *("simulate", "--data", data, "--out", out, "--methods", "fedrdn", "--rounds", 2, "--device", "cpu"),
        *("--threads", 1, *TINY_OPTIONS, "--no-report", "--engine", "inprocess", *extra),
    )


def test_a_site_that_has_no_case_of_a_class_trains_and_has_no_score_of_it(run, three_classes, tmp_path):
    out = tmp_path / "out"
    code, _, err = simulate(run, three_classes, out)
    assert code == 0, err
    results = json.loads((out / "results.json").read_text())
    assert results["config"]["classes"] == ["background", "tumour", "edema"]
    assert all("train_loss" in results["rounds"][1]["sites"][site] for site in "AB")
    scores = results["test"]["sites"]
    assert set(scores["A"]["classes"]) == {"tumour", "edema"}
    assert scores["A"]["classes"]["edema"]["dice"] is not None
    tumour = scores["A"]["classes"]["tumour"]
    assert 0 <= tumour["dice_low"] <= tumour["dice"] <= tumour["dice_high"] <= 1
    card = (out / "model_card.md").read_text()
    assert "{dice:.3f} \\[{dice_low:.3f} to {dice_high:.3f}\\]".format(**tumour) in card
    absent = scores["B"]["classes"].get("edema") or {}
    assert absent.get("dice") is None
    assert absent.get("hd95") is None
    assert scores["B"]["dice"] == pytest.approx(scores["B"]["classes"]["tumour"]["dice"])
