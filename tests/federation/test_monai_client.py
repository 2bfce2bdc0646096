"""The adapter to MONAI's `ClientAlgo`: another engine that calls it gets the same federation."""

from __future__ import annotations

import pytest
import torch
from monai.fl.client import ClientAlgo
from monai.fl.utils.constants import ExtraItems
from monai.fl.utils.exchange_object import ExchangeObject

from medfedaug.federation import Carrier, FederationServer, Reply, SiteTrainer, run, run_in_process
from medfedaug.federation.messages.messages import PREPARE, TEST, TRAIN, VALIDATE
from medfedaug.federation.monai_client import MonaiClient

SITES = ["site_A", "site_B"]


class ClientAlgoEngine(Carrier):
    """An engine that knows a site as a `ClientAlgo` alone."""

    def __init__(self, clients: dict[str, ClientAlgo]) -> None:
        self.clients = clients
        for name, client in clients.items():
            client.initialize({ExtraItems.CLIENT_NAME: name})

    def connected(self):
        return sorted(self.clients)

    def ask(self, request, sites, needed, accept):
        for site in sites:
            client = self.clients[site]
            received = {"once": request.once, "payload": request.payload}
            data = ExchangeObject(weights=request.weights, statistics=received)
            reply = Reply(request.task, request.round)
            if request.task == PREPARE:
                found = client.get_data_stats().statistics
                reply.payload, reply.num_samples = found["payload"], found["num_samples"]
            elif request.task == TRAIN:
                client.train(data, {"round": request.round})
                update = client.get_weights()
                reply.weights, reply.payload = update.weights, update.statistics["payload"]
                reply.num_samples = update.metrics["samples"]
            elif request.task in (VALIDATE, TEST):
                split = {VALIDATE: "validation", TEST: "test"}[request.task]
                reply.metrics = client.evaluate(data, {"split": split, "round": request.round}).metrics
            accept(site, reply)
        return {}

    def round_done(self, server):
        pass


def test_an_engine_of_client_algos_gives_the_models_of_our_own(tiny_config, phantom_dir):
    config = tiny_config("fedrdn,fedfa,fedbn")
    ours = run_in_process(config, phantom_dir, SITES, "cpu")
    server = FederationServer(config)
    clients = {name: MonaiClient(SiteTrainer(config, phantom_dir, "cpu")) for name in SITES}
    run(server, ClientAlgoEngine(clients))
    assert all(torch.equal(server.state[key], ours.state[key]) for key in ours.shared)
    assert server.payload.keys() == ours.payload.keys()


def test_an_update_before_the_first_round_is_refused(tiny_config, phantom_dir):
    client = MonaiClient(SiteTrainer(tiny_config(), phantom_dir, "cpu"))
    client.initialize({ExtraItems.CLIENT_NAME: "site_A"})
    with pytest.raises(ValueError, match="expected a trained model"):
        client.get_weights()


def test_an_aborted_client_keeps_nothing_of_its_round(tiny_config, phantom_dir):
    client = MonaiClient(SiteTrainer(tiny_config(), phantom_dir, "cpu"))
    client.initialize({ExtraItems.CLIENT_NAME: "site_A"})
    client.abort()
    with pytest.raises(Exception, match="the training was stopped"):
        client.train(ExchangeObject(), {"round": 1})
    assert not client.trainer.memory.latest(1)
