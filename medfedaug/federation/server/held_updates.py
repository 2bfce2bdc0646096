"""The updates of a round that wait for the others: in memory, and in temporary files where they are large."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress

import torch

from medfedaug.federation.messages.messages import Reply, num_bytes

MOST_IN_MEMORY = 2**31
"""Bytes of updates that are held in memory; the tensors of further ones are mapped from a temporary file."""


class HeldUpdates:
    """Updates by site, from their arrival to the end of the round.

    Beyond `MOST_IN_MEMORY` tensors are written to a file in the system's temporary folder (``TMPDIR``) and
    mapped from it, so that the system may drop their pages. The file's name is removed at once: nothing is
    left of it when the process ends, however that happens. On a full disk they stay in memory.
    """

    def __init__(self) -> None:
        self._replies: dict[str, Reply] = {}
        self._bytes = 0

    def put(self, site: str, reply: Reply) -> None:
        """Hold an update."""
        size = num_bytes(reply.weights) + num_bytes(reply.payload)
        tensors = (*reply.weights.values(), *reply.payload.values())
        if self._bytes + size > MOST_IN_MEMORY and all(tensor.device.type == "cpu" for tensor in tensors):
            with suppress(OSError, RuntimeError):  # PyTorch has errors of its own for a full disk
                reply.weights, reply.payload = _mapped(reply)
                size = 0
        self._bytes += size
        self._replies[site] = reply

    def take(self) -> dict[str, Reply]:
        """Return all held updates, in the order of the sites' names, and hold none any more."""
        replies, self._replies, self._bytes = self._replies, {}, 0
        return dict(sorted(replies.items()))


def _mapped(reply: Reply) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    descriptor, path = tempfile.mkstemp(prefix="medfedaug-update-", suffix=".pt")
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save({"weights": dict(reply.weights), "payload": dict(reply.payload)}, file)
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    finally:
        os.unlink(path)
    return found["weights"], found["payload"]
