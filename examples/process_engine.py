"""An engine of your own: each site answers in a process that stays, joined to the server by a pipe.

    python examples/process_engine.py --data DIR --out RUN

The results are those of every other engine to the last bit. A package offers it as `--engine processes` by an
entry point of the group `medfedaug.federation.engines`.
"""

import argparse
import json
import multiprocessing

from medfedaug.federation import Carrier, FederationServer, Site, SiteTrainer, run
from medfedaug.federation.engine import Engine
from medfedaug.federation.server.output import write_files


def serve(pipe, name, *settings):
    """Answer the server's requests until the pipe is closed."""
    site = Site(name, SiteTrainer(*settings))
    while (request := pipe.recv()) is not None:
        pipe.send(site.answer(request))


class ProcessCarrier(Carrier):
    """Sends a request to all sites, then collects the replies."""

    def __init__(self, federation):
        # One process imports PyTorch and MONAI, before anything touches a GPU; the sites are its copies.
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["medfedaug.federation.site.trainer"])
        self.pipes = {}
        for site in federation.sites:
            self.pipes[site.name], theirs = forks.Pipe()
            settings = (theirs, site.name, federation.config, site, federation.device)
            forks.Process(target=serve, args=settings, daemon=True).start()

    def connected(self):
        return sorted(self.pipes)

    def ask(self, request, sites, needed, accept):
        for site in sites:
            self.pipes[site].send(request)
        for site in sites:
            accept(site, self.pipes[site].recv())
        return {}

    def round_done(self, server):
        """Nothing is to be saved: this engine does not resume."""


class ProcessEngine(Engine):
    """A process for each site."""

    name = "processes"
    own_processes = True

    def run(self, federation, work):
        server = FederationServer(federation.config, federation.on_event, federation.execution)
        carrier = ProcessCarrier(federation)
        run(server, carrier)
        for pipe in carrier.pipes.values():
            pipe.send(None)
        return write_files(work, server)


def main():
    """Train FedRDN and FedFA with this engine."""
    from medfedaug.federation.engines import register
    from medfedaug.simulate import simulate

    register(ProcessEngine)
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--data", required=True)
    arguments.add_argument("--out", required=True)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--network-args", type=json.loads, default={}, help="JSON")
    options = arguments.parse_args()
    run = simulate(
        options.data,
        options.out,
        methods=["fedrdn", "fedfa"],
        rounds=options.rounds,
        network_args=options.network_args,
        engine="processes",
    )
    print(run.scores["mean"])


if __name__ == "__main__":
    main()
