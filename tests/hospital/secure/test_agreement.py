"""Secure aggregation between hospitals with kits, against a server that keeps to no rule.

Everything goes through kits, certificates, NVFlare's executor and the real sites (`hostile.HostileServer`).
An oracle that knows all secrets says what the server could compute of all that it saw (`hostile.Oracle`).
"""

import random
from dataclasses import replace
from functools import cache
from itertools import count, product

import numpy as np
import pytest
import reference
import torch
from hospitals import Hospital
from hostile import RUN, STEPS, HostileServer, Oracle, get, leaves, others, put
from secure_project import SERVER, Project, write_kit

from medfedaug.data.sites import find_sites
from medfedaug.federation.messages.messages import CONFIRM, KEYS, OPEN, SHARES, TEST, TRAIN, VALIDATE, Request
from medfedaug.hospital.secure import agreement, identity, masks, unmasking
from medfedaug.hospital.secure.history import SumHistory
from medfedaug.methods import parse_methods
from medfedaug.models import networks
from medfedaug.simulate import configure

SITES = "ABCDEF"


@pytest.fixture(scope="module")
def project():
    return Project()


@pytest.fixture(autouse=True, scope="module")
def _keys_checked_once():
    """A private key is checked for as long as a round takes, whenever a site starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "load_pem_private_key", cache(identity.load_pem_private_key))
        yield


@pytest.fixture(scope="module")
def issued(project):
    return {name: project.issue(name) for name in (*SITES, SERVER)}


@pytest.fixture
def oracle(monkeypatch):
    new = Oracle()
    new.watch(monkeypatch)
    return new


@pytest.fixture
def serve(make_photos, tmp_path, monkeypatch, project, issued, oracle):
    """A hostile server of some hospitals: `serve("ABCD", max_sum_sets=1)`."""
    monkeypatch.setitem(networks._NETWORKS, "reference_linear", reference.linear)

    def make(sites="ABCD", settings=None, **rules):
        hospitals = {}
        for index, name in enumerate(sites):
            make_photos(name, 5 + index, size=8)
            write_kit(tmp_path / "kits" / name, *issued[name], project.root)
            hospitals[name] = Hospital(
                *(tmp_path / "kits" / name, tmp_path / "photos" / name),
                privacy={"min_images": 1},
                jobs={"max_sum_sets": 10**6, **rules},
            )
        config = configure(
            find_sites(tmp_path / "photos"),
            methods=tuple(parse_methods("fedavg")),
            **{"network": "reference_linear", "rounds": 1000, "batch_size": 32, "learning_rate": 0.05},
            **{"secure_aggregation": True, "validate_every": 1000, **(settings or {})},
        )
        return HostileServer(hospitals, config, oracle)

    return make


def errors(replies, task):
    return [reply.error for reply in replies[task] if reply.error]


def check_alive(server, oracle):
    """After all of it, an honest round still gives the sum of all, to the last bit."""
    before = len(oracle.sealed)
    replies, total = server.play(server.model(10**6 + server.round))
    assert total is not None, [reply.error for answers in replies.values() for reply in answers]
    new = oracle.sealed[before:]
    assert len(new) == len(server.hospitals)
    assert np.array_equal(total, sum(one.words for one in new))
    oracle.check_equations()


# ---------------------------------------------------------------- the oracle itself


def test_an_honest_round_gives_the_sum_of_all_and_of_no_fewer(serve, oracle):
    server = serve("ABCD")
    check_alive(server, oracle)
    assert oracle.smallest() == 4
    # A site that helps the server takes its own numbers out of the sum.
    assert oracle.smallest("D") == 3
    assert oracle.smallest("BCD") == 1


def test_the_oracle_sees_other_models_where_sites_do_not_agree_on_one(serve, oracle, monkeypatch):
    server = serve("ABCD")
    for module in (masks, unmasking):
        monkeypatch.setattr(module, "request_digest", lambda *_: bytes(32))
    dead = server.model(2, scale=0.0)
    _, total = server.play(
        server.model(1), lambda r, name: [put(r, ["weights"], dead) if r.task == TRAIN and name != "A" else r]
    )
    assert total is not None
    known = {one.model for one in oracle.sealed if one.site != "A"}
    assert oracle.smallest(known=known) == 1


# ---------------------------------------------------------------- the attacks that were found


def test_a_server_that_lies_about_weights_gets_no_keys(serve, oracle):
    """With a tiny sum of weights, terms once left the range and dropped out of the sum."""
    server = serve("ABCD")
    for weights in (
        lambda found, name: {**dict.fromkeys(found, 1e-9), name: found[name]},
        lambda found, name: dict.fromkeys(found, 1e-9),
        lambda found, name: {**found, name: found[name] / 2**27},
        lambda found, name: {**found, "A": 1e15},
    ):
        replies, total = server.play(
            server.model(server.round),
            lambda r, name, weights=weights: [
                put(r, ["masks", "weights"], weights(r.masks["weights"], name)) if r.task == KEYS else r
            ],
        )
        assert total is None
        assert not replies[TRAIN]
    assert not oracle.sealed
    check_alive(server, oracle)


def test_a_site_with_another_model_is_in_no_sum(serve, oracle):
    """Pasquini et al. (CCS 2022): who trains a model without gradients adds nothing of its own."""
    server = serve("ABCD")
    dead = server.model(2, scale=0.0)

    def at_training(r, name):
        return [put(r, ["weights"], dead) if r.task == TRAIN and name != "A" else r]

    replies, total = server.play(server.model(1), at_training)
    assert total is None
    assert "another training than the sites agreed on" in errors(replies, TRAIN)[0]

    def from_the_start(r, name):
        if name != "A" and r.task == KEYS:
            digest = agreement.request_digest(Request(TRAIN, r.round, weights=dead, run=r.run), {})
            return [put(r, ["masks", "request"], digest)]
        return at_training(r, name)

    def and_passed_on(r, name):
        # The server says that all agreed to what this site agreed to.
        if r.task == SHARES:
            own = r.masks["keys"][name]["agreed"]
            return [
                put(
                    r,
                    ["masks", "keys"],
                    {site: {**sent, "agreed": own} for site, sent in r.masks["keys"].items()},
                )
            ]
        return from_the_start(r, name)

    for change in (from_the_start, and_passed_on):
        real, unmasking.ServerMasks.accept_keys = unmasking.ServerMasks.accept_keys, take_any_keys
        try:
            replies, total = server.play(server.model(3), change)
        finally:
            unmasking.ServerMasks.accept_keys = real
        assert total is None
        assert len(errors(replies, SHARES)) == 4
    known = {one.model for one in oracle.sealed if one.site != "A"}
    assert oracle.smallest(known=known) is None
    check_alive(server, oracle)


def test_a_site_with_other_frozen_entries_is_in_no_sum(serve, oracle):
    """The entries that no site trains decide over the gradients of all others."""
    server = serve("ABCD", {"freeze": ["1.weight"]})
    model, dead = server.model(1), server.model(2, scale=0.0)
    once = {"frozen/1.weight": model["1.weight"]}

    def change(r, name):
        if r.task == KEYS:
            digest = agreement.request_digest(Request(TRAIN, r.round, weights=model, run=r.run), once)
            return [put(r, ["masks", "request"], digest)]
        shown = model if name == "A" else {**model, "1.weight": dead["1.weight"]}
        return [replace(r, weights=shown, once=once) if r.task == TRAIN else r]

    real, unmasking.ServerMasks.accept_keys = unmasking.ServerMasks.accept_keys, take_any_keys
    try:
        replies, total = server.play(model, change)
    finally:
        unmasking.ServerMasks.accept_keys = real
    assert total is None
    assert len([e for e in errors(replies, TRAIN) if "another training than the sites agreed" in e]) == 3


def take_any_keys(self, site, reply):
    self._keys[site] = {key: value for key, value in reply.masks.items() if isinstance(value, bytes)}


def test_a_site_that_was_shown_another_model_before_trains_the_one_that_was_agreed_on(serve, oracle):
    """What a site keeps of requests that nobody signed (to score a model) has no part in its training."""
    server = serve("ABCD")
    model, shown = server.model(1), server.model(2)
    _, plain = server.play(model)
    for name in "AB":
        # Loaded, even where it may not be scored.
        server.ask(name, Request(VALIDATE, 1, weights=shown, run=RUN))
        assert not server.ask(name, Request(TEST, 1, weights=shown, run=RUN)).error
    _, after = server.play(model, round_=1)
    assert np.array_equal(plain, after)
    for name in "AB":
        once = {"initial/net": torch.zeros(3)}
        server.ask(name, Request(VALIDATE, 1, weights=shown, once=once, run=RUN))
    replies, total = server.play(server.model(3))
    assert total is None
    assert len([e for e in errors(replies, TRAIN) if "another training than the sites agreed" in e]) == 2


def test_shares_of_a_training_that_failed_open_nothing(serve, oracle):
    """A second training with fewer dealers once opened, with the shares of the first, single updates."""
    server = serve(SITES)
    few = "ABCD"

    def change(r, name):
        if r.task == TRAIN and name in few:
            fewer = put(r, ["masks", "shares"], {n: r.masks["shares"][n] for n in few})
            return [put(r, ["weights"], {"none": torch.zeros(1)}), fewer, r]
        summed = {"A": "AEFB", "E": "AEFC", "F": "AEFD", "B": "AEFB", "C": "AEFC", "D": "AEFD"}
        return [put(r, ["masks", "summed"], sorted(summed[name])) if r.task in (CONFIRM, OPEN) else r]

    replies, total = server.play(server.model(1), change)
    assert total is None
    assert sum(not reply.error for reply in replies[TRAIN]) == 2
    assert any("has no keys for this round" in error for error in errors(replies, TRAIN))
    assert not any(reply.masks for reply in replies[OPEN])
    assert oracle.smallest() is None
    check_alive(server, oracle)


def test_a_server_cannot_choose_a_few_sites_of_many(serve, oracle):
    server = serve(SITES, known_sites=[*SITES, "G", "H"])
    replies, _ = server.play(server.model(1), sites="ABC")
    assert all(
        "there are keys of 3 of the 8 sites that it knows, and 6 are needed" in r.error
        for r in replies[SHARES]
    )
    assert len(replies[SHARES]) == 3
    check_alive(server, oracle)


def test_sites_count_those_that_they_have_met_where_nobody_told_them(serve, oracle):
    server = serve(SITES)
    check_alive(server, oracle)  # all six have met
    server.crash(*SITES)
    replies, total = server.play(server.model(1), sites="ABC")
    assert total is None
    assert all("of 3 of the 6 sites that it knows, and 4 are needed" in r.error for r in replies[SHARES])
    _, total = server.play(server.model(2), sites="ABCD")
    assert total is not None
    assert oracle.smallest() == 4


@pytest.mark.parametrize(
    ("what", "crash"),
    [("the same round", tuple("ABCD")), ("another job", tuple("ABCD")), ("nearly the same model", ())],
    ids=["round after a crash", "another job after a crash", "near"],
)
def test_the_same_model_is_not_summed_again_without_a_site(serve, oracle, crash, what):
    server = serve("ABCD")
    model = server.model(1)
    _, total = server.play(model)
    assert total is not None
    server.crash(*crash)
    if what == "another job":
        server.begin_job()
    if what == "nearly the same model":
        # About a hundredth of what training moves it.
        model = {key: value + 1e-6 for key, value in model.items()}
    replies, total = server.play(
        model, sites="ABC", round_=server.round if what == "the same round" else None
    )
    assert total is None
    assert all("was opened for other sites before" in reply.error for reply in replies[CONFIRM])
    # The same sites again are no difference; after a crash of the server that is what it asks for.
    _, total = server.play(model, round_=1)
    assert total is not None
    # The oracle does not compare models: sums of two models have no difference to it.
    assert oracle.smallest() == 4


def test_the_sets_of_sites_of_a_job_are_counted(serve, oracle):
    server = serve("ABCD", max_sum_sets=2)
    seeds = count(1)
    assert server.play(server.model(next(seeds)))[1] is not None
    assert server.play(server.model(next(seeds)), sites="ABC")[1] is not None
    assert server.play(server.model(next(seeds)))[1] is not None
    server.crash(*"ABCD")
    replies, total = server.play(server.model(next(seeds)), sites="BCD")
    assert total is None
    # To D, which was not in the sum of ABC, it is the second.
    refused = errors(replies, CONFIRM)
    assert len(refused) == 2
    assert all("over 3 different sets of sites, and its rule max_sum_sets is 2" in error for error in refused)
    server.begin_job()
    assert server.play(server.model(next(seeds)), sites="BCD")[1] is not None


def test_different_lists_of_the_sum_are_never_both_opened(serve, oracle):
    """Without signatures, six sites told different lists opened the sum of three."""
    server = serve(SITES)
    lists = {"A": "ABCDE", "B": "ABCDE", "C": "ABCDE", "D": "ABCDF", "E": "ABCEF", "F": "ABCDF"}

    def change(r, name):
        if r.task not in (CONFIRM, OPEN):
            return [r]
        r = put(r, ["masks", "summed"], list(lists[name]))
        if r.task == OPEN:
            r = put(r, ["masks", "signed"], {n: s for n, s in r.masks["signed"].items() if n in lists[name]})
        return [r]

    replies, _ = server.play(server.model(1), change)
    assert not errors(replies, CONFIRM)
    assert len(errors(replies, OPEN)) == 6
    assert all("have a signature that is not theirs" in error for error in errors(replies, OPEN))
    assert oracle.smallest() is None


# ---------------------------------------------------------------- everything that can be done to a request


OUT, STALE = "out", "stale"


def variants(server, task):
    """For each field of a request: that it is left out, is the one of an earlier round, and each other value.

    Returns:
        Paths, each with what is done: `OUT`, `STALE`, or the number of a value.
    """
    seen: dict[tuple[str, str], Request] = {}

    def note(r, name):
        seen[r.task, name] = r
        return [r]

    server.play(server.model(10**5), note)
    paths = [path for path in leaves(seen[task, "A"]) if path != ("masks",)]
    ways = {path: [OUT, STALE, *range(len(others(get(seen[task, "A"], path))))] for path in paths}
    return seen, ways


def altered(task, path, how, receivers, seen):
    def change(r, name):
        if r.task != task or name not in receivers:
            return [r]
        try:
            now = get(r, path)
        except (KeyError, TypeError):  # an entry for a site that is not in this one
            return [r]
        if how == OUT:
            return [put(r, path, None)]
        return [put(r, path, get(seen[task, name], path) if how == STALE else others(now)[how])]

    return change


TOLD = ("A", "AB", "ABC", "ABCD")


def test_no_field_of_a_request_that_is_altered_withheld_or_swapped_opens_less_than_a_sum(serve, oracle):
    """A quarter of the fields of each step, one way each; a slow test takes all."""
    server, generator = serve("ABCD"), random.Random(0)
    for task in STEPS:
        oracle.sealed.clear()
        seen, found = variants(server, task)
        assert len(found) > 10
        for path, ways in generator.sample(sorted(found.items()), len(found) // 4):
            change = altered(task, path, generator.choice(ways), generator.choice(TOLD), seen)
            server.play(server.model(server.round), change)
        assert oracle.smallest() in (3, 4), f"{task}: a sum of fewer than three sites can be computed"
    check_alive(server, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("task", STEPS)
def test_no_value_of_any_field_opens_less_than_a_sum(serve, oracle, task, told):
    server = serve("ABCD")
    seen, found = variants(server, task)
    for path, how in ((path, how) for path, ways in found.items() for how in ways):
        model = server.model(server.round)
        server.play(model, altered(task, path, how, told, seen))
        server.play(model, sites="BCD")
    assert oracle.smallest() in (3, 4)
    check_alive(server, oracle)


def test_no_request_that_is_repeated_withheld_or_moved_opens_less_than_a_sum(serve, oracle):
    """Each change at some steps, to one site or to three."""
    server = serve("ABCD")
    earlier: dict[tuple[str, str], Request] = {}

    def note(r, name):
        earlier[r.task, name] = r
        return [r]

    server.play(server.model(10**5), note)
    for place, task in enumerate(STEPS):
        oracle.sealed.clear()
        other = STEPS[(place + 2) % len(STEPS)]
        changes = (
            lambda r, name: [r, r],
            lambda r, name: [],
            lambda r, name, task=task: [earlier[task, name]],
            lambda r, name, task=task: [earlier[task, name], r],
            lambda r, name, other=other: [earlier[other, name], r],
            lambda r, name, other=other: [replace(r, task=other), r],
            lambda r, name, other=other: [r, replace(r, task=other)],
        )
        for number, (receivers, change) in enumerate(product(("A", "ABC"), changes), place):
            if number % 4 == 0:
                server.play(
                    server.model(server.round),
                    lambda r, name, task=task, change=change, receivers=receivers: (
                        change(r, name) if r.task == task and name in receivers else [r]
                    ),
                )
        assert oracle.smallest() in (3, 4), f"{task}: a sum of fewer than three sites can be computed"
    check_alive(server, oracle)


@pytest.mark.parametrize("crashed", ["A", "ABCD"])
def test_after_a_crash_in_the_middle_of_a_round_old_requests_open_nothing_more(serve, oracle, crashed):
    server = serve("ABCD")
    for step in (SHARES, OPEN) if crashed == "A" else (TRAIN, CONFIRM):
        model, asked = server.model(server.round), []

        def note(r, name, asked=asked):
            asked.append((name, r))
            return [r]

        def between(task, step=step, asked=asked):
            if task != step:
                return
            server.crash(*crashed)
            for name, request in list(asked):
                reply = server.ask(name, request)
                assert reply.error or not reply.masks or request.task == KEYS or name not in crashed

        server.play(model, note, between=between)
        # The server has forgotten the round as well, and a site has gone.
        server.play(model, sites="BCD", round_=server.round)
    assert oracle.smallest() in (3, 4, None)
    check_alive(server, oracle)


def test_the_history_with_a_sites_secret_is_its_owners_alone(tmp_path):
    history = SumHistory(tmp_path / "sums.sqlite")
    assert history.key
    assert history.path.stat().st_mode & 0o077 == 0
    history.path.chmod(0o644)  # of a restored backup
    assert history.key
    assert history.path.stat().st_mode & 0o077 == 0
