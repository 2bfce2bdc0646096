r"""How long a protocol takes on one device, and how much of this time is arithmetic.

The in-process runner runs some rounds with decoded images. Their median duration is compared with two others:
that of the same rounds on batches that lie in memory, which is all but loading; and the floor, the time for
only the forward passes, backward passes and optimiser steps of a round, without the layers of any method and
without its passes over the images, measured before and after. The time of the whole protocol follows from its
number of rounds.

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
from measure import hardware
from torch.utils.flop_counter import FlopCounterMode

from medfedaug.config.run import RunConfig
from medfedaug.data.benchmarks import find_root, open_benchmark, write_federation
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


def floor(config: RunConfig, shape: torch.Size, samples: list[int], scored: int, device: torch.device):
    """Seconds and floating-point operations of only the passes of a round.

    Args:
        config: the run.
        shape: the shape of the network's input images.
        samples: the number of training samples of each site.
        scored: the number of samples that are scored in a round.
        device: the device.
    """
    network = Composition(replace(config, methods=({"name": "fedavg"},))).network
    network = network.to(device).to(memory_format=torch.channels_last)
    if config.precision == "bfloat16":
        run_in_bfloat16(network)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.0)
    batch = torch.rand(config.batch_size, *shape, device=device).to(memory_format=torch.channels_last)
    steps = sum(-(-n // config.batch_size) for n in samples) * config.local_epochs

    def train(times: int) -> None:
        network.train()
        for _ in range(times):
            network.zero_grad(set_to_none=True)
            network(batch).square().mean().backward()
            optimiser.step()

    def score(times: int) -> None:
        network.eval()
        with torch.no_grad():
            for _ in range(times):
                network(batch)

    train(2), score(2), wait(device)
    started = time.perf_counter()
    train(steps), score(-(-scored // config.batch_size)), wait(device)
    seconds = time.perf_counter() - started
    with FlopCounterMode(display=False) as counter:
        train(1)
    return seconds, counter.get_total_flops() * steps


@contextmanager
def batches_in_memory() -> Iterator[None]:
    """Within it, every site's batches are made once, and used in all epochs and passes."""
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
    """Run the rounds, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--data", required=True, help="as for medfedaug benchmark")
    parser.add_argument("--methods", default="fedfa+")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--rounds", type=int, default=5, help="how many to run; the first and the last do not count"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="as there")
    parser.add_argument("--limit", type=int, default=None, help="cases a split: does the script run?")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    preset = PRESETS[options.preset]
    axes = [parse_axis(text) for text in (*options.set, f"precision={options.precision}")]
    run = plan(
        preset,
        options.data,
        [options.methods],
        seeds=1,
        axes=axes,
        holdout=["none"],
        limit=options.limit,
    )[0]
    root = find_root(options.data, preset.benchmark)
    sites = open_benchmark(preset.benchmark, root, limit=options.limit, **run.data)
    config = replace(run.config, **federation_settings(sites), rounds=max(3, options.rounds))
    device = torch.device(options.device)
    if device.type == "cuda":
        print(torch.cuda.get_device_name(device))
    print(hardware())

    def rounds(data: Path, state: Path) -> tuple[float, FederationServer]:
        """The median duration of the rounds but the first, and of a single one the whole run by rounds."""
        seconds: list[float] = []

        def listen(event: dict) -> None:
            if event["event"] == "round_started":
                wait(device)
                seconds.append(time.perf_counter())

        started = time.perf_counter()
        server = run_in_process(config, data, names, options.device, listen, state)
        total = time.perf_counter() - started
        lengths = [later - earlier for earlier, later in pairwise(seconds)][1:]
        return statistics.median(lengths or [total / config.rounds]), server

    names = [site.name for site in sites]
    with tempfile.TemporaryDirectory() as folder, keep_decoded(16 * 2**30):
        data = Path(folder) / "data"
        write_federation(data, preset.benchmark, root, **run.data)
        trainer = SiteTrainer(config, data, options.device)
        trainer.open(names[0])
        shape = next(iter(trainer.samples.images(trainer.samples.training()[:1]))).shape[1:]
        scored = sum(
            len(list(trainer.task.evaluation_cases(site, "validation")))
            if config.task == "classification"
            else sum(case.image.shape[-1] for case in trainer.task.evaluation_cases(site, "validation"))
            for site in sites
            if site.trains
        )
        found, server = rounds(data, Path(folder) / "state")
        samples = list(server.sites.values())
        before, flops = floor(config, shape, samples, scored, device)
        with batches_in_memory():
            loaded, _ = rounds(data, Path(folder) / "other")
        after, _ = floor(config, shape, samples, scored, device)
        again, _ = rounds(data, Path(folder) / "again")
    found, passes = (found + again) / 2, (before + after) / 2
    whole = run.config.rounds * found
    print(f"{options.preset}, {options.methods}, {options.precision}, images of {tuple(shape)}:")
    print(f"  a round                          {found:8.3f} s")
    print(f"  the same with batches in memory  {loaded:8.3f} s, a round is {found / loaded:.2f} times that")
    print(f"  plain passes and steps alone     {passes:8.3f} s, a round is {found / passes:.2f} times that")
    print(f"  arithmetic of its training       {flops / 1e12:8.3f} TFLOP, {flops / 1e12 / found:.2f} TFLOP/s")
    print(f"  the protocol's {run.config.rounds} rounds        {whole:8.0f} s = {whole / 60:.1f} min")


if __name__ == "__main__":
    main()
