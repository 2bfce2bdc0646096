"""A training step as a CUDA graph: captured once in a round, then repeated without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from medfedaug.errors import first_line
from medfedaug.methods.base import STEP_HOOKS, Method, SitePart, overridden

__all__ = ["GRAPHS", "CudaGraph", "StepGraph", "graph_ready", "why_plain"]

Work = Callable[..., Tensor]


class CudaGraph:
    """A CUDA graph on a stream of its own, in the memory that all of the process share.

    At any time one site of a process trains, so that no two graphs are in use.

    Args:
        device: the GPU.
        generators: random generators beside PyTorch's own from which the captured work draws.
    """

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
        self.graph, self.stream = torch.cuda.CUDAGraph(), _stream(device)
        for generator in generators:
            self.graph.register_generator_state(generator)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A context for work that is not captured, on the stream of the capture, in order with all else."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record what ``work`` starts, without computing it; return the tensor that `replay` will fill."""
        # Another thread makes batches meanwhile, in memory that it asks CUDA for.
        where: dict[str, Any] = {"pool": _pool(), "stream": self.stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.graph, **where):
            return work()

    def replay(self) -> None:
        """Compute what was recorded."""
        self.graph.replay()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()


GRAPHS: dict[str, Callable[..., Any]] = {"cuda": CudaGraph}
"""The graph of each type of device that has one."""


class StepGraph:
    """A step that is captured when batches of one shape come, and is computed as it is for others.

    The first step is computed as it is: it makes what all later ones use, as an optimiser's moments. What it
    does in Python is not repeated, so that all that changes from step to step must be tensors on the device.

    Args:
        step: computes the loss of a batch and moves the weights.
        graph: a `CudaGraph`.
        parts: the methods' halves, whose attributes are put back where a capture fails.
        failed: called with the reason then; steps are computed as they are from there on.
    """

    def __init__(
        self, step: Work, graph: Any, parts: Iterable[SitePart], failed: Callable[[str], None]
    ) -> None:
        self.step, self.graph, self.parts, self.failed = step, graph, list(parts), failed
        self._plain = False
        self._shapes: list[Any] = []
        self._inputs: list[Tensor] = []
        self._loss: Tensor | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        """Take a step; the tensors of a batch are on the device."""
        shapes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in batch]
        first = not self._shapes
        self._shapes = self._shapes or shapes
        if first or self._plain or shapes != self._shapes:
            return self._plainly(batch)
        if self._loss is None and (reason := self._capture(batch)):
            self._plain = True
            self.failed(reason)
            return self._plainly(batch)
        for place, tensor in zip(self._inputs, batch, strict=True):
            place.copy_(tensor)
        self.graph.replay()
        assert self._loss is not None
        return self._loss.clone()

    def _plainly(self, batch: Iterable[Tensor]) -> Tensor:
        with self.graph.beside():
            return self.step(*batch)

    def _capture(self, batch: Iterable[Tensor]) -> str:
        """Capture the step; return the reason where that fails, with all as it was before."""
        inputs = [tensor.clone(memory_format=torch.preserve_format) for tensor in batch]
        attributes = [dict(vars(part)) for part in self.parts]
        drawn = torch.get_rng_state()
        try:
            loss = self.graph.capture(lambda: self.step(*inputs))
            reason = ""
        except Exception as error:  # of CUDA, PyTorch, or a network of the user's own, of many kinds
            reason = first_line(error)
        if not torch.equal(drawn, torch.get_rng_state()):
            reason = reason or "a step draws random numbers on the CPU"
            torch.set_rng_state(drawn)
        if reason:
            for part, before in zip(self.parts, attributes, strict=True):
                vars(part).clear()
                vars(part).update(before)
        else:
            self._inputs, self._loss = inputs, loss
        return reason


def why_plain(device: torch.device, methods: Iterable[Method], parts: Mapping[str, SitePart]) -> str:
    """Return the reason why a site's steps cannot be captured; empty where they can."""
    if device.type not in GRAPHS:
        return f"a device of type {device.type} has none"
    for method in methods:
        layers = type(method).prepare_network is not Method.prepare_network
        if (layers or overridden(parts[method.name], STEP_HOOKS)) and not method.capturable:
            return f"steps of {method.name} differ, or wait for numbers"
    return ""


def graph_ready(optimiser: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Let an optimiser count its steps on the device, whether or not they are captured: one arithmetic."""
    if device.type in GRAPHS:
        for group in optimiser.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        optimiser._warned_capturable_if_run_uncaptured = True
    return optimiser
