"""The papers' protocols by name: data, network, rounds, optimiser, and where the paper describes them.

>>> PRESETS["office_caltech_10"].config["rounds"], PRESETS["fedrdn_office_caltech_10"].config["rounds"]
(400, 100)
"""

from __future__ import annotations

from medfedaug.errors import ConfigError
from medfedaug.experiments import protocol_notes
from medfedaug.experiments.preset import Preset
from medfedaug.utils.validation import not_known

__all__ = ["PRESETS", "Preset", "find_preset"]

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
# FedFA+ Section 5.1: "As [18], [104]-[106], we set α to 0.3 or 0.6, and train a ResNet-18". With the stem for
# ImageNet the last two stages of an image of 32 pixels are single pixels, in which nothing varies.
_SMALL_IMAGES = {"conv1_t_size": 3, "conv1_t_stride": 1, "no_max_pool": True}
_LABEL_SKEW = {
    "network": "resnet18",
    "network_args": _SMALL_IMAGES,
    "optimizer": "sgd",
    "learning_rate": 1e-1,
    "weighting": "uniform",
}
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
    "weighting": "uniform",  # Algorithm 1, lines 7 and 8: θ ← 1/K Σ θ^k, and the generator alike
}
# FRAug Section 4.1: "only 10% (1% for the Digits dataset) of the original data is available for each client".
# Of a site's images 60 % can train here, of Digits' training images 80 %.
_TENTH, _HUNDREDTH = 0.1 / 0.6, 0.01 / 0.8

# FedRDN appendix A.2: "FedAvgM has a momentum hyper-parameter [...], which is set to 0.9 for two image
# classification datasets and 0.01 for ProstateMRI"; "0.001 for FedProx and 1 for FedProto on all datasets";
# FedMix: "The batch size is set to 5 and λ is set to 0.1". All but 0.01 are the methods' defaults.
_FEDRDN_PROSTATE_ARGUMENTS = {"fedavgm": {"momentum": 0.01}}
# FedFD-A Section 4.2: "the FedProx method [31], which entails L2 regularization with μ set to 0.1".
_FEDFD_A_ARGUMENTS = {"fedprox": {"mu": 0.1}}

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
            readings=protocol_notes.FEDFA,
        ),
        Preset(
            "domainnet_10",
            "domainnet_10",
            "FedFA+ Table 1 and Section 5.1; FedFA Table 9 and appendix E.2",
            _FEDFA_PHOTOGRAPHS,
            readings=protocol_notes.FEDFA,
        ),
        Preset(
            "prostate_mri",
            "prostate_mri",
            "FedFA+ Table 1 and Section 5.1; FedFA Table 9 and appendix E.3",
            _FEDFA_PROSTATE,
            protocol=_BY_PATIENT,
            readings=(protocol_notes.PATIENTS, *protocol_notes.FEDFA_PROSTATE),
        ),
        Preset(
            "prostate_mri_slices",
            "prostate_mri",
            "FedFA+ Table 1 and Section 5.1; FedFA Table 9 and appendix E.3",
            _FEDFA_PROSTATE,
            {"split": "published"},
            protocol=_BY_SLICE,
            readings=(protocol_notes.SLICES, *protocol_notes.FEDFA_PROSTATE),
        ),
        Preset(
            "mini_prostate_mri",
            "mini_prostate_mri",
            "FedFA+ Section 5.2.2",
            _FEDFA_PROSTATE,
            protocol=_BY_PATIENT,
            readings=(protocol_notes.PATIENTS, *protocol_notes.FEDFA_PROSTATE),
        ),
        Preset(
            "mini_prostate_mri_slices",
            "mini_prostate_mri",
            "FedFA+ Section 5.2.2",
            _FEDFA_PROSTATE,
            {"split": "published"},
            protocol=_BY_SLICE,
            readings=(protocol_notes.SLICES, *protocol_notes.FEDFA_PROSTATE),
        ),
        *(
            Preset(
                f"cifar_10_dir{alpha}",
                "cifar_10",
                "FedFA+ Table 1 and Section 5.1",
                _CIFAR,
                {"clients": 100, "alpha": alpha},
                readings=protocol_notes.SKEW,
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
                    "Table 1 has 500 rounds and 0.05 of the sites in each, Section 5.1 has 100 rounds and "
                    "0.1. The table is followed.",
                    *protocol_notes.SKEW,
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
                protocol_notes.UNIFORM,
                protocol_notes.STEM,
                "The sites are LEAF's writers with ten images or more; the paper has FedScale's 3,400.",
                protocol_notes.NO_AUGMENTATION,
                protocol_notes.SELECTION,
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
                protocol_notes.UNIFORM,
                "Each of the 100 sites is one writer; FedFA refers to FedMix and says no more.",
                "Table 9 has 100 sites, a tenth of them in each round, and batches of 64; Section 4.1 has "
                "200 sites, 10 of them in each round, and batches of 10. The table is followed.",
                "LeNet-5 has batch norm, ReLU and max pooling; the paper does not say.",
                protocol_notes.SELECTION,
            ),
        ),
        Preset(
            "fedrdn_office_caltech_10",
            "office_caltech_10",
            "FedRDN Section 4.1 and Table 6",
            _FEDRDN_PHOTOGRAPHS,
            readings=protocol_notes.FEDRDN,
        ),
        Preset(
            "fedrdn_domainnet_10",
            "domainnet_10",
            "FedRDN Section 4.1 and Table 6",
            _FEDRDN_PHOTOGRAPHS,
            readings=protocol_notes.FEDRDN,
        ),
        Preset(
            "fedrdn_prostate_mri",
            "prostate_mri",
            "FedRDN Section 4.1",
            _FEDRDN_PROSTATE,
            arguments=_FEDRDN_PROSTATE_ARGUMENTS,
            protocol=_BY_PATIENT,
            readings=(protocol_notes.PATIENTS, *protocol_notes.FEDRDN_PROSTATE),
        ),
        Preset(
            "fedrdn_prostate_mri_slices",
            "prostate_mri",
            "FedRDN Section 4.1 and Table 6",
            _FEDRDN_PROSTATE,
            {"split": "published"},
            _FEDRDN_PROSTATE_ARGUMENTS,
            protocol=_BY_SLICE,
            readings=(protocol_notes.SLICES, *protocol_notes.FEDRDN_PROSTATE),
        ),
        *(
            Preset(
                f"fedfd_a_{benchmark}",
                benchmark,
                "FedFD-A Section 4.1",
                _FEDFD_A,
                {"split": "domainbed"},
                _FEDFD_A_ARGUMENTS,
                protocol=_DOMAINS,
                readings=protocol_notes.FEDFD_A,
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
            {"fraction": 1.0, "split": "domainbed"},
            _FEDFD_A_ARGUMENTS,
            protocol=_DOMAINS,
            readings=protocol_notes.FEDFD_A_DOMAINNET,
            holdout=True,
            whole_site=True,
        ),
        Preset(
            "fraug_officehome",
            "officehome",
            "FRAug Sections 4.1 and 4.2, Algorithm 1",
            _FRAUG,
            {"fraction": _TENTH},
            readings=(protocol_notes.SCRATCH, *protocol_notes.FRAUG),
        ),
        Preset(
            "fraug_pacs",
            "pacs",
            "FRAug Sections 4.1 and 4.2, Algorithm 1",
            _FRAUG,
            {"fraction": _TENTH},
            readings=(protocol_notes.SCRATCH, *protocol_notes.FRAUG),
        ),
        Preset(
            "fraug_digits",
            "digits",
            "FRAug Sections 4.1 and 4.2, Algorithm 1",
            {**_FRAUG, "network": "digits_cnn", "image_size": 28, "augmentation": "none"},
            {"fraction": _HUNDREDTH, "synthetic": False},
            readings=protocol_notes.FRAUG,
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
        Preset(
            "lgg_multisite_3d",
            "lgg_multisite",
            "no paper: 100 rounds of one epoch over two patches of each volume, in three dimensions",
            {
                "network": "basicunet",
                "network_args": {"features": [16, 32, 64, 128, 256, 16], "norm": "instance"},
                "plan": {
                    "spatial_dims": 3,
                    "patch_size": [64, 64, 32],
                    "patches_per_volume": 2,
                    "foreground": 0.5,
                    "overlap": 0.25,
                },
                "rounds": 100,
                "batch_size": 2,
                "optimizer": "adam",
                "learning_rate": 1e-3,
                "intensity": "scale",
            },
            protocol=f"{_BY_PATIENT}; with --folds 5 every patient, and all of a site that is left out",
            whole_site=True,
        ),
        Preset(
            "retina_vessels",
            "retina_vessels",
            "no paper: 30 rounds of four epochs in batches of 4, and FedRDN's optimiser",
            {
                "network": "unet",
                "network_args": {"num_res_units": 0},
                "image_size": 256,
                "rounds": 30,
                "local_epochs": 4,
                "batch_size": 4,
                "optimizer": "adam",
                "learning_rate": 1e-3,
                "intensity": "scale",
            },
            protocol="photographs; with --folds 5 every patient, and all of a site that is left out",
            readings=protocol_notes.RETINA,
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
        raise ConfigError(f"benchmark {name!r} {not_known(name, PRESETS)}")
    return PRESETS[name]
