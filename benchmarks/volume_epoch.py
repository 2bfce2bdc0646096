r"""An epoch of a site on volumes, compared with MONAI's own `CacheDataset` and `ThreadDataLoader` loop.

    python benchmarks/volume_epoch.py --data lgg_multisite --site CS --plan-memory 2

`--plan auto` makes the plan from all sites. Both loops have the same network, loss, optimiser, layout and
augmentation, and the same number of steps and patches; each prepares images and cuts patches in its own way.
Epochs alternate. With one thread, time is processor time of all threads; with several, and on a GPU, it is
elapsed time. The parts are processor time of their thread.

On a GPU the plain loop follows MONAI's tutorials, with `CacheDataset`, workers, pinned memory and autocast to
bfloat16; ours computes in bfloat16 too, with graphs.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measure import alternately, begin, parser, report
from monai.data import CacheDataset, DataLoader, ThreadDataLoader, list_data_collate
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    LoadImaged,
    NormalizeIntensityd,
    Orientationd,
    RandCropByPosNegLabeld,
    ScaleIntensityd,
    Spacingd,
    SpatialPadd,
)
from torch import nn
from torch.utils.data import ConcatDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from medfedaug.config.machine import Machine
from medfedaug.config.plan import Plan, planning_settings
from medfedaug.config.run import RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.data.sites import find_sites
from medfedaug.federation import SiteTrainer
from medfedaug.federation.composition import Composition
from medfedaug.federation.planning.fingerprint import fingerprint
from medfedaug.federation.planning.planner import make_plan
from medfedaug.methods import parse_methods
from medfedaug.models.memory_format import channels_last
from medfedaug.simulate import configure
from medfedaug.tasks import Task
from medfedaug.tasks.losses import Loss

KEYS = ("image", "label")


class Parts:
    """Processor time of the parts of a step, in milliseconds, of the loop within `measured`."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def measured(self, loop: str, network: type[nn.Module]) -> Iterator[None]:
        """Measure an epoch of a loop; both loops call these functions."""
        seconds: dict[str, float] = defaultdict(float)
        named = {
            "batches": (_MapDatasetFetcher, "fetch"),
            "forward pass": (network, "forward"),
            "loss": (Loss, "__call__"),
            "backward pass": (torch.Tensor, "backward"),
            "optimiser": (torch.optim.Adam, "step"),
        }

        def clocked(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                started = time.thread_time()
                try:
                    return function(*args, **more)
                finally:
                    seconds[part] += time.thread_time() - started

            return call

        started = time.process_time()
        with ExitStack() as stack:
            for part, (owner, name) in named.items():
                stack.enter_context(patch.object(owner, name, clocked(part, getattr(owner, name))))
            yield
        total = time.process_time() - started
        for part in named:
            self.seconds[f"{loop}: {part}"].append(seconds[part])
        self.seconds[f"{loop}: all else"].append(total - sum(seconds.values()))


def planned(sites: list[SiteFolder], methods: str, memory: float) -> RunConfig:
    """Configure the run as `simulate --spatial-dims 3 --plan auto` does."""
    config = configure(
        sites,
        methods=tuple(parse_methods(methods)),
        plan=Plan(spatial_dims=3),
        planning=planning_settings(("spatial_dims",), memory),
    )
    return make_plan(
        {site.name: fingerprint(site, config.classes) for site in sites if site.trains}, config
    ).configure(config)


def of_site(
    config: RunConfig, site: SiteFolder, parts: Parts, device: torch.device
) -> tuple[float, SiteTrainer, Callable[[], None]]:
    """Return the seconds of a site's preparation, and its epoch."""
    trainer = SiteTrainer(config, site, str(device), machine=Machine(graphs="auto"))
    started = time.process_time()
    trainer.open(site.name)
    trainer.enter_run("0" * 32)
    once = trainer.prepare().payload
    assert trainer.samples is not None
    trainer.samples.training()
    seconds = time.process_time() - started
    trainer.start_round(1, {}, once={f"{key}/{site.name}": value for key, value in once.items()})
    number = 0

    def epoch() -> None:
        nonlocal number
        number += 1
        with parts.measured("medfedaug", type(trainer.network)):
            trainer.train(number)

    return seconds, trainer, epoch


def of_monai(
    config: RunConfig, site: SiteFolder, task: Task, parts: Parts, device: torch.device
) -> tuple[float, CacheDataset, Callable[[], None]]:
    """Return the seconds of the preparation by `CacheDataset`, and an epoch of a plain loop."""
    plan = config.plan
    augment = task.augmentation()
    fixed: list[Any] = [LoadImaged(KEYS), EnsureChannelFirstd(KEYS)]
    if plan.orientation:
        fixed.append(Orientationd(KEYS, axcodes=plan.orientation, labels=None))
    if plan.crop == "foreground":
        fixed.append(CropForegroundd(KEYS, source_key="image", select_fn=lambda image: image > image.min()))
    if plan.normalises:
        fixed.append(NormalizeIntensityd("image", channel_wise=True))
    else:
        fixed.append(ScaleIntensityd("image"))
    if plan.spacing:
        fixed.append(Spacingd(KEYS, pixdim=plan.spacing, mode=("bilinear", "nearest")))
    drawn: list[Any] = []
    if plan.patch_size:
        drawn = [
            RandCropByPosNegLabeld(
                KEYS,
                label_key="label",
                spatial_size=plan.patch_size,
                pos=plan.foreground,
                neg=1 - plan.foreground,
                num_samples=1,
                allow_smaller=True,
            )
        ]
    if augment is not None:
        drawn.append(lambda sample: augment([{key: sample[key].as_tensor() for key in KEYS}])[0])
    if plan.patch_size:
        drawn.append(SpatialPadd(KEYS, spatial_size=plan.patch_size))
    items = [{"image": case.image, "label": case.label} for case in site.cases["training"]]
    started = time.process_time()
    data = CacheDataset(items, Compose([*fixed, *drawn]), progress=False, num_workers=1)
    seconds = time.process_time() - started
    on_gpu = device.type == "cuda"
    loader = (DataLoader if on_gpu else ThreadDataLoader)(
        ConcatDataset([data] * task.samples_per_item),  # the same number of patches and steps
        batch_size=config.batch_size,
        shuffle=True,
        num_workers=4 * on_gpu,
        pin_memory=on_gpu,
        persistent_workers=on_gpu,
        collate_fn=list_data_collate,
    )
    network = channels_last(copy.deepcopy(Composition(config).network).to(device)).train()
    optimiser = torch.optim.Adam(network.parameters(), lr=config.learning_rate)
    half = torch.autocast(device.type, torch.bfloat16) if on_gpu else nullcontext()

    def epoch() -> None:
        with parts.measured("MONAI", type(network)):
            for batch in loader:
                images, labels = (
                    batch[key].as_subclass(torch.Tensor).to(device, non_blocking=True) for key in KEYS
                )
                optimiser.zero_grad(set_to_none=True)
                with half:
                    loss = task.loss(network(channels_last(images)), labels)
                loss.backward()
                optimiser.step()
                float(loss.detach())

    return seconds, data, epoch


def main() -> None:
    """Make the plan, prepare both loops, and let their epochs alternate."""
    arguments = parser(__doc__, repeats=3, on_gpu=True)
    arguments.add_argument("--data", type=Path, required=True, help="folder of sites with volumes")
    arguments.add_argument("--site", help="by default the first training site")
    arguments.add_argument("--limit", type=int, help="largest number of cases of each split and site")
    arguments.add_argument("--methods", default="fedavg", help="of our site; MONAI's loop has none")
    arguments.add_argument("--plan-memory", type=float, default=2.0, help="GiB for a training step")
    options, device = begin(arguments)
    sites = find_sites(options.data, limit=options.limit)
    config = planned(sites, options.methods, options.plan_memory)
    if device.type == "cuda":
        config = replace(config, precision="bfloat16")
    plan = config.plan
    site = next(one for one in sites if one.trains and options.site in (None, one.name))
    print(
        f"{site.name}: {len(site.cases['training'])} volumes; patches {plan.patch_size}, "
        f"{plan.patches_per_volume} a volume, batches of {config.batch_size}, "
        f"augmentation {config.augmentation}"
    )
    parts = Parts()
    ours, trainer, our_epoch = of_site(config, site, parts, device)
    theirs, _, their_epoch = of_monai(config, site, trainer.task, parts, device)
    print(f"  preparation of all volumes: medfedaug {ours:.2f} s, MONAI {theirs:.2f} s (processor time)")
    seconds = alternately({"medfedaug": our_epoch, "MONAI": their_epoch}, options.repeats)
    faster = device.type == "cuda"
    goal = {("MONAI", "medfedaug"): (">=", 1.3)} if faster else {("medfedaug", "MONAI"): ("<=", 1.05)}
    report("an epoch", seconds, goal)
    print("parts of an epoch, processor time")
    for part, values in parts.seconds.items():
        print(f"  {part:46s} {1e3 * statistics.median(values[1:]):9.0f} ms")


if __name__ == "__main__":
    main()
