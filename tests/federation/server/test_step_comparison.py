"""Steps shortened by those of the other sites, against float64 references; and sites that are named."""

import json
import math
import statistics

import pytest
import torch
from reference import same
from torch import nn

from medfedaug.config.run import MAX_STEP, RunConfig
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation import FederationServer, Reply
from medfedaug.federation.composition import Composition, with_step_limit
from medfedaug.federation.messages.tensor_checks import StateDictValidator
from medfedaug.federation.server.history import RunHistory
from medfedaug.federation.server.step_comparison import StepComparison, others_median, suspects
from medfedaug.utils.event_text import EventLines

SITES = list("ABCDE")


@pytest.fixture
def config(tiny_config):
    """A run of a network with running statistics, in which steps are limited to twice the others'."""

    def make(methods="fedavg", **changes):
        network = {"network": "unet", "network_args": {"channels": [4, 8], "strides": [2], "norm": "batch"}}
        return tiny_config(methods, **{**network, "max_step": 2.0, "max_share": 1.0, **changes})

    return make


class Federation:
    """A server, to which sites send a given step: what a real site sends, without its training."""

    def __init__(self, config, sites=SITES, samples=None):
        self.events = []
        self.server = FederationServer(config, self.events.append)
        self.samples = samples or dict.fromkeys(sites, 10)
        for site in sites:
            assert self.server.accept_preparation(site, Reply("prepare", 0, num_samples=self.samples[site]))
        self.server.finish_preparation()

    def round(self, steps, scores=None):
        """One round: by site its step, or a seed and a length; the scores are of the model before."""
        request = self.server.start_round()
        start = {key: value.clone() for key, value in request.weights.items()}
        sent = {}
        for site, step in steps.items():
            moved = step(start) if callable(step) else random_step(start, *step)
            sent[site] = {key: value.float() for key, value in moved.items()}
            metrics = {} if scores is None else {f"val_{self.server.record.metric}": scores[site]}
            reply = Reply("train", request.round, sent[site], num_samples=self.samples[site], metrics=metrics)
            assert self.server.accept(site, reply)
        self.server.finish_round()
        return start, sent


def random_step(start, seed, length):
    """The model after a random step; of running statistics too, whose deviations move."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for key, value in start.items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if key.endswith("running_var"):
            moved[key] = (value.double().sqrt() + 0.01 * length * noise.abs()).square()
        else:
            moved[key] = value.double() + 0.01 * length * noise
    return moved


def rooted(key, value):
    return value.double().sqrt() if key.endswith("running_var") else value.double()


def length(start, end, keys):
    return math.sqrt(sum(float((rooted(k, end[k]) - rooted(k, start[k])).square().sum()) for k in keys))


def reference(start, sent, weights, limit):
    """w + Σ pₖ fₖ Δₖ in float64, fₖ = min(1, limit · median of the others / own), for the root of weights."""
    buffers = {key for key in start if "running_" in key}
    factors = {}
    for keys, most in ((start.keys() - buffers, limit), (buffers, 2 * limit)):
        own = {site: length(start, model, keys) / math.sqrt(weights[site]) for site, model in sent.items()}
        for site in sent:
            median = statistics.median_high([own[other] for other in sent if other != site])
            factor = min(1.0, most * median / own[site]) if own[site] and median else 1.0
            factors.update(dict.fromkeys(((site, key) for key in keys), factor))
    total, mean = sum(weights.values()), {}
    for key in start:
        mean[key] = torch.zeros_like(start[key], dtype=torch.float64)
        for site, model in sent.items():
            first = rooted(key, start[key])
            used = first + factors[site, key] * (rooted(key, model[key]) - first)
            mean[key] += weights[site] / total * (used.square() if key.endswith("running_var") else used)
    return mean, factors


def check(federation, start, sent, limit=2.0):
    mean, factors = reference(start, sent, {s: float(federation.samples[s]) for s in sent}, limit)
    for key, expected in mean.items():
        torch.testing.assert_close(federation.server.state[key].double(), expected, rtol=1e-5, atol=1e-6)
    return factors


def shortened(federation):
    return [event["site"] for event in federation.events if event["event"] == "step_shortened"]


@pytest.mark.parametrize("huge", [2.1, 5.0, 30.0])
@pytest.mark.parametrize("sites", [3, 4, 5])
def test_one_long_step_is_shortened_to_the_others(config, sites, huge):
    federation = Federation(config(), SITES[:sites])
    steps = {site: (seed, 1.0) for seed, site in enumerate(SITES[:sites])}
    start, sent = federation.round({**steps, "B": (1, huge)})
    factors = check(federation, start, sent)
    assert {site for (site, _), factor in factors.items() if factor < 1} == {"B"}
    assert shortened(federation) == ["B"]
    assert set(federation.server.rounds[0]["steps"]) >= {"B"}


@pytest.mark.parametrize("liars", ["DE", "E"])
def test_as_long_as_most_are_honest_no_honest_step_is_shortened(config, liars):
    federation = Federation(config())
    steps = {site: (seed, 1.0) for seed, site in enumerate(SITES)}
    start, sent = federation.round({**steps, **dict.fromkeys(liars, (9, 30.0))})
    check(federation, start, sent)
    assert shortened(federation) == list(liars)


@pytest.mark.parametrize("idle", ["DE", "E"])
def test_sites_that_do_not_move_hold_nobody_back(config, idle):
    federation = Federation(config())
    steps = {site: (seed, 1.0) for seed, site in enumerate(SITES)}
    start, sent = federation.round({**steps, **dict.fromkeys(idle, lambda start: start)})
    check(federation, start, sent)
    assert not shortened(federation)


def test_where_nobody_else_moves_nothing_is_a_measure(config):
    federation = Federation(config())
    still = dict.fromkeys("ABCD", lambda start: start)
    start, sent = federation.round({**still, "E": (0, 1.0)})
    check(federation, start, sent)
    assert not shortened(federation)


def test_no_step_at_all_leaves_the_model(config):
    federation = Federation(config())
    start, _ = federation.round(dict.fromkeys(SITES, lambda start: start))
    assert all(torch.equal(federation.server.state[key], value) for key, value in start.items())
    nothing = {"parameters": 0.0, "buffers": 0.0, "cosine": 0.0}
    assert federation.server.rounds[0]["steps"] == dict.fromkeys(SITES, nothing)


def test_equal_steps_are_used_to_the_bit(config):
    results = []
    for limit in (0.0, 1.0, 2.0):
        federation = Federation(config(max_step=limit))
        federation.round(dict.fromkeys(SITES, (3, 1.0)))
        results.append(federation.server.state)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_of_two_sites_nobody_can_say_whose_step_is_too_long(config):
    limited, free = Federation(config(), "AB"), Federation(config(max_step=0.0), "AB")
    for federation in (limited, free):
        federation.round({"A": (0, 1.0), "B": (1, 30.0)})
    assert same(limited.server.state, free.server.state)
    assert not shortened(limited)
    assert "steps" not in limited.server.rounds[0]


def test_a_site_with_more_samples_may_go_as_much_farther_as_the_root_of_its_weight(config):
    samples = dict(zip(SITES, (10, 10, 10, 10, 160), strict=True))
    for times, expected in ((7.5, []), (8.5, ["E"])):
        federation = Federation(config(), samples=samples)
        alike = dict.fromkeys("ABCD", (0, 1.0))
        start, sent = federation.round({**alike, "E": (0, times)})
        check(federation, start, sent)
        assert shortened(federation) == expected


def test_claimed_samples_lengthen_a_step_by_what_the_share_allows(config):
    samples = {**dict.fromkeys("ABCD", 10), "E": 2**31 - 1}
    federation = Federation(config(max_share=0.45), samples=samples)
    start, sent = federation.round({**dict.fromkeys("ABCD", (0, 1.0)), "E": (0, 20.0)})
    weights = {**dict.fromkeys("ABCD", 10.0), "E": 0.45 / 0.55 * 40}
    mean, factors = reference(start, sent, weights, 2.0)
    for key, expected in mean.items():
        torch.testing.assert_close(federation.server.state[key].double(), expected, rtol=1e-5, atol=1e-6)
    parameter = next(key for key in start if "running_" not in key)
    assert factors["E", parameter] == pytest.approx(2 * math.sqrt(0.45 / 0.55 * 4) / 20)


def test_running_statistics_are_shortened_by_themselves_and_stay_variances(config):
    def step(start):
        moved = random_step(start, 1, 1.0)
        for key in moved:
            if key.endswith("running_var"):
                moved[key] = (moved[key].sqrt() + 1).square()
        return moved

    federation = Federation(config())
    steps = {site: (seed, 1.0) for seed, site in enumerate(SITES)}
    start, sent = federation.round({**steps, "B": step})
    factors = check(federation, start, sent)
    assert all((factors["B", key] < 1) == ("running_" in key) for key in start)
    state = federation.server.state
    assert all(bool((state[key] >= 0).all()) for key in start if key.endswith("running_var"))


@pytest.mark.parametrize("method", ["median", "trimmed_mean"])
def test_robust_methods_get_the_shortened_steps(config, method):
    """A step of a tenth of which is used counts as one of that length."""
    long, short = Federation(config(method)), Federation(config(method, max_step=0.0))
    steps = dict.fromkeys(SITES, (7, 1.0))
    long.round({**steps, "E": (7, 20.0)})
    short.round({**steps, "E": (7, 2.0)})
    for key in long.server.shared:
        if "running_" not in key:
            torch.testing.assert_close(long.server.state[key], short.server.state[key], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- directions


def test_the_cosine_is_that_with_the_mean_of_the_other_directions():
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model = StateDictValidator(network, [k for k in network.state_dict() if "tracked" not in k])
    start = {key: network.state_dict()[key].double() for key in model.shapes}
    updates = {site: random_step(start, seed, 1.0 + seed) for seed, site in enumerate(SITES)}
    steps = {site: model.steps(update, start) for site, update in updates.items()}
    compared = StepComparison(model, 2.0).compare(updates, steps, dict.fromkeys(SITES, 1.0), start)
    flat = {
        site: torch.cat([(update[key] - start[key]).flatten() for key in sorted(model.parameters)])
        for site, update in updates.items()
    }
    for site, own in flat.items():
        others = sum(flat[other] / flat[other].norm() for other in SITES if other != site)
        expected = float(torch.nn.functional.cosine_similarity(own, others, dim=0))
        assert compared[site].cosine == pytest.approx(expected, abs=1e-12)


def test_nothing_is_compared_of_a_site_that_does_not_move():
    network = nn.Linear(4, 3)
    model = StateDictValidator(network, list(network.state_dict()))
    start = {key: value.double() for key, value in network.state_dict().items()}
    updates = {"A": start, "B": random_step(start, 1, 1.0), "C": random_step(start, 2, 1.0)}
    steps = {site: model.steps(update, start) for site, update in updates.items()}
    compared = StepComparison(model, 2.0).compare(updates, steps, dict.fromkeys("ABC", 1.0), start)
    assert (compared["A"].cosine, compared["A"].times["parameters"]) == (0.0, 0.0)
    assert all(math.isfinite(step.cosine) for step in compared.values())


def test_the_others_median_is_not_of_the_site_itself():
    assert others_median({"A": 1.0, "B": 3.0}) == {"A": 3.0, "B": 1.0}
    assert others_median({"A": 1.0, "B": 2.0, "C": 3.0, "D": 4.0})["D"] == 2.0


def backwards(seed, size=1.0):
    """A step opposite to that of ``seed``."""

    def step(start):
        return {
            k: v if "running_" in k else 2 * start[k] - v for k, v in random_step(start, seed, size).items()
        }

    return step


def test_a_site_whose_steps_go_against_the_others_is_named_once(config):
    """Whether or not the others improve: a robust mean keeps the steps out of the model."""
    federation = Federation(config(rounds=4))
    for _ in range(4):
        federation.round({**dict.fromkeys(SITES, (0, 1.0)), "B": backwards(0)}, dict.fromkeys(SITES, 0.6))
    (event,) = [event for event in federation.events if event["event"] == "suspected"]
    assert (event["site"], event["round"]) == ("B", 3)
    (line,) = EventLines(4).lines(event)
    assert line.startswith("suspected: B: its steps went against the others' in 3 of 3 rounds: look at")
    (reason,) = federation.server.results()["suspected"].values()
    assert "in 4 of 4 rounds" in reason


def test_a_run_that_goes_on_after_a_restart_names_nobody_twice(config):
    federation = Federation(config(rounds=4))
    for _ in range(3):
        federation.round({**dict.fromkeys(SITES, (0, 1.0)), "B": backwards(0)})
    again = RunHistory(["dice"], {"scaling": "scale"}, on_event=federation.events.append)
    again.restore(federation.server.record.saved())
    federation.events.clear()
    again.finish_round({}, 1.0)
    assert not [event for event in federation.events if event["event"] == "suspected"]


def test_the_numbers_of_a_step_are_coarse_in_results(config):
    federation = Federation(config())
    federation.round({**{site: (seed, 1.0) for seed, site in enumerate(SITES)}, "B": (1, 7.3)})
    for step in federation.server.results()["rounds"][0]["steps"].values():
        assert step["parameters"] == round(step["parameters"])
        assert step["buffers"] == round(step["buffers"])
        assert step["cosine"] == round(step["cosine"], 1)


APART = {"parameters": 1.0, "buffers": 1.0, "cosine": -0.3}
ALIKE = {**APART, "cosine": 0.4}


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([APART] * 3, "went against the others' in 3 of 3 rounds"),
        ([ALIKE, APART, APART, APART, ALIKE, ALIKE], "went against the others' in 3 of 6 rounds"),
        ([{**ALIKE, "parameters": 11.0}] * 3, "were far longer than the others' in 3 of 3 rounds"),
        ([APART] * 2, ""),
        ([APART] * 3 + [ALIKE] * 4, ""),
        ([{**ALIKE, "parameters": 10.0, "buffers": 20.0, "cosine": -0.1}] * 9, ""),
    ],
)
def test_a_site_is_named_from_most_of_three_rounds_or_more_on(steps, words):
    named = suspects([{"steps": {"A": ALIKE, "B": step}} for step in steps])
    assert set(named) == ({"B"} if words else set())
    assert words in named.get("B", "")


def test_nothing_is_limited_unless_somebody_asks(tiny_config):
    assert tiny_config().max_step == 0
    server = FederationServer(tiny_config())
    assert server.aggregation.comparison is None


@pytest.mark.parametrize("value", [0.5, -1.0, math.nan, math.inf])
def test_a_limit_below_the_others_median_is_refused(tiny_config, value):
    with pytest.raises(ConfigError, match="max_step"):
        tiny_config(max_step=value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compare_sites": "statistics"}, "max_step compares whole updates"),
        ({"secure_aggregation": True}, "max_step compares single updates, which nobody sees"),
    ],
)
def test_where_single_updates_cannot_be_compared_the_limit_is_refused(tiny_config, changes, reason):
    with pytest.raises(MedFedAugError, match=reason):
        Composition(RunConfig.from_dict({**tiny_config(max_step=2.0).to_dict(), **changes}))
    free = RunConfig.from_dict({**tiny_config().to_dict(), **changes})
    assert with_step_limit(free) == free


def exported(run, tmp_path, *options, methods="fedavg"):
    job = tmp_path / "job"
    run("export", "--methods", methods, "--rounds", 1, "--out", job, *options)
    text = (job / "app/config/config_fed_server.json").read_text()
    return json.loads(text)["workflows"][0]["args"]["config"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), MAX_STEP),
        (("--max-step", 0), 0),
        (("--max-step", 5), 5),
        (("--secure-aggregation",), 0),
        (("--compare-sites", "statistics"), 0),
    ],
)
def test_a_job_for_hospitals_carries_a_limit_where_steps_can_be_compared(run, tmp_path, options, expected):
    assert exported(run, tmp_path, *options)["max_step"] == expected


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        ("fedavg", ("--min-sites", 4), ["fedavg"]),
        ("fedavg", ("--min-sites", 5), ["fedavg", "trimmed_mean"]),
        ("fedavg", ("--min-sites", 5, "--secure-aggregation"), ["fedavg"]),
        ("median", ("--min-sites", 5), ["median"]),
        ("fedavgm", ("--min-sites", 5), ["fedavgm"]),
    ],
)
def test_a_job_for_five_hospitals_has_the_trimmed_mean_unless_a_method_averages(
    run, tmp_path, given, options, expected
):
    methods = [method["name"] for method in exported(run, tmp_path, *options, methods=given)["methods"]]
    assert methods == expected


@pytest.mark.parametrize("method", ["fedmix", "feddg", "feddg_ga"])
def test_no_job_for_hospitals_has_a_method_that_cannot_name_its_patients(run, tmp_path, method):
    code, _, err = run("export", "--methods", method, "--out", tmp_path / "job")
    assert code == 2
    assert f"{method}: hospitals cannot say whose images are in what it sends" in " ".join(err.split())
