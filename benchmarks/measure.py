"""Common parts of the scripts: hardware, alternating measurements, medians and ratios."""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def parser(description: str | None, repeats: int = 0, *, on_gpu: bool = False) -> argparse.ArgumentParser:
    """Make a parser, with `--threads` and `--repeats` for measurements and `--device` for a GPU."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if repeats:
        result.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
        result.add_argument(
            "--repeats", type=int, default=repeats, help=f"measurements of each kind (default {repeats})"
        )
    if on_gpu:
        result.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    return result


def begin(arguments: argparse.ArgumentParser) -> tuple[argparse.Namespace, torch.device]:
    """Parse the options of `parser`, use their threads and device, and print the hardware."""
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    device = device_in_use(getattr(options, "device", "cpu"))
    print(hardware())
    return options, device


def device_in_use(name: str) -> torch.device:
    """Return the device of a name, and start a GPU, so that no measurement includes its start."""
    device = torch.device(name)
    torch.empty(1, device=device)
    return device


def hardware() -> str:
    """Describe processor, cores, vector instructions, threads and load of the machine, and the GPU."""
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
    """Measure the seconds of each kind of work in turn, so that all have the same conditions.

    One thread counts processor time, without the time of other programs; several threads and a GPU count
    elapsed time until the work is done. The first turn does not count.
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
    """Return the median of the ratios turn by turn, and their quartiles."""
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
        title: the measured work.
        seconds: the result of `alternately`.
        ratios: from numerator and denominator to ``("<=" or ">=", goal)``.
    """
    print(title)
    for name, values in seconds.items():
        print(f"  {name:46s} {1e3 * statistics.median(values):9.2f} ms")
    for (a, b), (relation, goal) in ratios.items():
        middle, low, high = ratio(seconds[a], seconds[b])
        met = middle <= goal if relation == "<=" else middle >= goal
        verdict = "met" if met else "missed"
        print(
            f"  {f'{a} / {b}':46s} {middle:9.3f}    quartiles {low:.3f} to {high:.3f}, "
            f"goal {relation} {goal}: {verdict}"
        )
