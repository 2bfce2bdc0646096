import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from calibrations import fingerprint, write_record
from matplotlib.backends.backend_agg import FigureCanvasAgg

from medfedaug.analysis.fingerprint_distance import KINDS
from medfedaug.analysis.gain_record import find_record
from medfedaug.analysis.pilot import Pilot
from medfedaug.analysis.prospect import make_prospect
from medfedaug.analysis.prospect_page import answer, distance_picture, judged_sentence, write_prospect
from medfedaug.data.quality.image_fingerprint import entry_shapes
from medfedaug.errors import ConfigError
from medfedaug.metrics.significance import detectable_difference

SITES = [fingerprint("A"), fingerprint("B"), fingerprint("C", mean=0.4, test_patients=30)]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "own.json"
    return write_record(path, families=11, each=2, seed=3, noise=0.01, seeds=2)


def pilot(ahead=0.08, rising=False, patients=100, spread=0.05):
    """Training alone ahead of FedAvg by this at each site."""
    scores = {"fedavg": dict.fromkeys("ABC", 0.6), "single": dict.fromkeys("ABC", 0.6 + ahead)}
    return Pilot("dice", 10, rising, scores, dict.fromkeys("ABC", (spread, patients)) if patients else {})


@pytest.fixture(scope="module")
def found(record):
    return make_prospect(SITES, {"D": "it is not connected"}, pilot=pilot(), record=record)


@pytest.fixture(scope="module")
def facts(record):
    return make_prospect(SITES, record=record)


def test_fingerprints_alone_predict_nothing(facts):
    assert facts.remedy == "fedavg"
    told = facts.to_dict()
    assert told["pilot"] is None
    assert told["together"] is None
    assert {*told["expected"]} == {"norm", "fedfa", "single"}
    ends = ("mean", "low80", "high80", "low95", "high95")
    for expected in (*told["expected"].values(), *told["sites"]["C"]["expected"].values()):
        assert not expected["known"]
        assert all(expected[name] is None for name in ends)
    assert told["expected"]["norm"]["yardstick80"] > 0
    assert told["sites"]["C"]["distance"] > told["sites"]["A"]["distance"] > 0
    text = " ".join(answer(facts))
    assert "Fingerprints predict no gain" in text
    assert "What differs most: intensities differ" in text
    json.dumps(told, allow_nan=False)


def test_a_pilot_lets_those_gains_be_expected_that_beat_the_yardstick(found, record):
    said = {(one.methods, one.level) for one in find_record("dice", path=record).claims if one.rule}
    assert ("norm", "mean") in said
    assert set(found.gains["mean"]) == {name for name, level in said if level == "mean"}
    assert found.remedy == "norm"
    expected = found.to_dict()["expected"]["norm"]
    assert expected["known"]
    assert expected["mean"] == pytest.approx(0.08, abs=0.02)
    assert (
        expected["low95"] <= expected["low80"] < expected["mean"] < expected["high80"] <= expected["high95"]
    )
    assert "The remedy to try first is norm, expected to gain +0.0" in " ".join(answer(found))
    assert "held and beat the yardstick for" in judged_sentence(found)


def test_nothing_follows_from_a_pilot_that_still_rose_or_is_beyond_the_table(record):
    for measured in (pilot(rising=True), pilot(ahead=0.3)):
        other = make_prospect(SITES, pilot=measured, record=record)
        assert not other.expected("norm")
        assert other.remedy == "fedavg"
    assert "nothing follows from it" in " ".join(
        answer(make_prospect(SITES, pilot=pilot(rising=True), record=record))
    )


def test_fewer_test_patients_never_give_a_narrower_interval(record):
    widths = []
    for patients in (200, 50, 12, 4):
        low, high = (
            make_prospect(SITES, pilot=pilot(patients=patients, spread=0.2), record=record)
            .expected("norm")
            .interval80
        )
        widths.append(high - low)
    assert widths == sorted(widths)
    assert widths[-1] > 1.5 * widths[0]


def test_without_scores_of_patients_their_number_is_that_of_the_fingerprint(record):
    told = make_prospect(SITES, pilot=pilot(patients=0), record=record)
    assert told.expected("norm") is not None
    hidden = [replace(site, test_patients=0) for site in SITES]
    assert make_prospect(hidden, pilot=pilot(patients=0), record=record).expected("norm") is None


def test_the_pilot_is_that_of_the_results():
    def run(site, cases, patients):
        scores = {"dice": float(np.mean(list(cases.values()))), "cases": cases, "patients": patients}
        rounds = [{"sites": {site: {"val_dice": 0.5}}} for _ in range(3)]
        return {"config": {"task": "segmentation"}, "rounds": rounds, "test": {"sites": {site: scores}}}

    owners = {"a1": 0, "a2": 0, "b": 1, "c": 2}
    found = Pilot.of_results(
        {
            "fedavg": run("A", {"a1": 0.4, "a2": 0.6, "b": 0.7, "c": 0.5}, owners),
            "single": run("A", {"a1": 0.5, "a2": 0.7, "b": 0.6, "c": 0.8}, owners),
        }
    )
    assert (found.rounds, found.rising) == (3, False)
    assert found.difference("A") == pytest.approx(0.1)
    # The two cases of a patient are one: 0.1, -0.1, 0.3.
    spread = np.std([0.1, -0.1, 0.3], ddof=1)
    assert found.patients["A"] == (pytest.approx(spread), 3)
    half = 4.3027 * spread / np.sqrt(3)
    assert found.interval("A") == pytest.approx((0.1 - half, 0.1 + half), abs=1e-4)
    assert found.to_dict()["sites"]["A"]["single_minus_fedavg"] == pytest.approx(0.1)
    assert Pilot.of_results({}) is None


def test_patients_needed_are_the_fewest_that_show_the_gain(found):
    needed, gain = found.patients_needed("norm"), found.expected("norm").mean
    assert detectable_difference(0.1, needed) <= gain < detectable_difference(0.1, needed - 1)
    assert found.to_dict()["patients_needed"] == needed
    assert found.patients_needed("pooled") is None


def test_the_answer_is_of_a_site_or_of_all(found):
    assert "With the 50 test patients of all sites" in answer(found)[-1]
    assert answer(found, "C")[-1].startswith("With your 30 test patients")
    text = " ".join(answer(found, "C"))
    assert "FedAvg scored -0.080 against training alone at C" in text
    of_two = {name: {site: scores[site] for site in "AB"} for name, scores in found.pilot.scores.items()}
    without = replace(found, pilot=replace(found.pilot, scores=of_two))
    assert "The pilot has no score of C." in " ".join(answer(without, "C"))


def test_one_page_says_all_of_it_and_replaces_no_other_page(found, tmp_path):
    page = tmp_path / "prospect.html"
    write_prospect(found, page)
    text = page.read_text()
    for words in ("Should we train together?", "Without D: it is not connected", "octaves", "0 ± 0.0"):
        assert words in text
    assert "Measured in the pilot" in text
    write_prospect(found, page, site="C", releases=["Sent: 13 numbers."])
    assert "Should C join?" in page.read_text()
    assert "Sent: 13 numbers." in page.read_text()
    (tmp_path / "other.html").write_text("<html></html>")
    with pytest.raises(ConfigError, match="is no page of medfedaug"):
        write_prospect(found, tmp_path / "other.html")


def test_noise_in_a_fingerprint_is_said(record, tmp_path):
    sites = [fingerprint("A", noise_added=0.05), *SITES[1:]]
    write_prospect(make_prospect(sites, record=record), tmp_path / "page.html")
    assert "A added noise of deviation 0.05" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("cases", "noticed"), [(50, True), (2, False)])
def test_a_distance_that_chance_alone_would_give_is_no_reason(record, cases, noticed):
    """Two means 1.5 deviations apart: 0.2 by chance with 50 cases, and 1 with two."""
    sites = [fingerprint("A"), fingerprint("B", mean=0.33, std=0.13)]
    found = make_prospect([replace(site, looked_at=cases) for site in sites], record=record)
    assert found.to_dict()["sites"]["A"]["distance"] == pytest.approx(1.5, rel=1e-3)
    assert any("intensities differ by 1.5 deviations" in reason for reason in found.reasons()) == noticed
    assert found.reasons("A") == found.reasons("B")


def test_polarity_comes_before_everything_else(record):
    dark, bright = fingerprint("A", 0.2, 0.05), fingerprint("B", 0.8, 0.05)
    assert (
        "may store bright what another stores dark"
        in make_prospect([dark, bright], record=record).reasons()[0]
    )


def test_a_site_with_html_in_its_name_is_text(record, tmp_path):
    sites = [fingerprint("<script>alert(1)</script>"), fingerprint("B")]
    write_prospect(make_prospect(sites, record=record), tmp_path / "page.html")
    assert "<script>alert" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("width", [9.0, 4.0])
def test_the_legend_of_long_names_is_within_the_picture(width):
    apart = {f"University_Hospital_of_Town_{n}": dict.fromkeys(KINDS, float(n)) for n in range(12)}
    drawing = distance_picture(apart, width=width)
    FigureCanvasAgg(drawing).draw()
    (legend,), (panel,) = drawing.legends, drawing.axes
    ends = legend.get_window_extent().transformed(drawing.dpi_scale_trans.inverted())
    assert ends.x0 >= 0
    assert ends.x1 <= width
    assert ends.y1 <= panel.get_window_extent().transformed(drawing.dpi_scale_trans.inverted()).y0
    assert panel.get_window_extent().height > 2 * drawing.dpi


def test_other_norms_and_photographs_have_no_record_of_pilots_and_no_prediction(tmp_path):
    entries = {name: torch.full(size, 0.3) for name, size in entry_shapes("classification", 3, 1).items()}
    of = {"task": "classification", "classes": ("a", "b", "c")}
    photographs = [replace(fingerprint(name), entries=entries, **of) for name in ("A", "B", "C")]
    for sites, norm in ((photographs, "batch"), (SITES, "instance")):
        other = make_prospect(sites, norm=norm, pilot=pilot())
        assert not any(other.gains.values())
        assert "No gain of a method is predicted" in " ".join(answer(other))
        write_prospect(other, tmp_path / f"{norm}.html")
        assert "Measured in the pilot" in (tmp_path / f"{norm}.html").read_text()
    assert "shares" in (tmp_path / "batch.html").read_text()
