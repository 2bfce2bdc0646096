r"""Measure the time of a protocol on one device, and the share of arithmetic in it.

The in-process runner runs some rounds with decoded images. Their median duration is compared with two others:
the same rounds with batches in memory, without loading; and the floor, only the forward passes, backward
passes and optimiser steps of a round, without any method, measured before and after. The time of the whole
protocol follows from its number of rounds. On a GPU the floor is measured again with each step and pass as a
CUDA graph: without Python, it is the arithmetic only.

    python benchmarks/protocol.py office_caltech_10 --data DIR --methods fedfa+ --device cuda \
        --precision bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measure import device_in_use, hardware, parser, steps_on
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from medfedaug.config.machine import GRAPHS, Machine
from medfedaug.config.run import RunConfig
from medfedaug.data.benchmarks import find_root, open_benchmark, write_federation
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.preparation.decoded_cache import keep_decoded
from medfedaug.data.sites import federation_settings
from medfedaug.experiments.axes import parse_axis
from medfedaug.experiments.presets import PRESETS
from medfedaug.experiments.run_list import plan
from medfedaug.federation import FederationServer, SiteTrainer, run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.federation.site.samples import SiteSamples
from medfedaug.models.precision import run_in_bfloat16


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def floor(
    config: RunConfig, shape: torch.Size, samples: list[int], scored: int, device: torch.device
) -> tuple[dict[str, float], float]:
    """Return the seconds, by name, and the floating-point operations of the passes of a round.

    Args:
        config: the run.
        shape: the shape of the network's input images.
        samples: the number of training samples of each site.
        scored: the number of scored samples of a round.
        device: the device.
    """
    network = Composition(replace(config, methods=({"name": "fedavg"},))).network
    network = network.to(device).to(memory_format=torch.channels_last)
    if config.precision == "bfloat16":
        run_in_bfloat16(network)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.0)
    batch = torch.rand(config.batch_size, *shape, device=device).to(memory_format=torch.channels_last)
    steps = sum(-(-n // config.batch_size) for n in samples) * config.local_epochs

    def train(batch: Tensor) -> Tensor:
        network.zero_grad(set_to_none=True)
        loss = network(batch).square().mean()
        loss.backward()
        optimiser.step()
        return loss.detach()

    work: dict[bool, dict[str, Any]] = {}
    for training, name, step in ((True, "steps", train), (False, "passes", torch.no_grad()(network))):
        network.train(training)
        work[training] = steps_on(device, (batch,), {name: lambda step=step: (step, ())})
        for one in (*work[training].values(), *work[training].values()):
            one()  # the second time, graphs are captured
    with FlopCounterMode(display=False) as counter:
        network.train()
        train(batch)
    seconds = {}
    for kind in (" (graph)", ""):
        if f"steps{kind}" not in work[True]:
            continue
        wait(device)
        started = time.perf_counter()
        network.train()
        for _ in range(steps):
            work[True][f"steps{kind}"]()
        network.eval()
        for _ in range(-(-scored // config.batch_size)):
            work[False][f"passes{kind}"]()
        wait(device)
        seconds[f"plain passes and steps alone{kind}"] = time.perf_counter() - started
    return seconds, counter.get_total_flops() * steps


def write_stand_in(folder: Path, patients: int, edge: int, slices: int) -> None:
    """Write phantoms in place of LGG's volumes, for the time of a round only."""
    sites = make_phantom(folder, sites=4, patients=patients, shape=(edge, edge, slices))
    for site, name in zip(sites, ("CS", "DU", "FG", "HT"), strict=True):
        site.rename(folder / name)


@contextmanager
def batches_in_memory() -> Iterator[None]:
    """Make every site's batches once, and use them in all epochs and passes."""
    loader, batches = SiteSamples.loader, SiteSamples.batches
    kept: dict[Any, list[Any]] = {}

    def kept_loader(self: SiteSamples, dataset: Any, seed: int) -> list[Any]:
        if (key := ("loader", self.folder.name)) not in kept:
            kept[key] = list(loader(self, dataset, seed))
        return kept[key]

    def kept_batches(self: SiteSamples, samples: Any) -> Iterator[Any]:
        if (key := ("batches", self.folder.name, len(samples))) not in kept:
            kept[key] = list(batches(self, samples))
        return iter(kept[key])

    with patch.object(SiteSamples, "loader", kept_loader), patch.object(SiteSamples, "batches", kept_batches):
        yield


def main() -> None:
    """Read the options, and write a stand-in for missing data."""
    arguments = parser(__doc__)
    arguments.add_argument("preset", choices=PRESETS)
    arguments.add_argument("--data", type=Path, help="as of medfedaug benchmark; by default phantoms")
    stand_in = ("PATIENTS", "EDGE", "SLICES")
    arguments.add_argument(
        "--stand-in", type=int, nargs=3, default=(10, 128, 36), metavar=stand_in, help="its size a site"
    )
    arguments.add_argument("--methods", default="fedfa+")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    arguments.add_argument("--graphs", choices=GRAPHS, default="off")
    arguments.add_argument(
        "--rounds", type=int, default=5, help="rounds to run; the first and the last do not count"
    )
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="as there")
    arguments.add_argument("--limit", type=int, default=None, help="cases a split, for a quick test")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)

    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            options.data = Path(folder) / "lgg_multisite"
            write_stand_in(options.data, *options.stand_in)
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Run the rounds, and print the comparison."""
    preset = PRESETS[options.preset]
    axes = [parse_axis(text) for text in (*options.set, f"precision={options.precision}")]
    run = plan(
        preset, options.data, [options.methods], seeds=1, axes=axes, holdout=["none"], limit=options.limit
    )[0]
    root = find_root(options.data, preset.benchmark)
    sites = open_benchmark(preset.benchmark, root, limit=options.limit, **run.data)
    config = replace(run.config, **federation_settings(sites), rounds=max(3, options.rounds))
    device = device_in_use(options.device)
    machine = Machine(graphs=options.graphs)
    print(hardware())

    def rounds(data: Path, state: Path) -> tuple[float, FederationServer]:
        """Return the median duration of all rounds but the first, or the mean of a short run."""
        seconds: list[float] = []

        def listen(event: dict) -> None:
            if event["event"] == "round_started":
                wait(device)
                seconds.append(time.perf_counter())

        started = time.perf_counter()
        server = run_in_process(config, data, names, str(device), listen, state, machine=machine)
        total = time.perf_counter() - started
        lengths = [later - earlier for earlier, later in pairwise(seconds)][1:]
        return statistics.median(lengths or [total / config.rounds]), server

    names = [site.name for site in sites]
    with tempfile.TemporaryDirectory() as folder, keep_decoded(16 * 2**30):
        data = Path(folder) / "data"
        write_federation(data, preset.benchmark, root, **run.data)
        trainer = SiteTrainer(config, data, str(device))
        trainer.open(names[0])
        shape = next(iter(trainer.samples.images(trainer.samples.training()[:1]))).shape[1:]
        scored = sum(
            len(list(trainer.task.evaluation_cases(site, "validation")))
            if config.task == "classification"
            else sum(case.image.shape[-1] for case in trainer.task.evaluation_cases(site, "validation"))
            for site in sites
            if site.trains
        )
        duration, server = rounds(data, Path(folder) / "state")
        samples = list(server.sites.values())
        before, flops = floor(config, shape, samples, scored, device)
        with batches_in_memory():
            loaded, _ = rounds(data, Path(folder) / "other")
        after, _ = floor(config, shape, samples, scored, device)
        again, _ = rounds(data, Path(folder) / "again")
    duration, whole = (duration + again) / 2, run.config.rounds * (duration + again) / 2
    parts = {"the same with batches in memory": loaded}
    parts.update({name: (before[name] + after[name]) / 2 for name in before})
    chosen = f"{options.precision}, graphs {options.graphs}"
    print(f"{options.preset}, {options.methods}, {chosen}, images of {tuple(shape)}:")
    print(f"  {'a round':40s} {duration:8.3f} s")
    for name, seconds in parts.items():
        print(f"  {name:40s} {seconds:8.3f} s, a round is {duration / seconds:.2f} times that")
    tera = flops / 1e12
    print(f"  {'arithmetic of its training':40s} {tera:8.3f} TFLOP, {tera / duration:.2f} TFLOP/s")
    print(f"  {f'the protocol in {run.config.rounds} rounds':40s} {whole:8.0f} s = {whole / 60:.1f} min")


if __name__ == "__main__":
    main()
