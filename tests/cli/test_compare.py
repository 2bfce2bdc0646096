"""`medfedaug compare`: what is tried on a user's own data, and what is recommended."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest
from results import Page
from running import TINY_AXES

from medfedaug.analysis.score_table import Row, Score, Table
from medfedaug.data.partial_phantom import annotate_apart
from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.research.comparison.trial import recommend, suggest, taken_in


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Sites of which two store dark what the others store bright."""
    folder = tmp_path_factory.mktemp("apart") / "data"
    make_phantom(folder, sites=3, patients=5, shape=(32, 32, 4), inverted=[False, False, True])
    return folder


def scores(**means: tuple[float, ...]) -> Table:
    rows = tuple(
        Row(label, tuple(range(len(values))), {"A": Score(values)}, Score(values), baseline=label == "fedavg")
        for label, values in means.items()
    )
    return Table("dice", ("A",), (), rows)


def test_a_remedy_for_each_cause_of_differences_is_tried(apart):
    assert suggest(find_sites(apart)).methods == ("fedrdn", "fedbn", "ditto")


def test_the_recommendation_names_what_it_rests_on():
    first, second, third, last = recommend(
        scores(single=(0.5, 0.6, 0.7), fedavg=(0.6, 0.7, 0.6), fedrdn=(0.7, 0.8, 0.5))
    )
    assert first == (
        "Train together: Dice 0.667 with fedrdn against 0.600 with single, better in 2 of 3 trainings."
    )
    assert second.startswith("Go on with fedrdn: Dice 0.667 with fedrdn against 0.633 with fedavg")
    assert third == "Best by site, with its Dice minus that of fedavg: A fedrdn (+0.033)."
    assert "3 trainings" in last
    assert "no verdict" in last


def test_a_recommendation_that_one_site_carries_names_the_site_and_the_others_gain():
    at = {
        "single": {"A": 0.7, "B": 0.5, "C": 0.5},
        "fedavg": {"A": 0.2, "B": 0.6, "C": 0.6},
        "ditto": {"A": 0.5, "B": 0.58, "C": 0.59},
    }
    means = {label: fmean(sites.values()) for label, sites in at.items()}
    table = scores(**{label: (mean,) for label, mean in means.items()})
    rows = [replace(row, sites={s: Score((v,)) for s, v in at[row.label].items()}) for row in table.rows]
    alone, averaged, *_ = recommend(replace(table, rows=tuple(rows)))
    assert alone.startswith("Stay alone, as it looks now: ")
    assert alone.endswith("with single, better in 0 of 1 trainings, by A alone (elsewhere +0.085).")
    assert averaged.endswith("with fedavg, better in 1 of 1 trainings, by A alone (elsewhere -0.015).")


def test_it_says_so_where_sites_alone_are_better_and_where_plain_averaging_is_best():
    first, second, _ = recommend(scores(single=(0.8, 0.8), fedavg=(0.6, 0.6), norm=(0.5, 0.5)))
    assert first.startswith("Stay alone, as it looks now: Dice 0.600 with fedavg against 0.800 with single")
    assert second.startswith("To train together all the same, take fedavg: no other method that was tried")


def test_a_site_where_nothing_was_learned_is_named():
    at = {"single": {"A": 0.7, "B": 0.5}, "fedavg": {"A": 0.8, "B": 0.0}}
    table = scores(**{label: (fmean(sites.values()),) for label, sites in at.items()})
    rows = [replace(row, sites={s: Score((v,)) for s, v in at[row.label].items()}) for row in table.rows]
    said = recommend(replace(table, rows=tuple(rows)))
    assert "Nothing was learned at B with fedavg: Dice 0.000." in said


def test_sites_without_outlines_are_judged_at_the_others():
    def of(**sites: dict[str, float]) -> Table:
        rows = tuple(
            Row(label, (0,), {s: Score((v,)) for s, v in found.items()}, Score((fmean(found.values()),)))
            for label, found in sites.items()
        )
        return Table("dice", tuple(next(iter(sites.values()))), (), rows)

    # The best method with them is not the one that is best at C, which alone has no outline to train with.
    more = of(condist={"A": 0.5, "B": 0.6, "C": 0.9}, teacher={"A": 0.6, "B": 0.7, "C": 0.1})
    without = of(single={"A": 0.4, "B": 0.4}, fedavg={"A": 0.6, "B": 0.6})
    (said,) = taken_in(more, without, ["C"])
    assert "0.650 with teacher at the other sites, against 0.600 with fedavg without them" in said
    assert taken_in(more, of(fedavg={"C": 0.5}), ["C"]) == []


def test_nothing_is_recommended_while_plain_averaging_still_improves():
    (only,) = recommend(scores(single=(0.5,), fedavg=(0.2,), norm=(0.6,)), rising=3)
    assert only.startswith("No recommendation: after 3 rounds the validation score of fedavg still rose")
    assert "--rounds 6" in only


def test_the_command_tries_alone_together_and_the_remedy(run, apart, tmp_path):
    options = ("--seeds", 1, "--rounds", 3, "--device", "cpu", "--out", tmp_path / "trial")
    options += tuple(part for axis in TINY_AXES for part in ("--set", axis))
    code, out, err = run("compare", "--data", apart, *options, "--json", tmp_path / "trial.json")
    assert code == 0, err
    assert "trying single, fedavg, fedrdn, fedbn, ditto" in out
    written = json.loads((tmp_path / "trial.json").read_text())
    assert set(written["scores"]) == {"single", "fedavg", "fedrdn", "fedbn", "ditto"}
    page = Page((tmp_path / "trial/report.html").read_text())
    for sentence in written["recommendation"]:
        assert " ".join(sentence.split()) in " ".join(out.split())
        assert sentence in page.text
    # A run keeps the model that can be used again, and a trial of rounds none.
    assert {path.name for path in (tmp_path / "trial/fedavg").rglob("*.pt")} == {"global_model.pt"}
    assert not [*(tmp_path / "trial_rounds").rglob("*model.pt")]
    # Asked again, nothing is trained anew.
    (results,) = (tmp_path / "trial/ditto").rglob("results.json")
    before = results.stat().st_mtime_ns
    assert run("compare", "--data", apart, *options)[0] == 0
    assert results.stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_site_without_outlines_is_tried_without_and_with_its_images(run, tmp_path):
    data, out = tmp_path / "data", tmp_path / "trial"
    make_phantom(data, sites=3, patients=5, shape=(32, 32, 4))
    annotate_apart(data, apart=False, unlabelled=["site_C"])
    options = ("--methods", "fedavg", "--seeds", 1, "--rounds", 3, "--device", "cpu", "--out", out)
    options += tuple(part for axis in TINY_AXES for part in ("--set", axis))
    code, printed, err = run("compare", "--data", data, *options, "--json", tmp_path / "trial.json")
    assert code == 0, err
    assert "site_C: no training case has an outline" in printed
    record = json.loads((tmp_path / "trial.json").read_text())
    assert set(record["scores"]) == {"single", "fedavg"}
    assert record["recommendation"][-1].startswith("With the images of site_C, which has no outlines: Dice")
    trained = {
        path.relative_to(tmp_path).parts[:2]: json.loads(path.read_text())["sites"]
        for path in tmp_path.glob("trial*/**/results.json")
    }
    assert {"site_A", "site_B"} == {*trained["trial", "fedavg"]}
    assert {"site_A", "site_B", "site_C"} == {*trained["trial_unlabelled", "teacher"]}
