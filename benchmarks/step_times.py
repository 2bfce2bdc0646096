"""Time of a training step and of a pass with each network of the papers' protocols and tables.

    python benchmarks/step_times.py --out benchmarks/step_times.json
    python benchmarks/step_times.py --out benchmarks/step_times.json --device cuda

The record holds seconds for an image, by network, shape and batch, for each kind of device. A step is the
forward and backward pass and SGD's step; the fastest counts. On a CPU it is one thread's processor time, and
a batch has at most 4 images of 256 x 256, so that its memory stays small. `docs/entries.py` computes the
hours of a protocol and of an entry: a step for every training image of all rounds, and a pass for every
validation image of the sites in it. Reading images, the server, and what methods add are left out.
"""

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from medfedaug.methods.registry import parse_methods
from medfedaug.research.papers.axes import shown
from medfedaug.research.papers.papers import Entry, entries
from medfedaug.research.papers.preset import Preset
from medfedaug.research.papers.presets import PRESETS

RECORD = Path(__file__).with_suffix(".json")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Images:
    """Sites of a data set, and images of all of them.

    Args:
        sites: number of training sites.
        training: in the protocol of most entries.
        validation: scored after each round.
        size: of the images, where a protocol does not resize them.
    """

    sites: int
    training: float
    validation: float
    size: int = 0


# From the published lists, or the data sets' numbers of images and the shares of `docs/datasets.md`.
IMAGES = {
    "office_caltech_10": Images(4, 1213, 812),
    "domainnet_10": Images(6, 5847, 3653),
    "prostate_mri": Images(6, 1111, 369, 384),
    "mini_prostate_mri": Images(6, 221, 369, 384),
    "cifar_10": Images(100, 45_000, 5000, 32),
    "tiny_imagenet": Images(100, 90_000, 10_000, 64),
    "femnist": Images(2800, 0.8 * 637_877, 0.1 * 637_877, 28),
    "emnist": Images(100, 18_200, 2275, 28),
    "pacs": Images(4, 9991, 0.1 * 9991),
    "vlcs": Images(4, 10_729, 0.1 * 10_729),
    "officehome": Images(4, 15_588, 0.2 * 15_588),
    "digits": Images(4, 0.8 * 199_549, 0.2 * 199_549, 28),
    "lgg_multisite": Images(4, 2340, 780, 128),
    "retina_vessels": Images(5, 67, 27, 256),
}
_OTHERS = {"fraug_pacs": 0.2 * 9991, "fedfd_a_domainnet_10": 2288, "fedfd_a_officehome": 0.1 * 15_588}
_OF_ALL = {"fraug_pacs": 0.1, "fraug_officehome": 0.1, "fraug_digits": 0.0125}


@dataclass(frozen=True)
class Work:
    """Work of a run: a network, and its numbers of trained and scored images.

    Args:
        network: key of the record.
        make: arguments of `medfedaug.models.build_network`.
        shape: of an image, with its channels.
        batch: images in a step.
        trained: images of all steps.
        scored: images of all passes of validation.
    """

    network: str
    make: Mapping[str, Any]
    shape: tuple[int, ...]
    batch: int
    trained: float
    scored: float


def work(preset: Preset, settings: Mapping[str, Any] = {}) -> Work:
    """Return the work of one run of a protocol, with all sites that it leaves out in turn.

    Args:
        preset: the protocol.
        settings: differences from the protocol.
    """
    images, config = IMAGES[preset.benchmark], {**preset.config, **settings}
    own = preset.config.get("network_args", {}) if config["network"] == preset.config["network"] else {}
    network = {**own, **settings.get("network_args", {})}
    size, patch = config.get("image_size") or images.size, config.get("plan", {}).get("patch_size")
    shape = (3, *(patch or (size, size)))
    turns, sites = (images.sites, images.sites - 1) if preset.holdout else (1, images.sites)
    share = config.get("participation", 1.0) * sites / images.sites
    rounds, deal = config["rounds"], preset.data.get("deal", 1)
    writers = settings["writers"] / preset.data["writers"] if "writers" in settings else 1
    if steps := config.get("local_steps", 0):
        trained = rounds * steps * config["batch_size"] * share * images.sites * deal
    else:
        training = images.training * _OF_ALL.get(preset.name, 1.0) * settings.get("fraction", 1)
        trained = rounds * config.get("local_epochs", 1) * training * share * writers
    scored = rounds * _OTHERS.get(preset.name, images.validation) * share * writers
    if patch:  # volumes of 36 slices, two patches of each; about nine windows score one
        trained, scored = trained / 36 * 2, scored / 36 * 9
    arguments = f" {json.dumps(network, sort_keys=True)}" if network else ""
    name = f"{config['network']}{arguments}, {' x '.join(map(str, shape[1:]))}, batch {config['batch_size']}"
    make = {"name": config["network"], "spatial_dims": len(shape) - 1, **network}
    return Work(name, make, shape, config["batch_size"], turns * trained, turns * scored)


def hours(done: Work, device: str = "cpu") -> float | None:
    """Return the hours of a run on one core, or on a GPU; None where its steps were not measured."""
    one = _record().get(device, {}).get("networks", {}).get(done.network)
    return None if one is None else (done.trained * one["step"] + done.scored * one["pass"]) / 3600


@cache
def _record() -> Any:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def runs(entry: Entry, protocol: str) -> list[dict[str, Any]]:
    """Return the settings of an entry's runs in a protocol with one seed, once for each site left out."""
    settings: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in entry.comparisons(protocol):
        for text in one.methods:
            parts = {spec["name"] for spec in parse_methods(text)}
            axes = [axis for axis in one.axes if axis.method in ("", *parts)]
            for values in product(*(axis.values for axis in axes)):
                named = {axis.name: value for axis, value in zip(axes, values, strict=True)}
                settings[(text, *sorted((name, shown(value)) for name, value in named.items()))] = named
    rows = [row for row in entry.published if row.protocol == protocol and row.held_out]
    left_out = max((len(row.sites) for row in rows), default=1) if not PRESETS[protocol].holdout else 1
    return list(settings.values()) * left_out


def networks() -> dict[str, Work]:
    """Return the measured networks by name: those of the protocols, and those of the settings of entries."""
    wanted = [work(preset) for preset in PRESETS.values()]
    for entry in entries().values():
        wanted += [
            work(PRESETS[name], settings) for name in entry.protocols for settings in runs(entry, name)
        ]
    return {one.network: one for one in wanted}


def measure(done: Work, device: str, repeats: int) -> dict[str, float]:
    """Return seconds of a step and of a pass for an image."""
    import torch

    from medfedaug.models import build_network

    channels = 1 if "unet" in done.network and len(done.shape) == 4 else 3
    sized = {"img_size": done.shape[-1]} if done.make["name"] == "vit" else {}
    net = build_network(in_channels=channels, out_channels=10, **{**sized, **done.make}).to(device)
    net = net.to(memory_format=torch.channels_last) if len(done.shape) == 3 else net
    batch = done.batch if device == "cuda" else min(done.batch, max(1, 2**18 // math.prod(done.shape[1:])))
    images = torch.rand(batch, channels, *done.shape[1:], device=device)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.0)

    def step() -> None:
        optimiser.zero_grad()
        net.train()
        net(images).square().mean().backward()
        optimiser.step()

    def score() -> None:
        net.eval()
        with torch.no_grad():
            net(images)

    def seconds(once: Any) -> float:
        clock = time.perf_counter if device == "cuda" else time.process_time
        started = clock()
        once()
        if device == "cuda":
            torch.cuda.synchronize()
        return clock() - started

    seconds_per_image = {}
    for name, once in (("step", step), ("pass", score)):
        seconds(once)
        seconds_per_image[name] = min(seconds(once) for _ in range(repeats)) / batch
    return {name: float(f"{value:.3g}") for name, value in seconds_per_image.items()}


def main() -> None:
    """Measure what the record does not have, and write it after each network."""
    import torch
    from measure import device_in_use, hardware, parser

    arguments = parser(__doc__, 3)
    arguments.add_argument("--out", type=Path, default=RECORD)
    arguments.add_argument("--device", choices=DEVICES, default="cpu")
    arguments.add_argument("--only", help="network to measure, by the beginning of its name")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.device == "cuda":
        device_in_use("cuda")
    print(machine := hardware())
    record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    own = record.setdefault(options.device, {"hardware": machine, "networks": {}})["networks"]
    for name, done in networks().items():
        if name.startswith(options.only or "") and name not in own:
            own[name] = measure(done, options.device, options.repeats)
            # One line for each network
            text = re.sub(r"\{\s+(\S+ \S+)\s+(\S+ \S+)\s+\}", r"{\1 \2}", json.dumps(record, indent=1))
            options.out.write_text(text + "\n", encoding="utf-8")
        if name in own:
            print(f"{name}: {own[name]}")


if __name__ == "__main__":
    main()
