"""Hooks that go with a network to another process."""

from __future__ import annotations

from torch.utils.hooks import RemovableHandle


class PickledHook:
    """A hook that holds its handle, so that it stays when its network is unpickled in another process.

    PyTorch numbers hooks in each process, and unpickles those of a module with the numbers that they had: a
    hook that is registered later may get the same number, and would replace it without a word. A handle that
    is unpickled says which numbers are taken.
    """

    handle: RemovableHandle | None = None
