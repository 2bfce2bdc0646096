"""What the scripts of this folder share: hardware, alternating measurements, medians and ratios."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # an environment of peers has no medfedaug
    from medfedaug.methods.base import Method, ServerContext, SitePart

__all__ = ["alternately", "device_in_use", "exchange_once", "hardware", "parser", "report", "steps_on"]

Made = tuple[Callable[..., Tensor], Sequence["SitePart"]]


def parser(description: str | None, repeats: int, *, on_gpu: bool = False) -> argparse.ArgumentParser:
    """The arguments that all scripts take, and `--device` of those that also measure a GPU."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    result.add_argument(
        "--repeats", type=int, default=repeats, help=f"measurements of each kind (default {repeats})"
    )
    if on_gpu:
        result.add_argument("--device", default="cpu", help="cpu, cuda or pretended (default cpu)")
    return result


def device_in_use(name: str) -> torch.device:
    """The device of a name; a GPU is started, so that no measurement includes that, and is in `hardware`.

    ``pretended`` is that of `step_graphs.py`, on which everything runs and nothing is measured.
    """
    if name == "pretended":
        from step_graphs import DEVICE, Recording

        Recording().__enter__()
        return DEVICE
    device = torch.device(name)
    torch.empty(1, device=device)
    return device


def exchange_once(methods: Sequence[Method], parts: Sequence[SitePart], server: ServerContext) -> None:
    """Exchange with one site what methods exchange in every round; what it sends is on the CPU."""
    for method, part in zip(methods, parts, strict=True):
        exchange = method.every_round(server)
        if exchange is not None and part.every_round is not None:
            exchange.accept("site", {key: value.cpu() for key, value in part.every_round.collect().items()})
            part.every_round.apply(exchange.result())


def steps_on(
    device: torch.device, batch: Sequence[Tensor], makers: Mapping[str, Callable[[], Made]]
) -> dict[str, Callable[[], Tensor]]:
    """Steps on a batch, and where the device has graphs, each once more as a graph.

    Args:
        device: of the batch.
        batch: the tensors that a step takes.
        makers: by name, makes a step and the methods' halves in it.

    Returns:
        The steps by name; the name of one as a graph ends in ``(graph)``.
    """
    from medfedaug.federation.site.step_graph import GRAPH_OF, StepGraph, generators_on

    work: dict[str, Callable[[], Tensor]] = {
        name: partial(make()[0], *batch) for name, make in makers.items()
    }
    for name, make in makers.items() if device.type in GRAPH_OF else ():
        step, parts = make()
        graph = GRAPH_OF[device.type](device, generators_on(device, parts))
        failed = partial(print, f"{name} is not captured:")
        work[f"{name} (graph)"] = partial(StepGraph(step, graph, parts, failed), *batch)
    return work


def hardware() -> str:
    """Processor, cores, vector instructions, threads and the load of the machine, and the GPU in use."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1] for line in info.read_text().splitlines() if "model name" in line]
        model = names[0].strip() if names else model
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    device = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_initialized() else ""
    cores = f"{model}, {os.cpu_count()} cores, {device}"
    return f"{gpu}{cores}, torch {torch.__version__}, {threads} thread(s){load}"


def alternately(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds for each kind of work, measured in turn many times, so that all have the same conditions.

    With one thread it is processor time, which does not include waiting for other programs; otherwise, and
    where a GPU is in use, elapsed time until the work is done. The first turn is not counted.
    """
    on_gpu = torch.cuda.is_initialized()
    clock = time.process_time if torch.get_num_threads() == 1 and not on_gpu else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, function in work.items():
            started = clock()
            function()
            if on_gpu:
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(clock() - started)
    return seconds


def ratio(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Median of the ratios turn by turn, and their quartiles."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    if len(ratios) < 2:
        return (ratios[0],) * 3
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def report(
    title: str, seconds: Mapping[str, list[float]], ratios: Mapping[tuple[str, str], tuple[str, float]]
) -> None:
    """Print medians in milliseconds, and ratios with their goals.

    Args:
        title: what was measured.
        seconds: the result of `alternately`.
        ratios: from numerator and denominator to ``("<=" or ">=", goal)``; those of graphs are printed too.
    """
    print(title)
    for name, values in seconds.items():
        print(f"  {name:46s} {1e3 * statistics.median(values):9.2f} ms")
    graphs = {(f"{a} (graph)", f"{b} (graph)"): goal for (a, b), goal in ratios.items()}
    for (a, b), (relation, goal) in {**ratios, **graphs}.items():
        if a not in seconds or b not in seconds:
            continue
        middle, low, high = ratio(seconds[a], seconds[b])
        met = middle <= goal if relation == "<=" else middle >= goal
        verdict = "met" if met else "missed"
        print(
            f"  {f'{a} / {b}':46s} {middle:9.3f}    quartiles {low:.3f} to {high:.3f}, "
            f"goal {relation} {goal}: {verdict}"
        )
