"""Secure aggregation, attacked: by a server, by sites that vanish, and by sites that lie."""

from itertools import combinations

import numpy as np
import pytest
import reference
import torch

from medfedaug.config.run import Execution
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation import FederationServer, run_in_process
from medfedaug.federation.in_process import InProcessCarrier
from medfedaug.federation.messages.messages import CONFIRM, KEYS, MASKED, OPEN, SHARES, TRAIN, Request
from medfedaug.methods import parse_methods
from medfedaug.models import networks
from medfedaug.simulate import configure, simulate

SITES = "ABCD"


class Recording(InProcessCarrier):
    """Keeps all that reaches the server, and what the sites would have sent without masks."""

    log: list

    def ask(self, request, sites, needed, accept):
        def keep(site, reply):
            self.log.append((request, site, reply))
            return accept(site, reply)

        return super().ask(request, sites, needed, keep)


@pytest.fixture
def federation(make_photos, tmp_path, monkeypatch):
    """`federation("fedfa", carrier=Hostile, min_sites=3, secure=False)`: four sites of photographs."""
    for name, network in reference.NETWORKS.items():
        monkeypatch.setitem(networks._NETWORKS, name, network)
    for index, name in enumerate(SITES):
        make_photos(name, 5 * (1 + index % 3), size=8)

    def run(methods="fedavg", carrier=Recording, min_sites=0, secure=True, sites=SITES, **changes):
        folder = tmp_path / "photos"
        values = {"network": "reference_linear", "rounds": 1, "batch_size": 6, "learning_rate": 0.05}
        values["max_share"] = 1.0  # nobody can lower a share under masks, so without them nobody does
        config = configure(
            find_sites(folder),
            methods=tuple(parse_methods(methods)),
            secure_aggregation=secure,
            **{**values, **changes},
        )
        carrier.log = []
        execution = Execution(min_sites=min_sites, threads=1)
        return run_in_process(config, folder, list(sites), "cpu", execution=execution, carrier=carrier)

    return run


def silent(**vanished):
    """A carrier whose sites do not answer: `silent(keys="A", open="AB")`."""

    class Silent(Recording):
        def ask(self, request, sites, needed, accept):
            gone = set(vanished.get(request.task, ()))
            silent_sites = super().ask(request, [site for site in sites if site not in gone], needed, accept)
            return {**silent_sites, **{site: f"site {site} did not answer" for site in gone & set(sites)}}

    return Silent


def masked(carrier) -> dict[str, np.ndarray]:
    return {
        site: reply.masks[MASKED].numpy().view(np.uint64)
        for request, site, reply in carrier.log
        if request.task == TRAIN and MASKED in reply.masks
    }


def assert_close(state, expected, sites, share=1.0):
    """Within what rounding to 2^-36 at every site may do, and that of float32."""
    assert set(state) == set(expected)
    for key, value in expected.items():
        allowed = sites * 2.0**-37 / share + 2.0**-23 * value.double().abs()
        assert bool(((state[key].double() - value.double()).abs() <= allowed).all()), key


# ---------------------------------------------------------------- the same sums


@pytest.mark.parametrize(
    ("methods", "changes"),
    [
        ("fedavg", {}),
        ("fedfa+", {"network": "reference_convolutional"}),
        ("fedfd", {"network": "reference_convolutional", "weighting": "uniform"}),
    ],
)
def test_sums_are_those_without_masks_to_the_stated_precision(federation, methods, changes):
    plain = federation(methods, secure=False, **changes)
    secure = federation(methods, **changes)
    assert_close(secure.state, plain.state, len(SITES))
    for key, value in plain.payload.items():
        # γ divides by variances over sites, which are differences of sums.
        torch.testing.assert_close(secure.payload[key], value, rtol=1e-4, atol=1e-6)
    assert set(plain.payload) == set(secure.payload)
    (entry,) = secure.rounds
    assert entry["methods"]["masks"]["summed"] == list(SITES)
    assert entry["methods"]["masks"]["recovered"] == []
    assert entry["bytes"]["masks"]["up"] > 0
    update = sum(secure.state[key].numel() for key in secure.shared)
    assert entry["bytes"]["model"]["up"] >= 8 * len(SITES) * update


def test_masks_are_others_in_every_round_and_run_and_the_model_is_the_same(federation):
    models, sent = [], []
    for _ in range(2):
        models.append(federation("fedavg", rounds=2).state)
        sent += [
            reply.masks for request, site, reply in Recording.log if site == "A" and request.task != OPEN
        ]
    assert reference.same(*models)
    seen = [bytes(m[MASKED].numpy().tobytes()) for m in sent if MASKED in m]
    keys = [m["mask"] for m in sent if "mask" in m]
    assert len(set(seen)) == len(seen) == 4
    assert len(set(keys)) == len(keys) == 4


# ---------------------------------------------------------------- what the server sees


def test_no_sites_numbers_and_no_sum_of_fewer_can_be_read_at_the_server(federation):
    plain = federation("fedfa", secure=False, network="reference_convolutional")
    own = {
        site: torch.cat([v.double().flatten() for v in reply.weights.values()]).numpy()
        for request, site, reply in Recording.log
        if request.task == TRAIN
    }
    secure = federation("fedfa", network="reference_convolutional")
    for request, _, reply in Recording.log:
        assert not reply.weights
        assert not reply.payload, request.task
    words = masked(Recording)
    assert set(words) == set(own) == set(SITES)
    shares = {site: n / sum(plain.sites.values()) for site, n in plain.sites.items()}
    true = {
        site: np.rint(values * shares[site] * 2.0**36).astype(np.int64).view(np.uint64)
        for site, values in own.items()
    }
    size = len(true["A"])  # the weights come first
    for count in range(1, len(SITES) + 1):
        # Not even the sum of all is readable before the sites have opened it.
        for chosen in combinations(SITES, count):
            left = sum(words[site][:size] for site in chosen) - sum(true[site] for site in chosen)
            high = (left >> np.uint64(56)).astype(float)  # uniform from 0 to 255 under a mask
            assert abs(high.mean() - 127.5) < 6 * 73.9 / np.sqrt(size)
            assert np.count_nonzero(left < 2**40) + np.count_nonzero(left > 2**64 - 2**40) == 0
    assert secure.state.keys() == plain.state.keys()


# ---------------------------------------------------------------- sites that vanish


@pytest.mark.parametrize("task", [KEYS, SHARES, TRAIN])
def test_a_site_that_vanishes_before_its_numbers_came_is_left_out_and_the_round_goes_on(federation, task):
    plain = federation("fedfa", silent(train="B"), 3, secure=False, network="reference_convolutional")
    secure = federation("fedfa", silent(**{task: "B"}), 3, network="reference_convolutional")
    share = 1 - secure.sites["B"] / sum(secure.sites.values())
    assert_close(secure.state, plain.state, 3, share if task == TRAIN else 1.0)
    (entry,) = secure.rounds
    assert [trouble["site"] for trouble in entry["missing"]] == ["B"]
    assert entry["methods"]["masks"]["summed"] == ["A", "C", "D"]
    assert entry["methods"]["masks"]["recovered"] == (["B"] if task == TRAIN else [])


@pytest.mark.parametrize("task", [CONFIRM, OPEN])
def test_a_site_that_vanishes_after_its_numbers_came_counts(federation, task):
    plain = federation(secure=False)
    secure = federation(carrier=silent(**{task: "B"}))
    assert_close(secure.state, plain.state, 4)
    assert [trouble["site"] for trouble in secure.rounds[0]["missing"]] == ["B"]


@pytest.mark.parametrize("slow", [TRAIN, OPEN])
def test_a_sum_that_needs_more_sites_than_a_round_waits_for_them(federation, slow):
    """Of four sites three must open a sum, whatever `min_sites` and `grace` are."""

    class Hasty(Recording):
        def ask(self, request, sites, needed, accept):
            if request.task != slow:
                return super().ask(request, sites, needed, accept)
            good, silent = 0, {}
            for site in sites:  # with a grace of 0, the rest are not waited for
                if good >= needed:
                    silent[site] = f"site {site} did not answer while the others were waited for"
                else:
                    good += accept(site, self.sites[site].answer(request))
            return silent

    server = federation(carrier=Hasty, min_sites=2)
    assert len(server.rounds[0]["methods"]["masks"]["summed"]) == (3 if slow == TRAIN else 4)


@pytest.mark.parametrize(
    ("vanished", "words"),
    [
        ({"open": "BC"}, "2 sites opened the sum, and 3 of 4 are needed"),
        ({"keys": "BC"}, "there are keys of 2 sites, and 3 are needed"),
        ({"shares": "BC"}, "there are shares of 2 sites, and 3 are needed"),
        ({"train": "BC"}, "there are numbers of 2 sites, and 3 are needed|2 sites opened|0 sites opened"),
    ],
)
def test_too_few_sites_end_the_run_with_the_reason(federation, vanished, words):
    with pytest.raises(RunFailed, match=words):
        federation(carrier=silent(**vanished), min_sites=2)


# ---------------------------------------------------------------- a server that lies


class Lying(Recording):
    """Changes requests for some sites: `change(request, site)`; `then` is called with the finished round."""

    changes = staticmethod(lambda request, site: request)

    def ask(self, request, sites, needed, accept):
        for site in sites:
            sent = self.changes(request, site)
            reply = self.sites[site].answer(sent)
            self.log.append((sent, site, reply))
            accept(site, reply)
        return {}


def lying(change):
    return type("LyingNow", (Lying,), {"changes": staticmethod(change)})


def spoiling(task, site, masks):
    """A carrier that replaces the masks of one site's replies to a task: `masks(reply)`."""

    class Spoiling(Recording):
        def ask(self, request, sites, needed, accept):
            def spoil(name, reply):
                if request.task == task and name == site:
                    reply.masks = masks(reply)
                return accept(name, reply)

            return super().ask(request, sites, needed, spoil)

    return Spoiling


def replaced(request, **masks):
    return Request(**{**vars(request), "masks": {**request.masks, **masks}})


def test_a_site_is_not_told_to_train_without_masks_or_with_the_same_ones_twice(federation):
    for change, words in (
        (lambda r: Request(**{**vars(r), "masks": {}}), "other shares than the sites'"),
        (lambda r: replaced(r, shares={}), "other shares than the sites'"),
        (lambda r: replaced(r, shares={k: r.masks["shares"][k] for k in "AB"}), "other shares|of 2 sites"),
        (lambda r: Request(**{**vars(r), "selected_round": 1}), "another training than the sites agreed"),
    ):
        carrier = lying(lambda r, site, change=change: change(r) if r.task == TRAIN else r)
        with pytest.raises(RunFailed, match=words):
            federation(carrier=carrier)

    class Twice(Recording):
        def ask(self, request, sites, needed, accept):
            silent_sites = super().ask(request, sites, needed, accept)
            if request.task in (TRAIN, SHARES):
                for site in sites:
                    again = self.sites[site].answer(request)
                    assert not again.masks
                    assert "already" in again.error
            return silent_sites

    assert federation(carrier=Twice).rounds


# ---------------------------------------------------------------- a site that lies


def test_a_hostile_site_can_end_the_run_and_nobody_can_tell_which(federation):
    def rubbish(reply):
        return {MASKED: torch.randint(-(2**62), 2**62, reply.masks[MASKED].shape)}

    with pytest.raises(RunFailed, match=r"mean of A, B, C, D cannot be used .* nobody can tell whose"):
        federation(carrier=spoiling(TRAIN, "C", rubbish))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda reply: {MASKED: reply.masks[MASKED][:-1]},
        lambda reply: {MASKED: reply.masks[MASKED].double()},
        lambda reply: {MASKED: "numbers"},
        lambda reply: {**reply.masks, "more": torch.zeros(1)},
        lambda reply: {},
    ],
)
def test_what_is_no_masked_update_is_refused_by_name(federation, spoil):
    server = federation(carrier=spoiling(TRAIN, "C", spoil), min_sites=3)
    (entry,) = server.rounds
    assert [refused["site"] for refused in entry["refused"]] == ["C"]
    assert entry["methods"]["masks"]["recovered"] == ["C"]


def test_false_shares_end_the_run_and_are_named(federation):
    def false_shares(reply):
        return {name: bytes(len(share)) for name, share in reply.masks.items()}

    with pytest.raises(RunFailed, match="cannot be put together, since one of A, B, C sent a false share"):
        federation(carrier=spoiling(OPEN, "B", false_shares))


# ---------------------------------------------------------------- what does not go together


@pytest.mark.parametrize(
    ("methods", "changes", "words"),
    [
        ("fedrdn", {}, "what fedrdn exchanges before training is each site's own"),
        ("median", {}, "median makes the global model from each site's own"),
        ("scaffold", {}, "scaffold: its result does not follow from the sum of the sites' values"),
        ("single", {}, "nothing that is added up"),
        ("fedavg", {"max_share": 0.5}, "max_share limits what single sites add"),
    ],
)
def test_what_needs_the_values_of_single_sites_is_refused_with_the_reason(
    federation, methods, changes, words
):
    with pytest.raises(ConfigError, match=f"secure aggregation: .*{words}"):
        federation(methods, **changes)


def test_a_job_under_masks_is_no_other_job(federation):
    """A site never sends its numbers as they are because the server leaves out what belongs to masks."""
    plain = federation(secure=False)
    assert isinstance(plain, FederationServer)
    site = next(iter(Recording.log))
    assert site[0].masks == {}
    carrier = lying(lambda r, s: Request(KEYS, 1, run=r.run) if r.task == TRAIN else r)
    with pytest.raises(RunFailed, match="no task 'keys'"):
        federation(secure=False, carrier=carrier)


@pytest.mark.slow
def test_nvflare_carries_it_to_the_same_model(photo_config, onednn, tmp_path):
    """Keys, shares, masked numbers and what opens them are messages like all others."""
    config = photo_config("fedavg", secure_aggregation=True)
    models = {}
    for engine in ("inprocess", "nvflare"):
        out = tmp_path / engine
        results = simulate(
            tmp_path / "photos",
            out,
            config,
            engine=engine,
            device="cpu",
            report=False,
            execution=Execution(threads=1),
        )
        models[engine] = torch.load(out / "final_model.pt", weights_only=True)
        for entry in results["rounds"]:
            assert entry["methods"]["masks"]["summed"] == ["A", "B", "C"]
            assert set(entry["bytes"]) == {"model", "masks"}
    assert reference.same(models["inprocess"], models["nvflare"])
