"""A site's guard: what it refuses, how much one case can change, how much noise there is, what it spends."""

import json
import math
import multiprocessing
import random
import sys
from functools import partial

import pytest
import torch
from opacus.accountants import RDPAccountant

from medfedaug.config.run import Execution
from medfedaug.errors import ConfigError, PrivacyRefused
from medfedaug.federation import FederationServer, Site, SiteTrainer, run_in_process
from medfedaug.hospital.privacy import PrivacyLedger, PrivacyPolicy, epsilon_spent
from medfedaug.hospital.privacy.guard import PrivacyGuard, SitePrivacy
from medfedaug.methods import FedFA, FedFAh, FedRDN
from medfedaug.methods.base import Contributions, ServerContext, SiteContext, SiteExchange
from medfedaug.models import build_network, ffa_layers
from medfedaug.statistics import image_moments

CLIP = {
    "intensity_mean": [0.0, 200.0],
    "intensity_std": [1.0, 100.0],
    "feature_mean": [-1.0, 3.0],
    "feature_std": [0.0, 2.0],
}
NOISY = {"min_images": 2, "noise_multiplier": 0.5, "epsilon": 1e6, "clip": CLIP}


def policy(**changes) -> PrivacyPolicy:
    return PrivacyPolicy.from_dict({**NOISY, **changes})


class Given(SiteExchange):
    """An exchange whose contributions are given."""

    def __init__(self, values, **kinds):
        self.values, self.kinds, self.through_network = values, kinds, False

    def collect(self):
        return {"exact": torch.ones(1)}

    def apply(self, payload):
        raise AssertionError

    def contributions(self, bounds):
        return Contributions(self.kinds, iter(self.values), self.through_network)


class Silent(random.Random):
    """No noise at all: what is left is the mean within the bounds."""

    def gauss(self, mu=0.0, sigma=1.0):
        return 0.0


def released(exchange, cases, generator=None, **changes):
    guard = PrivacyGuard("A", policy(**changes), cases, generator=generator or Silent())
    guard.observe("m", exchange)
    return guard.collect("m", exchange)


# ---------------------------------------------------------------- the policy


def test_a_policy_survives_json_and_unknown_settings_are_errors():
    given = policy(delta=1e-6, cases_per_patient=3)
    assert PrivacyPolicy.from_dict(json.loads(json.dumps(given.to_dict()))) == given
    assert PrivacyPolicy.from_dict({}) == PrivacyPolicy()
    assert PrivacyPolicy().min_images == 10
    with pytest.raises(
        ConfigError, match=r"unknown keys min_image \(did you mean min_images\?\); known: min_images"
    ):
        PrivacyPolicy.from_dict({"min_image": 20})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"min_images": 0}, "min_images"),
        ({"min_images": True}, "min_images"),
        ({"min_images": "10"}, "min_images"),
        ({"cases_per_patient": 0}, "cases_per_patient"),
        ({"noise_multiplier": -1}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"delta": 0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"epsilon": None}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"clip": {"colour": [0, 1]}}, "clip: unknown colour"),
        ({"clip": {"feature_mean": [1, 1]}}, "feature_mean"),
        ({"clip": {"feature_mean": [1]}}, "feature_mean"),
        ({"clip": {"feature_mean": [0, "1"]}}, "feature_mean"),
        ({"clip": {"intensity_std": [0, 1]}}, "cannot be 0"),
        ({"clip": {"feature_std": [-1, 1]}}, "cannot be negative"),
        ({"clip": [1, 2]}, "must be a JSON object"),
    ],
)
def test_a_policy_that_makes_no_sense_is_an_error(wrong, words):
    with pytest.raises(ConfigError, match=words):
        policy(**wrong)


def test_noise_without_opacus_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(ConfigError, match=r"pip install 'medfedaug\[privacy\]'"):
        PrivacyGuard("A", policy(), 5)
    PrivacyGuard("A", PrivacyPolicy(), 5)


# ---------------------------------------------------------------- a least number of cases


def test_too_few_cases_are_refused_with_site_number_and_limit():
    for settings in ({}, NOISY):
        guard = PrivacyGuard("CS", PrivacyPolicy.from_dict({**settings, "min_images": 10}), cases=9)
        for use in (guard.check, guard.observe):
            with pytest.raises(PrivacyRefused, match=r"site CS: fedfa's.* 9 images.*needs at least 10"):
                use("fedfa", Given([]))
    assert PrivacyGuard("CS", PrivacyPolicy(), 10).collect("fedfa", Given([])) == {"exact": torch.ones(1)}


def test_a_site_learns_before_training_that_a_method_is_refused(tiny_config, phantom_dir):
    trainer = SiteTrainer(tiny_config("fedfa"), phantom_dir, "cpu", privacy=SitePrivacy(PrivacyPolicy()))
    assert "fedfa's" in Site("site_A", trainer).answer(FederationServer(tiny_config("fedfa")).prepare()).error


@pytest.mark.parametrize("method", ["fedproto", "fpl", "fedsr"])
def test_what_is_sent_of_classes_is_refused_before_training(photo_config, tmp_path, method):
    config = photo_config(method)
    for settings, reason in (
        ({"min_images": 99}, f"site A: {method}'s statistics would summarise"),
        (NOISY, f"site A: {method}: noise cannot be added to this exchange"),
    ):
        trainer = SiteTrainer(
            config, tmp_path / "photos", "cpu", privacy=SitePrivacy(PrivacyPolicy.from_dict(settings))
        )
        assert reason in Site("A", trainer).answer(FederationServer(config).prepare()).error


# ---------------------------------------------------------------- sensitivity


def test_one_case_moves_the_mean_by_no_more_than_the_stated_bound_and_by_as_much():
    """Replace one case by every extreme one, in units of the blocks' diameters: Δ₂ = m√J/n."""
    torch.manual_seed(0)
    n, channels, bins = 4, 2, 3
    kinds = {"a": "feature_mean", "b": "intensity_std", "h": "histogram"}
    blocks = 3 + 1 + channels
    diameters = {"a": 4.0, "b": 99.0, "h": math.sqrt(2)}

    def case(a, b, h):
        return {"a": torch.tensor(a), "b": torch.tensor([b]), "h": h}

    def peak(*where):
        return torch.nn.functional.one_hot(torch.tensor(where), bins).double()

    extremes = [
        case([-1e9] * 3, -5.0, peak(0, 0)),
        case([1e9] * 3, 1e9, peak(2, 1)),
        case([math.inf] * 3, math.inf, peak(1, 1)),
        case([-math.inf, math.inf, math.nan], math.nan, torch.full((channels, bins), math.nan)),
        case([0.0] * 3, 50.0, torch.full((channels, bins), 1e30)),
        case([-1.0, 3.0, -1.0], 1.0, torch.tensor([[-1e9, 0.0, 1e9], [5.0, 5.0, -5.0]])),
        case(torch.randn(3).tolist(), 7.0, torch.rand(channels, bins)),
    ]
    others = [case(torch.randn(3).tolist(), 10.0, torch.rand(channels, bins)) for _ in range(n - 1)]
    means = [released(Given([*others, extreme], **kinds), n) for extreme in extremes]
    distances = [
        math.sqrt(sum(float(((p[k] - q[k]) / diameters[k]).square().sum()) for k in kinds))
        for p in means
        for q in means
    ]
    bound = math.sqrt(blocks) / n
    assert max(distances) <= bound + 1e-12
    assert max(distances) == pytest.approx(bound, rel=1e-12)


def test_noise_is_the_multiplier_times_the_bound_in_every_block():
    """Against the equation, with the generator's own numbers, in float64."""
    n, z, m = 5, 0.7, 2
    kinds = {"a": "feature_mean", "h": "histogram"}
    torch.manual_seed(1)
    values = [{"a": torch.randn(2), "h": torch.rand(3, 4).softmax(dim=1)} for _ in range(n)]
    changes = {"noise_multiplier": z, "cases_per_patient": m}
    payload = released(Given(values, **kinds), n, random.Random(3), **changes)

    draw, blocks = random.Random(3), 2 + 3
    sensitivity = m * math.sqrt(blocks) / n
    for index in range(2):
        mean = math.fsum(min(max(float(v["a"][index]), -1.0), 3.0) for v in values) / n
        noisy = mean + z * sensitivity * 4.0 * draw.gauss(0, 1)
        assert float(payload["a"][index]) == pytest.approx(min(max(noisy, -1.0), 3.0), rel=1e-12)
    mean = torch.stack([v["h"].double() for v in values]).mean(dim=0)
    noise = torch.tensor([draw.gauss(0, 1) for _ in range(12)], dtype=torch.float64).view(3, 4)
    noisy = mean + z * sensitivity * math.sqrt(2) * noise
    for row, expected in zip(payload["h"], noisy, strict=True):
        # The nearest histogram: Σ max(0, v − t) = 1, t by bisection.
        low, high = float(expected.min()) - 1, float(expected.max())
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if float((expected - middle).clamp_min(0).sum()) > 1 else (low, middle)
        torch.testing.assert_close(row, (expected - low).clamp_min(0), rtol=0, atol=1e-12)


def test_noise_comes_from_the_operating_system_and_not_from_the_seed():
    exchange = [Given([{"a": torch.zeros(8)}] * 3, a="feature_mean") for _ in range(2)]
    payloads = []
    for given in exchange:
        torch.manual_seed(0)
        random.seed(0)
        guard = PrivacyGuard("A", policy(noise_multiplier=0.01), 3)  # values at a bound would be equal
        assert isinstance(guard.generator, random.SystemRandom)
        guard.observe("m", given)
        payloads.append(guard.collect("m", given)["a"])
    assert not torch.equal(*payloads)


def test_a_method_must_declare_what_it_contributes_for_every_case():
    with pytest.raises(PrivacyRefused, match="did not declare"):
        released(Given([{"a": torch.zeros(1), "b": torch.zeros(1)}] * 2, a="feature_mean"), 2)
    with pytest.raises(PrivacyRefused, match="2 of 3 cases"):
        released(Given([{"a": torch.zeros(1)}] * 2, a="feature_mean"), 3)
    with pytest.raises(PrivacyRefused, match=r'public bounds: "clip": \{"feature_std"'):
        released(Given([], a="feature_std"), 3, clip={})
    undeclared = Given([])
    undeclared.contributions = lambda bounds: SiteExchange.contributions(undeclared, bounds)
    with pytest.raises(PrivacyRefused, match="site A: m: noise cannot be added to this exchange"):
        released(undeclared, 3)


def test_nothing_is_sent_twice_for_one_release():
    guard = PrivacyGuard("A", policy(), 2)
    exchange = Given([{"a": torch.zeros(1)}] * 2, a="feature_mean")
    guard.observe("m", exchange)
    guard.collect("m", exchange)
    with pytest.raises(PrivacyRefused, match="nothing was observed"):
        guard.collect("m", exchange)


# ---------------------------------------------------------------- what the methods contribute


def cases_of(count=4, slices=(3, 1, 4, 2), channels=1, size=32, seed=0):
    torch.manual_seed(seed)
    return [torch.rand(slices[i], channels, size, size) for i in range(count)]


def context_of(network, cases, name="A"):
    return SiteContext(
        name,
        network,
        case_moments=lambda over: (image_moments(case.permute(1, 2, 3, 0)) for case in cases),
        case_batches=lambda: ([b for b in case.split(2) if len(b)] for case in cases),
        training_images=lambda: iter(cases),
        num_samples=lambda: sum(map(len, cases)),
    )


def contributed(method, cases, network):
    part = method.at_site(context_of(network, cases))
    exchange = part.every_round or part.before_training
    return list(exchange.contributions(policy().bounds).values)


@pytest.mark.parametrize("method", [FedRDN(), FedFA(), FedFAh(), FedFAh(samples="pixels")], ids=repr)
def test_what_a_case_contributes_does_not_depend_on_any_other(method):
    """Replace the last case by an extreme one: all others contribute what they did, to the bit."""
    torch.manual_seed(3)
    network = method.prepare_network(build_network("basicunet", features=[4, 8, 8, 8, 8, 4]))
    network.train()
    cases = cases_of()
    before = contributed(method, cases, network)
    changed = contributed(method, [*cases[:3], torch.full((9, 1, 64, 64), 1e6)], network)
    assert any(not torch.equal(before[3][key], changed[3][key]) for key in before[3])
    for first, second in zip(before[:3], changed[:3], strict=True):
        for key in first:
            assert torch.equal(first[key], second[key])


def test_fedrdn_contributes_the_statistics_of_each_image():
    cases = cases_of()
    for case, entries in zip(cases, contributed(FedRDN(), cases, build_network("basicunet")), strict=True):
        torch.testing.assert_close(entries["mean"], case.double().mean().view(1))
        torch.testing.assert_close(entries["std"], case.double().std(correction=0).view(1))


def test_fedfa_contributes_a_case_as_the_mean_over_its_images_in_evaluation_mode():
    torch.manual_seed(0)
    network = FedFA().prepare_network(build_network("basicunet", features=[4, 8, 8, 8, 8, 4]))
    cases = [*cases_of(3), torch.zeros(0, 1, 32, 32)]
    contributions = contributed(FedFA(), cases, network)
    seen = {}
    for stage, layer in ffa_layers(network).items():
        layer.register_forward_hook(lambda m, args, out, stage=stage: seen.update({stage: args[0]}))
    network.eval()
    for case, values in zip(cases[:3], contributions[:3], strict=True):
        with torch.no_grad():
            network(case)
        for stage, features in seen.items():
            pixels = features.double().flatten(2)
            torch.testing.assert_close(values[f"{stage}/mean"], pixels.mean(2).mean(0), rtol=1e-4, atol=1e-6)
            expected = (pixels.var(2, correction=0) + 1e-6).sqrt().mean(0)
            torch.testing.assert_close(values[f"{stage}/std"], expected, rtol=1e-4, atol=1e-6)
    assert all(value.isnan().all() for value in contributions[3].values())


def test_a_case_without_images_counts_as_the_middle():
    values = [{"a": torch.tensor([3.0])}, {"a": torch.tensor([math.nan])}]
    assert float(released(Given(values, a="feature_mean"), 2)["a"]) == (3.0 + 1.0) / 2
    histograms = [{"h": torch.tensor([[1.0, 0.0]])}, {"h": torch.full((1, 2), math.nan)}]
    histogram = released(Given(histograms, h="histogram"), 2)["h"]
    torch.testing.assert_close(histogram, torch.tensor([[0.75, 0.25]], dtype=torch.float64))


def test_fedfa_sends_the_noisy_means_as_its_own_averages_would_be():
    """Sites with and without noise must agree on the scale: Eq. 5 with a constant batch is the reference."""
    for correction in (False, True):
        method = FedFA(bias_correction=correction, prob=1.0)
        network = method.prepare_network(build_network("basicunet", features=[4, 8, 8, 8, 8, 4]))
        part = method.at_site(context_of(network, cases_of()))
        part.start_round()
        means = {}
        for stage, layer in ffa_layers(network).items():
            constant = torch.rand(2, layer.num_channels, 4, 4)
            layer.train()
            for _ in range(7):
                layer(constant)
            means[f"{stage}/mean"] = constant.mean(dim=(0, 2, 3)).double()
            means[f"{stage}/std"] = (constant.var(dim=(2, 3), correction=0) + 1e-6).sqrt().mean(0).double()
        exact = part.collect()
        for key, value in part.privatised(means, 4).items():
            torch.testing.assert_close(value.float(), exact[key], rtol=1e-4, atol=1e-5)


def test_fedfa_h_bins_in_the_public_range():
    torch.manual_seed(0)
    network = build_network("basicunet", features=[4, 8, 8, 8, 8, 4])
    method = FedFAh()
    part = method.at_site(context_of(network, cases_of()))
    values = list(part.contributions(policy().bounds).values)
    for histogram in (v["histogram"] for v in values):
        torch.testing.assert_close(histogram.sum(dim=1), torch.ones(8, dtype=torch.float64))
    assert part.low.tolist() == [-1.0] * 8
    assert part.high.tolist() == [3.0] * 8
    server = method.every_round(ServerContext(network, 1))
    noisy = released(Given(values, histogram="histogram"), 4, random.Random(0), noise_multiplier=5.0)
    server.check({"histogram": noisy["histogram"].float()})


def test_averages_over_rounds_have_no_bound_and_are_refused():
    method = FedFA(running="continue")
    network = method.prepare_network(build_network("basicunet", features=[4, 8, 8, 8, 8, 4]))
    guard = PrivacyGuard("A", policy(), 4)
    with pytest.raises(PrivacyRefused, match='fedfa: noise needs running="reset"'):
        guard.check("fedfa", method.at_site(context_of(network, cases_of())).every_round)


@pytest.mark.parametrize("methods", ["fedfa,fedbn", "fedfa_h,fedbn", "norm,fedfa"])
def test_features_that_depend_on_what_stays_at_the_site_are_refused(tiny_config, phantom_dir, methods):
    trainer = SiteTrainer(tiny_config(methods), phantom_dir, "cpu", privacy=SitePrivacy(policy()))
    reply = Site("site_A", trainer).answer(FederationServer(tiny_config(methods)).prepare())
    assert "let one patient move what all others contribute" in reply.error
    # Without noise the same job runs, and FedRDN's statistics do not pass through the network.
    trainer = SiteTrainer(tiny_config("fedrdn,fedbn"), phantom_dir, "cpu", privacy=SitePrivacy(policy()))
    assert not Site("site_A", trainer).answer(FederationServer(tiny_config("fedrdn,fedbn")).prepare()).error


def test_after_a_noisy_release_fedrdn_uses_the_noisy_pair_itself():
    context = SiteContext("A", torch.nn.Identity())  # without data: the exact pair cannot be had
    part = FedRDN().at_site(context)
    payload = part.privatised({"mean": torch.tensor([7.0]), "std": torch.tensor([2.0])}, 12)
    assert float(payload["count"]) == 12
    (transform,) = part.transforms(training=False)
    assert float(transform({"image": torch.full((1, 2, 2), 11.0)})["image"].mean()) == 2.0


def test_the_number_of_studies_is_not_that_of_one_patient():
    guard = PrivacyGuard("A", PrivacyPolicy(), cases=40)
    assert guard.counts([2] * 12)["studies"] == 24
    assert not guard.counts([1] * 11 + [29]).get("studies")


# ---------------------------------------------------------------- the account


def by_hand(noise, count, delta):
    accountant = RDPAccountant()
    for _ in range(count):
        accountant.step(noise_multiplier=noise, sample_rate=1.0)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(("noise", "count"), [(0.8, 1), (1.5, 6), (5.0, 40)])
def test_epsilon_is_what_opacus_says_and_what_the_equation_says(noise, count):
    delta = 1e-5
    epsilon = epsilon_spent([(noise, count)], delta)
    assert epsilon == pytest.approx(by_hand(noise, count, delta), rel=1e-9)
    # RDP of the Gaussian mechanism, α/(2z²), and its conversion (Balle et al., 2020, Theorem 21).
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    bound = min(
        count * a / (2 * noise**2) + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1)
        for a in orders
    )
    assert epsilon == pytest.approx(bound, rel=1e-9)


def test_the_ledger_survives_restarts_and_is_shared_by_all_jobs(tmp_path):
    path = tmp_path / "state" / "privacy_ledger.json"
    cap = by_hand(1.0, 3, 1e-5) * 1.0001
    spent = [PrivacyLedger(path).spend(1.0, 1e-5, cap) for _ in range(4)]
    assert spent[:3] == [pytest.approx(by_hand(1.0, k, 1e-5)) for k in (1, 2, 3)]
    assert spent[3] is None
    assert PrivacyLedger(path).releases() == [(1.0, 3, 1.0)]
    # Another job with more noise still fits where the fourth did not.
    assert PrivacyLedger(path).spend(50.0, 1e-5, cap * 1.01) is not None
    assert PrivacyLedger(path).releases() == [(1.0, 3, 1.0), (50.0, 1, 1.0)]


def spend_twenty_times(path):
    ledger = PrivacyLedger(path)
    for _ in range(20):
        ledger.spend(9.0, 1e-5, 1e9)


def test_jobs_at_the_same_time_lose_no_entry(tmp_path):
    path = tmp_path / "ledger.json"
    processes = multiprocessing.get_context("fork")  # which have imported everything
    jobs = [processes.Process(target=spend_twenty_times, args=(path,)) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0]
    assert PrivacyLedger(path).releases() == [(9.0, 40, 1.0)]


@pytest.mark.parametrize("content", ["", "{"])
def test_a_damaged_ledger_counts_as_spent(tmp_path, content):
    path = tmp_path / "ledger.json"
    path.write_text(content)
    guard = PrivacyGuard("A", policy(), 2, ledger=PrivacyLedger(path))
    exchange = Given([{"a": torch.zeros(1)}] * 2, a="feature_mean")
    with pytest.raises(PrivacyRefused, match=r"site A: .*ledger\.json is not a privacy ledger"):
        guard.observe("m", exchange)
    assert path.read_text() == content


def test_the_budget_is_entered_before_the_images_are_read(tmp_path):
    def burning():
        raise RuntimeError("power cut")
        yield

    guard = PrivacyGuard("A", policy(), 2, ledger=PrivacyLedger(tmp_path / "ledger.json"))
    exchange = Given(burning(), a="feature_mean")
    with pytest.raises(RuntimeError, match="power cut"):
        guard.observe("m", exchange)
    assert PrivacyLedger(tmp_path / "ledger.json").releases() == [(0.5, 1, 1.0)]


# ---------------------------------------------------------------- a federation with noise


def test_a_run_records_epsilon_and_stops_at_the_cap(tiny_config, phantom_dir, tmp_path):
    """FedRDN is one release, FedFA+ two a round."""
    config = tiny_config("fedrdn,fedfa+", rounds=3)
    cap = by_hand(0.5, 5, 1e-5) * 1.0001
    trainer = SiteTrainer(
        config, phantom_dir, "cpu", privacy=SitePrivacy(policy(epsilon=cap), tmp_path / "ledger.json")
    )
    site, server = Site("site_A", trainer), FederationServer(config, execution=Execution(min_sites=1))
    reply = site.answer(server.prepare())
    server.accept_preparation("site_A", reply)
    twin = {key: value.clone() for key, value in reply.payload.items()}
    reply.payload = twin
    server.accept_preparation("site_B", reply)
    server.finish_preparation()
    for round_, epsilon in ((1, by_hand(0.5, 3, 1e-5)), (2, by_hand(0.5, 5, 1e-5))):
        reply = site.answer(server.start_round(["site_A"]))
        assert server.accept("site_A", reply), server.rounds[-1]["refused"]
        entry = server.rounds[-1]["sites"]["site_A"]
        assert entry["privacy/epsilon"] == pytest.approx(epsilon), round_
        assert entry["privacy/delta"] == 1e-5
        server.finish_round()
    server.state = {k: v + 0.5 if v.is_floating_point() else v for k, v in server.state.items()}
    reply = site.answer(server.start_round(["site_A"]))
    assert "site site_A: privacy budget spent" in reply.error
    assert not server.accept("site_A", reply)
    assert "privacy budget spent" in server.rounds[-1]["refused"][0]["reason"]
    assert not reply.weights
    assert PrivacyLedger(tmp_path / "ledger.json").releases() == [(0.5, 5, 1.0)]
    # Refused before any work: the network holds what the server sent, untrained.
    sent = {key: server.state[key] for key in server.shared}
    assert all(torch.equal(trainer.network.state_dict()[key], sent[key]) for key in sent)


def test_without_a_policy_nothing_changes_and_noise_does_not_disturb_training(tiny_config, phantom_dir):
    """The guard's pass leaves the training's random numbers alone: FedFA's γ acts from round 2 on."""
    sites = ["site_A", "site_B"]
    plain = run_in_process(tiny_config("fedfa", rounds=1), phantom_dir, sites, "cpu")
    guarded = run_in_process(
        tiny_config("fedfa", rounds=1),
        phantom_dir,
        sites,
        "cpu",
        privacy=partial(SitePrivacy, PrivacyPolicy(min_images=2)),
    )
    noisy = run_in_process(
        tiny_config("fedfa", rounds=1), phantom_dir, sites, "cpu", privacy=partial(SitePrivacy, policy())
    )
    for other in (guarded, noisy):
        assert all(torch.equal(plain.state[key], other.state[key]) for key in plain.state)
    assert "privacy/epsilon" not in guarded.rounds[0]["sites"]["site_A"]
    assert plain.payload.keys() == noisy.payload.keys()
    assert any(not torch.equal(plain.payload[k], noisy.payload[k]) for k in plain.payload)
    assert all(torch.equal(plain.payload[k], guarded.payload[k]) for k in plain.payload)
