"""`cost_table`: time, parameters, bytes and memory of methods in a protocol."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure

from medfedaug.analysis.plots import bars, byte_unit
from medfedaug.analysis.text_table import TextTable
from medfedaug.config.run import Execution
from medfedaug.data.federation import federation_settings
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation.in_process import InProcessCarrier, run_in_process
from medfedaug.federation.site.local_training import LocalRound
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.research.datasets.benchmarks import find_root, open_benchmark
from medfedaug.research.papers.presets import Preset
from medfedaug.research.sweeps.planned import PlannedRun
from medfedaug.research.sweeps.workers import Processes
from medfedaug.sampling.prefetch import on_device

__all__ = ["Cost", "CostTable", "cost_table"]

_STEPS, _REPEATS = 5, 3
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Cost:
    """Cost of one combination of methods at one site.

    Args:
        methods: the combination, with the settings that differ from the protocol.
        parameters: of the network with the methods' additions.
        step: seconds of a training step.
        inference: seconds of a batch in evaluation mode.
        up: bytes of an update.
        down: bytes of a request to train.
        once: bytes that a site sends before training.
        memory: rise of the process's peak in bytes, or on a GPU of its tensors' peak; ``None`` if unknown.
        images: in the batch.
    """

    methods: str
    parameters: int
    step: float
    inference: float
    up: int
    down: int
    once: int
    memory: int | None
    images: int


@dataclass(frozen=True)
class CostTable(TextTable):
    """Costs by combination of methods.

    Args:
        rows: the costs.
        notes: conditions of the measurement.
    """

    rows: tuple[Cost, ...]
    notes: tuple[str, ...]
    reduced: str = ""

    @property
    def header(self) -> list[str]:
        return ["method", "weights", "step, ms", "inference, ms", "up", "down", "once", "memory"]

    @property
    def body(self) -> list[list[str]]:
        return [
            [
                row.methods,
                f"{row.parameters / 1e6:.2f} M",
                f"{1e3 * row.step:.1f}",
                f"{1e3 * row.inference:.1f}",
                *map(_size, (row.up, row.down, row.once, row.memory)),
            ]
            for row in self.rows
        ]

    def records(self) -> list[dict[str, Any]]:
        return [dict(vars(row)) for row in self.rows]

    def draw(self) -> Figure:
        """Draw times, bytes of a round, and memory if known."""
        columns = {
            "step, ms": [1e3 * row.step for row in self.rows],
            "inference, ms": [1e3 * row.inference for row in self.rows],
            "up and down, MB": [(row.up + row.down) / 1e6 for row in self.rows],
            "memory, MB": [row.memory / 1e6 for row in self.rows if row.memory is not None],
        }
        known = {name: values for name, values in columns.items() if len(values) == len(self.rows)}
        return bars([row.methods for row in self.rows], known)


def _size(number: int | None) -> str:
    if number is None:
        return "–"
    size, unit = byte_unit(number)
    return f"{number / size:.4g} {unit}"


def cost_table(
    runs: Sequence[PlannedRun],
    preset: Preset,
    root: str | Path,
    *,
    device: str = "auto",
    threads: int = 0,
) -> CostTable:
    """Measure each combination of methods and settings once, in a separate process.

    Two sites make two rounds of one step each; then steps of one batch of the protocol are repeated, with the
    methods' terms, exchanges and steps, and without reading images.

    Args:
        runs: of a sweep; the first counts of runs that differ in seed, fold or held-out site.
        preset: their protocol.
        root: the folder with the data set's files, or its parent.
    """
    measure = partial(_measured, preset.benchmark, find_root(root, preset.benchmark), device, threads)
    rows = []
    for run in {(run.methods, run.variant): run for run in reversed(runs)}.values():
        with Processes(1, 2**30).pool() as pool:
            try:
                rows.append(pool.submit(measure, run).result())
            except MedFedAugError as error:
                raise ConfigError(f"{run.methods}: {error}") from error
    rows.reverse()
    size, hardware = runs[0].config.image_size, _hardware(device)
    images = f"{max(row.images for row in rows)} images" + (f" of {size} x {size} pixels" if size else "")
    notes = (
        f"{preset.name} with {runs[0].config.network}: a step and an inference of {images}, medians of "
        f"{_REPEATS} times {_STEPS}, on {hardware}. Bytes up and down are of one site in a round, without "
        "framing; once: before training.",
        "Memory: the rise of the process's peak, or on a GPU of its tensors' peak, over its start.",
    )
    return CostTable(tuple(rows), notes)


def _hardware(device: str) -> str:
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "a CPU")
    return f"{model}, torch {torch.__version__}"


def _measured(benchmark: str, root: Path, device: str, threads: int, run: PlannedRun) -> Cost:
    before = _memory("VmRSS")
    sites = open_benchmark(benchmark, root, limit=run.config.batch_size, **run.data)
    trained = sorted((s for s in sites if s.trains), key=lambda s: -len(s.cases["training"]))[:2]
    small: dict[str, Any] = {
        **{"rounds": 2, "local_steps": 1, "local_epochs": 1, "participation": 1.0},
        **{"validate_every": 2, "holdout": (), "limit": None},
    }
    config = replace(run.config, **federation_settings(sites), **small)
    trainers: dict[str, SiteTrainer] = {}

    class Keeping(InProcessCarrier):
        def __init__(self, server: Any, sites: Mapping[str, SiteTrainer], saving: Any) -> None:
            super().__init__(server, sites, saving)
            trainers.update(sites)

    execution = Execution(threads=threads)
    server = run_in_process(config, root, trained, device, execution=execution, carrier=Keeping)
    trainer = trainers[trained[0].name]
    step, inference, images = _timed(trainer)
    if trainer.device.type == "cuda":
        memory: int | None = torch.cuda.max_memory_allocated(trainer.device)
    else:
        peak = _memory("VmHWM")
        memory = None if peak is None or before is None else peak - before
    last = server.rounds[-1]
    return Cost(
        methods=", ".join(filter(None, (run.methods, run.variant))),
        parameters=sum(parameter.numel() for parameter in trainer.network.parameters()),
        step=step,
        inference=inference,
        up=last["bytes_up"] // len(trained),
        down=last["bytes_down"] // len(trained),
        once=sum(server.record.once_bytes.values()) // len(trained),
        memory=memory,
        images=images,
    )


def _timed(trainer: SiteTrainer) -> tuple[float, float, int]:
    """Return the seconds of a step and of an inference, and the number of images in the batch."""
    training, samples = trainer.training, trainer.samples
    assert samples is not None
    batch = next(iter(training.batches(samples, trainer.own_dataset(0), 0)))
    inputs, _ = on_device(batch, trainer.device)
    round_ = LocalRound.of(trainer.config, trainer.config.rounds, seed=0, epochs=1)

    def steps() -> None:
        for part in trainer.parts.values():
            part.start_round()
        training.run([batch] * _STEPS, round_)

    def infer() -> None:
        trainer.network.eval()
        with torch.no_grad():
            for _ in range(_STEPS):
                trainer.network(inputs)

    seconds = []
    for work in (steps, infer):
        work()
        seconds.append(median(_seconds(work, trainer.device) for _ in range(_REPEATS)) / _STEPS)
    return seconds[0], seconds[1], len(inputs)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    single = torch.get_num_threads() == 1 and device.type == "cpu"
    clock = time.process_time if single else time.perf_counter  # without the time of other programs
    started = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started


def _memory(name: str) -> int | None:
    """Return a number of the process's status in bytes, if known."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
