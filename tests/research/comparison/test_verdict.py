"""One verdict for page, tables and terminal, through `medfedaug report` on runs made for it."""

import csv
import random

import pytest
from results import Page

from medfedaug import cli
from medfedaug.analysis import summary_table
from medfedaug.analysis.grouping import group_runs
from medfedaug.analysis.report import answer
from medfedaug.metrics.registry import METRICS
from medfedaug.metrics.significance import paired_t_test
from medfedaug.research.comparison import judge, patient_table
from medfedaug.research.comparison.comparison import compare_groups
from medfedaug.research.comparison.paired_tests import compare_patients, crossed_test
from medfedaug.research.comparison.verdict import LEVEL, chance
from medfedaug.runs.load_results import load_run


@pytest.fixture
def against_fedavg(fold):
    """Runs of FedAvg and FedRDN, whose patients gain about so much: `against_fedavg(60, 5, gain=0.05)`."""

    def make(patients, seeds, gain, spread=0.02):
        rng, folders = random.Random(5), []
        for seed in range(seeds):
            plain = {f"p{i}": 0.5 + 0.002 * i + 0.01 * seed for i in range(patients)}
            better = {name: score + rng.gauss(gain, spread) for name, score in plain.items()}
            for methods, scores in ((("fedavg",), plain), (("fedrdn",), better)):
                sites = {"DU": dict([*scores.items()][::2]), "EZ": dict([*scores.items()][1::2])}
                folders.append(fold(sites, 0, seed=seed, methods=methods).path.parent)
        return folders

    return make


@pytest.mark.parametrize(
    ("patients", "seeds", "gain", "verdict"),
    [
        (8, 1, 0.05, "open: 1 of 5 seeds, 8 of 20 patients"),
        (60, 3, 0.05, "open: 3 of 5 seeds"),
        (60, 5, -0.05, "worse"),
        (60, 5, 0.0, "no difference shown"),
    ],
)
def test_page_tables_and_terminal_say_the_same(
    run, against_fedavg, tmp_path, monkeypatch, patients, seeds, gain, verdict
):
    folders = against_fedavg(patients, seeds, gain)
    monkeypatch.setattr(cli.out_console, "width", 250)
    out, tables = tmp_path / "page.html", tmp_path / "tables"
    said = run.ok("report", *folders, "--out", out, "--tables", tables)
    for name in ("scores", "patients"):
        *_, record = csv.DictReader((tables / f"{name}.csv").open())
        assert record["verdict"] == verdict
        assert f" {verdict} |" in (tables / f"{name}.md").read_text()
    page = Page(out.read_text()).text
    assert f"with {seeds} seed{'s' * (seeds > 1)}. Verdict: {verdict}." in page
    # In both tables, and nowhere a word that says more or less.
    assert " ".join(said.split()).count(verdict) >= 2
    for other in ("more than the choice", "may be chance", "none is tested"):
        assert other not in page + said
    # With so many patients the numbers alone would have said otherwise.
    if gain and seeds == 1:
        (row,) = patient_table([load_run(folder) for folder in folders]).rows
        assert row.patients.p <= 0.05
        assert row.patients.low > 0


def grouped(fold, patients, images, sites="A", folds=1):
    """FedAvg and FedRDN over five seeds; the gain is the patient's in the mean, and all images say it."""
    rng, runs = random.Random(1), []
    gain = {(s, p): rng.gauss(0.02, 0.05) for s in sites for p in range(patients)}
    for seed in range(5):
        for part in range(folds):
            of_part = [p for p in range(patients) if p % folds == part]
            plain = {
                s: {f"p{p}/{i}": rng.uniform(0.3, 0.4) for p in of_part for i in range(images)} for s in sites
            }
            better = {
                s: {
                    name: score + gain[s, int(name[1 : name.index("/")])] + 0.001 * (seed - 2)
                    for name, score in cases.items()
                }
                for s, cases in plain.items()
            }
            for methods, scores in ((("fedavg",), plain), (("fedrdn",), better)):
                whose = lambda name: name.split("/")[0]  # noqa: E731
                runs.append(fold(scores, part, seed=seed, methods=methods, whose=whose))
    return runs, gain


def test_images_of_one_patient_are_one_pair(fold):
    """Sixty images of six patients at two sites, whom they name alike."""
    runs, gain = grouped(fold, 3, 10, sites="AB")
    (row,) = patient_table(runs).rows
    expected = compare_patients([*gain.values()], [0.0] * 6)
    assert row.patients.patients == 6
    assert (row.patients.difference, row.patients.p) == pytest.approx((expected.difference, expected.p))
    assert (row.patients.low, row.patients.high) == pytest.approx((expected.low, expected.high))
    assert str(row.verdict) == "open: 6 of 20 patients"
    few, _ = grouped(fold, 4, 10)
    table = patient_table(few)
    assert not table.rows
    assert "Too few to compare: 4 of the training sites' patients in common with fedavg" in " ".join(
        table.notes
    )


def test_a_patients_cases_are_averaged_first(fold):
    """One patient has twenty images, six have one each: all seven have the same weight."""
    names = [*(f"many/{i}" for i in range(20)), *(f"p{i}/0" for i in range(6))]
    gains = {name: 0.2 if name.startswith("many") else 0.01 for name in names}
    runs = [
        fold(
            {"A": {name: 0.5 + gain * (method == "fedrdn") for name, gain in gains.items()}},
            0,
            methods=(method,),
            whose=lambda name: name.split("/")[0],
        )
        for method in ("fedavg", "fedrdn")
    ]
    (row,) = patient_table(runs).rows
    assert (row.patients.patients, row.patients.better) == (7, 7)
    assert row.patients.difference == pytest.approx((0.2 + 6 * 0.01) / 7)


def test_both_comparisons_must_lie_on_one_side():
    up, level, zero = [0.1, 0.12, 0.09, 0.11, 0.1], [0.1, -0.1, 0.1, -0.1, 0.01], [0.0] * 5
    named = {"up": up, "down": [-value for value in up], "level": level}
    over = {name: paired_t_test(values, zero) for name, values in named.items()}
    by = {name: crossed_test([values * 4] * 5) for name, values in named.items()}
    found = {(a, b): judge(over[a], 5, by[b], 20).word for a in over for b in by}
    assert found.pop(("up", "up")) == "better"
    assert found.pop(("down", "down")) == "worse"
    assert set(found.values()) == {"no difference shown"}
    assert str(judge(over["up"], 5, None, 0, METRICS["accuracy"])) == "open: 0 of 20 images"


def test_unseen_sites_are_judged_by_their_own_scores(fold):
    """Better at the site that trained, worse at the one that never did."""
    runs = []
    for seed in range(5):
        plain = {f"p{i}": 0.5 + 0.001 * i * (seed + 1) for i in range(24)}
        for methods, gain in ((("fedavg",), 0.0), (("fedrdn",), 0.2 + 0.001 * seed)):
            seen = {name: score + gain for name, score in plain.items()}
            unseen = {name: score - gain for name, score in plain.items()}
            runs.append(fold({"DU": seen}, 0, seed=seed, methods=methods, unseen={"EZ": unseen}))
    found = {row.where: str(row.verdict) for row in patient_table(runs).rows}
    assert found == {"training sites": "better at DU", "unseen sites": "worse at EZ"}
    assert str(summary_table(runs).rows[1].verdict) == "better at DU"


@pytest.fixture
def at_sites(fold):
    """Runs of FedAvg and of methods that gain so much at each of the sites: `at_sites(fedrdn=(0.1, 0))`."""

    def make(patients=24, seeds=5, spread=0.01, **gains):
        rng, runs = random.Random(2), []
        sites = "ABCDE"[: len(next(iter(gains.values())))]
        for seed in range(seeds):
            plain = {
                s: {f"p{i}": 0.4 + 0.01 * i + 0.005 * seed for i in range(patients // len(sites))}
                for s in sites
            }
            runs.append(fold(plain, 0, seed=seed))
            for method, of_sites in gains.items():
                scores = {
                    s: {name: value + rng.gauss(gain, spread) for name, value in plain[s].items()}
                    for s, gain in zip(sites, of_sites, strict=True)
                }
                runs.append(fold(scores, 0, seed=seed, methods=(method,)))
        return runs

    return make


def test_a_gain_of_one_site_is_named_with_the_others(at_sites):
    runs = at_sites(
        patients=120,
        fedrdn=(0.2, 0.0, 0.0, 0.0),
        fedbn=(0.05, 0.04, 0.06, 0.05),
        fedprox=(-0.3, 0.01, 0.0, 0.0),
    )
    found = {row.label: row.verdict for row in patient_table(runs).rows}
    assert str(found["fedbn"]) == "better"
    for label, word in (("fedrdn", "better"), ("fedprox", "worse")):
        assert (found[label].word, [*found[label].carried]) == (word, ["A"])
        assert str(found[label]).startswith(f"{word} at A (elsewhere ")
        assert abs(found[label].carried["A"]) < 0.02
    # Both tables have one verdict.
    assert {row.label: row.verdict for row in summary_table(runs).rows if row.verdict} == found


def test_a_gain_that_two_sites_share_names_both_where_neither_may_lack(at_sites, fold):
    verdict = patient_table(at_sites(fedrdn=(0.03, 0.03, -0.025, -0.025), spread=0.001)).rows[0].verdict
    assert verdict.word in ("no difference shown", "better")
    assert verdict.word == "no difference shown" or {"A", "B"} <= verdict.carried.keys()
    plain, runs = {site: {f"p{i}": 0.4 + 0.01 * i for i in range(12)} for site in "AB"}, []
    for seed in range(5):
        moved = {f"p{i}": 0.5485 + 0.01 * i + 0.25 * (-1) ** i + 0.001 * seed for i in range(12)}
        runs.append(fold(plain, 0, seed=seed))
        runs.append(fold(dict.fromkeys("AB", moved), 0, seed=seed, methods=("fedrdn",)))
    half = summary_table(runs)
    found = str(half.rows[1].verdict)
    assert found == "better, not shown without A (+0.150) or without B (+0.150)"
    assert f"by the rule of this page: {found}." in answer(half)


def test_sites_that_a_seed_did_not_test_are_compared_over_the_other_seeds(at_sites, fold):
    runs = at_sites(patients=60, fedrdn=(0.05, 0.05))
    scores = {"A": {f"p{i}": 0.4 + 0.01 * i for i in range(30)}}
    for method, gain in (("fedavg", 0.0), ("fedrdn", 0.05)):
        moved = {"A": {name: score + gain for name, score in scores["A"].items()}}
        runs.append(fold(moved, 0, seed=5, methods=(method,)))
    assert str(patient_table(runs).rows[0].verdict) == "better"


def test_the_more_methods_the_stronger_the_evidence_has_to_be(at_sites):
    """A method whose p-value is enough alone is not one of eleven."""
    null = dict.fromkeys(("fedbn", "fedprox", "silobn", "fedfa", "norm", "ditto", "fixbn"), (0.0, 0.0))
    runs = at_sites(spread=0.03, fedrdn=(0.14, 0.14), **null)
    pair = [run for run in runs if run.methods in (("fedavg",), ("fedrdn",))]
    (alone,) = compare_groups(group_runs(pair))
    among = next(one for one in compare_groups(group_runs(runs)) if one.label == "fedrdn")
    assert alone.adjusted == chance(alone.seeds, alone.crossed, alone.rare) <= LEVEL
    assert among.adjusted == pytest.approx(8 * alone.adjusted)
    assert among.adjusted > LEVEL
    assert alone.verdict.word == "better"
    assert among.verdict.word == "no difference shown"


def test_a_gain_that_a_missed_structure_in_a_few_patients_would_undo_is_not_claimed(at_sites):
    """The same gain of 0.05 at 24 and at 200 patients; the observed differences show it in both."""
    for patients, verdict in ((24, "not confirmed (rare losses could undo the gain)"), (200, "better")):
        (row,) = patient_table(at_sites(patients=patients, fedrdn=(0.05, 0.05))).rows
        assert row.patients.p < 0.001
        assert str(row.verdict) == verdict


def test_any_method_can_be_the_reference(run, at_sites, tmp_path):
    runs = at_sites(fedrdn=(0.2, 0.2), fedbn=(0.4, 0.4))
    against = {row.label: str(row.verdict) for row in patient_table(runs, "fedrdn").rows}
    assert against == {"fedavg": "worse", "fedbn": "better"}
    out = tmp_path / "page.html"
    said = run.ok("report", *(r.path.parent for r in runs), "--reference", "fedrdn", "--out", out)
    page = Page(out.read_text()).text
    assert "above fedrdn" in page
    assert "Δ to fedrdn" in page
    assert "Δ to fedavg" not in page + said
    folders = [r.path.parent for r in runs]
    _, alike, _ = run("report", *folders, "--reference", " FedRDN,", "--out", out)
    assert alike == said
    for wrong, why in (
        ("fedrnd", "did you mean"),
        ("fedfa", "no run of fedfa to compare with; the runs are of fedavg; fedrdn; fedbn"),
        ("fedrdn,fedbn", "no run of fedrdn,fedbn to compare with"),
        ("", "no method was named"),
    ):
        err = run.refused("report", *folders, "--reference", wrong, "--out", out)
        assert why in " ".join(err.split()).lower()


def test_a_verdict_takes_a_p_value_at_the_level_and_follows_the_adjusted_one():
    rng = random.Random(4)
    over = paired_t_test([0.02, 0.022, 0.018, 0.021, 0.019], [0.0] * 5)
    both = crossed_test([[0.02 + rng.gauss(0, 0.01) for _ in range(30)] for _ in range(5)])
    assert chance(over, both) == max(over.p, both.p) < LEVEL
    assert judge(over, 5, both, 30).word == "better"
    assert judge(over, 5, both, 30, adjusted=LEVEL * 1.01).word == "no difference shown"
    opposite = paired_t_test([-0.02, -0.022, -0.018, -0.021, -0.019], [0.0] * 5)
    assert chance(opposite, both) == chance(None, both) == chance(over, None) == 1.0
