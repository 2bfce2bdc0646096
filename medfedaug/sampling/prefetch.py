"""Prefetch batches, and copy them to a GPU, during computation."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from monai.utils import CommonKeys as Keys
from torch import Tensor
from torch.utils._pytree import tree_map_only

Batch = TypeVar("Batch")


def prefetch(batches: Iterable[Batch], count: int, device: torch.device) -> Iterator[Batch]:
    """Prepare batches in advance, in order, in one thread.

    Unlike MONAI's `ThreadBuffer`, this function raises errors of the thread. For a GPU, CPU tensors go to
    pinned memory, which is copied while the GPU computes. ``count`` batches are in preparation during the use
    of one: none for 0, and on a CPU whose cores are all in use by PyTorch.
    """
    # PyTorch's threads wait for each other after every operation: a thread that shares its core with this
    # one delays all, which costs more than the batch.
    if not count or (device.type == "cpu" and torch.get_num_threads() >= (os.cpu_count() or 1)):
        yield from batches
        return
    source = iter(batches)

    def make() -> Batch | None:
        batch = next(source, None)
        return tree_map_only(Tensor, _pinned, batch) if device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as pool:
        # Each context shares the decoded images with the thread.
        waiting = deque(pool.submit(copy_context().run, make) for _ in range(count))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(copy_context().run, make))
            yield batch


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def on_device(batch: Mapping[Any, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy a batch's images and its targets to a device."""
    images, targets = (batch[key].to(device, non_blocking=True) for key in (Keys.IMAGE, Keys.LABEL))
    return images, targets
