"""Hooks that stay with a network in another process."""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class PickledHook:
    """A hook that holds its handle, so that it stays when its network is unpickled in another process.

    PyTorch numbers hooks in each process, and unpickles the hooks of a module with their numbers. A hook that
    is registered later could get the same number and replace the first one silently; an unpickled handle
    reserves the number.
    """

    handle: RemovableHandle | None = None

    def register_first(self, module: nn.Module) -> None:
        """Register the hook before a module's other forward hooks, which then see its result."""
        hook: Any = self
        self.handle = module.register_forward_hook(hook, prepend=True)
