"""Small Bundles in the layout of MONAI's model zoo, and sites that they train on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from benchmark_files import write_volume
from PIL import Image

BOTH = ["image", "label"]
_FROM = "$monai.handlers.from_engine(['pred', 'label'])"


def target(name: str, **args: Any) -> dict[str, Any]:
    return {"_target_": name, **args}


def volumes() -> dict[str, Any]:
    """As spleen_ct_segmentation: patches of volumes, Novograd, a sliding window, Dice."""
    return _zoo(
        network=target(
            "UNet",
            spatial_dims=3,
            in_channels=1,
            out_channels=2,
            channels=[4, 8, 8],
            strides=[2, 2],
            num_res_units=1,
            norm="batch",
        ),
        loss=target("DiceCELoss", include_background=True, to_onehot_y=True, softmax=True, batch=True),
        optimizer=target("Novograd", params="$@network.parameters()", lr=0.02),
        once=[
            target("LoadImaged", keys=BOTH),
            target("EnsureChannelFirstd", keys=BOTH),
            target("Orientationd", keys=BOTH, axcodes="RAS"),
            target("ScaleIntensityRanged", keys="image", a_min=0, a_max=1500, b_min=0, b_max=1, clip=True),
            target("EnsureTyped", keys=BOTH),
        ],
        drawn=[
            target(
                "RandCropByPosNegLabeld",
                keys=BOTH,
                label_key="label",
                spatial_size=[16, 16, 8],
                pos=1,
                neg=1,
                num_samples=2,
                image_key="image",
                image_threshold=0,
            ),
            target("RandShiftIntensityd", keys="image", offsets=0.1, prob=0.5),
        ],
        inferer=target("SlidingWindowInferer", roi_size=[16, 16, 8], sw_batch_size=4, overlap=0.25),
        postprocessing=[
            target("Activationsd", keys="pred", softmax=True),
            target("AsDiscreted", keys=["pred", "label"], argmax=[True, False], to_onehot=2),
        ],
        key={"val_mean_dice": target("MeanDice", include_background=False, output_transform=_FROM)},
        more={"val_accuracy": target("ignite.metrics.Accuracy", output_transform=_FROM)},
        batch_size=2,
    )


def channels() -> dict[str, Any]:
    """As brats_mri_segmentation: files of several channels, labels that overlap, one metric for each."""
    regions = ("tc", "wt", "et")
    dice = {"include_background": True}
    return _zoo(
        network=target(
            "SegResNet", blocks_down=[1, 1], blocks_up=[1], init_filters=8, in_channels=2, out_channels=3
        ),
        loss=target("DiceLoss", smooth_nr=0, squared_pred=True, to_onehot_y=False, sigmoid=True),
        optimizer=target("torch.optim.Adam", params="$@network.parameters()", lr=0.01, weight_decay=1e-5),
        once=[
            target("LoadImaged", keys=BOTH, image_only=False),
            target("ConvertToMultiChannelBasedOnBratsClassesd", keys="label"),
            target("NormalizeIntensityd", keys="image", nonzero=True, channel_wise=True),
        ],
        drawn=[
            target("RandSpatialCropd", keys=BOTH, roi_size=[16, 16, 8], random_size=False),
            target("RandFlipd", keys=BOTH, prob=0.5, spatial_axis=0),
            target("RandScaleIntensityd", keys="image", factors=0.1, prob=1.0),
        ],
        inferer=target("SlidingWindowInferer", roi_size=[16, 16, 8], sw_batch_size=1, overlap=0.5),
        postprocessing=[
            target("Activationsd", keys="pred", sigmoid=True),
            target("AsDiscreted", keys="pred", threshold=0.5),
            target("SplitDimd", keys=["pred", "label"], output_postfixes=list(regions)),
        ],
        key={"val_mean_dice": target("MeanDice", **dice, output_transform=_FROM)},
        more={
            f"val_mean_dice_{name}": target(
                "MeanDice",
                **dice,
                output_transform=f"$monai.handlers.from_engine(['pred_{name}', 'label_{name}'])",
            )
            for name in regions
        },
        batch_size=1,
    )


def _zoo(
    *,
    network: dict[str, Any],
    loss: dict[str, Any],
    optimizer: dict[str, Any],
    once: list[Any],
    drawn: list[Any],
    inferer: dict[str, Any],
    postprocessing: list[Any],
    key: dict[str, Any],
    more: dict[str, Any],
    batch_size: int,
) -> dict[str, Any]:
    """The keys that most Bundles of the zoo have."""
    listed = "$[{'image': i, 'label': l} for i, l in zip(@images, @labels)]"
    evaluator = {"additional_metrics": "@validate#additional_metrics"} if more else {}
    return {
        "imports": ["$import glob", "$import os", "$import ignite"],
        "bundle_root": ".",
        "ckpt_dir": "$@bundle_root + '/models'",
        "dataset_dir": "/nowhere",
        "images": "$list(sorted(glob.glob(@dataset_dir + '/imagesTr/*.nii.gz')))",
        "labels": "$list(sorted(glob.glob(@dataset_dir + '/labelsTr/*.nii.gz')))",
        "epochs": 800,
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": network,
        "network": "$@network_def.to(@device)",
        "loss": loss,
        "optimizer": optimizer,
        "lr_scheduler": target("torch.optim.lr_scheduler.StepLR", optimizer="@optimizer", step_size=5000),
        "train": {
            "deterministic_transforms": once,
            "random_transforms": drawn,
            "preprocessing": target(
                "Compose", transforms="$@train#deterministic_transforms + @train#random_transforms"
            ),
            "dataset": target("CacheDataset", data=listed, transform="@train#preprocessing", cache_rate=1.0),
            "dataloader": target(
                "DataLoader", dataset="@train#dataset", batch_size=batch_size, shuffle=True, num_workers=4
            ),
            "inferer": target("SimpleInferer"),
            "postprocessing": target("Compose", transforms=postprocessing),
            "handlers": [
                target("LrScheduleHandler", lr_scheduler="@lr_scheduler", print_lr=True),
                target("ValidationHandler", validator="@validate#evaluator", interval=1),
            ],
            "trainer": target(
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
                amp=True,
            ),
        },
        "validate": {
            "preprocessing": target("Compose", transforms="%train#deterministic_transforms"),
            "dataset": target(
                "CacheDataset", data=listed, transform="@validate#preprocessing", cache_rate=1.0
            ),
            "dataloader": target("DataLoader", dataset="@validate#dataset", batch_size=1, num_workers=4),
            "inferer": inferer,
            "postprocessing": "%train#postprocessing",
            "handlers": [target("StatsHandler", iteration_log=False)],
            "key_metric": key,
            **({"additional_metrics": more} if more else {}),
            "evaluator": target(
                "SupervisedEvaluator",
                device="@device",
                val_data_loader="@validate#dataloader",
                network="@network",
                inferer="@validate#inferer",
                postprocessing="@validate#postprocessing",
                key_val_metric="@validate#key_metric",
                val_handlers="@validate#handlers",
                amp=True,
                **evaluator,
            ),
        },
        "initialize": ["$monai.utils.set_determinism(seed=123)"],
        "run": ["$@train#trainer.run()"],
    }


def photographs() -> dict[str, Any]:
    """As classification_template, whose keys are at the top, and which scales after its random transforms."""
    return {
        "imports": ["$import os", "$import json", "$import datetime", "$import torch"],
        "image": "$monai.utils.CommonKeys.IMAGE",
        "label": "$monai.utils.CommonKeys.LABEL",
        "pred": "$monai.utils.CommonKeys.PRED",
        "rand_prob": 0.5,
        "batch_size": 3,
        "learning_rate": 0.05,
        "num_classes": 2,
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "bundle_root": ".",
        "data_fp": "$open(@bundle_root + '/data/train_samples.json')",
        "data_dict": "$json.load(@data_fp)",
        "network_def": target(
            "DenseNet",
            spatial_dims=2,
            in_channels=3,
            out_channels="@num_classes",
            init_features=4,
            growth_rate=4,
            block_config=[1, 1],
        ),
        "network": "$@network_def.to(@device)",
        "base_transforms": [
            target("LoadImaged", keys="@image"),
            target("EnsureChannelFirstd", keys="@image", channel_dim=-1),
            target("Resized", keys="@image", spatial_size=[32, 32]),
        ],
        "train_transforms": [
            target("RandAxisFlipd", keys="@image", prob="@rand_prob"),
            target("ScaleIntensityd", keys="@image"),
        ],
        "val_transforms": [target("ScaleIntensityd", keys="@image")],
        "preprocessing": target("Compose", transforms="$@base_transforms + @train_transforms"),
        "val_preprocessing": target("Compose", transforms="$@base_transforms + @val_transforms"),
        "train_dataset": target("Dataset", data="@data_dict", transform="@preprocessing"),
        "val_dataset": target("Dataset", data="@data_dict", transform="@val_preprocessing"),
        "train_dataloader": target(
            "ThreadDataLoader", dataset="@train_dataset", batch_size="@batch_size", repeats=1, num_workers=4
        ),
        "val_dataloader": target("DataLoader", dataset="@val_dataset", batch_size="@batch_size"),
        "lossfn": target("torch.nn.CrossEntropyLoss", reduction="sum"),
        "optimizer": target(
            "torch.optim.SGD", params="$@network.parameters()", lr="@learning_rate", momentum=0.9
        ),
        "inferer": target("SimpleInferer"),
        "postprocessing": target(
            "Compose",
            transforms=[
                target("Activationsd", keys="@pred", softmax=True),
                target(
                    "AsDiscreted", keys=["@pred", "@label"], argmax=[True, False], to_onehot="@num_classes"
                ),
                target("ToTensord", keys=["@pred", "@label"], device="@device"),
            ],
        ),
        "evaluator": target(
            "SupervisedEvaluator",
            device="@device",
            val_data_loader="@val_dataloader",
            network="@network",
            postprocessing="@postprocessing",
            key_val_metric={
                "val_accuracy": target(
                    "ignite.metrics.Accuracy", output_transform="$monai.handlers.from_engine([@pred, @label])"
                )
            },
            additional_metrics={
                "val_f1": target(
                    "ConfusionMatrix",
                    metric_name="f1 score",
                    output_transform="$monai.handlers.from_engine([@pred, @label])",
                )
            },
        ),
        "trainer": target(
            "SupervisedTrainer",
            max_epochs=10,
            device="@device",
            train_data_loader="@train_dataloader",
            network="@network",
            inferer="@inferer",
            loss_function="@lossfn",
            optimizer="@optimizer",
            key_train_metric=None,
        ),
        "run": ["$@trainer.run()"],
    }


KINDS = {"volumes": volumes, "channels": channels, "photographs": photographs}


def write(folder: Path, content: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> Path:
    """A Bundle's folder; those whose keys are at the top are in YAML, as in the zoo."""
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    if "train" in content:
        (folder / "configs/train.json").write_text(json.dumps(content, indent=4))
    else:
        (folder / "configs/train.yaml").write_text(yaml.safe_dump(dict(content), sort_keys=False))
    (folder / "configs/metadata.json").write_text(json.dumps(metadata or {"version": "0.1.0"}))
    for name in ("docs/README.md", "LICENSE"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("words")
    return folder


def make_brats_sites(root: Path, names: str = "AB", cases=(2, 1, 1)) -> Path:
    """Sites of volumes in a file for each channel, with the labels 0, 1, 2 and 4 of BraTS."""
    for name in names:
        folder, index = root / name, 0
        rng = np.random.default_rng(sum(name.encode()))
        content: dict[str, Any] = {"labels": {"0": "background", "1": "core", "2": "edema", "3": "unused"}}
        for split, count in zip(("training", "validation", "test"), cases, strict=True):
            content[split] = []
            for _ in range(count):
                files = [f"images/{index}_{kind}.nii.gz" for kind in ("t1", "t2")]
                for file in files:
                    write_volume(folder / file, rng.normal(100, 20, (16, 16, 8)).astype(np.float32))
                label = np.zeros((16, 16, 8), np.uint8)
                label[3:9, 3:9, 1:5], label[4:8, 4:8, 2:4], label[5:7, 5:7, 2] = 2, 1, 4
                write_volume(folder / f"labels/{index}.nii.gz", label)
                content[split].append({"image": files, "label": f"labels/{index}.nii.gz"})
                index += 1
        (folder / "dataset.json").write_text(json.dumps(content))
    return root


def make_photographs(root: Path, names: str = "AB", per_class: int = 5) -> Path:
    """Sites of small photographs in one folder a class."""
    for name in names:
        rng = np.random.default_rng(sum(name.encode()))
        for index, label in enumerate(("inside", "outside")):
            (root / name / label).mkdir(parents=True)
            for number in range(per_class):
                pixels = rng.integers(0, 150, (32, 32, 3), dtype=np.uint8)
                pixels[..., index] += 100
                Image.fromarray(pixels).save(root / name / label / f"{number}.png")
    return root
