"""Statistics of a batch across the processes of a joint training, as with `DistributedDataParallel`."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, distributed


def several_processes() -> bool:
    """Return whether this process is one of several in the default group of `torch.distributed`."""
    return (
        distributed.is_available() and distributed.is_initialized() and int(distributed.get_world_size()) > 1
    )


@cache
def _not_compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Leave a function out of compiled graphs; the import of the compiler waits until the first call."""
    uncompiled: Callable[[Tensor], Tensor] = torch.compiler.disable(function)
    return uncompiled


def rows_of_all(rows: Tensor) -> Tensor:
    """Return the rows of all processes in the order of their ranks; their numbers may differ.

    Gradients flow back to the process of a row, as with `torch.nn.SyncBatchNorm`: averaged over processes by
    `DistributedDataParallel`, they are the gradients of the mean of all losses.

    Rows are (B, N), the result is (sum of all B, N), the same in every process; the values keep their bits.
    """
    return _not_compiled(_gather)(rows)


def drawn_together(value: Tensor) -> Tensor:
    """Return the random number of the first process in all processes."""
    return _not_compiled(_broadcast)(value)


def _gather(rows: Tensor) -> Tensor:
    from torch.distributed.nn import functional

    rank, world = distributed.get_rank(), distributed.get_world_size()
    sizes = torch.zeros(world, dtype=torch.int64, device=rows.device)
    sizes[rank] = len(rows)
    distributed.all_reduce(sizes)
    # A sum with zeros for all other rows, since gathering needs equal numbers of rows.
    before, after = int(sizes[:rank].sum()), int(sizes[rank + 1 :].sum())
    padded: Tensor = functional.all_reduce(torch.nn.functional.pad(rows, (0, 0, before, after)))
    return padded


def _broadcast(value: Tensor) -> Tensor:
    distributed.broadcast(value, 0)
    return value
