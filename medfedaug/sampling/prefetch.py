"""Prefetch batches, and copy them to a GPU, during computation."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from monai.utils import CommonKeys as Keys
from torch import Tensor
from torch.utils._pytree import tree_map_only

from medfedaug.models.memory_format import channels_last

Batch = TypeVar("Batch")


class _End:
    """Mark after the last batch."""


def prefetch(batches: Iterable[Batch], count: int, device: torch.device) -> Iterator[Batch]:
    """Prepare batches in advance, in order, in one thread.

    Unlike MONAI's `ThreadBuffer`, this function raises errors of the thread. For a GPU, CPU tensors go to
    pinned memory, which is copied while the GPU computes.

    Args:
        batches: source of the batches.
        count: number of batches in preparation during the use of one; 0 for none, as on a CPU whose cores
            are all in use by PyTorch.
        device: device that computes with the batches.
    """
    # PyTorch's threads wait for each other after every operation: a thread that shares its core with this
    # one delays all, which costs more than the batch.
    if not count or (device.type == "cpu" and torch.get_num_threads() >= (os.cpu_count() or 1)):
        yield from batches
        return
    source = iter(batches)

    def make() -> Batch | _End:
        batch = next(source, _End())
        return tree_map_only(Tensor, _pinned, batch) if device.type == "cuda" else batch

    def submit(pool: ThreadPoolExecutor) -> Future[Batch | _End]:
        # The thread shares the context's decoded images.
        context = copy_context()
        return pool.submit(lambda: context.run(make))

    with ThreadPoolExecutor(1) as pool:
        waiting = deque(submit(pool) for _ in range(count))
        while not isinstance(batch := waiting.popleft().result(), _End):
            waiting.append(submit(pool))
            yield batch


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def on_device(batch: Mapping[Any, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy a batch's images, channels last, and its targets to a device."""
    images, targets = (batch[key].to(device, non_blocking=True) for key in (Keys.IMAGE, Keys.LABEL))
    return channels_last(images), targets
