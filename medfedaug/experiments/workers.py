"""Processes that make runs at the same time, each with decoded images of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from medfedaug.data.preparation.decoded_cache import keep_decoded

__all__ = ["outcome", "worker_pool"]


@contextmanager
def worker_pool(jobs: int, memory: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end when this one leaves the block or dies.

    Args:
        jobs: how many; they share the cores.
        memory: bytes of decoded images that each keeps.
    """
    spawn = get_context("spawn")
    end, lifeline = spawn.Pipe(duplex=False)
    with ProcessPoolExecutor(jobs, spawn, _prepare_process, (jobs, memory, end)) as pool:
        try:
            yield pool
        finally:
            lifeline.close()


_process = ExitStack()  # closed by nobody: what is in it lasts as long as a worker does


def _prepare_process(jobs: int, memory: int, lifeline: Connection) -> None:
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    _process.enter_context(keep_decoded(memory))


def _end_with(lifeline: Connection) -> None:
    """End this process when the sweep's is stopped or dies: the next sweep continues the same runs."""
    with suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)


def outcome(future: Future[str]) -> str:
    """Return a worker's result, or the reason why there is none."""
    try:
        return future.result()
    except BrokenProcessPool:
        return "its process was ended from outside, as happens when memory runs out"
