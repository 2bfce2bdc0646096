"""Operations on the device in one training step and one inference of each method.

    python benchmarks/operations.py
    python benchmarks/operations.py --methods fedavg fedfd --out counts.json --before earlier.json

On a GPU that waits for Python, the number of operations decides the time of a step. Each method trains on the
pretended device of `pretended_gpu.py`, where PyTorch hands every operation to the script first. Views,
metadata and allocations, which start nothing on a device, do not count. Optimisers take all parameters at
once, as on a GPU. Each operator of `medfedaug.functional.operators` starts one kernel and is one operation.

Classifiers are a ResNet-18, segmentation networks MONAI's BasicUNet. Random layers are active in every step.
The script counts the last step of the last round, when everything exchanged has arrived.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import hardware, parser
from monai.utils import CommonKeys as Keys
from pretended_gpu import DEVICE, PretendedTensor, Pretending, data_by_task, unscored
from torch import Tensor
from torch.optim import optimizer
from torch.utils._pytree import tree_leaves

from medfedaug.data.sites import find_sites
from medfedaug.errors import MedFedAugError
from medfedaug.federation.in_process import run_in_process
from medfedaug.federation.site.local_training import LocalTraining
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods import method_names, parse_methods
from medfedaug.simulate import configure

STEPS, ROUNDS = 2, 2
PHASES = ("forward", "backward", "optimiser")
SETTINGS = {
    "segmentation": {"network_args": {"features": [4, 4, 4, 4, 4, 4]}},
    "classification": {"network": "resnet18", "image_size": 32},
}
BY_CHANCE = {"fedfa", "mixstyle"}
_aten = torch.ops.aten
_ALLOCATING = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_METADATA = {_aten.detach, _aten.alias, _aten._unsafe_view, _aten.lift_fresh, _aten.is_same_size}
_FREE = _ALLOCATING | _METADATA


class Counting(Pretending):
    """Count the operations on the pretended device, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: str | None = None
        self.by_phase: Counter[str] = Counter()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        on_device = any(isinstance(leaf, PretendedTensor) for leaf in tree_leaves((args, kwargs, result)))
        if self.phase and on_device and not func.is_view and func.overloadpacket not in _FREE:
            self.by_phase[self.phase] += 1
            self.by_name[func.overloadpacket.__name__] += 1
        return result

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the operations in the block as a phase."""
        before = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = before


def operations(method: str) -> tuple[str, dict[str, int], Counter[str]]:
    """Count the operations of one method.

    Returns:
        The task, the operations of a step and an inference by phase, and of both by name.

    Raises:
        MedFedAugError: when the method trains on neither task.
    """
    refused = None
    with tempfile.TemporaryDirectory() as folder:
        for task, data in reversed(data_by_task(Path(folder)).items()):
            sites = find_sites(data)
            try:
                methods = parse_methods(method)
                for one in methods:
                    one["args"].update({"prob": 1.0} if one["name"] in BY_CHANCE else {})
                settings = {"rounds": ROUNDS, "local_steps": STEPS, "batch_size": 4, **SETTINGS[task]}
                config = configure(sites, methods=tuple(methods), **settings)
                counts, names = _trained(partial(run_in_process, config, data, sites, str(DEVICE)))
            except MedFedAugError as error:
                refused = error
                continue
            return task, counts, names
    assert refused is not None
    raise refused


def _trained(run: Any) -> tuple[dict[str, int], Counter[str]]:
    counting, train = Counting(), LocalTraining.run

    def step(*_: Any) -> None:
        counting.by_phase.clear()
        counting.by_name.clear()

    def counted(training: LocalTraining, loader: Any, *others: Any) -> list[float]:
        with counting.during("forward"):
            losses = train(training, loader, *others)
        inputs = next(iter(loader))[Keys.IMAGE].to(training.device)
        training.network.eval()
        with torch.no_grad(), counting.during("inference"):
            training.network(inputs)
        return losses

    def labelled(function: Any, phase: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if counting.phase is None:
                return function(*args, **kwargs)
            with counting.during(phase):
                return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(LocalTraining, "run", counted),
        mock.patch.object(LocalTraining, "check_stop", step),
        mock.patch.object(SiteTrainer, "evaluate_round", unscored),
        mock.patch.object(Tensor, "backward", labelled(Tensor.backward, "backward")),
        mock.patch.object(torch.autograd, "grad", labelled(torch.autograd.grad, "backward")),
        mock.patch.object(torch.optim.SGD, "step", labelled(torch.optim.SGD.step, "optimiser")),
        mock.patch.object(torch.optim.Adam, "step", labelled(torch.optim.Adam.step, "optimiser")),
        all_at_once(),
        counting,
    ):
        run()
    return {phase: counting.by_phase[phase] for phase in (*PHASES, "inference")}, counting.by_name


@contextmanager
def all_at_once() -> Iterator[None]:
    """Let optimisers treat the pretended device as CUDA and take all parameters at once."""
    types = [*optimizer._foreach_supported_types, PretendedTensor]
    with (
        mock.patch.object(optimizer, "_foreach_supported_types", types),
        mock.patch.object(optimizer, "_get_foreach_kernels_supported_devices", return_value=[DEVICE.type]),
        mock.patch.object(optimizer, "_get_fused_kernels_supported_devices", return_value=[]),
    ):
        yield


def main() -> None:
    """Print a line for every method."""
    arguments = parser(__doc__)
    arguments.add_argument("--methods", nargs="+", help="by default all federated methods")
    arguments.add_argument("--out", type=Path, help="JSON file to write")
    arguments.add_argument("--before", type=Path, help="JSON file of an earlier run, for a further column")
    arguments.add_argument("--names", action="store_true", help="print the operations by name as well")
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before = json.loads(options.before.read_text(encoding="utf-8")) if options.before else {}
    print(hardware(), "\n\n| method | task | forward | backward | optimiser | a step | inference | before |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    counts: dict[str, dict[str, int]] = {}
    for name in options.methods or [name for name in method_names() if name not in ("pooled", "single")]:
        try:
            task, by_phase, names = operations(name)
        except MedFedAugError as error:
            print(f"| {name} | {str(error).splitlines()[0]} |", flush=True)
            continue
        step = sum(by_phase[phase] for phase in PHASES)
        counts[name] = {**by_phase, "step": step}
        old = before.get(name, {})
        cells = [*(by_phase[phase] for phase in PHASES), step, by_phase["inference"]]
        cells.append(f"{old['step']}; {old['inference']}" if old else "")
        print("| " + " | ".join((name, task, *map(str, cells))) + " |", flush=True)
        if options.names:
            print(names.most_common())
    if options.out is not None:
        options.out.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
