"""The papers' protocols by name: data, network, rounds, optimiser, and where the paper says so.

>>> PRESETS["office_caltech_10"].config["rounds"], PRESETS["fedrdn_office_caltech_10"].config["rounds"]
(400, 100)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from medfedaug.errors import ConfigError

__all__ = ["PRESETS", "Preset", "find_preset"]


@dataclass(frozen=True)
class Preset:
    """A protocol.

    Args:
        name: what ``medfedaug benchmark`` calls it.
        benchmark: the data set, a key of `medfedaug.data.benchmarks.BENCHMARKS`.
        source: where the paper says so.
        config: the fields of `medfedaug.config.RunConfig` that it decides; the others have their defaults.
        data: options of the data set that differ from their defaults.
        protocol: how it is tested, in a few words.
        readings: what was read into the paper where it is silent or contradicts itself, and where this is not
            the paper's.
        holdout: whether each site is left out in turn unless something else is asked for.
        whole_site: whether a held-out site is tested with all its cases, and not with its test cases alone.
    """

    name: str
    benchmark: str
    source: str
    config: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    protocol: str = "test cases of each site"
    readings: tuple[str, ...] = ()
    holdout: bool = False
    whole_site: bool = False

    @property
    def schedule(self) -> str:
        """Rounds and what a site does in each, in words."""
        steps, epochs = self.config.get("local_steps", 0), self.config.get("local_epochs", 1)
        local = f"{steps} steps" if steps else f"{epochs} epoch{'s' * (epochs > 1)}"
        return f"{self.config['rounds']} x {local}"


_SELECTION = "The model is the one of the best mean validation score; the paper does not say which it tests."
_UNIFORM = "Sites weigh alike in the mean (FedFA+ Eq. 1)."
_FLIPS = (
    "Training images are mirrored and turned by up to 30 degrees, as appendix E.2 of FedFA says and FedFA+ "
    "does not; the public code of FedFA does neither for Office-Caltech 10 (--set augmentation=none)."
)
_SLICES = (
    "The published order of slices puts slices of one patient into training and test: for comparison with "
    "the paper only."
)
_PATIENTS = "Split by patient and scored by volume, and therefore not comparable with the paper's numbers."
_INTENSITIES = "Volumes are clipped at their 99 % quantile, as in HarmoFL's code; the papers do not say."
_SCRATCH = (
    "The network starts from random weights, the paper's from weights pre-trained on ImageNet, which are not "
    "shipped: expect lower numbers than the paper's."
)

_U_NET = {"network": "basicunet", "network_args": {"features": [32, 64, 128, 256, 512, 32], "act": "relu"}}
_FEDFA_PHOTOGRAPHS = {
    "network": "alexnet",
    "image_size": 256,
    "rounds": 400,
    "batch_size": 32,
    "optimizer": "sgd",
    "learning_rate": 1e-2,
    "augmentation": "flip_rotate",
    "weighting": "uniform",
}
_FEDFA_PROSTATE = {
    **_U_NET,
    "rounds": 500,
    "batch_size": 16,
    "optimizer": "adam",
    "learning_rate": 1e-4,
    "weight_decay": 1e-4,
    "weighting": "uniform",
}
_LABEL_SKEW = {"network": "resnet18", "optimizer": "sgd", "learning_rate": 1e-1, "weighting": "uniform"}
_CIFAR = {**_LABEL_SKEW, "rounds": 100, "local_epochs": 10, "batch_size": 10, "participation": 0.1}
_TINY = {**_LABEL_SKEW, "rounds": 500, "local_epochs": 5, "batch_size": 20, "participation": 0.05}
_FEDRDN_PHOTOGRAPHS = {
    "network": "alexnet",
    "image_size": 256,
    "rounds": 100,
    "local_epochs": 5,
    "batch_size": 32,
    "optimizer": "sgd",
    "learning_rate": 1e-2,
    "weight_decay": 1e-5,
    "augmentation": "flip_rotate",
}
_FEDRDN_PROSTATE = {
    **_U_NET,
    "rounds": 200,
    "local_epochs": 5,
    "batch_size": 16,
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "weight_decay": 1e-4,
    "augmentation": "flip",
}
_FEDFD_A = {
    "network": "resnet18",
    "image_size": 224,
    "rounds": 40,
    "local_steps": 200,
    "batch_size": 64,
    "optimizer": "sgd",
    "learning_rate": 1e-2,
    "momentum": 0.5,
    "augmentation": "flip",
}
_FRAUG = {
    "network": "resnet18",
    "image_size": 224,
    "rounds": 100,
    "batch_size": 32,
    "optimizer": "sgd",
    "learning_rate": 1e-2,
    "augmentation": "flip",
}

_FEDFA_READINGS = (_UNIFORM, _FLIPS, _SELECTION)
_FEDFA_PROSTATE_READINGS = (
    _UNIFORM,
    "Weight decay 1e-4 is from appendix E.3 of FedFA; FedFA+ does not say.",
    _INTENSITIES,
    _SELECTION,
)
_SKEW_READINGS = (
    _UNIFORM,
    "No augmentation and no weight decay: FedFA+ names none for these data.",
    "A tenth of each site's images validates; the paper has no validation images here.",
    _SELECTION,
)
_FEDRDN_READINGS = (
    "Sites weigh by their number of training images (FedRDN Eq. 1).",
    '"Basic data augmentation techniques like random flipping" are read as the flips and turns of FedFA, on '
    "whose protocol the paper builds.",
    "Images have 256 x 256 pixels as in that protocol; the paper does not say.",
    "The model is the one of the best mean validation score; the paper's public code selects on test images.",
)
_FEDRDN_PROSTATE_READINGS = (
    "Sites weigh by their number of training samples (FedRDN Eq. 1).",
    "The loss is Dice plus cross-entropy, the paper's Dice alone.",
    "Basic augmentation is read as flips.",
    _INTENSITIES,
    "The model is the one of the best mean validation score; the paper's public code selects on test images.",
)
_FEDFD_A_READINGS = (
    _SCRATCH,
    "Images have 224 x 224 pixels and are mirrored; the paper refers to DomainBed, which also crops and "
    "jitters colours.",
    "What a site sends is the model after its 200 steps, the paper's the best of every 20 on its validation "
    "images.",
    "The held-out site is tested with all its images, as in DomainBed.",
)
_FRAUG_READINGS = (
    "Rounds, epochs, batch, rate, image size and augmentation are left to the paper's appendix, which is not "
    "in its text: 100 rounds of one epoch, batches of 32, SGD at 0.01.",
    "The images that train are the paper's share, evenly from each site's list; validation and test are "
    "whole.",
    "Sites weigh by their number of training images.",
)
_DOMAINS = "each site left out in turn, tested with all its images"
_BY_SLICE = "slices in the published order"
_BY_PATIENT = "patient volumes"

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "office_caltech_10",
            "office_caltech_10",
            "FedFA+ Table 1 and Section 5.1; FedFA Table 9 and appendix E.2",
            _FEDFA_PHOTOGRAPHS,
            readings=_FEDFA_READINGS,
        ),
        Preset(
            "domainnet_10",
            "domainnet_10",
            "FedFA+ Table 1 and Section 5.1; FedFA Table 9 and appendix E.2",
            _FEDFA_PHOTOGRAPHS,
            readings=_FEDFA_READINGS,
        ),
        Preset(
            "prostate_mri",
            "prostate_mri",
            "FedFA+ Table 1 and Section 5.1; FedFA Table 9 and appendix E.3",
            _FEDFA_PROSTATE,
            protocol=_BY_PATIENT,
            readings=(_PATIENTS, *_FEDFA_PROSTATE_READINGS),
        ),
        Preset(
            "prostate_mri_slices",
            "prostate_mri",
            "FedFA+ Table 1 and Section 5.1; FedFA Table 9 and appendix E.3",
            _FEDFA_PROSTATE,
            {"split": "published"},
            protocol=_BY_SLICE,
            readings=(_SLICES, *_FEDFA_PROSTATE_READINGS),
        ),
        Preset(
            "mini_prostate_mri",
            "mini_prostate_mri",
            "FedFA+ Section 5.2.2",
            _FEDFA_PROSTATE,
            protocol=_BY_PATIENT,
            readings=(_PATIENTS, *_FEDFA_PROSTATE_READINGS),
        ),
        Preset(
            "mini_prostate_mri_slices",
            "mini_prostate_mri",
            "FedFA+ Section 5.2.2",
            _FEDFA_PROSTATE,
            {"split": "published"},
            protocol=_BY_SLICE,
            readings=(_SLICES, *_FEDFA_PROSTATE_READINGS),
        ),
        *(
            Preset(
                f"cifar_10_dir{alpha}",
                "cifar_10",
                "FedFA+ Table 1 and Section 5.1",
                _CIFAR,
                {"clients": 100, "alpha": alpha},
                readings=_SKEW_READINGS,
            )
            for alpha in (0.6, 0.3)
        ),
        *(
            Preset(
                f"tiny_imagenet_dir{alpha}",
                "tiny_imagenet",
                "FedFA+ Table 1",
                _TINY,
                {"clients": 100, "alpha": alpha},
                readings=(
                    "Table 1 has 500 rounds and 0.05 of the sites in each, Section 5.1 100 rounds and 0.1: "
                    "the table is followed.",
                    *_SKEW_READINGS,
                ),
            )
            for alpha in (0.6, 0.3)
        ),
        Preset(
            "femnist",
            "femnist",
            "FedFA+ Table 1 and Section 5.1",
            {
                **_LABEL_SKEW,
                "rounds": 1000,
                "local_epochs": 5,
                "batch_size": 32,
                "learning_rate": 5e-2,
                "participation": 0.015,
            },
            readings=(
                _UNIFORM,
                "Writers are LEAF's with ten images or more; the paper has FedScale's 3,400.",
                _SELECTION,
            ),
        ),
        Preset(
            "emnist",
            "emnist",
            "FedFA Table 9",
            {
                "network": "lenet5",
                "rounds": 200,
                "local_epochs": 10,
                "batch_size": 64,
                "optimizer": "sgd",
                "learning_rate": 1e-1,
                "participation": 0.1,
                "weighting": "uniform",
            },
            {"writers": 100},
            readings=(
                _UNIFORM,
                "The 100 sites are writers; FedFA follows FedMix and says no more.",
                _SELECTION,
            ),
        ),
        Preset(
            "fedrdn_office_caltech_10",
            "office_caltech_10",
            "FedRDN Section 4.1 and Table 6",
            _FEDRDN_PHOTOGRAPHS,
            readings=_FEDRDN_READINGS,
        ),
        Preset(
            "fedrdn_domainnet_10",
            "domainnet_10",
            "FedRDN Section 4.1 and Table 6",
            _FEDRDN_PHOTOGRAPHS,
            readings=_FEDRDN_READINGS,
        ),
        Preset(
            "fedrdn_prostate_mri",
            "prostate_mri",
            "FedRDN Section 4.1",
            _FEDRDN_PROSTATE,
            protocol=_BY_PATIENT,
            readings=(_PATIENTS, *_FEDRDN_PROSTATE_READINGS),
        ),
        Preset(
            "fedrdn_prostate_mri_slices",
            "prostate_mri",
            "FedRDN Section 4.1 and Table 6",
            _FEDRDN_PROSTATE,
            {"split": "published"},
            protocol=_BY_SLICE,
            readings=(_SLICES, *_FEDRDN_PROSTATE_READINGS),
        ),
        *(
            Preset(
                f"fedfd_a_{benchmark}",
                benchmark,
                "FedFD-A Section 4.1",
                _FEDFD_A,
                protocol=_DOMAINS,
                readings=_FEDFD_A_READINGS,
                holdout=True,
                whole_site=True,
            )
            for benchmark in ("pacs", "vlcs", "officehome")
        ),
        Preset(
            "fedfd_a_domainnet_10",
            "domainnet_10",
            "FedFD-A appendix A.2",
            {**_FEDFD_A, "network": "alexnet", "image_size": 256},
            {"fraction": 1.0},
            protocol=_DOMAINS,
            readings=(
                "Images have 256 x 256 pixels and are mirrored; the paper does not say.",
                *_FEDFD_A_READINGS[2:],
            ),
            holdout=True,
            whole_site=True,
        ),
        Preset(
            "fraug_officehome",
            "officehome",
            "FRAug Sections 4.1 and 4.2",
            _FRAUG,
            {"fraction": 0.1},
            readings=(_SCRATCH, *_FRAUG_READINGS),
        ),
        Preset(
            "fraug_pacs",
            "pacs",
            "FRAug Sections 4.1 and 4.2",
            _FRAUG,
            {"fraction": 0.1},
            readings=(_SCRATCH, *_FRAUG_READINGS),
        ),
        Preset(
            "fraug_digits",
            "digits",
            "FRAug Sections 4.1 and 4.2",
            {**_FRAUG, "network": "digits_cnn", "image_size": 28, "augmentation": "none"},
            {"fraction": 0.01},
            readings=(
                *_FRAUG_READINGS,
                "All sites that are there take part; the paper has four, without SynthDigits.",
            ),
        ),
        Preset(
            "lgg_multisite",
            "lgg_multisite",
            "no paper: 100 rounds of one epoch, and FedRDN's optimiser",
            {
                **_U_NET,
                "rounds": 100,
                "batch_size": 16,
                "optimizer": "adam",
                "learning_rate": 1e-3,
                "weight_decay": 1e-4,
            },
            protocol=f"{_BY_PATIENT}; with --folds 5 every patient, and all of a site that is left out",
            whole_site=True,
        ),
    )
}


def find_preset(name: str) -> Preset:
    """The preset of a name.

    Raises:
        ConfigError: when there is none, listing them all.
    """
    if name not in PRESETS:
        near = [preset for preset in PRESETS if name.lower() in preset] or get_close_matches(name, PRESETS)
        meant = f"did you mean {' or '.join(near)}? All: " if name and near else "choose from "
        raise ConfigError(f"benchmark {name!r} is not known; {meant}{', '.join(PRESETS)}")
    return PRESETS[name]
