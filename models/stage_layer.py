"""Base classes of layers to insert after the stages of an encoder, and of the hooks that call them."""

from typing import Any, ClassVar

from torch import nn
from torch.utils.hooks import RemovableHandle


class StageLayer(nn.Module):
    """A layer on the features of a stage, (B, C, *spatial).

    It adds nothing to the network's state dict: buffers are not persistent, and parameters are not entries.

    Args:
        num_channels: number of channels C.

    Attributes:
        stage: name of the stage; empty until the layer is inserted.
        stage_index: position among the inserted layers, counted from 1; 0 for a layer in a network's code.
    """

    kind: ClassVar[str]
    """Name of the layer in messages."""
    slug: ClassVar[str]
    """The name of its module in the network."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.stage = ""
        self.stage_index = 0


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
