"""The tables of a sweep, and ours next to the published numbers."""

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest
from benchmark_files import OFFICE
from sweeps import OFFICE_PRESET, read_csv

from medfedaug.research.papers.axes import parse_axis
from medfedaug.research.sweeps.run_list import plan
from medfedaug.research.sweeps.tables import write_tables


def pretend(run, out: Path, values: dict[str, float], unseen: dict[str, float] | None = None) -> None:
    folder = out / run.folder
    folder.mkdir(parents=True)
    score = {
        group: {site: {"accuracy": value} for site, value in (by_site or {}).items()}
        for group, by_site in (("sites", values), ("unseen", unseen))
    }
    content = {
        "config": run.config.to_dict(),
        "input": {"scaling": "each volume"},
        "rounds": [
            {"round": 1, "sites": {site: {"train_loss": 1.0, "val_accuracy": 0.5} for site in values}}
        ],
        "selected_round": 1,
        "test": {**score, "mean": {"accuracy": fmean(values.values())}},
        "data": run.data_folder("office_caltech_10").name,
        "data_options": dict(run.data),
        "engine": "inprocess",
    }
    (folder / "results.json").write_text(json.dumps(content))


def test_the_table_and_the_published_numbers_by_hand(office, tmp_path):
    runs = plan(OFFICE_PRESET, office, ["fedavg", "fedfa+"], seeds=3)
    ours = {"fedavg": (0.70, 0.72, 0.77), "fedfa+": (0.80, 0.81, 0.91)}
    for run in runs:
        mean = ours[run.methods][run.seed]
        pretend(run, tmp_path, dict(zip(OFFICE, (mean - 0.1, mean + 0.1, mean, mean), strict=True)))
    write_tables(runs, OFFICE_PRESET, tmp_path)
    rows = read_csv(tmp_path / "table.csv")
    row = rows["fedfa + fedfa_h"]
    assert float(row["amazon"]) == pytest.approx(fmean(v - 0.1 for v in ours["fedfa+"]))
    assert float(row["mean_std"]) == pytest.approx(stdev(ours["fedfa+"]))
    differences = [a - b for a, b in zip(ours["fedfa+"], ours["fedavg"], strict=True)]
    t = fmean(differences) / (stdev(differences) / 3**0.5)
    assert float(row["difference"]) == pytest.approx(fmean(differences))
    assert float(row["p"]) == pytest.approx(1 - t / (2 + t * t) ** 0.5)  # Student's t, two degrees of freedom
    published = read_csv(tmp_path / "published.csv")
    assert set(published) == {"fedavg", "fedfa+"}
    assert float(published["fedfa+"]["mean_published"]) == 0.848
    assert float(published["fedfa+"]["dslr_published"]) == 0.909
    assert float(published["fedfa+"]["mean"]) == pytest.approx(0.84)
    text = (tmp_path / "published.md").read_text()
    assert "FedFA+ Table 3, FEDFA+: the sites' mean is 84.7." in text
    assert "| fedavg | not recorded | 0.630 ± 0.036 / 0.844 |" in text
    assert "| -0.055 | FedFA+ Table 3 |" in text
    assert "FedFA+ Table 1" in (tmp_path / "report.html").read_text()
    assert "REDUCED" not in text


def test_reduced_runs_are_named_below_each_table_and_on_the_page(office, tmp_path):
    runs = plan(OFFICE_PRESET, office, ["fedavg"], seeds=2, scale=0.1)
    for run in runs:
        pretend(run, tmp_path, dict.fromkeys(OFFICE, 0.7))
    write_tables(runs, OFFICE_PRESET, tmp_path)
    for name in ("table", "published"):
        assert (
            "REDUCED, not the paper's protocol: 40 instead of 400 rounds."
            in (tmp_path / f"{name}.md").read_text()
        )
    assert "REDUCED, not the paper's protocol" in (tmp_path / "report.html").read_text()
    other = plan(OFFICE_PRESET, office, ["fedavg"], seeds=1, axes=[parse_axis("image_size=64")])
    pretend(other[0], tmp_path / "other", dict.fromkeys(OFFICE, 0.7))
    tables, notes = write_tables(other, OFFICE_PRESET, tmp_path / "other")
    assert "published" not in tables
    assert "Not the protocol's, in all runs: image_size=64." in notes


def test_sites_left_out_in_turn_make_one_row_beside_the_papers(office, tmp_path):
    runs = plan(OFFICE_PRESET, office, ["fedavg"], seeds=2, holdout=["all"])
    for run in runs:
        others = {site: 0.9 for site in OFFICE if site != run.held_out}
        pretend(run, tmp_path, others, {run.held_out: 0.1 * OFFICE.index(run.held_out) + 0.01 * run.seed})
    write_tables(runs, OFFICE_PRESET, tmp_path)
    row = read_csv(tmp_path / "table.csv")["fedavg"]
    assert float(row["webcam"]) == pytest.approx(0.305)
    assert float(row["mean"]) == pytest.approx(0.155)
    assert float(row["mean_std"]) == pytest.approx(stdev((0.15, 0.16)))
    published = read_csv(tmp_path / "published.csv")["fedavg"]
    assert (published["published_in"], float(published["mean_published"])) == ("FedFA+ Table 6", 0.604)
    assert "when it was left out of training" in (tmp_path / "table.md").read_text()
