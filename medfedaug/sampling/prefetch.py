"""Batches that are made, and copied to a GPU, while others are used."""

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
    """After the last batch."""


def ahead(batches: Iterable[Batch], count: int, device: torch.device) -> Iterator[Batch]:
    """The same batches, of which some are made ahead, in order and in a thread of their own.

    Unlike MONAI's `ThreadBuffer`, it passes on what goes wrong while a batch is made. For a GPU, what is on
    the CPU is put into pinned memory, from which it is copied while the GPU computes.

    Args:
        batches: what makes them.
        count: how many are ready or being made while one is used; 0 makes each when it is asked for, and so
            does a CPU whose cores are all in use by PyTorch.
        device: what uses them.
    """
    # PyTorch's threads wait for each other after every operation: one that has to share its core holds up
    # all, which costs more than the batch.
    if not count or (device.type == "cpu" and torch.get_num_threads() >= (os.cpu_count() or 1)):
        yield from batches
        return
    source = iter(batches)

    def make() -> Batch | _End:
        batch = next(source, _End())
        return tree_map_only(Tensor, _pinned, batch) if device.type == "cuda" else batch

    def submit(pool: ThreadPoolExecutor) -> Future[Batch | _End]:
        # Decoded images that are kept for this context are there for the thread, too.
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
    """The images of a batch, channels last, and its targets, on the device that computes with them."""
    images, targets = (batch[key].to(device, non_blocking=True) for key in (Keys.IMAGE, Keys.LABEL))
    return channels_last(images), targets
