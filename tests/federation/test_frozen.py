"""Entries that no site trains travel once, and again to a site that has lost them."""

import shutil
from dataclasses import replace

import pytest
import torch

from medfedaug.config.run import Execution
from medfedaug.federation import FederationServer, Site, SiteTrainer, run_in_process
from medfedaug.federation.in_process import InProcessCarrier
from medfedaug.federation.messages.messages import FROZEN, TRAIN, entries_hash, num_bytes, own_entries

SITES = ["A", "B", "C"]
FROZEN_HALF = ("model.0.*",)


class Watched(InProcessCarrier):
    """Keeps the requests, and lets a site lose what it keeps before a round."""

    seen: list
    lost: dict  # site by round

    def ask(self, request, sites, needed, accept):
        self.seen.append(request)
        if request.task == TRAIN and (site := self.lost.get(request.round)):
            trainer = self.sites[site].trainer
            trainer.memory.take_once({})
            shutil.rmtree(trainer.memory.folder or "nothing", ignore_errors=True)
        return super().ask(request, sites, needed, accept)


@pytest.fixture
def data(make_site, tmp_path):
    for name in SITES:
        make_site(name)
    return tmp_path / "data"


@pytest.fixture
def watched():
    return type("Watching", (Watched,), {"seen": [], "lost": {}})


def is_frozen(key):
    return key.startswith("model.0.")


@pytest.mark.all_layers
@pytest.mark.parametrize("methods", ["fedrdn,fedfa", "ditto", "fedbn secure"])
def test_what_no_site_trains_travels_with_the_first_request_alone(tiny_config, data, watched, methods):
    methods, _, secure = methods.partition(" ")
    options = {"secure_aggregation": True} if secure else {}
    config = tiny_config(methods, rounds=3, freeze=FROZEN_HALF, **options)
    server = run_in_process(config, data, SITES, "cpu", carrier=watched)
    first, *later = [request for request in watched.seen if request.task == TRAIN]
    frozen = {key for key in server.shared if is_frozen(key)}
    assert frozen
    assert set(own_entries(first.once, FROZEN)) == frozen
    assert not any(request.once for request in later)
    assert not any(set(request.weights) & frozen for request in watched.seen)
    assert {request.frozen for request in watched.seen if request.weights} == {first.frozen}
    assert first.frozen
    rounds = server.results()["rounds"]
    size = sum(num_bytes({key: server.state[key]}) for key in frozen)
    assert [entry["bytes"].get(FROZEN, {"down": 0})["down"] for entry in rounds] == [3 * size, 0, 0]
    assert rounds[1]["bytes"]["model"]["down"] == 3 * num_bytes({k: server.state[k] for k in server.sent})
    assert set(server.results()["test"]["sites"]) == set(SITES)


def test_a_site_that_has_lost_them_is_sent_them_again(tiny_config, data, watched, tmp_path):
    watched.lost[2] = "B"
    config = tiny_config("fedavg", rounds=4, freeze=FROZEN_HALF)
    state = tmp_path / "state"
    few = Execution(min_sites=2)
    server = run_in_process(config, data, SITES, "cpu", state_dir=state, carrier=watched, execution=few)
    refused = [[one["site"] for one in entry["refused"]] for entry in server.rounds]
    assert refused == [[], ["B"], [], []]
    assert "was the site started again" in server.rounds[1]["refused"][0]["reason"]
    assert [bool(request.once) for request in watched.seen if request.task == TRAIN] == [
        True,
        False,
        True,
        False,
    ]
    assert set(server.results()["test"]["sites"]) == set(SITES)


def test_wrong_entries_of_a_server_are_refused_and_never_kept(tiny_config, data, tmp_path):
    config = tiny_config("fedrdn", rounds=2, freeze=FROZEN_HALF)
    server = FederationServer(config)
    sites = {n: Site(n, SiteTrainer(config, data, "cpu", tmp_path / "state" / n)) for n in SITES}
    for name, site in sites.items():
        server.accept_preparation(name, site.answer(server.prepare()))
    server.finish_preparation()
    request = server.start_round()
    key = next(key for key in request.once if key.startswith(f"{FROZEN}/"))
    right = request.once[key]
    for wrong, value in {
        "not finite": torch.full_like(right, torch.nan),
        "no tensor": "weights",
        "another shape": torch.zeros(3),
        "not those of the hash": right + 1,
    }.items():
        once = {**request.once, key: value}
        named = request.frozen if wrong in ("no tensor", "not those of the hash") else hashed(once)
        assert sites["A"].answer(replace(request, once=once, frozen=named)).error, wrong
        assert not list((tmp_path / "state").rglob("*.frozen.pt")), wrong
    again = Site("A", SiteTrainer(config, data, "cpu", tmp_path / "state" / "A"))
    reply = again.answer(request)
    assert not reply.error
    assert list((tmp_path / "state/A").rglob("*.frozen.pt"))


def hashed(once):
    return entries_hash({key: value for key, value in once.items() if key.startswith(f"{FROZEN}/")})
