"""Five sites, of which some may lie."""

import shutil

import pytest
import torch

from medfedaug.config.run import Execution
from medfedaug.data.phantom import make_phantom
from medfedaug.federation import run_in_process
from medfedaug.federation.in_process import InProcessCarrier

SITES = list("ABCDE")


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    root = tmp_path_factory.mktemp("five") / "data"
    made = make_phantom(root, sites=5, patients=5, shape=(16, 16, 8), seed=0, shift=(0, 0, 0, 0, 3))
    for folder, name in zip(made, SITES, strict=True):
        shutil.move(folder, root / name)
    return root


@pytest.fixture(scope="module")
def federation(five, tiny_config):
    """A run in which sites may lie: `lie(site, request, reply)` changes a reply in place."""

    def run(lie=None, sites=SITES, data=five, min_sites=2, methods="fedavg", connected=None, **changes):
        class Lying(InProcessCarrier):
            def connected(self):
                return connected(self.server.round + 1) if connected else super().connected()

            def ask(self, request, names, needed, accept):
                def see(name, reply):
                    if lie is not None and not reply.error:
                        lie(name, request, reply)
                    return accept(name, reply)

                return super().ask(request, names, needed, see)

        network = {"network": "unet", "network_args": {"channels": [4, 8], "strides": [2], "norm": "batch"}}
        if methods.startswith("fedfa"):  # needs a network with stages
            network = {}
        events = []
        # Scores are no part of any check, but for those of the last round.
        config = tiny_config(methods, **{**network, "rounds": 3, "validate_every": 10, **changes})
        execution = Execution(min_sites=min_sites)
        server = run_in_process(
            config, data, list(sites), "cpu", events.append, execution=execution, carrier=Lying
        )
        return server, events

    return run


@pytest.fixture
def lies():
    """`lies("BE", {"fedrdn/std": 1e-6}, "prepare")`: some sites send this value in place of theirs."""

    def make(liars, values, task="train"):
        def lie(site, request, reply):
            if site in liars and request.task == task:
                for key, value in values.items():
                    reply.payload[key] = torch.full_like(reply.payload[key], value)

        return lie

    return make
