"""All sites one after another in one process: for unit tests and for sweeps on a GPU.

NVFlare is the engine; this runner does the same arithmetic without it and nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medfedaug.config import RunConfig
from medfedaug.federation.checkpoint import server_checkpoint
from medfedaug.federation.pooled import Pool
from medfedaug.federation.server import FederationServer
from medfedaug.federation.site import Site, SiteTrainer
from medfedaug.privacy import PrivacyPolicy

__all__ = ["run_in_process"]

# A checkpoint that is written in less than so many seconds is written after each round; one that takes longer
# may take this share of the time.
_BRIEF, _SHARE_FOR_CHECKPOINTS = 1.0, 0.1


def run_in_process(
    config: RunConfig,
    data_dir: str | Path,
    sites: Sequence[str],
    device: str = "auto",
    on_event: Callable[[dict[str, Any]], None] | None = None,
    state_dir: str | Path | None = None,
    resume: bool = False,
    policy: PrivacyPolicy | None = None,
) -> FederationServer:
    """Run a federation to its end.

    Models stay on the sites' device on their way, where the methods let the mean be the global model. The
    state is saved after every round, or where that takes more than a second, so seldom that it takes a tenth
    of the time: a run that is continued repeats the rounds since then, to the same bits.

    Args:
        config: the run.
        data_dir: the folder that holds the sites' folders.
        sites: their names.
        device: see `medfedaug.federation.SiteTrainer`.
        on_event: see `medfedaug.federation.FederationServer`.
        state_dir: a folder for what must survive a restart, of server and sites; ``None`` keeps nothing.
        resume: continue from what is in ``state_dir``.
        policy: every site's, each with a budget of its own that lasts as long as the run.

    Returns:
        The server with its `FederationServer.results` and models.

    Raises:
        MedFedAugError: when too few sites can train, or too few updates of a round can be used.
    """
    server = FederationServer(config, on_event)
    states = Path(state_dir) if state_dir is not None else None
    checkpoint = server_checkpoint(states) if states else None
    if server.pools_data:
        trainers: Mapping[str, SiteTrainer] = Pool(config, data_dir, sites, device).trainers
    else:
        trainers = {
            name: SiteTrainer(config, data_dir, device, states / name if states else None, policy)
            for name in sites
        }
    members = {name: Site(name, trainers[name]) for name in sites}
    if resume and checkpoint is not None:
        server.restore(checkpoint)
    saving = _Saving(server, trainers.values(), checkpoint)
    target = next(iter(trainers.values())).device
    # What makes a model otherwise has tensors of its own, on the CPU.
    if target.type != "cpu" and not server.has_aggregators:
        server.move_models(target)
        for trainer in trainers.values():
            trainer.exchange_device = target
    for name in sorted(set(sites) - server.known):
        server.accept_preparation(name, members[name].answer(server.prepare()))
    server.finish_preparation()
    while server.round < config.rounds:
        targets = server.choose_sites()
        request = server.start_round(targets)
        for name in targets:
            server.accept(name, members[name].answer(request))
        server.finish_round()
        saving.save(last=server.round == config.rounds)
    request = server.validate()
    for name in sorted(server.sites):
        server.accept_validation(name, members[name].answer(request))
    server.finish_validation()
    request = server.test()
    for name in sites:
        server.accept_test(name, members[name].answer(request))
    return server


class _Saving:
    """The server's state and the sites', of one and the same round."""

    def __init__(
        self, server: FederationServer, trainers: Iterable[SiteTrainer], checkpoint: Path | None
    ) -> None:
        self.server, self.trainers, self.checkpoint = server, list(trainers), checkpoint
        self.took, self.finished = 0.0, time.perf_counter()
        for trainer in self.trainers:
            trainer.saves_each_round = False
        self._pin()

    def _pin(self) -> None:
        # Killed between the files, sites are ahead of the server, and need what it then asks them for.
        for trainer in self.trainers:
            trainer.checkpointed = (self.server.round, self.server.selected_round)

    def save(self, *, last: bool) -> None:
        started = time.perf_counter()
        if self.checkpoint is None:
            return
        share = self.took / (started - self.finished)
        if self.took > _BRIEF and share > _SHARE_FOR_CHECKPOINTS and not last:
            return
        for trainer in self.trainers:
            trainer.save()
        self.server.save(self.checkpoint)
        self._pin()
        self.finished = time.perf_counter()
        self.took = self.finished - started
