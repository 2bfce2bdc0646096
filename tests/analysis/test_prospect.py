import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from calibrations import fingerprint, write_table
from matplotlib.backends.backend_agg import FigureCanvasAgg

from medfedaug.analysis.calibration_table import Calibration
from medfedaug.analysis.fingerprint_distance import KINDS
from medfedaug.analysis.prospect import make_prospect
from medfedaug.analysis.prospect_page import (
    agreement,
    answer,
    distance_picture,
    judged_sentence,
    write_prospect,
)
from medfedaug.data.quality.image_fingerprint import entry_shapes
from medfedaug.errors import ConfigError
from medfedaug.metrics.significance import detectable_difference


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = write_table(tmp_path_factory.mktemp("table") / "t.csv", families=5, each=5, seed=3, noise=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medfedaug.analysis.calibration_table._TABLE", "analysis/none.csv")
        return Calibration.load([path])


@pytest.fixture(scope="module")
def found(table):
    sites = [fingerprint("A"), fingerprint("B"), fingerprint("C", mean=0.4, test_patients=30)]
    return make_prospect(sites, table, {"D": "it is not connected"})


def test_the_remedy_is_what_gained_there_and_alone_is_worse(found):
    assert found.remedy == "norm"
    assert found.together.mean == pytest.approx(0.1, abs=0.01)
    told = found.to_dict()
    assert told["expected"]["norm"]["mean"] > 0.05 > abs(told["expected"]["fedfa"]["mean"])
    site = told["sites"]["C"]
    assert site["distance"] > told["sites"]["A"]["distance"] > 0
    assert site["expected"]["norm"]["mean"] > told["sites"]["A"]["expected"]["norm"]["mean"]
    for expected in (told["expected"]["norm"], site["expected"]["norm"], told["worst"]["norm"]):
        assert (
            expected["low95"]
            <= expected["low80"]
            < expected["mean"]
            < expected["high80"]
            <= expected["high95"]
        )
    json.dumps(told, allow_nan=False)


def test_patients_needed_are_the_fewest_that_show_the_gain(found):
    needed, gain = found.patients_needed("norm"), found.gains["mean"]["norm"][""].mean
    assert detectable_difference(0.1, needed) <= gain < detectable_difference(0.1, needed - 1)
    assert found.to_dict()["patients_needed"] == needed
    assert found.patients_needed("pooled") is None


def test_three_sentences_that_claim_no_more_than_was_judged(found):
    first, second, third = answer(found)
    assert "+0.1" in first
    assert ("not shown" in first) == (not found.holds("fedavg"))
    assert "first is norm" in second
    assert "since intensities differ" in second
    assert "With the 50 test patients of all sites" in third
    assert answer(found, "C")[2].startswith("With your 30 test patients")
    assert "25 federations of 5 families" in judged_sentence(found)
    few = make_prospect(found.sites, Calibration(found.table.federations[:12]))
    assert "do not tell whether training together is better" in answer(few)[0]
    assert "begin with FedAvg" in answer(few)[1]
    assert "first guess" in judged_sentence(few)
    assert not any(expected["shown_to_hold"] for expected in few.to_dict()["expected"].values())


def test_where_only_the_interval_holds_no_size_is_told(found):
    judged = {key: replace(one, error=one.error_of_zero) for key, one in found.judged.items()}
    without = replace(found, judged=judged)
    low, high = found.together.interval80
    ends = f"{low:+.3f} to {high:+.3f}"
    assert f"by {found.together.mean:+.3f} (80%: {ends}) over training alone." in answer(found)[0]
    assert f"by {ends} (80%) over training alone; fingerprints do not tell" in answer(without)[0]
    assert f"{found.together.mean:+.3f} " not in answer(without)[0]


def test_one_page_says_all_of_it_and_replaces_no_other_page(found, tmp_path):
    page = tmp_path / "prospect.html"
    write_prospect(found, page)
    text = page.read_text()
    for words in (
        "Should we train together?",
        "Without D: it is not connected",
        "octaves",
        "patients needed",
    ):
        assert words in text
    write_prospect(found, page, site="C", releases=["Sent: 13 numbers."])
    assert "Should C join?" in page.read_text()
    assert "Sent: 13 numbers." in page.read_text()
    (tmp_path / "other.html").write_text("<html></html>")
    with pytest.raises(ConfigError, match="is no page of medfedaug"):
        write_prospect(found, tmp_path / "other.html")


def test_a_trial_agrees_with_what_was_predicted_or_does_not(found):
    expected = found.gains["mean"]["norm"][""]
    inside, outside = expected.mean, expected.interval80[1] + 0.01
    assert found.holds("norm")
    assert agreement(found, {"norm": inside, "unknown": 0.1})[0].endswith(": agrees")
    few = make_prospect(found.sites, Calibration(found.table.federations[:12]))
    assert agreement(few, {"norm": inside})[0].endswith(
        ": agrees, and it is not shown that such intervals hold"
    )
    assert len(agreement(found, {"norm": inside, "unknown": 0.1})) == 1
    assert agreement(found, {"norm": outside})[0].endswith(": does not agree")


def test_noise_in_a_fingerprint_makes_the_answer_wider_and_the_page_says_how_much(table, tmp_path):
    def sites(noise):
        return [fingerprint("A", noise_added=noise), fingerprint("B"), fingerprint("C", mean=0.4)]

    none, noisy = make_prospect(sites(0.0), table), make_prospect(sites(0.05), table)
    for methods in ("norm", "fedfa"):
        plain, wide = (one.gains["mean"][methods][""] for one in (none, noisy))
        assert plain.from_noise == 0
        assert plain.mean == wide.mean
        half = np.hypot(np.diff(plain.interval80) / 2, 1.2816 * wide.from_noise)
        np.testing.assert_allclose(wide.interval80, [plain.mean - half[0], plain.mean + half[0]])
    assert noisy.gains["mean"]["norm"][""].from_noise > 0.005
    write_prospect(noisy, tmp_path / "page.html")
    assert "By this noise alone" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("cases", "noticed"), [(50, True), (2, False)])
def test_a_distance_that_chance_alone_would_give_is_no_reason(table, cases, noticed):
    """Two means 1.5 deviations apart: 0.2 by chance with 50 cases, and 1 with two."""
    sites = [fingerprint("A"), fingerprint("B", mean=0.33, std=0.13)]
    found = make_prospect([replace(site, looked_at=cases) for site in sites], table)
    assert found.to_dict()["sites"]["A"]["distance"] == pytest.approx(1.5, rel=1e-3)
    assert any("intensities differ by 1.5 deviations" in reason for reason in found.reasons()) == noticed
    assert found.reasons("A") == found.reasons("B")


def test_polarity_comes_before_everything_else(table):
    dark, bright = fingerprint("A", 0.2, 0.05), fingerprint("B", 0.8, 0.05)
    assert "polarity first" in make_prospect([dark, bright], table).reasons()[0]


def test_a_site_with_html_in_its_name_is_text(table, tmp_path):
    sites = [fingerprint("<script>alert(1)</script>"), fingerprint("B")]
    write_prospect(make_prospect(sites, table), tmp_path / "page.html")
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


def test_a_table_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="has 0 federations"):
        make_prospect([fingerprint("A"), fingerprint("B")], Calibration(()))


def test_nothing_is_said_of_a_gain_of_which_nothing_is_shown(found, tmp_path):
    few = make_prospect(found.sites, Calibration(found.table.federations[:12]))
    write_prospect(few, tmp_path / "few.html")
    text = (tmp_path / "few.html").read_text()
    assert "Nothing is shown of the gain of fedfa; norm; single." in text
    assert "patients needed" not in text
    assert few.remedy == "fedavg"
    assert few.to_dict()["expected"]["norm"]["mean"] > 0.05


def test_photographs_to_classify_get_distances_and_no_gain_of_dice(table, tmp_path):
    entries = {name: torch.full(size, 0.3) for name, size in entry_shapes("classification", 3, 1).items()}
    of = {"task": "classification", "classes": ("a", "b", "c")}
    sites = [replace(fingerprint(name), entries=entries, **of) for name in ("A", "B")]
    other = make_prospect(sites, table)
    assert not other.is_predicted
    assert answer(other)[0].startswith("No gain is predicted")
    assert other.to_dict()["expected"] == {}
    write_prospect(other, tmp_path / "page.html")
    assert "shares" in (tmp_path / "page.html").read_text()
