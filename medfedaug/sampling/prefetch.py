"""Batches that are made while others are used."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch

__all__ = ["ahead"]

Batch = TypeVar("Batch")


class _End:
    """After the last batch."""


def ahead(batches: Iterable[Batch], count: int, device: torch.device) -> Iterator[Batch]:
    """The same batches, of which some are made ahead, in order and in a thread of their own.

    Unlike MONAI's `ThreadBuffer`, it passes on what goes wrong while a batch is made.

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
        return next(source, _End())

    def submit(pool: ThreadPoolExecutor) -> Future[Batch | _End]:
        # Decoded images that are kept for this context are there for the thread, too.
        context = copy_context()
        return pool.submit(lambda: context.run(make))

    with ThreadPoolExecutor(1) as pool:
        waiting = deque(submit(pool) for _ in range(count))
        while not isinstance(batch := waiting.popleft().result(), _End):
            waiting.append(submit(pool))
            yield batch
