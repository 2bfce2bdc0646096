"""Training steps and passes of inference as CUDA graphs, captured once and replayed without Python."""

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
    """A CUDA graph on a separate stream, in a memory pool of the process.

    Only one site of a process trains at a time, so that no two graphs run at once. ``generators`` are those
    of the captured work besides PyTorch's default one.
    """

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
        self.graph, self.stream = torch.cuda.CUDAGraph(), _stream(device)
        for generator in generators:
            self.graph.register_generator_state(generator)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run uncaptured work on the stream of the capture, in order with the current stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def capture(self, work: Callable[[], Any]) -> Any:
        """Record ``work`` without computing it; return the tensors that `replay` will fill."""
        # Meanwhile another thread makes batches, and allocates memory for them.
        where: dict[str, Any] = {"pool": _pool(), "stream": self.stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.graph, **where):
            return work()

    def replay(self) -> None:
        """Compute the recorded work."""
        self.graph.replay()


_stream = cache(torch.cuda.Stream)
_pool = cache(torch.cuda.graph_pool_handle)


GRAPH_OF: dict[str, Callable[..., Any]] = {"cuda": CudaGraph}
"""The class of graphs for each type of device."""


class StepGraph:
    """A step that is captured for batches of one shape, and computed plainly for others.

    The first step is computed plainly, since it allocates state such as an optimiser's moments. A replay
    repeats no Python, so that everything that changes between steps must be a tensor on the device, at a
    fixed place in memory.

    Args:
        step: computes the result of a batch, such as the loss of a training step.
        graph: a `CudaGraph`.
        parts: the methods' halves, whose attributes are restored if a capture fails.
        failed: called with the reason of a failed capture; all later steps are plain.
    """

    def __init__(
        self, step: Work, graph: Any, parts: Iterable[SitePart], failed: Callable[[str], None]
    ) -> None:
        self.step, self.graph, self.parts, self.failed = step, graph, list(parts), failed
        self._plain = False
        self._shapes: list[Any] = []
        self._inputs: list[Tensor] = []
        self._outputs: Any = None

    def __call__(self, *batch: Tensor) -> Any:
        """Take a step; the tensors of a batch are on the device."""
        shapes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in batch]
        first = not self._shapes
        self._shapes = self._shapes or shapes
        if first or self._plain or shapes != self._shapes:
            return self._plainly(batch)
        if self._outputs is None and (reason := self._capture(batch)):
            self._plain = True
            self.failed(reason)
            return self._plainly(batch)
        for place, tensor in zip(self._inputs, batch, strict=True):
            place.copy_(tensor)
        self.graph.replay()
        return tree_map_only(Tensor, torch.clone, self._outputs)

    def _plainly(self, batch: Iterable[Tensor]) -> Any:
        with self.graph.on_stream():
            return self.step(*batch)

    def _capture(self, batch: Iterable[Tensor]) -> str:
        """Capture the step; on failure restore everything and return the reason."""
        inputs = [tensor.clone(memory_format=torch.preserve_format) for tensor in batch]
        attributes = [dict(vars(part)) for part in self.parts]
        random = torch.get_rng_state()
        try:
            outputs, reason = self.graph.capture(lambda: self.step(*inputs)), ""
        except Exception as error:  # of many kinds, from CUDA, PyTorch or the network
            reason = first_line(error)
        if not torch.equal(random, torch.get_rng_state()):
            reason = reason or "a step draws random numbers on the CPU"
            torch.set_rng_state(random)
        if reason:
            for part, before in zip(self.parts, attributes, strict=True):
                vars(part).clear()
                vars(part).update(before)
        else:
            self._inputs, self._outputs = inputs, outputs
        return reason


class Capturing:
    """Captures repeated work of a site as graphs, until a reason not to arises; warns of it once.

    ``what`` names the work in the plural, and ``wanted`` is one of `medfedaug.config.machine.GRAPHS`.
    """

    def __init__(self, what: str, site: str, device: torch.device, wanted: str, reason: str) -> None:
        self.what, self.site, self.device = what, site, device
        self.on = {"off": False, "auto": device.type in GRAPH_OF, "on": True}[wanted]
        if self.on and reason:
            self.stop(reason)

    def stop(self, reason: str) -> None:
        """Capture nothing from now on, and warn with the reason."""
        self.on = False
        warn(f"{self.what} are not captured as CUDA graphs: {reason}", site=self.site)

    def repeated(self, work: Work, parts: Mapping[str, SitePart]) -> Work:
        """Return the work, captured if capturing is on."""
        if not self.on:
            return work
        graph = GRAPH_OF[self.device.type](self.device, generators_on(self.device, parts))
        return StepGraph(work, graph, parts.values(), self.stop)


class CapturedNetwork(nn.Module):
    """A network in evaluation mode with captured passes for batches of one shape.

    It is valid as long as only the values of the network's weights change.
    """

    def __init__(self, network: nn.Module, passes: Capturing, parts: Mapping[str, SitePart]) -> None:
        super().__init__()
        self.network = network
        self._repeated = passes.repeated(network, parts)

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        """Return the network's output."""
        plain = settings or not all(isinstance(tensor, Tensor) for tensor in inputs)
        return self.network(*inputs, **settings) if plain else self._repeated(*inputs)


def generators_on(device: torch.device, parts: Any) -> list[torch.Generator]:
    """Return the methods' random generators on a device."""
    return [generator for generator in find_generators(parts) if getattr(generator, "device", None) == device]


def why_plain(
    device: torch.device, methods: Iterable[Method], parts: Mapping[str, SitePart] | None = None
) -> str:
    """Return the reason why a site's work cannot be captured; empty if it can."""
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
    """Fuse an optimiser's step on a GPU, and count its steps on the device.

    Applies with and without capturing, for equal arithmetic. A CPU's optimiser stays as it is.
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
