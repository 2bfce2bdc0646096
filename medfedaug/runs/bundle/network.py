"""Reduce a finished run to a MONAI network and a pair for normalisation."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from monai.bundle import ConfigParser
from torch import Tensor, nn

from medfedaug.data.base import SPLITS
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError, first_line
from medfedaug.federation.composition import network_arguments
from medfedaug.federation.site.model import SiteModel
from medfedaug.models.memory_format import is_faster_last
from medfedaug.models.networks import network_definition
from medfedaug.runs.bundle.inference_config import Pair, inference_config
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.input_statistics import Origin
from medfedaug.tasks.segmentation import SegmentationTask
from medfedaug.transforms import FedRDNd

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
        try:
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
        except Exception as error:  # networks fail in many ways
            text = f"MONAI's class makes another one ({first_line(error)}); {_INSTEAD}"
            raise ConfigError(f"network {config.network}: {text}") from error
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
    """Build MONAI's network from a bundle's configuration."""
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
