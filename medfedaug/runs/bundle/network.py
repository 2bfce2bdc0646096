"""Express the inference of a finished run with only MONAI: a network, and the workflow around it."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from monai.bundle import ConfigParser
from torch import Tensor, nn

from medfedaug.data.base import SPLITS
from medfedaug.data.io.formats import label_bits
from medfedaug.data.preparation.preparation import ModalityNormalisation
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError, config_errors
from medfedaug.federation.composition import network_arguments
from medfedaug.federation.site.model import SiteModel
from medfedaug.models.execution import is_faster_last
from medfedaug.models.networks import network_definition
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.tasks.segmentation import SegmentationTask
from medfedaug.transforms import FedRDNd

Pair = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of each channel

_LARGEST = 3e38  # JSON has no infinity
_IMAGE, _PREDICTION = "image", "pred"
_INSTEAD = "use `medfedaug predict`"


@dataclass(frozen=True, eq=False)
class PlainInference:
    """Inference with only MONAI: ``configs/inference.json``, and MONAI's network in evaluation mode.

    The example is a random input image, (1, C, *spatial). With ``fixed_size`` the network takes only images
    of that size, not of its multiples.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    network: nn.Module
    example: Tensor
    pair: Pair | None
    fixed_size: bool


def plain_inference(run: FinishedRun, origin: Origin) -> PlainInference:
    """Express a run's inference with only MONAI, and check the result.

    The network of MONAI's class, built from the bundle's configuration, gets the weights and a random image.
    Its output must equal the output of the run's network to the last bit.
    """
    config = run.config
    if config.task != "segmentation":
        raise ConfigError(f"{run.model}: a bundle gives label maps, and this run is for {config.task}")
    # A site without images, for its layers and pair, if any.
    splits: dict[str, Any] = dict.fromkeys(SPLITS, ())
    folder = VolumeFolder(origin.site, run.model.parent, config.classes, splits)
    model = run.at_site(origin.site, folder, "cpu", statistics=origin.pair)
    task = cast(SegmentationTask, model.task)
    pair = _pair(model)
    with run.scoring(model) as network:
        weights = {key: value.detach().cpu().clone() for key, value in network.state_dict().items()}
        problem = f"network {config.network}: MONAI's class makes another one"
        with config_errors(problem, remedy=f"; {_INSTEAD}"):  # networks fail in many ways
            content = inference_config(
                _json(network_definition(**network_arguments(config))),
                task,
                channels=config.in_channels,
                batch_size=config.batch_size,
                pair=pair,
                photographs=_of_photographs(run),
                bfloat16=config.precision == "bfloat16",
                channels_last=is_faster_last(network, "cpu"),
            )
            plain = _plain_network(content, weights)
        example = _example(network, task, config.in_channels)
        with torch.no_grad():
            ours, theirs = network(example), plain(example)
    if not isinstance(theirs, Tensor) or not torch.equal(ours, theirs):
        raise ConfigError(_difference(run, network))
    fixed = (config.plan.patch_size or config.image_size) is not None
    return PlainInference(content, weights, plain, example, pair, fixed)


def _pair(model: SiteModel) -> Pair | None:
    """Return the pair of the only transform before the network; ``None`` without one."""
    pair: Pair | None = None
    for method, part in model.parts.items():
        try:
            transforms = part.transforms(training=False)
        except DataError as error:  # no images to compute statistics from
            raise ConfigError(
                f"{method} normalises images with the statistics of their place, which MONAI cannot compute "
                "before it predicts; name a site of the run with --site, or give --statistics FILE "
                "(medfedaug statistics)"
            ) from error
        for transform in transforms:
            values = transform.normalizer.pair if isinstance(transform, FedRDNd) else None
            if values is None or pair is not None:
                raise ConfigError(
                    f"{method}: MONAI has no transform that does what {type(transform).__name__} does; "
                    f"{_INSTEAD}"
                )
            pair = values[0].tolist(), values[1].tolist()
    return pair


def _of_photographs(run: FinishedRun) -> bool:
    scores = run.record.get("test", {})
    entries = [*scores.get("sites", {}).values(), *scores.get("unseen", {}).values()]
    return "fixed" in run.record["input"]["scaling"] or any(entry.get("unit") == "px" for entry in entries)


def _plain_network(content: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
    parser = ConfigParser({**content, "device": torch.device("cpu")})
    plain: nn.Module = parser.get_parsed_content("network")
    plain.load_state_dict(weights)
    parser.get_parsed_content("initialize")
    return plain.eval()


def _example(network: nn.Module, task: SegmentationTask, channels: int) -> Tensor:
    """Return a random image of the smallest size that the network takes, or of the size of a window."""
    generator = torch.Generator().manual_seed(0)
    plan, dims = task.plan, task.plan.spatial_dims
    sizes: list[tuple[int, ...]] = [(factor * task.divisor,) * dims for factor in (1, 2, 4)]
    if task.image_size is not None:
        sizes = [(math.ceil(task.image_size / task.divisor) * task.divisor,) * dims]
    if plan.patch_size is not None:
        sizes = [plan.patch_size]
    for size in sizes:
        example = torch.rand(1, channels, *size, generator=generator)
        with suppress(Exception), torch.no_grad():  # networks fail in many ways
            network(example)
            break
    return example


def _difference(run: FinishedRun, network: nn.Module) -> str:
    kinds = {type(module) for module in network.modules()}
    names = sorted(kind.__name__ for kind in kinds if kind.__module__.startswith("medfedaug."))
    methods = ", ".join(method.name for method in run.composition.methods)
    layers = f" (it has {', '.join(names)})" if names else ""
    return (
        f"{methods}: at inference the network computes what MONAI's {run.config.network} does not{layers}; "
        f"{_INSTEAD}"
    )


def _json(value: Any) -> Any:
    """Convert tuples to lists."""
    if isinstance(value, dict):
        return {key: _json(entry) for key, entry in value.items()}
    return [_json(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def inference_config(
    network: dict[str, Any],
    task: SegmentationTask,
    *,
    channels: int,
    batch_size: int,
    pair: Pair | None = None,
    photographs: bool = False,
    bfloat16: bool = False,
    channels_last: bool = False,
) -> dict[str, Any]:
    """Make ``configs/inference.json`` for ``python -m monai.bundle run``.

    It does the steps of `SegmentationTask.predict_case` in the same order. MONAI's `Spacing` samples between
    the centres of the outer voxels. A plan's resampling keeps the edges of a volume: an expression calls
    ``interpolate`` with a size for each volume.

    ``network`` has MONAI's class and its arguments (`medfedaug.models.networks.network_definition`), and
    ``batch_size`` slices or windows are in one pass of the network. ``channels_last`` is the layout of its
    weights on a CPU.
    """
    plan = task.plan
    layout = f"torch.{'channels_last' if plan.spatial_dims == 2 else 'channels_last_3d'}"
    # The memory format of the weights determines the order of sums.
    placed = (
        f"@device, memory_format={layout} if @device.type == 'cpu' else None" if channels_last else "@device"
    )
    config: dict[str, Any] = {
        "imports": [
            *("$import glob", "$import os", "$import numpy as np"),
            *(["$from PIL import Image"] if photographs else []),
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "pattern": "*.png" if photographs else "*.nii*",
        "images": "$sorted(glob.glob(os.path.join(@dataset_dir, @pattern)))",
        "output_dir": "$@bundle_root + '/predictions'",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": network,
        "network": f"$@network_def.to({placed})",
    }
    if pair is not None:
        config["mean"], config["std"] = ([float(v) for v in values] for values in pair)
    config.update(_expressions(task))
    steps = _loaded(task, channels, photographs) + _placed(task, channels) + _resized(task)
    if pair is not None:
        steps.append(_transform("NormalizeIntensityd", subtrahend="@mean", divisor="@std", channel_wise=True))
    config["preprocessing"] = _compose(steps + _padded(task))
    config.update(
        dataset={
            "_target_": "Dataset",
            "data": "$[{'image': image} for image in @images]",
            "transform": "@preprocessing",
        },
        dataloader={"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0},
        inferer=_inferer(task, batch_size),
        postprocessing=_compose(_written(photographs, label_bits(task.num_classes))),
        **_EVALUATION,
        initialize=[_IN_BFLOAT16] if bfloat16 else [],
        run=["$@evaluator.run()"],
    )
    return config


_EVALUATION = {
    "handlers": [
        {
            "_target_": "CheckpointLoader",
            "load_path": "$@bundle_root + '/models/model.pt'",
            "load_dict": {"model": "@network"},
            "map_location": "@device",
        }
    ],
    "evaluator": {
        "_target_": "SupervisedEvaluator",
        "device": "@device",
        "val_data_loader": "@dataloader",
        "network": "@network",
        "inferer": "@inferer",
        "postprocessing": "@postprocessing",
        "val_handlers": "@handlers",
    },
}

_IN_BFLOAT16 = (
    "$setattr(@network, 'forward', (lambda forward: lambda x: forward(x).float())"
    "(torch.autocast(@device.type, torch.bfloat16)(@network.forward)))"
)


def _expressions(task: SegmentationTask) -> dict[str, Any]:
    """Return functions that MONAI's transforms lack, as expressions."""
    expressions: dict[str, Any] = {}
    if task.plan.spacing is None and task.image_size is None:
        return expressions
    expressions["changed"] = (
        "$lambda x, voxels, **more: monai.data.MetaTensor(voxels, meta={**x.meta, **more}, "
        "applied_operations=x.applied_operations)"
    )
    interpolate = "torch.nn.functional.interpolate"
    if task.plan.spacing is not None:
        expressions["spacing"] = list(task.plan.spacing)
        expressions["size_at_spacing"] = (
            "$lambda x: [max(1, round(n * edge / goal)) for n, edge, goal in zip(x.shape[1:], "
            "np.linalg.norm(np.asarray(x.affine, dtype=float)[:3, :3], axis=0).tolist(), @spacing)]"
        )
        expressions["resampled"] = (
            f"$lambda x, size: {interpolate}(x.as_tensor()[None], size, mode='trilinear', "
            "align_corners=False)[0]"
        )
    if task.image_size is not None:
        expressions["in_plane"] = (
            f"$lambda x, size, **more: {interpolate}(x.as_tensor().permute(3, 0, 1, 2), size, "
            "mode='bilinear', **more).permute(1, 2, 3, 0)"
        )
    return expressions


def _loaded(task: SegmentationTask, channels: int, photographs: bool) -> list[dict[str, Any]]:
    scaled = task.intensity == "scale"
    if not photographs:
        load = [_transform("LoadImaged"), _transform("EnsureChannelFirstd")]
        # Each file has its own range; the files of a case are channels.
        each = "$len(@images) > 0 and isinstance(@images[0], (list, tuple))"
        return [*load, *([_transform("ScaleIntensityd", channel_wise=each)] if scaled else [])]
    if channels == 1:
        grey = "np.asarray(image if image.mode.startswith('I') else image.convert('L'), np.float32)"
        white = " / (65535 if image.mode.startswith('I') else 255)" if scaled else ""
        converter = f"$lambda image: Image.fromarray({grey}{white})"
    else:
        converter = "$lambda image: image.convert('RGB')"
    load = [
        _transform("LoadImaged", reader="PILReader", converter=converter),
        _transform("EnsureChannelFirstd"),
    ]
    if scaled and channels > 1:
        load.append(_transform("ScaleIntensityRanged", a_min=0, a_max=255, b_min=0, b_max=1))
    return [*load, _transform("Lambdad", func="$lambda x: x[..., None]")]


def _placed(task: SegmentationTask, channels: int) -> list[dict[str, Any]]:
    """Place the image as `medfedaug.data.preparation.preparation.Preparation.on_grid` does."""
    plan, steps = task.plan, []
    if plan.orientation is not None:
        steps.append(_transform("Orientationd", axcodes=plan.orientation))
    if plan.normalises:
        steps += _by_modality(ModalityNormalisation(plan, channels))
    if plan.spacing is not None:
        steps.append(
            _both_ways(
                "@changed(x, @resampled(x, @size_at_spacing(x)), box=list(x.shape[1:]))",
                "@changed(x, @resampled(x, [int(n) for n in x.meta['box']]))",
            )
        )
    return steps


def _by_modality(normalisation: ModalityNormalisation) -> list[dict[str, Any]]:
    """Normalise as `ModalityNormalisation` does, except for channels that a site lacks."""
    steps = []
    if normalisation.clips:
        low, high = (
            [value if math.isfinite(value) else math.copysign(_LARGEST, value) for value in values]
            for values in (normalisation.low, normalisation.high)
        )
        clamp = f"torch.clamp(x, *(torch.tensor(v)[:, None, None, None] for v in ({low}, {high})))"
        steps.append(_both_ways(clamp, "x"))
    pair = {"subtrahend": normalisation.mean, "divisor": normalisation.deviation}
    return [*steps, _transform("NormalizeIntensityd", channel_wise=True, **pair)]


def _resized(task: SegmentationTask) -> list[dict[str, Any]]:
    """Resize as `medfedaug.data.preparation.preparation.resize_in_plane` does."""
    if task.image_size is None:
        return []
    size = [task.image_size] * 2
    resized = f"x.as_tensor() if list(x.shape[1:3]) == {size} else @in_plane(x, {size}, antialias=True)"
    return [
        _both_ways(
            f"@changed(x, {resized}, plane=list(x.shape[1:3]))",
            "@changed(x, @in_plane(x, [int(n) for n in x.meta['plane']]))",
        )
    ]


def _padded(task: SegmentationTask) -> list[dict[str, Any]]:
    if task.plan.patch_size is not None:
        return []
    k = [task.divisor] * task.plan.spatial_dims + [1] * (3 - task.plan.spatial_dims)
    return [_transform("DivisiblePadd", k=k, method="end")]


def _inferer(task: SegmentationTask, batch_size: int) -> dict[str, Any]:
    plan = task.plan
    windows: dict[str, Any] = {"sw_batch_size": batch_size}
    if plan.patch_size is not None:
        windows.update(roi_size=list(plan.patch_size), overlap=plan.overlap, mode="gaussian")
    elif plan.spatial_dims == 3:
        return {"_target_": "SimpleInferer"}
    else:
        windows["roi_size"] = [-1, -1]  # whole slices
    if plan.spatial_dims == 3:
        return {"_target_": "SlidingWindowInferer", **windows}
    return {"_target_": "SliceInferer", "spatial_dim": 2, **windows}


def _written(photographs: bool, bits: int) -> list[dict[str, Any]]:
    """Return to the file's grid, choose the class of each voxel, and write the file."""
    inverse = {
        "_target_": "Invertd",
        "keys": _PREDICTION,
        "orig_keys": _IMAGE,
        "transform": "@preprocessing",
        "nearest_interp": False,
    }
    classes = {"_target_": "AsDiscreted", "keys": _PREDICTION, "argmax": True}
    # Turning there and back changes the affine by rounding.
    original = (
        "$lambda x: monai.data.MetaTensor(x.as_tensor(), "
        "meta={**x.meta, 'affine': torch.as_tensor(x.meta['original_affine'])})"
    )
    place = {
        "_target_": "Lambdad",
        "keys": _PREDICTION,
        "func": "$lambda x: x[..., 0]" if photographs else original,
    }
    saved = {
        "_target_": "SaveImaged",
        "keys": _PREDICTION,
        "output_dir": "@output_dir",
        "output_postfix": "",
        "separate_folder": False,
        "resample": False,
        "output_dtype": f"$np.uint{bits}",
        "output_ext": ".png" if photographs else ".nii.gz",
        "writer": "PILWriter" if photographs else "NibabelWriter",
    }
    return [inverse, classes, place, saved]


def _transform(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": name, "keys": _IMAGE, **arguments}


def _both_ways(forward: str, inverse: str) -> dict[str, Any]:
    """Return a transform and its inverse. `Lambda`, since `Lambdad` does not use its inverse."""
    of_image = "$lambda data: {**data, 'image': (lambda x: %s)(data['image'])}"
    return {"_target_": "Lambda", "func": of_image % forward, "inv_func": of_image % inverse}


def _compose(transforms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"_target_": "Compose", "transforms": list(transforms)}
