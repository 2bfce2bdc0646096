"""Count the waits of a GPU inside a step of each method, and refuse tensors of two devices; needs no GPU.

    python benchmarks/pretended_gpu.py
    python benchmarks/pretended_gpu.py --methods fedfd_a feddg
    python benchmarks/pretended_gpu.py --device cuda

A federation of two sites trains with each method on a pretended device: a wrapper of CPU tensors that follow
CUDA's rules. An operation on tensors of both places is an error, unless one is a single number. A GPU waits
where the next operation needs a value first (`item`, `tolist`, a copy to the CPU, `nonzero`, a mask as an
index); the script counts these waits by the line of medfedaug, in the training of the rounds only. Values and
gradients are real. It does not show errors of CUDA's own kernels, memory, time, and optimisers that take
several tensors at once.

With `--device cuda` the same trainings run on a real GPU. Its errors are CUDA's own, and its waits are those
that PyTorch reports (`torch.cuda.set_sync_debug_mode`), copies to the GPU among them.

PyTorch's own `FakeTensorMode` needs a build for CUDA, has no values and no backward pass, and in torch 2.15
no network can be moved to its device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import plain_operators  # noqa: F401  the operators, on the pretended device too
import torch
from measure import device_in_use, hardware, parser
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.errors import MedFedAugError
from medfedaug.federation.in_process import run_in_process
from medfedaug.federation.site.local_training import LocalTraining
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.functional import operators
from medfedaug.methods import method_names, parse_methods
from medfedaug.simulate import configure

# No accelerator for PyTorch, with a backward pass in the calling thread.
DEVICE = torch.device("lazy:0")
STEPS, ROUNDS = 3, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "segmentation": {"network_args": {"features": [4, 4, 4, 4, 4, 4]}},
    "classification": {"network": "digits_cnn", "image_size": 28},
}
_aten = torch.ops.aten
_WAITING = {
    *(_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_dim),
    *(_aten.unique_consecutive, _aten.bincount, _aten.equal, _aten._linalg_check_errors),
}
BETWEEN = {_aten.copy_, _aten._to_copy}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_}

waits: Counter[tuple[str, str]] = Counter()
_apart = ThreadPoolExecutor(1)


class PretendedTensor(Tensor):
    """A tensor of the CPU that pretends another device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendedTensor:
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
        )
        wrapper.held = held
        return wrapper

    def __repr__(self) -> str:
        return f"PretendedTensor({self.held!r})"

    def tolist(self) -> Any:
        """Wait, as a tensor on a GPU."""
        _wait("tolist")
        return self.detach().held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


@contextmanager
def reporting() -> Iterator[None]:
    """Count PyTorch's reports of waits for a real GPU."""
    with warnings.catch_warnings(), mock.patch.object(warnings, "showwarning", _reported):
        warnings.filterwarnings("always", "called a synchronizing CUDA operation")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _reported(*warning: object) -> None:
    _wait("reported")


class Pretending(TorchDispatchMode):
    """Allows to make tensors on the pretended device and to move them there."""

    def __enter__(self) -> Pretending:
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(…, device=…)` makes them there first
        self._operators = mock.patch.object(operators, "_compiles_on", DEVICE.type.__eq__)
        self._operators.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._operators.stop()
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    operation = func.overloadpacket
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    pretended = any(isinstance(tensor, PretendedTensor) for tensor in tensors)
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    on_device = pretended if target is None else target.type == DEVICE.type
    if not pretended and not on_device:
        return func(*args, **kwargs)
    if pretended:
        _check(operation, args, tensors)
        leaves = (target is not None and not on_device) or (
            operation is _aten.copy_ and not isinstance(args[0], PretendedTensor)
        )
        masks = operation in _INDEXING and any(
            i.dtype in (torch.bool, torch.uint8) for i in tree_leaves(args[1]) if i is not None
        )
        if operation in _WAITING or leaves or masks or func is _aten.repeat_interleave.Tensor:
            _wait("to the CPU" if leaves else "a mask as index" if masks else operation.__name__)
    elif isinstance(kwargs.get("generator"), torch.Generator):
        raise RuntimeError(f"Expected a '{DEVICE.type}' device type for generator but found 'cpu'")
    held_args, held_kwargs = tree_map_only(PretendedTensor, lambda tensor: tensor.held, (args, kwargs))
    if target is not None:
        held_kwargs = {**held_kwargs, "device": torch.device("cpu")}
    if func.namespace == "medfedaug":
        # The plain versions differentiate, which PyTorch's dispatch forbids in this thread.
        result = _apart.submit(func, *held_args, **held_kwargs).result()
    else:
        result = func(*held_args, **held_kwargs)
    if operation is _aten.copy_:
        return args[0]
    if not on_device:
        return result
    return return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, PretendedTensor, result))


def _check(operation: Any, args: Any, tensors: list[Tensor]) -> None:
    strangers = [t for t in tensors if not isinstance(t, PretendedTensor) and t.dim()]
    if operation in _INDEXING and isinstance(args[0], PretendedTensor):
        strangers = []  # indices may be on the CPU
    if strangers and operation not in BETWEEN:
        shape = list(strangers[0].shape)
        raise RuntimeError(f"{operation.__name__}: a tensor {shape} of the CPU with one of the device")


def _wait(what: str) -> None:
    frame, place = sys._getframe(2), ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("medfedaug.") and not place:
            place = f"{module}:{frame.f_lineno}"
        if frame.f_code is LocalTraining.run.__code__:
            waits[what, place] += 1
            return
        frame = frame.f_back


def read_options(description: str | None) -> argparse.Namespace:
    """Read methods and device from the command line, and compute on one thread without warnings."""
    arguments = parser(description)
    federated = [name for name in method_names() if name not in ("pooled", "single")]
    arguments.add_argument("--methods", nargs="+", default=federated, help="by default all federated methods")
    arguments.add_argument("--device", help="cuda: a real GPU in place of the pretended one")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return arguments.parse_args()


def main() -> None:
    """Print a line for every method."""
    options = read_options(__doc__)
    device = device_in_use(options.device) if options.device else DEVICE
    print(
        hardware(), f"\n\n| method | task | waits in {ROUNDS} rounds of {STEPS} steps at 2 sites | outcome |"
    )
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = data_by_task(Path(folder))
        for name in options.methods:
            print("| " + " | ".join((name, *_try(name, data, device))) + " |", flush=True)


def data_by_task(folder: Path) -> dict[str, Path]:
    """Write volumes and photographs of two sites; return their folders."""
    make_phantom(folder / "volumes", sites=2, patients=4, shape=(32, 32, 4))
    random = np.random.default_rng(0)
    for site in ("one", "two"):
        for label in ("a", "b"):
            images = folder / "photographs" / site / label
            images.mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(images / f"{number}.png")
    return {"segmentation": folder / "volumes", "classification": folder / "photographs"}


def unscored(trainer: SiteTrainer, split: str, round_: int, *, full: bool | None = None) -> dict[str, Any]:
    """Return no score."""
    return {trainer.task.metric: None, "cases": {}}


def _try(name: str, data: dict[str, Path], device: torch.device) -> tuple[str, str, str]:
    message = ""
    for task, folder in data.items():
        waits.clear()
        sites = find_sites(folder)
        try:
            methods = tuple(parse_methods(name))
            config = configure(
                sites, methods=methods, rounds=ROUNDS, local_steps=STEPS, batch_size=4, **SETTINGS[task]
            )
        except MedFedAugError as error:
            message = str(error)
            continue
        try:
            watched = Pretending() if device == DEVICE else reporting()
            with watched, mock.patch.object(SiteTrainer, "evaluate_round", unscored):
                run_in_process(config, folder, sites, str(device))
        except MedFedAugError as error:
            message = str(error)
            if "of the CPU with" in message or "for generator" in message:
                return task, "", message
            continue
        each = STEPS * ROUNDS * len(sites)
        lines = [f"{count} x {what}, {place}" for (what, place), count in waits.most_common()]
        inside = sum(count for count in waits.values() if count > ROUNDS * len(sites))
        return task, "; ".join(lines), f"{inside / each:.3g} waits a step" if inside else "none in a step"
    return "", "", message


if __name__ == "__main__":
    main()
