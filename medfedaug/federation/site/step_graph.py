"""Training steps and passes of inference as CUDA graphs: captured once, then repeated without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from medfedaug.errors import first_line, warn
from medfedaug.federation.site.training_state import find_generators
from medfedaug.methods.base import STEP_HOOKS, Method, SitePart, overridden

Work = Callable[..., Any]


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
    def on_stream(self) -> Iterator[None]:
        """A context for work that is not captured, on the stream of the capture, in order with all else."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def capture(self, work: Callable[[], Any]) -> Any:
        """Record what ``work`` starts, without computing it; return the tensors that `replay` will fill."""
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


GRAPH_OF: dict[str, Callable[..., Any]] = {"cuda": CudaGraph}
"""The graph of each type of device that has one."""


class StepGraph:
    """A step that is captured when batches of one shape come, and is computed as it is for others.

    The first step is computed as it is: it makes what all later ones use, as an optimiser's moments. What it
    does in Python is not repeated, so that all that changes from step to step must be tensors on the device,
    each at its place in memory.

    Args:
        step: computes something of a batch, as its loss while it moves the weights.
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
        self._made: Any = None

    def __call__(self, *batch: Tensor) -> Any:
        """Take a step; the tensors of a batch are on the device."""
        shapes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in batch]
        first = not self._shapes
        self._shapes = self._shapes or shapes
        if first or self._plain or shapes != self._shapes:
            return self._plainly(batch)
        if self._made is None and (reason := self._capture(batch)):
            self._plain = True
            self.failed(reason)
            return self._plainly(batch)
        for place, tensor in zip(self._inputs, batch, strict=True):
            place.copy_(tensor)
        self.graph.replay()
        return tree_map_only(Tensor, torch.clone, self._made)

    def _plainly(self, batch: Iterable[Tensor]) -> Any:
        with self.graph.on_stream():
            return self.step(*batch)

    def _capture(self, batch: Iterable[Tensor]) -> str:
        """Capture the step; return the reason where that fails, with all as it was before."""
        inputs = [tensor.clone(memory_format=torch.preserve_format) for tensor in batch]
        attributes = [dict(vars(part)) for part in self.parts]
        drawn = torch.get_rng_state()
        try:
            made = self.graph.capture(lambda: self.step(*inputs))
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
            self._inputs, self._made = inputs, made
        return reason


class Capturing:
    """Makes graphs of what a site repeats, until there is a reason not to, which is said once.

    Args:
        what: is repeated, in the plural, for the message.
        site: the site's name, for it.
        device: computes it.
        wanted: one of `medfedaug.config.machine.GRAPHS`.
        reason: of a site that cannot; empty for one that can.
    """

    def __init__(self, what: str, site: str, device: torch.device, wanted: str, reason: str) -> None:
        self.what, self.site, self.device = what, site, device
        self.on = {"off": False, "auto": device.type in GRAPH_OF, "on": True}[wanted]
        if self.on and reason:
            self.stop(reason)

    def stop(self, reason: str) -> None:
        """Capture nothing from here on, and say why."""
        self.on = False
        warn(f"{self.what} are not captured as CUDA graphs: {reason}", site=self.site)

    def repeated(self, work: Work, parts: Mapping[str, SitePart]) -> Work:
        """Return the same work, captured where that is on."""
        if not self.on:
            return work
        graph = GRAPH_OF[self.device.type](self.device, generators_on(self.device, parts))
        return StepGraph(work, graph, parts.values(), self.stop)


class CapturedNetwork(nn.Module):
    """A network in evaluation mode, of whose batches those of one shape are captured.

    It serves as long as nothing but the values of the network's weights changes.
    """

    def __init__(self, network: nn.Module, passes: Capturing, parts: Mapping[str, SitePart]) -> None:
        super().__init__()
        self.network = network
        self._repeated = passes.repeated(network, parts)

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        """Return the network's output."""
        plain = settings or not all(isinstance(one, Tensor) for one in inputs)
        return self.network(*inputs, **settings) if plain else self._repeated(*inputs)


def generators_on(device: torch.device, parts: Any) -> list[torch.Generator]:
    """Return the random generators on a device that methods' halves hold."""
    return [one for one in find_generators(parts) if getattr(one, "device", None) == device]


def why_plain(
    device: torch.device, methods: Iterable[Method], parts: Mapping[str, SitePart] | None = None
) -> str:
    """Return the reason why a site's work cannot be captured; empty where it can."""
    if device.type not in GRAPH_OF:
        return f"a device of type {device.type} has none"
    for method in methods:
        layers = type(method).prepare_network is not Method.prepare_network
        hooks = parts is not None and overridden(parts[method.name], STEP_HOOKS)
        if (layers or hooks) and not method.capturable:
            return f"steps of {method.name} differ, or wait for numbers"
    return ""


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def of_device(optimiser: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Let an optimiser do its step in one operation, and count its steps on the device.

    It does so whether or not steps are captured: one arithmetic. A CPU's optimiser stays as it is.
    """
    if device.type in GRAPH_OF:
        fused = device.type == "cuda" and type(optimiser) in _FUSED
        for group in optimiser.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            if fused and group["fused"] is None and group["foreach"] is None:
                group["fused"] = not group["differentiable"]
        optimiser._warned_capturable_if_run_uncaptured = True
    return optimiser
