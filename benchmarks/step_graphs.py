"""Compare steps of each method that are captured as a CUDA graph with steps taken one by one.

    python benchmarks/step_graphs.py
    python benchmarks/step_graphs.py --methods fedfa fraug
    python benchmarks/step_graphs.py --device cuda

Each method trains twice with the same seeds, without graphs and with them. Without a GPU it trains on the
pretended device of `pretended_gpu.py`, whose graph records operations and computes them again. As on a GPU, a
captured step exchanges nothing with the CPU: no copy, no number for Python, no choice by a mask. All of
Python, and operations on tensors of the CPU, happen once. It does not show time, memory, and errors of CUDA.
With `--device cuda` both trainings run on a real GPU, with deterministic operations, and a difference of
weights, losses or metrics above 1e-6 ends in exit code 1.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pretended_gpu
import torch
from measure import device_in_use, hardware
from pretended_gpu import DEVICE, SETTINGS, PretendedTensor, Pretending, data_by_task, read_options, unscored
from torch import Tensor
from torch.optim import adam
from torch.utils._pytree import tree_leaves

from medfedaug.config.machine import Machine
from medfedaug.data.sites import find_sites
from medfedaug.errors import MedFedAugError
from medfedaug.federation.in_process import run_in_process
from medfedaug.federation.server.server import FederationServer
from medfedaug.federation.site import step_graph
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure

ROUNDS = 2
LIMIT = 1e-6
_fork_rng = torch.random.fork_rng


class Recording(Pretending):
    """The pretended device, with graphs."""

    def __enter__(self) -> Recording:
        self.capturing: RecordedGraph | None = None
        where = "_get_capturable_supported_devices"
        self._patches = [
            mock.patch.dict(step_graph.GRAPH_OF, {DEVICE.type: self._graph}),
            mock.patch.object(pretended_gpu, "_wait", self._refuse),
            mock.patch.object(torch.random, "fork_rng", self._fork_rng),
            mock.patch.object(adam, where, return_value=[DEVICE.type]),
        ]
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def _graph(self, device: torch.device, generators: Iterable[torch.Generator]) -> RecordedGraph:
        return RecordedGraph(self)

    def _fork_rng(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        self._refuse("the state of random numbers")
        return _fork_rng(*args, **kwargs)

    def _refuse(self, what: str) -> None:
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        graph = self.capturing
        if graph is not None:
            graph.keep((args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if graph is None:
            return result
        if any(isinstance(leaf, PretendedTensor) for leaf in tree_leaves((args, kwargs, result))):
            sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if func.overloadpacket in pretended_gpu.BETWEEN and type(sources[-1]) is Tensor:
                self._refuse("from the CPU")
            graph.operations.append((func, args, kwargs or {}, result))
        elif torch.Tag.nondeterministic_seeded in func.tags:
            graph.drew_on_the_cpu = True
        return result


class RecordedGraph:
    """A graph with the methods of `medfedaug.federation.site.step_graph.CudaGraph`.

    Attributes:
        operations: the captured operations.
        drew_on_the_cpu: whether the capture drew random numbers there.
    """

    def __init__(self, device: Recording) -> None:
        self.device, self.drew_on_the_cpu = device, False
        self.operations: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self._before: dict[int, tuple[Any, Any]] = {}

    def on_stream(self) -> AbstractContextManager[None]:
        """Return a context without a stream."""
        return nullcontext()

    def keep(self, inputs: Any) -> None:
        """Keep the memory of an operation's inputs, since a capture computes nothing."""
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, PretendedTensor):
                storage = leaf.held.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """See `CudaGraph.capture`."""
        drawn, self.device.capturing = torch.get_rng_state(), self
        try:
            return work()
        finally:
            self.device.capturing = None
            for storage, before in self._before.values():
                storage.copy_(before)
            self._before.clear()
            torch.set_rng_state(drawn)
            if self.drew_on_the_cpu:
                torch.rand(())

    @torch.no_grad()
    def replay(self) -> None:
        """See `CudaGraph.replay`."""
        for func, args, kwargs, outputs in self.operations:
            result = func(*args, **kwargs)
            for old, new in zip(tree_leaves(outputs), tree_leaves(result), strict=True):
                if isinstance(old, PretendedTensor) and old is not new:
                    old.held.copy_(new.held)


@dataclass(frozen=True)
class Setup:
    """Device, data by task, and settings of the runs."""

    device: torch.device
    folders: dict[str, Path]
    settings: dict[str, dict[str, Any]]
    steps: int

    def train(self, method: str, task: str, graphs: str) -> tuple[FederationServer, int]:
        """Train one method.

        Returns:
            The server at the end, and the number of replayed steps.

        Raises:
            MedFedAugError: when the method cannot train on the task.
        """
        data = self.folders[task]
        sites = find_sites(data)
        settings = {"rounds": ROUNDS, "local_steps": self.steps, "batch_size": 4, **self.settings[task]}
        config = configure(sites, methods=tuple(parse_methods(method)), **settings)
        replays = Counter[str]()
        kind: Any = RecordedGraph if self.device == DEVICE else step_graph.CudaGraph
        replay = kind.replay

        def counted(graph: Any) -> None:
            replays["all"] += 1
            replay(graph)

        with (
            Recording() if self.device == DEVICE else nullcontext(),
            mock.patch.object(kind, "replay", counted),
            mock.patch.object(SiteTrainer, "evaluate_round", unscored),
        ):
            machine = Machine(graphs=graphs, deterministic=self.device != DEVICE)
            server = run_in_process(config, data, sites, str(self.device), machine=machine)
        return server, replays["all"]


def difference(one: FederationServer, other: FederationServer) -> float:
    """Return the largest difference of weights, losses and metrics of two runs."""
    pairs = [(value, other.state[key]) for key, value in one.state.items()]
    differences = [float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()]
    for mine, its in zip(one.rounds, other.rounds, strict=True):
        for site, numbers in mine["sites"].items():
            both = [(value, its["sites"][site][name]) for name, value in numbers.items() if name != "seconds"]
            differences += [abs(a - b) for a, b in both if isinstance(a, float)]
    return max(differences)


def seconds_of_a_step(server: FederationServer, steps: int) -> float:
    """Return the seconds of a step in the last round, as a mean over the sites."""
    seconds = [numbers["seconds"] / steps for numbers in server.rounds[-1]["sites"].values()]
    return sum(seconds) / len(seconds)


def compared(method: str, setup: Setup) -> dict[str, Any]:
    """Train without and with graphs.

    Returns:
        ``task``, ``replays``, ``difference``, and ``seconds`` of a step without and with graphs.

    Raises:
        MedFedAugError: when the method trains on neither task.
    """
    refused: MedFedAugError | None = None
    for task in setup.folders:
        try:
            plain, _ = setup.train(method, task, "off")
        except MedFedAugError as error:
            refused = error
            continue
        captured, replays = setup.train(method, task, "auto")
        return {
            "task": task,
            "replays": replays,
            "difference": difference(plain, captured),
            "seconds": [seconds_of_a_step(one, setup.steps) for one in (plain, captured)],
        }
    assert refused is not None
    raise refused


def pretended(folder: Path) -> Setup:
    """Set up the pretended device, with tiny networks."""
    data = data_by_task(folder)
    small = {**SETTINGS, "classification": {"network": "lenet5", "image_size": 28}}
    return Setup(DEVICE, {task: data[task] for task in sorted(data)}, small, 5)


def real(device: str, folder: Path) -> Setup:
    """Set up a GPU, with networks of usual sizes."""
    usual = {"batch_size": 16, "image_size": 128}
    settings = {"segmentation": usual, "classification": {**usual, "network": "resnet18"}}
    return Setup(device_in_use(device), data_by_task(folder), settings, 30)


def main() -> None:
    """Print a line for every method."""
    options = read_options(__doc__)
    warnings.filterwarnings("always", ".*not captured as CUDA graphs")
    print(hardware())
    apart = 0.0
    with tempfile.TemporaryDirectory() as folder:
        setup = real(options.device, Path(folder)) if options.device else pretended(Path(folder))
        steps = setup.steps * ROUNDS * 2
        print(f"\n| method | task | replayed, of {steps} steps | difference | ms a step | with graphs |")
        print("|---|---|---:|---:|---:|---:|")
        for name in options.methods:
            try:
                result = compared(name, setup)
            except MedFedAugError as error:
                print(f"| {name} | {str(error).splitlines()[0]} |", flush=True)
                continue
            apart = max(apart, result["difference"])
            times = " | ".join(f"{1000 * value:.1f}" for value in result["seconds"])
            print(
                f"| {name} | {result['task']} | {result['replays']} | {result['difference']:.1g} | {times} |",
                flush=True,
            )
    if apart > LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
