"""Updates held until the end of a round: in memory, and large ones in temporary files."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress

import torch

from medfedaug.federation.messages.messages import Reply, num_bytes

MOST_IN_MEMORY = 2**31
"""Bytes of updates held in memory; tensors of further updates are mapped from temporary files."""


class HeldUpdates:
    """Updates by site, from their arrival to the end of the round.

    Beyond `MOST_IN_MEMORY`, tensors are mapped from a file in the system's temporary folder (``TMPDIR``), so
    that the system may drop their pages. The file is unlinked at once and disappears with the process. On a
    full disk the tensors stay in memory.
    """

    def __init__(self) -> None:
        self._replies: dict[str, Reply] = {}
        self._bytes = 0

    def put(self, site: str, reply: Reply) -> None:
        """Hold an update."""
        size = num_bytes(reply.weights) + num_bytes(reply.payload)
        tensors = (*reply.weights.values(), *reply.payload.values())
        if self._bytes + size > MOST_IN_MEMORY and all(tensor.device.type == "cpu" for tensor in tensors):
            with suppress(OSError, RuntimeError):  # PyTorch raises RuntimeError on a full disk
                reply.weights, reply.payload = _mapped(reply)
                size = 0
        self._bytes += size
        self._replies[site] = reply

    def take(self) -> dict[str, Reply]:
        """Return and release all updates, in the order of the sites' names."""
        replies, self._replies, self._bytes = self._replies, {}, 0
        return dict(sorted(replies.items()))


def _mapped(reply: Reply) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    descriptor, path = tempfile.mkstemp(prefix="medfedaug-update-", suffix=".pt")
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save({"weights": dict(reply.weights), "payload": dict(reply.payload)}, file)
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    finally:
        os.unlink(path)
    return tensors["weights"], tensors["payload"]
