"""The page: what it holds, what it escapes, what it says."""

import base64
import re

import pytest
from results import Page, content

from medfedaug.analysis import metric_table, summary_table, write_report
from medfedaug.errors import DataError
from medfedaug.research.comparison import patient_table
from medfedaug.runs.load_results import load_run


@pytest.mark.usefixtures("drawn")
def test_report_holds_everything_and_loads_nothing(write, tmp_path):
    data = content(methods=("fedrdn", "fedfa"), unseen={"EZ": 0.25})
    data["rounds"][1]["refused"] = [
        {"site": "HT", "reason": "site HT, conv: expected finite values, got NaN"}
    ]
    out = write_report([write(), write(data)], tmp_path / "new" / "report.html")
    text = out.read_text()
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[\w+/=]+", "", text))
    for drawing in re.findall(r"base64,([\w+/=]+)", text):
        svg = base64.b64decode(drawing).decode()
        assert not re.search(r'href="(?!#)|<script|<image|@import|url\((?!#)', svg)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href"):
            assert value.startswith("data:image/svg+xml;base64,")
    assert all(alt for name, alt in page.attributes if name == "alt")
    for expected in (
        "0.250",
        "EZ †",
        "fedrdn + fedfa",
        "got NaN",
        "local_epochs",
        "8\u00a0kB",
        "γ by layer",
        "1.5 min",
    ):
        assert expected in page.text
    assert page.tags.count("img") == 3
    remarks = [text for text in re.findall(r'<p class="soft">(.*?)</p>', text) if text]
    assert len({*remarks}) == len(remarks)
    folded = re.findall(r'<details class="section"><summary><h2>(.*?)</h2>', text)
    assert "Configuration" in folded
    assert "Dice on the test cases" not in folded
    assert ("name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text
    assert [p.name for p in out.parent.iterdir()] == ["report.html"]


@pytest.mark.usefixtures("drawn")
def test_report_escapes_names(write, tmp_path):
    evil = '<script>alert("1")</script>&$\\foo$'
    data = content(scores={evil: 0.5})
    data["config"]["task"] = evil
    data["rounds"][0]["refused"] = [{"site": evil, "reason": "<img src=x onerror=alert(1)>"}]
    text = write_report([write(data)], tmp_path / "r.html").read_text()
    page = Page(text)
    assert "<script" not in text
    assert "onerror" not in [name for name, _ in page.attributes]
    assert page.text.count(evil) >= 3


@pytest.mark.usefixtures("drawn")
def test_report_is_the_same_for_the_same_runs(write, tmp_path):
    run = write(methods=("fedfa",))
    first, second = (write_report([run], tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


def test_report_tells_what_failed_once_however_often_it_happened(write, tmp_path):
    data = content(methods=("fedfa",), rounds=6)
    for entry in data["rounds"]:
        entry["missing"] = []
        if entry["round"] != 4:
            entry["missing"] = [{"site": "CS", "task": "train", "reason": "site CS is not connected"}]
    data["left_out"] = {"FG": "site FG: no such folder"}
    data["suspected"] = {"DU": "its steps went against the others' in 4 of 6 rounds"}
    data["sites"] = {"DU": 5, "HT": 5}
    del data["test"]["sites"]["HT"]
    data["test"]["missing"] = {"HT": "site HT: no answer in time"}
    few = {"dice": None, "cases": {}, "scored_cases": 4, "note": "4 scored cases, and means are of 10"}
    data["test"]["sites"]["DU"] = few
    text = Page(write_report([write(), write(data)], tmp_path / "r.html").read_text()).text
    assert text.count("site CS is not connected") == 1
    assert "no answer to train1–3, 5–6site CS" in text
    assert "left outsite FG: no such folder" in text
    assert "suspectedits steps went against the others' in 4 of 6 rounds" in text
    assert "not testedsite HT: no answer in time" in text
    assert "no score4 scored cases, and means are of 10" in text
    assert load_run(write(data)).cases["DU"] == 4  # though it names none
    assert "fedfa, seed 0: HT could not be tested" in text
    nothing = Page(write_report([write()], tmp_path / "n.html").read_text()).text
    assert "refused updates" not in nothing


@pytest.mark.usefixtures("drawn")
def test_report_begins_with_structures_that_are_marked_many_times_too_large(write, tmp_path):
    data = content()
    classes = {
        "lesion": {"dice": 0.1, "volume_ratio": 41.6},
        "ventricles": {"dice": 0.8, "volume_ratio": 1.3},
    }
    data["test"]["sites"]["HT"]["classes"] = classes
    text = Page(write_report([write(data)], tmp_path / "r.html").read_text()).text
    assert "HT: the model marks lesion 42 times as large as outlined." in text
    assert text.index("the model marks lesion") < text.index("Dice on the test cases")


def test_a_bad_run_leaves_an_earlier_report_alone(write, tmp_path):
    out = tmp_path / "r.html"
    earlier = write_report([write()], out).read_text()
    with pytest.raises(DataError):
        write_report([write(seed=1), tmp_path / "nothing"], out)
    assert out.read_text() == earlier


def test_every_table_says_whose_model_was_scored(write, without, tmp_path):
    """Global, personal, of an unseen site, or not recorded: on the page and in all forms of the tables."""
    plain, own = content(unseen={"EZ": 0.4}), content(methods=("fedbn",), unseen={"EZ": None})
    own["scored"] = dict.fromkeys(("validation", "test"), "personal (own layers)") | {"unseen": "unseen"}
    old = content(methods=("fedfa",))
    del old["scored"]
    for data, more in ((plain, 0.0), (own, 0.01)):
        cases = {f"p{k}": 0.1 * k + more for k in range(8)}
        data["test"]["sites"] = {"DU": {"dice": 0.35, "cases": cases}}
        data["test"]["unseen"] = {"EZ": {"dice": 0.35, "cases": cases}}
    folders = [write(data) for data in (plain, own, old)]
    runs = [load_run(folder) for folder in folders]
    expected = {"fedavg": "global", "fedbn": "personal (own layers)", "fedfa": "not recorded"}
    for table in (summary_table(runs), metric_table(runs)):
        records = {row["method"]: row["model"] for row in table.records}
        assert records == expected
        for label, model in expected.items():
            (row, *_) = [line for line in table.markdown().splitlines() if line.startswith(f"| {label} |")]
            assert f"| {model} |" in row
    patients = [(row["model"], row["where"]) for row in patient_table(runs).records]
    assert patients == [("personal (own layers)", "training sites"), ("unseen", "unseen sites")]
    text = Page(write_report(folders, tmp_path / "page.html").read_text()).text
    assert "Model: fedavg global, fedbn personal (own layers), fedfa not recorded." in text
    left_out = [
        without(site, {other: {"p1": 0.5}}, {site: {"p1": 0.3}})
        for site, other in (("DU", "HT"), ("HT", "DU"))
    ]
    (row,) = summary_table(left_out).records
    assert row["model"] == "unseen"
