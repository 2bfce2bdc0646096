"""Every pair of methods, built at the server and at a site under several settings: refused, and why."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from medfedaug.config.plan import Plan
from medfedaug.config.run import RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.errors import MedFedAugError
from medfedaug.federation import SiteTrainer
from medfedaug.federation.server.server import FederationServer
from medfedaug.methods import registry
from medfedaug.privacy import PrivacyPolicy
from medfedaug.simulate import configure

U_NET = {"channels": [2, 4, 4], "strides": [2, 2]}
WITH_BATCH_NORM = {**U_NET, "norm": "batch"}
VOLUMES = Plan(spatial_dims=3, patch_size=[16, 16, 16], patches_per_volume=1)
RESNET = {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [4, 4, 4, 4]}
VIT = {"img_size": 40, "hidden_size": 12, "mlp_dim": 8, "num_layers": 2}
BESIDE_METHODS = ("averaged_buffers", "given_shares", "soft_labels")
"""Words on which a method is refused with the network, an option or the loss."""
_NOISE = {
    "noise_multiplier": 50.0,
    "epsilon": 1000.0,
    "clip": dict.fromkeys(("intensity_mean", "intensity_std", "feature_mean", "feature_std"), (0.01, 2.0)),
}


@dataclass(frozen=True)
class Setting:
    """Options of a run, and the policy of its sites.

    Args:
        photographs: a classification of photographs; otherwise a segmentation of phantoms.
        network: its arguments.
        options: of `RunConfig`.
        policy: of `PrivacyPolicy`.
    """

    photographs: bool = False
    network: dict[str, Any] = field(default_factory=lambda: {**U_NET, "norm": "instance"})
    options: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    "slices_batch_norm": Setting(network=WITH_BATCH_NORM),
    "slices": Setting(),
    "volumes_batch_norm": Setting(network=WITH_BATCH_NORM, options={"plan": VOLUMES}),
    "volumes": Setting(options={"plan": VOLUMES}),
    "photographs_batch_norm": Setting(True, RESNET, {"network": "monai.networks.nets.ResNet"}),
    "photographs": Setting(True, {**RESNET, "norm": "instance"}, {"network": "monai.networks.nets.ResNet"}),
    "photographs_vit": Setting(True, VIT, {"network": "vit"}),
    "labels_alone": Setting(options={"loss": "monai.losses.HausdorffDTLoss"}),
    "max_share": Setting(options={"max_share": 0.5}),
    "bfloat16": Setting(options={"precision": "bfloat16"}),
    "secure_aggregation": Setting(options={"secure_aggregation": True}),
    "noise": Setting(policy=_NOISE),
    "private_steps": Setting(policy={**_NOISE, "sgd_noise_multiplier": 1.0}),
}


_REFUSAL = re.compile(
    r"(?P<first>.+) and (?P<second>.+) cannot be combined: (?P<one>.+) (requires|provides) (?P<word>\S+) "
    r"\(.+\), (?P<other>.+) excludes it; .+"
)


def ground(reason: str, pair: tuple[str, str]) -> str:
    """The ground of a refusal: a word where two cannot be combined, else the line without its asides.

    Raises:
        AssertionError: where two cannot be combined, and the line names others.
    """
    match = _REFUSAL.fullmatch(reason)
    if match is None:
        return re.sub(r" \([^)]*\)", "", reason).partition(";")[0]
    assert {match["first"], match["second"]} == {match["one"], match["other"]}, reason
    assert {match["one"], match["other"]} & set(pair), reason
    word = match["word"]
    if word not in BESIDE_METHODS:
        assert {match["one"], match["other"]} == set(pair), reason
    return "method" if word.startswith("method:") else word


def specs(pair: Iterable[str]) -> tuple[dict[str, Any], ...]:
    """The methods of a pair, with arguments that suit a site of few cases."""
    small = {"fedmix": {"group": 2}, "feddg": {"group": 1}}
    return tuple({"name": name, "args": small.get(name, {})} for name in dict.fromkeys(pair))


def pairs() -> list[tuple[str, str]]:
    """All pairs of the methods that are built in; a method alone is a pair with itself."""
    return list(itertools.combinations_with_replacement(registry.built_in_methods(), 2))


class Sites:
    """Small sites whose data are open, and the configuration of their runs.

    Args:
        root: an empty folder for the data.
    """

    def __init__(self, root: Path) -> None:
        make_phantom(root / "phantom", sites=2, patients=5, shape=(32, 32, 16), seed=0)
        rng = np.random.default_rng(0)
        for site, label, index in itertools.product(("A", "B"), ("cat", "dog"), range(5)):
            folder = root / "photographs" / site / label
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / f"{index}.png")
        self.root = root
        self._opened: dict[str, tuple[RunConfig, SiteFolder]] = {}
        self._alone: dict[tuple[str, str], str] = {}

    def of(self, name: str) -> tuple[RunConfig, SiteFolder]:
        """The run of a setting with FedAvg, and the data of the site."""
        if name not in self._opened:
            setting = SETTINGS[name]
            folder = self.root / ("photographs" if setting.photographs else "phantom")
            sites = find_sites(folder)
            options = {
                "network": "unet",
                "batch_size": 2,
                "rounds": 2,
                "methods": specs(["fedavg"]),
                **setting.options,
            }
            make = partial(configure, sites) if setting.photographs else RunConfig
            config = make(network_args=setting.network, **options)
            self._opened[name] = config, sites[0]
        return self._opened[name]

    def refusal(self, pair: tuple[str, str], name: str) -> str:
        """The line with which server or site refuse a pair; empty where both accept it."""
        if len(set(pair)) > 1:
            return self._refusal(pair, name)
        if (pair[0], name) not in self._alone:
            self._alone[pair[0], name] = self._refusal(pair, name)
        return self._alone[pair[0], name]

    def _refusal(self, pair: tuple[str, str], name: str) -> str:
        config, site = self.of(name)
        pooled = "pooled" in pair
        try:
            config = RunConfig.from_dict({**config.to_dict(), "methods": list(specs(pair))})
            FederationServer(config, travels=not pooled)
            policy = PrivacyPolicy(min_images=1, **SETTINGS[name].policy)
            trainer = SiteTrainer(config, site, "cpu", policy=policy)
            trainer.open(site.name)
            for method, part in trainer.parts.items():
                for exchange in (part.before_training, part.every_round):
                    if exchange is not None:
                        trainer.guard.check(method, exchange)
        except MedFedAugError as error:
            return str(error)
        return ""


def outcome(sites: Sites, pair: tuple[str, str], name: str) -> str:
    """The outcome of a pair in a setting.

    Returns:
        ``allowed``; the ground on which the pair is refused; or ``as NAME alone`` where one of the two is
        refused with the same words by itself.
    """
    reason = sites.refusal(pair, name)
    for method in pair if len(set(pair)) > 1 and reason else ():
        if sites.refusal((method, method), name) == reason:
            return f"as {method} alone"
    return ground(reason, pair) if reason else "allowed"
