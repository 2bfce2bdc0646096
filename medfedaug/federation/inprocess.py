"""All sites one after another in one process: for unit tests and for sweeps on a GPU.

NVFlare is the engine; this runner does the same arithmetic without it and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medfedaug.config import RunConfig
from medfedaug.federation.checkpoint import server_checkpoint
from medfedaug.federation.pooled import Pool
from medfedaug.federation.server import FederationServer
from medfedaug.federation.site import Site, SiteTrainer
from medfedaug.privacy import PrivacyPolicy

__all__ = ["run_in_process"]


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
    for name in sorted(set(sites) - server.known):
        server.accept_preparation(name, members[name].answer(server.prepare()))
    server.finish_preparation()
    while server.round < config.rounds:
        targets = server.choose_sites()
        request = server.start_round(targets)
        for name in targets:
            server.accept(name, members[name].answer(request))
        server.finish_round()
        if checkpoint is not None:
            server.save(checkpoint)
    request = server.validate()
    for name in sorted(server.sites):
        server.accept_validation(name, members[name].answer(request))
    server.finish_validation()
    request = server.test()
    for name in sites:
        server.accept_test(name, members[name].answer(request))
    return server
