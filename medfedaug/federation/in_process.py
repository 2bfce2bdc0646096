"""Runners of all sites one after another in one process, for unit tests and for sweeps on a GPU.

They do the computation of an NVFlare job, without its other features.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset

from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.machine import Machine
from medfedaug.config.run import Execution, RunConfig, derive_seed
from medfedaug.data.base import SiteFolder
from medfedaug.federation.engine import Engine, FederationRun
from medfedaug.federation.job_folder import server_checkpoint
from medfedaug.federation.messages.initial_weights import InitialWeights
from medfedaug.federation.messages.messages import TRAIN, VALIDATE, Reply, Request
from medfedaug.federation.protocol import Accept, Carrier, compare, run
from medfedaug.federation.server.comparison import Comparison
from medfedaug.federation.server.output import write_files
from medfedaug.federation.server.server import FederationServer
from medfedaug.federation.site.comparison import ComparisonSite
from medfedaug.federation.site.guard import Privacy
from medfedaug.federation.site.site import Site
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.sampling import ConcatenatedDataset
from medfedaug.utils.event_text import OnEvent
from medfedaug.utils.validation import check_keys


class SimulatedTime:
    """A clock for sites of different speed, and the replies that have not arrived.

    A round of training takes a site of speed 1 one hour, and everything else no time. A site trains one round
    at a time. Simultaneous replies arrive in the order of their requests. Without speeds no time passes.
    """

    def __init__(self, execution: Execution, sites: Collection[str]) -> None:
        check_keys("site_speed: no site", execution.site_speed, sorted(sites))
        self.speeds, self.now = execution.site_speed, 0.0
        self._free: dict[str, float] = {}
        self._coming: list[tuple[float, int, str, Reply]] = []
        self._sent = 0

    def trains(self, site: str) -> float:
        """Let a site train; return the hour at which it finishes."""
        start = max(self.now, self._free.get(site, 0.0))
        self._free[site] = start + (1 / self.speeds.get(site, 1.0) if self.speeds else 0.0)
        return self._free[site]

    def train_together(self, sites: Iterable[str]) -> None:
        """Let sites train at the same time, and wait for the last."""
        self.now = max((self.trains(site) for site in sites), default=self.now)

    def send(self, site: str, reply: Reply) -> None:
        """Let a site train; its reply arrives when it finishes."""
        self._sent += 1
        heapq.heappush(self._coming, (self.trains(site), self._sent, site, reply))

    def next_reply(self) -> tuple[str, Reply]:
        """Return the next reply, and advance to its arrival."""
        arrival, _, site, reply = heapq.heappop(self._coming)
        self.now = max(self.now, arrival)
        return site, reply

    def coming(self) -> list[str]:
        """Return the sites whose reply has not arrived."""
        return [site for _, _, site, _ in self._coming]

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint; empty at hour 0 without pending replies."""
        coming = [(arrival, sent, site, vars(reply)) for arrival, sent, site, reply in self._coming]
        passed = {"now": self.now, "free": self._free, "coming": coming, "sent": self._sent}
        return passed if self.now or coming else {}

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Restore a result of `state`, with models on a device."""
        self.now, self._free, self._sent = saved["now"], dict(saved["free"]), saved["sent"]
        for arrival, sent, site, reply in saved["coming"]:
            weights = {key: value.to(device) for key, value in reply["weights"].items()}
            self._coming.append((arrival, sent, site, Reply(**{**reply, "weights": weights})))


class SitesInProcess(Carrier):
    """Asks one site after another."""

    def __init__(self, sites: Mapping[str, Site | ComparisonSite]) -> None:
        self.sites = dict(sorted(sites.items()))

    def connected(self) -> list[str]:
        """Return all sites."""
        return list(self.sites)

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Ask each site, which answers immediately."""
        for name in sites:
            accept(name, self.sites[name].answer(request))
        return {}

    def round_done(self, server: FederationServer) -> None:
        """Do nothing."""


class InProcessCarrier(SitesInProcess):
    """The carrier of a federation, with checkpoints and simulated time."""

    travels = True
    """Flag: sites and server exchange messages."""

    sites: dict[str, Site]  # type: ignore[assignment]

    def __init__(
        self, server: FederationServer, trainers: Mapping[str, SiteTrainer], checkpoint: Path | None = None
    ) -> None:
        super().__init__({name: Site(name, trainer) for name, trainer in trainers.items()})
        self.server, self.trainers, self.checkpoint = server, trainers, checkpoint
        for trainer in trainers.values():
            trainer.saves_each_round = False
        self._pin()
        self.time = SimulatedTime(server.execution, trainers)
        if server.carried:
            self.time.restore(server.carried, next(iter(trainers.values())).exchange_device)

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Ask each site; a round of training lasts until the slowest site has answered."""
        if request.task == TRAIN:
            self.time.train_together(sites)
        return super().ask(request, sites, needed, accept)

    def gather(
        self, request: Request, sites: Sequence[str], needed: int, accept: Accept
    ) -> Mapping[str, str]:
        """Ask each site, and hand over the first replies."""
        for site in sites:
            self.time.send(site, self.sites[site].answer(request))
        good = 0
        while good < needed and self.time.coming():
            good += accept(*self.time.next_reply())
        return {}

    def under_way(self) -> list[str]:
        """Return the sites whose reply has not arrived."""
        return self.time.coming()

    def round_done(self, server: FederationServer) -> None:
        """Record the hour, and save the states of server and sites for the same round."""
        if self.time.speeds:
            server.rounds[-1]["hours"] = self.time.now
        if self.checkpoint is not None:
            for trainer in self.trainers.values():
                trainer.memory.save()
            server.save(self.checkpoint, self.time.state())
            self._pin()

    def _pin(self) -> None:
        # If killed between two files, the sites are ahead of the server, which asks for earlier rounds again.
        for trainer in self.trainers.values():
            trainer.memory.checkpointed = (self.server.round, self.server.selected_round)


class PooledCarrier(InProcessCarrier):
    """Carrier that lets one site train on all images, and uses its update for every site.

    The mean of equal models is the same model bit for bit.
    """

    travels = False

    def __init__(
        self, server: FederationServer, trainers: Mapping[str, SiteTrainer], checkpoint: Path | None = None
    ) -> None:
        super().__init__(server, trainers, checkpoint)
        for trainer in trainers.values():
            trainer.training_dataset = self.dataset

    def dataset(self, seed: int) -> Dataset[Any]:
        """Return the training images of all sites, each with its site's transforms."""
        for name, trainer in sorted(self.trainers.items()):
            if trainer.samples is None:  # no request yet in a resumed run
                trainer.take_plan(self.server.planning.planned())
                trainer.open(name)
        training = [trainer for _, trainer in sorted(self.trainers.items()) if trainer.trains]
        return ConcatenatedDataset([one.own_dataset(derive_seed(seed, one.name)) for one in training])

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Let one site train; all others only score the model on their validation cases."""
        if request.task != TRAIN:
            return super().ask(request, sites, needed, accept)
        update = Reply(TRAIN, request.round)
        for name in sites:
            if name == sites[0]:
                update = self.sites[name].answer(request)
                accept(name, replace(update))
            else:
                scored = self._validation(name, request)
                metrics = {**update.metrics, **scored.metrics}
                error, samples = update.error or scored.error, self.server.sites[name]
                accept(name, replace(update, num_samples=samples, metrics=metrics, error=error))
        return {}

    def _validation(self, name: str, request: Request) -> Reply:
        """Return a site's validation score of the previous round's model, if due."""
        if not self.server.config.validates(request.round - 1):
            return Reply(VALIDATE)
        reply = self.sites[name].answer(replace(request, task=VALIDATE, round=request.round - 1))
        metric = self.server.record.metric
        return replace(reply, metrics={f"val_{metric}": reply.metrics.get(metric)})


def run_in_process(
    config: RunConfig,
    data_dir: str | Path,
    sites: Sequence[str] | Sequence[SiteFolder],
    device: str = "auto",
    on_event: OnEvent | None = None,
    state_dir: str | Path | None = None,
    resume: bool = False,
    privacy: Callable[[], Privacy] = Privacy,
    execution: Execution | None = None,
    carrier: type[InProcessCarrier] = InProcessCarrier,
    machine: Machine | None = None,
    initial: InitialWeights | None = None,
) -> FederationServer:
    """Run a federation to its end.

    Models stay on the sites' device if the mean is the global model. The state is saved after every round. A
    resumed run repeats the interrupted round, with the same results bit for bit.

    Args:
        state_dir: a folder for the state of server and sites; ``None`` keeps nothing.
        resume: continue from the state in ``state_dir``.
        privacy: makes the limits of what leaves each site; by default none.
        carrier: turns requests into replies; by default each site answers by itself.

    Raises:
        MedFedAugError: when too few sites can train, or too few updates of a round can be used.
    """
    server = FederationServer(config, on_event, execution, travels=carrier.travels, initial=initial)
    threads = server.execution.threads
    trainers: dict[str, SiteTrainer] = {}
    for site in sites:
        name, data = (site, data_dir) if isinstance(site, str) else (site.name, site)
        state = Path(state_dir) / name if state_dir is not None else None
        trainers[name] = SiteTrainer(config, data, device, state, privacy(), threads=threads, machine=machine)
    target = next(iter(trainers.values())).device
    checkpoint = server_checkpoint(state_dir) if state_dir is not None else None
    if resume and checkpoint is not None:
        server.restore(checkpoint)
    # Methods that compute the global model keep tensors on the CPU.
    if target.type != "cpu" and not server.aggregation.aggregators:
        server.move_models(target)
        for trainer in trainers.values():
            trainer.exchange_device = target
    run(server, carrier(server, trainers, checkpoint))
    return server


run_pooled = partial(run_in_process, carrier=PooledCarrier)
"""Train on the images of all sites together; see `run_in_process`."""


def compare_in_process(
    config: ComparisonConfig,
    sites: Sequence[SiteFolder],
    folder: Path,
    device: str = "auto",
    on_event: OnEvent | None = None,
    execution: Execution | None = None,
) -> dict[str, Any]:
    """Make the trainings of a comparison, or continue them.

    ``folder`` keeps the states of server and sites. Returns the content of ``compare.json``
    (`medfedaug.federation.server.comparison.Comparison.results`).
    """
    comparison = Comparison(config, folder, execution, on_event)
    threads = comparison.execution.threads

    def site(data: SiteFolder) -> ComparisonSite:
        state = folder / data.name

        def trainer(run: RunConfig) -> SiteTrainer:
            return SiteTrainer(run, data, device, state, threads=threads)

        return ComparisonSite(data.name, config, trainer, state)

    compare(comparison, SitesInProcess({data.name: site(data) for data in sites}))
    return comparison.results()


class InProcessEngine(Engine):
    """The sites take turns in this process."""

    name = "inprocess"
    keeps_time = True
    carrier: ClassVar[type[InProcessCarrier]] = InProcessCarrier

    def run(self, run: FederationRun, work: Path) -> dict[str, Any]:
        """Run a federation; see `Engine.run`."""
        server = run_in_process(
            run.config,
            run.data_dir,
            run.sites,
            run.device,
            run.on_event,
            state_dir=run.state_dir,
            resume=run.resume,
            execution=run.execution,
            carrier=self.carrier,
            machine=run.machine,
            initial=run.initial,
        )
        return write_files(work, server)


class PooledEngine(InProcessEngine):
    """Engine of runs whose method pools all images, independent of ``--engine``."""

    name = "pooled"
    travels = False
    keeps_time = False
    carrier = PooledCarrier
