"""Updates within all fixed limits that would end everybody's run: the liar is named, and the run goes on."""

import json
import math
import shutil

import pytest
import torch
from reference import same
from running import TINY_OPTIONS

from medfedaug.data.phantom import make_phantom
from medfedaug.errors import RunFailed
from medfedaug.federation.messages.messages import PREPARE, TRAIN

SITES = list("ABCDE")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Four sites of four patients, and one of thirty-two: two and twenty of them train."""
    root = tmp_path_factory.mktemp("uneven")
    few = make_phantom(root / "few", sites=4, patients=4, shape=(16, 16, 4), seed=0)
    *_, many = make_phantom(root / "many", sites=2, patients=32, shape=(16, 16, 4), seed=1)
    for folder, name in zip((*few, many), SITES, strict=True):
        shutil.copytree(folder, root / "sites" / name)
    return root / "sites"


def is_buffer(key):
    return "running_" in key


def away(request, reply, times):
    """A random step, so many times as long as the model is from the origin."""
    keys = [key for key in reply.weights if not is_buffer(key)]
    generator = torch.Generator().manual_seed(0)
    noise = {key: torch.randn(reply.weights[key].shape, generator=generator) for key in keys}
    scale = norm(request.weights[key] for key in keys) / norm(noise.values())
    for key in keys:
        reply.weights[key] = request.weights[key] + noise[key] * scale * times


def norm(tensors):
    return math.hypot(*(float(tensor.norm()) for tensor in tensors))


def refusals(server):
    return [
        (entry["round"], one["site"], one["reason"]) for entry in server.rounds for one in entry["refused"]
    ]


@pytest.fixture(scope="module")
def without_d(federation):
    """The model after a round of the four sites that do not lie."""
    server, _ = federation(sites="ABCE", rounds=1)
    return {key: server.state[key] for key in server.shared}


@pytest.mark.parametrize(("times", "claims"), [(99, False), (5, True)])
def test_one_long_update_in_the_first_round_is_the_liars_alone(federation, without_d, times, claims):
    second = {}

    def lie(site, request, reply):
        if site == "D" and request.task in (PREPARE, TRAIN) and claims:
            reply.num_samples = 2**31
        if site == "D" and request.task == TRAIN and request.round == 1:
            away(request, reply, times)
        if request.task == TRAIN and request.round == 2:
            second.update({key: value.clone() for key, value in request.weights.items()})

    server, _ = federation(lie, rounds=2)
    ((round_, site, reason),) = refusals(server)
    assert (round_, site) == (1, "D")
    assert reason.startswith("site D, parameters: expected a step of norm up to")
    assert "where the median of 5 sites is" in reason
    assert len(server.rounds) == 2
    assert all(set(entry["sites"]) >= set("ABCE") for entry in server.rounds)
    # The first round is that of the others, to the same bits: the second begins with their model.
    assert same(second, without_d)


def test_running_statistics_far_from_the_others_are_refused_in_the_first_round(federation):
    def lie(site, request, reply):
        if site == "B" and request.task == TRAIN:
            for key in reply.weights:
                if key.endswith("running_var"):
                    reply.weights[key] += 1e8

    server, _ = federation(lie, rounds=1)
    ((_, site, reason),) = refusals(server)
    assert site == "B"
    assert reason.startswith("site B, buffers: expected a step of norm up to")


@pytest.mark.parametrize("way", [-24.0, None])
def test_a_liar_below_the_limits_in_every_round_gets_no_honest_site_blamed(federation, way):
    def lie(site, request, reply):
        if site == "D" and request.task in (PREPARE, TRAIN):
            reply.num_samples = 2**31
        if site != "D" or request.task != TRAIN:
            return
        if way is None and request.round == 1:
            away(request, reply, 1.9)
        for key, start in request.weights.items():
            if way is not None and not is_buffer(key):
                reply.weights[key] = start + way * (reply.weights[key] - start)

    server, _ = federation(lie, rounds=4, learning_rate=0.01)
    assert not [one for one in refusals(server) if one[1] != "D"]
    assert len(server.rounds) == 4
    assert all(torch.isfinite(value).all() for value in server.state.values())


@pytest.mark.all_layers
def test_honest_sites_are_never_refused_with_an_odd_scanner_or_ten_times_the_samples(
    federation, uneven, five
):
    for data, methods, optimizer, intensity in (
        (five, "fedavg", "adam", "raw"),
        (uneven, "scaffold", "sgd", "scale"),
    ):
        changes = {"optimizer": optimizer, "learning_rate": 0.01, "intensity": intensity, "batch_size": 2}
        server, _ = federation(data=data, methods=methods, rounds=2, **changes)
        assert not refusals(server)


def test_of_two_sites_nobody_is_called_the_liar(federation):
    def lie(site, request, reply):
        if site == "B" and request.task == TRAIN and request.round == 1:
            away(request, reply, 99)

    with pytest.raises(RunFailed) as caught:
        federation(lie, sites="AB", rounds=4)
    assert "nobody can say who is wrong: this site, or one that moved the model before" in str(caught.value)


def test_a_round_with_two_updates_compares_them_with_the_model_and_says_so(federation):
    def lie(site, request, reply):
        if site == "B" and request.round == 2:
            for key in reply.weights:
                if is_buffer(key):
                    reply.weights[key] += 1e8

    def connected(round_):
        return list("AB" if round_ == 2 else "ABC")

    server, _ = federation(lie, sites="ABC", rounds=3, min_sites=1, connected=connected)
    ((round_, site, reason),) = refusals(server)
    assert (round_, site) == (2, "B")
    assert "nobody can say who is wrong" in reason


# ---------------------------------------------------------------- shares


def test_a_claim_of_two_thousand_million_samples_is_lowered_by_default_and_told(federation):
    def lie(site, request, reply):
        if site == "D" and request.task in (PREPARE, TRAIN):
            reply.num_samples = 2**31

    sent = {}

    def spy(site, request, reply):
        lie(site, request, reply)
        if request.task == TRAIN:
            sent[site] = {key: value.double() for key, value in reply.weights.items()}

    server, events = federation(spy, rounds=1)
    weights = {site: float(server.sites[site]) for site in "ABCE"}
    weights["D"] = 0.45 / 0.55 * sum(weights.values())
    total = sum(weights.values())
    for key in server.shared:
        expected = sum(weights[site] / total * sent[site][key] for site in SITES)
        torch.testing.assert_close(server.state[key].double(), expected, rtol=1e-5, atol=1e-6)
    ((told),) = [event for event in events if event["event"] == "share_lowered"]
    assert told["site"] == "D"
    assert told["after"] == pytest.approx(0.45)
    assert server.results()["shares"]["D"]["by_samples"] == pytest.approx(1.0, abs=1e-6)
    assert server.rounds[0]["shares"] == {"D": pytest.approx(0.45)}


@pytest.mark.parametrize(("sites", "changes"), [("AE", {}), (SITES, {"max_share": 1})])
def test_two_sites_and_sites_of_a_run_without_a_cap_keep_the_shares_of_their_samples(
    federation, uneven, sites, changes
):
    server, events = federation(data=uneven, sites=sites, rounds=1, **changes)
    assert "shares" not in server.results()
    assert not [event for event in events if event["event"] == "share_lowered"]


def test_the_command_says_whose_share_was_lowered_and_the_word_for_it(run, uneven, tmp_path):
    options = ("--rounds", 1, "--engine", "inprocess", *TINY_OPTIONS)
    out = tmp_path / "run"
    code, text, err = run(
        *("simulate", "--data", uneven, "--methods", "fedavg", *options, "--out", out, "--no-report")
    )
    assert code == 0, err
    assert "counts as 45% of the average" in text + err
    assert "--max-share 1" in text + err
    shares = json.loads((out / "results.json").read_text())["shares"]
    assert set(shares) == {"E"}
    assert shares["E"]["by_samples"] > 0.5
