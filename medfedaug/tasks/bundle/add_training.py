"""Training for a Bundle that only infers: its network and transforms, and MONAI's common parts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monai import transforms
from monai.bundle import ConfigParser

from medfedaug.config.bundle_reference import has_training
from medfedaug.errors import ConfigError, first_line
from medfedaug.utils.files import write_json

_BOTH = ["image", "label"]
# Parts of an inference that a training replaces or does not need.
_OF_INFERENCE = (
    *("preprocessing", "dataset", "dataloader", "postprocessing", "handlers", "checkpointloader"),
    *("evaluator", "initialize", "run"),
)


def add_training(folder: Path) -> tuple[Path, list[str]]:
    """Write ``configs/train.json`` of a Bundle that segments, from its ``configs/inference.json``.

    Network, inferer and deterministic transforms come from the inference; loss, optimiser, crops of the
    inferer's windows and the metric are common ones, for the Bundle's owner to check. Nothing is evaluated.

    Returns:
        The file, and the transforms of the inference that it lacks: their effect on a label is unknown.

    Raises:
        ConfigError: when the Bundle trains already, or its inference names no network with several classes.
    """
    if has_training(folder):
        raise ConfigError(f"{folder}: the Bundle has a training already")
    source, target = folder / "configs/inference.json", folder / "configs/train.json"
    try:
        inference = ConfigParser.load_config_file(str(source))
        network, steps = inference["network_def"], inference["preprocessing"]["transforms"]
        classes = network["out_channels"]
        converted = [_for_both(step) for step in steps]
    except Exception as error:  # of files, JSON and unexpected values
        reason = first_line(error) or type(error).__name__
        raise ConfigError(
            f"{source}: network_def with out_channels and preprocessing with transforms are needed ({reason})"
        ) from error
    if not isinstance(classes, int) or classes < 2:
        raise ConfigError(f"{source}: network_def#out_channels must be at least 2 classes, got {classes!r}")
    inferer = inference.get("inferer") or {"_target_": "SimpleInferer"}
    window = inferer.get("roi_size") if isinstance(inferer, Mapping) else None
    write_json(
        target,
        {
            "bundle_root": ".",
            "dataset_dir": ".",
            "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
            "network": "$@network_def.to(@device)",
            **{key: value for key, value in inference.items() if key not in _OF_INFERENCE},
            "inferer": inferer,
            "epochs": 100,
            "loss": _part("DiceCELoss", to_onehot_y=True, softmax=True),
            "optimizer": _part("torch.optim.Adam", params="$@network.parameters()", lr=1e-3),
            "train": _training([step for step in converted if step is not None], window, classes),
            "validate": _VALIDATION,
            "initialize": ["$monai.utils.set_determinism(seed=0)"],
            "run": ["$@train#trainer.run()"],
        },
    )
    return target, [
        str(step.get("_target_")) for step, one in zip(steps, converted, strict=True) if one is None
    ]


def _part(kind: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": kind, **arguments}


def _for_both(step: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert a transform of the image to one of image and label; ``None`` for an unknown function."""
    kind = getattr(transforms, str(step["_target_"]).rpartition(".")[2], None)
    if not inspect.isclass(kind) or not issubclass(kind, transforms.MapTransform):
        return None
    if issubclass(kind, transforms.Lambdad):
        return None
    if kind.__module__.startswith("monai.transforms.intensity"):
        return {**step, "keys": "image"}
    mode = inspect.signature(kind).parameters.get("mode")
    if mode is None or not kind.__module__.startswith("monai.transforms.spatial"):
        return {**step, "keys": _BOTH}
    return {**step, "keys": _BOTH, "mode": [step.get("mode", str(mode.default)), "nearest"]}


def _training(steps: list[dict[str, Any]], window: Any, classes: int) -> dict[str, Any]:
    crops = [
        _part("SpatialPadd", keys=_BOTH, spatial_size=window),
        _part("RandCropByPosNegLabeld", keys=_BOTH, label_key="label", spatial_size=window, num_samples=4),
    ]
    return {
        "cases": "$monai.data.load_decathlon_datalist(@dataset_dir + '/dataset.json', True, 'training')",
        "deterministic_transforms": steps,
        "random_transforms": crops if window is not None else [],
        "preprocessing": _part(
            "Compose", transforms="$@train#deterministic_transforms + @train#random_transforms"
        ),
        "dataset": _part("CacheDataset", data="@train#cases", transform="@train#preprocessing"),
        # Whole images differ in size.
        "dataloader": _part(
            "DataLoader", dataset="@train#dataset", batch_size=1 if window is None else 2, shuffle=True
        ),
        "inferer": _part("SimpleInferer"),
        "postprocessing": _part(
            "Compose",
            transforms=[
                _part("Activationsd", keys="pred", softmax=True),
                _part("AsDiscreted", keys=["pred", "label"], argmax=[True, False], to_onehot=classes),
            ],
        ),
        "handlers": [_part("ValidationHandler", validator="@validate#evaluator", interval=1)],
        "trainer": _part(
            "SupervisedTrainer",
            max_epochs="@epochs",
            device="@device",
            train_data_loader="@train#dataloader",
            network="@network",
            loss_function="@loss",
            optimizer="@optimizer",
            inferer="@train#inferer",
            postprocessing="@train#postprocessing",
            train_handlers="@train#handlers",
        ),
    }


_VALIDATION = {
    "cases": "$monai.data.load_decathlon_datalist(@dataset_dir + '/dataset.json', True, 'validation')",
    "preprocessing": _part("Compose", transforms="%train#deterministic_transforms"),
    "dataset": _part("CacheDataset", data="@validate#cases", transform="@validate#preprocessing"),
    "dataloader": _part("DataLoader", dataset="@validate#dataset"),
    "postprocessing": "%train#postprocessing",
    "key_metric": {
        "val_mean_dice": _part(
            "MeanDice",
            include_background=False,
            output_transform="$monai.handlers.from_engine(['pred', 'label'])",
        )
    },
    "evaluator": _part(
        "SupervisedEvaluator",
        device="@device",
        val_data_loader="@validate#dataloader",
        network="@network",
        inferer="@inferer",
        postprocessing="@validate#postprocessing",
        key_val_metric="@validate#key_metric",
    ),
}
