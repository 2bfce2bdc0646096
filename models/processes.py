"""Statistics of a batch that several processes train on together, as with `DistributedDataParallel`."""

from __future__ import annotations

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
    """Leave a function out of compiled graphs, when it is first called, since that imports the compiler."""
    left_out: Callable[[Tensor], Tensor] = torch.compiler.disable(function)
    return left_out


def rows_of_all(rows: Tensor) -> Tensor:
    """The rows of all processes, in the order of their ranks; a process may have more rows than another.

    Gradients flow back to the process that a row comes from, as with `torch.nn.SyncBatchNorm`: with the
    average over processes that `DistributedDataParallel` takes, they are those of the mean of all losses.

    Args:
        rows: (B, N).

    Returns:
        (sum of all B, N), with the same values in every process, and those of ``rows`` to the bit.
    """
    return _not_compiled(_gather)(rows)


def drawn_together(value: Tensor) -> Tensor:
    """A random number that all processes share: the first one's."""
    return _not_compiled(_broadcast)(value)


def _gather(rows: Tensor) -> Tensor:
    from torch.distributed.nn import functional

    rank, world = distributed.get_rank(), distributed.get_world_size()
    sizes = torch.zeros(world, dtype=torch.int64, device=rows.device)
    sizes[rank] = len(rows)
    distributed.all_reduce(sizes)
    # A sum with zeros in the place of all other rows, since gathering needs the same number everywhere.
    before, after = int(sizes[:rank].sum()), int(sizes[rank + 1 :].sum())
    padded: Tensor = functional.all_reduce(torch.nn.functional.pad(rows, (0, 0, before, after)))
    return padded


def _broadcast(value: Tensor) -> Tensor:
    distributed.broadcast(value, 0)
    return value
