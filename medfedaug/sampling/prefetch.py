"""Prefetch batches, and copy them to a GPU, during computation."""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from monai.utils import CommonKeys as Keys
from torch import Tensor
from torch.utils._pytree import tree_map_only

Batch = TypeVar("Batch")


def prefetch(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Prepare the next batch in a thread during the use of one, unless PyTorch uses all cores of the CPU.

    Unlike MONAI's `ThreadBuffer`, this function raises errors of the thread. For a GPU, CPU tensors go to
    pinned memory, which is copied while the GPU computes.
    """
    # PyTorch's threads wait for each other after every operation: a thread that shares its core with this
    # one delays all, which costs more than the batch.
    if device.type == "cpu" and torch.get_num_threads() >= (os.cpu_count() or 1):
        yield from batches
        return
    source = iter(batches)

    def make() -> Batch | None:
        batch = next(source, None)
        return tree_map_only(Tensor, _pinned, batch) if device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as pool:
        # Each context shares the decoded images with the thread.
        waiting = pool.submit(copy_context().run, make)
        while (batch := waiting.result()) is not None:
            waiting = pool.submit(copy_context().run, make)
            yield batch


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def on_device(batch: Mapping[Any, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy a batch's images and its targets to a device."""
    images, targets = (batch[key].to(device, non_blocking=True) for key in (Keys.IMAGE, Keys.LABEL))
    return images, targets
