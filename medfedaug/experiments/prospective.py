"""`prospect_of` and `pilot_of`: a comparison and a pilot of sites on one machine, before a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medfedaug.analysis.pilot import METHODS, Pilot
from medfedaug.analysis.prospect import Prospect, make_prospect
from medfedaug.config.run import RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.data.quality.image_fingerprint import SAMPLE, fingerprint_of, sample_cases
from medfedaug.data.sites import arrange, find_sites, unlabelled_sites
from medfedaug.errors import ConfigError
from medfedaug.experiments.axes import parse_axis
from medfedaug.federation.in_process import run_in_process
from medfedaug.simulate import configure

SMALL: Mapping[str, Any] = {
    "network_args": {"features": [8, 8, 16, 32, 64, 8]},
    "local_epochs": 4,
    "batch_size": 8,
    "learning_rate": 0.006,
    "schedule": "cosine",
}
"""Settings of the recorded federations of slices, with which a pilot trains a `basicunet`."""


def small_settings(task: str, network: str | None) -> Mapping[str, Any]:
    """Return `SMALL` for its network, and nothing for others."""
    return SMALL if task == "segmentation" and network in (None, "basicunet") else {}


def training_sites(data: Path, limit: int | None = None) -> list[SiteFolder]:
    """Open the sites that train.

    Args:
        data: folder of the sites.
        limit: largest number of cases of each split and site.

    Raises:
        ConfigError: for fewer than two of them.
    """
    sites = [site for site in arrange(find_sites(data, limit)) if site.trains]
    if len(sites) < 2:
        raise ConfigError(f"a prospect needs two sites that train, and {data} has {len(sites)}")
    return sites


def prospect_of(
    sites: Sequence[SiteFolder],
    sample: int = SAMPLE,
    on_case: Callable[[int, int], None] | None = None,
    *,
    norm: str = "batch",
    pilot: Pilot | None = None,
    record: Path | None = None,
) -> Prospect:
    """Compare the images of sites.

    Args:
        sites: of `training_sites`.
        sample: number of training cases of each site, taken evenly from its list.
        on_case: called with the number of finished cases of a site and of all.
        norm: of the networks.
        pilot: of the same sites.
        record: see `medfedaug.analysis.gain_record.find_record`.

    Raises:
        ConfigError: for sites that cannot be compared, or a record that cannot be read.
        DataError: for images that cannot be read.
    """
    fingerprints = [fingerprint_of(site, sample_cases(site, sample), on_case) for site in sites]
    return make_prospect(fingerprints, norm=norm, pilot=pilot, record=record)


def pilot_config(
    sites: Sequence[SiteFolder], network: str | None, norm: str | None, settings: Sequence[str] = ()
) -> RunConfig:
    """Configure a pilot: an exchange of fingerprints, then FedAvg and each site alone.

    Args:
        sites: of `training_sites`.
        network: its name; by default the task's network, a small one for segmentation.
        norm: of the network; by default its own.
        settings: ``NAME=VALUE``, one value each.

    Raises:
        ConfigError: for unknown settings.
    """
    axes = [parse_axis(text) for text in settings]
    for axis in axes:
        if len(axis.values) > 1:
            raise ConfigError(f"--set {axis.name}: give one value")
    values = {**small_settings(sites[0].task, network), **({"network": network} if network else {})}
    values |= {"unlabelled_weight": 0.0} if unlabelled_sites(sites) else {}
    values |= {axis.name: axis.values[0] for axis in axes}
    if norm is not None:
        values["network_args"] = {**values.get("network_args", {}), "norm": norm}
    return configure(sites, **{"prospect": True, "pilot": METHODS, **values})


def pilot_of(
    config: RunConfig,
    data: Path,
    sites: Sequence[SiteFolder],
    device: str = "auto",
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Pilot | None:
    """Train the pilot, by the protocol of a job between hospitals.

    Args:
        config: of `pilot_config`.
        data: folder of the sites.
        sites: of `training_sites`.
        device: see `medfedaug.federation.SiteTrainer`.
        on_event: see `medfedaug.federation.FederationServer`.

    Raises:
        MedFedAugError: when too few sites can train.
    """
    return Pilot.of_results(run_in_process(config, data, sites, device, on_event).pilot)
