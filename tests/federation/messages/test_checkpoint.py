"""What a server keeps of a run: the best round, who has the exchange before training, what may be resumed."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from running import TINY_NETWORK

from medfedaug.config.run import Execution
from medfedaug.errors import ConfigError
from medfedaug.federation.in_process import InProcessCarrier, run_in_process
from medfedaug.federation.messages.checkpoint import check_same_run
from medfedaug.federation.server.history import Selection
from medfedaug.federation.server.server import InitialExchange

SITES = ["site_A", "site_B"]


def offered(selection, *rounds):
    for number, scores in enumerate(rounds, 1):
        selection.offer(number, scores, {"weight": torch.tensor(float(number))}, {})
    return selection.round


def test_the_best_mean_is_taken_and_the_first_of_equals():
    assert offered(Selection(), {"A": 0.5, "B": 0.7}, {"A": 0.7, "B": 0.6}, {"A": 0.6, "B": 0.7}) == 2
    assert offered(Selection(higher_is_better=False), {"A": 3.0}, {"A": 2.0}, {"A": 2.5}) == 2
    assert offered(Selection(), {}, {"A": 0.1}, {}) == 2
    assert offered(Selection(), {}) == 0


def test_a_round_is_no_better_because_a_hard_site_did_not_score_it():
    rounds = [{"A": 0.8, "B": 0.2}, {"A": 0.82}, {"A": 0.84, "B": 0.25}, {"A": 0.83}, {"C": 0.5}]
    assert offered(Selection(), *rounds) == 3
    assert offered(Selection(), *rounds[:2]) == 2  # A is better


def test_a_continued_run_compares_as_if_it_had_not_stopped():
    first, second = Selection(), Selection()
    offered(first, {"A": 0.8, "B": 0.2})
    second.restore(first.saved())
    second.offer(2, {"A": 0.79}, {}, {})
    assert second.round == 1
    second.offer(3, {"A": 0.7, "B": 0.4}, {}, {})
    assert second.round == 3


def test_what_was_exchanged_before_training_is_sent_until_a_site_has_answered():
    once = InitialExchange()
    once.payload = {"norm/mean": torch.zeros(1)}
    assert once.due(SITES)
    once.answered("site_A")
    assert not once.due(["site_A"])
    once.answered("site_A")
    assert once.due(SITES)  # B has not answered
    for site in SITES:
        once.answered(site)
    assert not once.due(SITES)
    assert once.due(["site_A"])  # which did not answer the last request
    once.site_joined()
    once.answered("site_A")  # to the request before another site joined
    assert once.due(["site_A"])


@pytest.mark.all_layers
@pytest.mark.parametrize("method", ["fixbn", "feddg_ga", "fedavg"])
def test_what_goes_by_the_number_of_rounds_is_not_resumed_with_more(tiny_config, method):
    saved = {"config": tiny_config(method, rounds=4).to_dict()}
    longer = tiny_config(method, rounds=8)
    with nullcontext() if method == "fedavg" else pytest.raises(ConfigError, match="rounds: 4, asked for 8"):
        check_same_run(Path("run.pt"), saved, longer)


def test_a_site_that_lost_the_first_request_trains_with_the_method_afterwards(phantom_dir, tiny_config):
    kept = []

    class Losing(InProcessCarrier):
        def ask(self, request, sites, needed, accept):
            lost = request.task == "train" and request.round == 1
            reached = [site for site in sites if not (lost and site == "site_B")]
            super().ask(request, reached, needed, accept)
            kept.append(self.sites["site_B"].trainer.memory.once)
            return {site: "it did not answer" for site in sites if site not in reached}

    config = tiny_config("fedrdn", **TINY_NETWORK, rounds=2)
    execution = Execution(min_sites=1)
    server = run_in_process(config, phantom_dir, SITES, device="cpu", execution=execution, carrier=Losing)
    trained = [[name for name in SITES if "train_loss" in entry["sites"][name]] for entry in server.rounds]
    assert trained == [["site_A"], SITES]
    assert not server.rounds[1]["refused"]
    assert any(key.startswith("fedrdn/") for key in kept[-1])
