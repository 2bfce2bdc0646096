"""All sites one after another in one process: for unit tests and for sweeps on a GPU.

NVFlare is the engine; this runner does the same arithmetic without it and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from monai.fl.utils.constants import ExtraItems

from medfedaug.config import RunConfig
from medfedaug.federation.server import FederationServer
from medfedaug.federation.site import SiteTrainer, answer
from medfedaug.privacy import PrivacyPolicy

__all__ = ["run_in_process"]


def run_in_process(
    config: RunConfig,
    data_dir: str | Path,
    sites: Sequence[str],
    device: str = "auto",
    on_event: Callable[[dict[str, Any]], None] | None = None,
    policy: PrivacyPolicy | None = None,
) -> FederationServer:
    """Run a federation to its end.

    Args:
        config: the run.
        data_dir: the folder that holds the sites' folders.
        sites: their names.
        device: see `medfedaug.federation.SiteTrainer`.
        on_event: see `medfedaug.federation.FederationServer`.
        policy: every site's, each with a budget of its own that lasts as long as the run.

    Returns:
        The server with its `FederationServer.results` and models.

    Raises:
        MedFedAugError: when a site's data cannot be used, or too few updates of a round.
    """
    server = FederationServer(config, on_event)
    trainers: dict[str, SiteTrainer] = {}
    for site in sites:
        trainers[site] = SiteTrainer(config, data_dir, device, policy)
        trainers[site].initialize({ExtraItems.CLIENT_NAME: site})
        server.accept_preparation(site, answer(trainers[site], server.prepare()))
    server.finish_preparation()
    for _ in range(config.rounds):
        targets = server.choose_sites()
        request = server.start_round(targets)
        for site in targets:
            server.accept(site, answer(trainers[site], request))
        server.finish_round()
    request = server.validate()
    for site in sorted(server.sites):
        server.accept_validation(site, answer(trainers[site], request))
    server.finish_validation()
    request = server.test()
    for site in sites:
        server.accept_test(site, answer(trainers[site], request))
    return server
