"""Buffered rounds: the first updates that come make the next model, and late ones count in a later round."""

import json

import pytest
import torch
from running import TINY_OPTIONS

from medfedaug.config.run import Execution, RunConfig
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation import FederationServer, Reply, Request, run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.federation.in_process import SitesInProcess
from medfedaug.methods import parse_methods
from medfedaug.runs.load_results import check_record
from medfedaug.simulate import simulate

SAMPLES = {"A": 10, "B": 30, "C": 20}


def started(config):
    server = FederationServer(config)
    for site, samples in SAMPLES.items():
        server.accept_preparation(site, Reply("prepare", num_samples=samples))
    server.finish_preparation()
    return server


def moved(server, request, generator):
    """A site's update: the request's model, and a step."""
    weights = {
        key: value + 0.1 * torch.rand(value.shape, generator=generator)
        for key, value in request.weights.items()
    }
    return weights, {key: value.double() for key, value in weights.items()}


def answer(server, site, round_, weights, **more):
    return server.accept(site, Reply("train", round_, weights=weights, num_samples=SAMPLES[site], **more))


def late_step(key, scale, sent, first, now):
    """s Δ for parameters; running statistics, of a variance the deviation, go towards the site's by s."""
    if not key.endswith(("running_mean", "running_var")):
        return scale * (sent - first)
    if key.endswith("mean"):
        return scale * (sent - now)
    return (now.sqrt() + scale * (sent.sqrt() - now.sqrt())) ** 2 - now


@pytest.mark.parametrize("exponent", [0.0, 2.0])
def test_the_models_are_those_of_the_equations(tiny_config, exponent):
    """FedBuff, Nguyen et al. 2022: w ← w + Σ pₖ s(τₖ) Δₖ over K updates, s(τ) = (1 + τ)^−a, in float64."""
    config = tiny_config(rounds=4, buffer=2, staleness=exponent, max_share=1.0)
    server, generator = started(config), torch.Generator().manual_seed(0)
    model = {key: server.state[key].double() for key in server.sent}
    # Site C takes three rounds, A and B one each; each round takes two updates.
    order = [(("A", 1), ("B", 1)), (("A", 2), ("B", 2)), (("B", 3), ("C", 1)), (("A", 3), ("C", 4))]
    under_way: dict[str, tuple] = {}
    for round_, taken in enumerate(order, 1):
        request = server.start_round(sorted(SAMPLES.keys() - under_way.keys()))
        start = dict(model)
        for site in sorted(SAMPLES.keys() - under_way.keys()):
            under_way[site] = (round_, start, *moved(server, request, generator))
        step = {key: torch.zeros_like(value) for key, value in model.items()}
        for site, began in taken:
            asked, first, sent, exact = under_way.pop(site)
            assert asked == began
            assert answer(server, site, began, sent)
            scale = (1 + round_ - began) ** -exponent
            share = SAMPLES[site] / sum(SAMPLES[one] for one, _ in taken)
            for key in step:
                step[key] += share * late_step(key, scale, exact[key], first[key], model[key])
        model = {key: value + step[key] for key, value in model.items()}
        state = server.finish_round()
        for key, value in model.items():
            torch.testing.assert_close(state[key].double(), value, rtol=1e-5, atol=1e-6)
        late = {site: numbers["staleness"] for site, numbers in server.rounds[-1]["sites"].items()}
        assert late == {site: round_ - began for site, began in taken}


def test_a_buffer_of_all_sites_gives_the_bits_of_a_run_without(tiny_config, make_site, tmp_path):
    for name in "ABC":
        make_site(name)
    models = [
        run_in_process(tiny_config("fedrdn,fedfa+", buffer=n), tmp_path / "data", list("ABC"), "cpu").state
        for n in (0, 3)
    ]
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


@pytest.fixture(scope="module")
def three_sites(tmp_path_factory):
    from medfedaug.data.phantom import make_phantom

    root = tmp_path_factory.mktemp("buffered") / "data"
    make_phantom(root, sites=3, patients=5, shape=(32, 32, 4), seed=0)
    return root


NAMES = ["site_A", "site_B", "site_C"]
SLOW = Execution(site_speed={"site_C": 0.4})


def test_a_slow_site_counts_late_and_nobody_waits_for_it(tiny_config, three_sites):
    runs = [
        run_in_process(tiny_config(rounds=5, buffer=2), three_sites, NAMES, "cpu", execution=SLOW)
        for _ in range(2)
    ]
    results = runs[0].results()
    check_record(results)
    late = [{s: numbers.get("staleness") for s, numbers in one["sites"].items()} for one in results["rounds"]]
    taken = [{site for site, n in one.items() if n is not None} for one in late]
    assert taken[:2] == [{"site_A", "site_B"}] * 2
    assert late[2]["site_C"] == 2
    assert [one["hours"] for one in results["rounds"]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert set(results["test"]["sites"]) == set(NAMES)
    # Its score of the model that it began with stands in that model's round.
    assert results["config"]["buffer"] == 2
    assert all(torch.equal(runs[0].state[key], runs[1].state[key]) for key in runs[0].state)


def test_synchronous_rounds_take_as_long_as_the_slowest_site(tiny_config, three_sites):
    server = run_in_process(tiny_config(), three_sites, NAMES, "cpu", execution=SLOW)
    assert [one["hours"] for one in server.rounds] == [2.5, 5.0]


def test_a_late_answer_is_checked_as_one_of_its_own_round(tiny_config):
    config = tiny_config(rounds=3, buffer=1)
    server, generator = started(config), torch.Generator().manual_seed(0)
    first = server.start_round(list("ABC"))
    for site in "AB":
        weights, _ = moved(server, first, generator)
        if site == "A":
            assert answer(server, "A", 1, weights)
            server.finish_round()
            server.start_round(["A"])
    before = dict(server.state)
    assert not answer(server, "B", 2, weights)  # it was asked in round 1
    assert "expected 1, got 2" in server.rounds[-1]["refused"][-1]["reason"]
    far = {key: value + 1e6 for key, value in weights.items()}
    assert not answer(server, "C", 1, far)
    assert "a step of norm" in server.rounds[-1]["refused"][-1]["reason"]
    with pytest.raises(RunFailed, match="0 of 1 needed"):
        server.finish_round()
    assert all(torch.equal(before[key], server.state[key]) for key in before)


@pytest.mark.parametrize("methods", [pytest.param("feddg_ga", marks=pytest.mark.all_layers), "pooled"])
def test_methods_that_cannot_do_with_late_updates_are_refused_by_what_they_declare(tiny_config, methods):
    config = tiny_config(methods, buffer=2)
    with pytest.raises(ConfigError, match="buffer"):
        Composition(config).check_apart("a federation")


def test_other_settings_that_do_not_go_with_a_buffer_are_refused(tiny_config):
    with pytest.raises(ConfigError, match="secure_aggregation and buffer cannot be combined"):
        tiny_config(buffer=2, secure_aggregation=True)
    with pytest.raises(ConfigError, match="this engine has no buffered rounds"):
        SitesInProcess({}).gather(Request("train"), [], 1, print)
    with pytest.raises(ConfigError, match=r"buffer is 4: .*3 sites can train"):
        started(tiny_config(buffer=4))
    with pytest.raises(ConfigError, match="buffer is 2: a round needs 3 updates"):
        started(tiny_config("median", buffer=2))


@pytest.mark.all_layers
def test_speeds_are_read_from_the_command_and_checked(three_sites, tmp_path, run):
    out = tmp_path / "run"
    options = ("--methods", "fedavg", "--engine", "inprocess", "--rounds", 3, "--buffer", 2, *TINY_OPTIONS)
    speeds = ("--site-speed", "site_C=0.4, site_B=2")
    code, _, err = run("simulate", "--data", three_sites, "--out", out, *options, *speeds)
    assert code == 0, err
    results = json.loads((out / "results.json").read_text())
    assert results["execution"]["site_speed"] == {"site_C": 0.4, "site_B": 2}
    assert [one["hours"] for one in results["rounds"]] == [1.0, 2.0, 2.5]
    page = (out / "report.html").read_text()
    assert (
        "of the first 2 updates. Updates were late by this many rounds on average: site_A 0.0, at most 0"
        in page
    )
    with pytest.raises(ConfigError, match="--engine inprocess"):
        simulate(three_sites, tmp_path / "other", RunConfig(**{"rounds": 1}), execution=SLOW)
    pooled = RunConfig(methods=tuple(parse_methods("pooled")))
    with pytest.raises(ConfigError, match="a federation"):
        simulate(three_sites, tmp_path / "other", pooled, execution=SLOW, engine="inprocess")
