"""Short trainings of several methods: their order, their end, and what they show."""

import json
from dataclasses import replace

import pytest
from running import TINY_NETWORK

from medfedaug.config.comparison import ComparisonConfig, Training
from medfedaug.config.run import RunConfig
from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation.in_process import compare_in_process
from medfedaug.federation.messages.messages import TEST, Request
from medfedaug.federation.server.comparison import Comparison
from medfedaug.federation.site.comparison import ComparisonSite
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure

NAMES = ("fedavg", "single", "fedrdn", "ditto")


def settings(run: RunConfig, names=NAMES, **more) -> ComparisonConfig:
    return ComparisonConfig(run=run, methods={name: parse_methods(name) for name in names}, **more)


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "data"
    make_phantom(folder, sites=2, patients=8, shape=(24, 24, 2), seed=3)
    return find_sites(folder)


@pytest.fixture(scope="module")
def run(sites):
    small = {**TINY_NETWORK, "local_steps": 2, "batch_size": 4, "learning_rate": 0.02, "augmentation": "none"}
    return configure(sites, methods=parse_methods("fedavg"), rounds=3, **small)


@pytest.fixture(scope="module")
def compared(sites, run, tmp_path_factory):
    return compare_in_process(settings(run), sites, tmp_path_factory.mktemp("state"), "cpu")


# ---------------------------------------------------------------- a whole comparison


def test_every_training_has_the_rounds_and_a_score_of_each_site(compared, run):
    made = [(training["method"], training["seed"]) for training in compared["trainings"]]
    assert made == [(name, seed) for name in NAMES for seed in (0, 1)]
    assert {training["rounds"] for training in compared["trainings"]} == {run.rounds}
    assert all(set(training["sites"]) == {"site_A", "site_B"} for training in compared["trainings"])
    assert compared["budget"]["stages"] == [2, 3]


def test_an_interrupted_comparison_continues_with_the_same_results(sites, run, compared, tmp_path):
    class Stopped(Exception):
        pass

    def stop(event):
        if event["event"] == "round_finished":
            rounds.append(event)
            if len(rounds) in (4, 11):
                raise Stopped

    rounds = []
    for _ in range(2):
        with pytest.raises(Stopped):
            compare_in_process(settings(run), sites, tmp_path, "cpu", stop)
    again = compare_in_process(settings(run), sites, tmp_path, "cpu")
    for result in (again, compared):
        for training in result["trainings"]:
            training.pop("seconds", None)
    assert {**again, "budget": None} == {**compared, "budget": None}


def test_another_comparison_does_not_continue_it(sites, run, tmp_path):
    Comparison(settings(run), tmp_path)._save()
    with pytest.raises(ConfigError, match="other settings"):
        Comparison(settings(replace(run, rounds=4)), tmp_path)


def test_a_site_scores_no_test_case_in_a_comparison(sites, run, tmp_path):
    site = ComparisonSite(
        "site_A", settings(run), lambda config: SiteTrainer(config, sites[0], "cpu"), tmp_path
    )
    reply = site.answer(Request(TEST, 1, training="fedavg/0", run="0" * 32))
    assert "no task 'test'" in reply.error
    assert "no such training" in site.answer(Request(TEST, 1, training="fedfa/0")).error


# ---------------------------------------------------------------- decisions


def scored(run, tmp_path, gains, *, learned=True, rounds=8, seconds=1.0, **more):
    """Compare without training: each site's score is its gain over FedAvg's, with a little noise."""
    comparison = Comparison(settings(replace(run, rounds=rounds), tuple(gains), **more), tmp_path)
    made = []
    for turn in comparison.turns():
        name, seed = turn.training.method, turn.training.seed
        made.append((str(turn.training), turn.rounds))
        metric = 0.5 * learned
        for index, site in enumerate("ABC"):
            gain = gains[name] + (0.002 * (index - 1) + 0.001 * seed) * (name != "fedavg")
            difference = {"difference": gain, "low": gain - 0.01, "high": gain + 0.01, "patients": 5}
            turn.scores[site] = {
                "dice": max(0.0, metric + gain),
                "compared": difference if name != "fedavg" else {},
            }
        turn.started -= seconds
        turn.server.round = turn.rounds
        comparison.finish(turn)
    return comparison, made


def test_all_methods_train_to_the_end_and_gains_have_intervals_and_sites(run, tmp_path):
    gains = {"fedavg": 0.0, "single": -0.3, "fedrdn": 0.2, "ditto": 0.199}
    comparison, made = scored(run, tmp_path, gains)
    result = comparison.results()
    assert result["budget"]["stages"] == [4, 8]
    assert ("single/0", 8) in made  # the worst: a slow method may overtake
    assert result["recommended"] == ["fedrdn", "ditto"]
    assert result["gains"]["single"]["high"] < 0
    assert set(result["gains"]["fedrdn"]) == {"mean", "low", "high"}
    assert result["sites"]["A"]["gains"]["fedrdn"]["mean"] == pytest.approx(0.1985)
    assert result["sites"]["A"]["patients"] == 5


def test_fedavg_is_recommended_where_others_only_lose_and_nothing_where_nothing_shows(run, tmp_path):
    losses, _ = scored(run, tmp_path / "a", {"fedavg": 0, "single": -0.3, "ditto": -0.01})
    assert losses.results()["recommended"] == ["fedavg"]
    alike, _ = scored(run, tmp_path / "b", {"fedavg": 0, "single": 0.0, "ditto": 0.0})
    assert alike.results()["recommended"] == []


def test_the_budget_shortens_the_last_stage_for_all_methods(run, tmp_path):
    gains = {"fedavg": 0.0, "single": 0.0, "ditto": 0.0}
    comparison, made = scored(run, tmp_path, gains, seconds=4.0, budget=31.0)
    # Six trainings of four rounds take 24 s, a second a round: one more round fits into 31 s.
    assert comparison.results()["budget"]["stages"] == [4, 5]
    assert [rounds for _, rounds in made] == [4] * 6 + [5] * 6
    assert comparison.results()["budget"]["spent"] == pytest.approx(48, abs=2)


def test_a_method_that_learns_where_fedavg_does_not_is_recommended(run, tmp_path):
    comparison, _ = scored(run, tmp_path, {"fedavg": 0.0, "single": 0.2, "ditto": 0.0}, learned=False)
    result = comparison.results()
    assert (result["nothing_learned"], result["recommended"]) == ("", ["single"])


def test_nothing_is_compared_where_no_method_learned_anything(run, tmp_path):
    comparison, _ = scored(run, tmp_path, {"fedavg": 0.0, "single": -0.1, "ditto": -0.1}, learned=False)
    result = comparison.results()
    assert result["nothing_learned"]
    assert (result["gains"], result["recommended"]) == ({}, [])


def test_a_method_that_fails_is_left_out_and_the_reference_must_not_fail(run, tmp_path):
    comparison = Comparison(settings(run), tmp_path)
    turns = comparison.turns()
    turn = next(turns)
    with pytest.raises(RunFailed):
        comparison.fail(turn, RunFailed("no site"))
    turn.training = Training("ditto", 0)
    comparison.fail(turn, RunFailed("no site"))
    assert comparison.record["failed"]["ditto"]["reason"] == "no site"
    assert not any(turn.training.method == "ditto" for turn in turns)


def test_lower_is_better_where_the_metric_says_so(run, tmp_path):
    comparison, _ = scored(run, tmp_path, {"fedavg": 0.0, "single": 0.0, "ditto": 0.1})
    comparison._sign = -1
    assert comparison.results()["gains"]["ditto"]["mean"] == pytest.approx(-0.1005)


def test_the_record_holds_no_score_of_a_case(sites, run, compared, tmp_path):
    assert not {case.name for site in sites for case in site.cases["validation"]} & {
        *json.dumps(compared).split('"')
    }
