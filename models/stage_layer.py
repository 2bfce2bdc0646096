"""The base class of layers that are inserted after the stages of an encoder."""

from typing import ClassVar

from torch import nn


class StageLayer(nn.Module):
    """A layer on the features of a stage, (B, C, *spatial).

    It adds nothing to the network's state dict: its buffers are not persistent, and parameters, if it has
    any, are no entries.

    Args:
        num_channels: number of channels C.

    Attributes:
        stage: name of the stage, set where the layer is inserted.
        stage_index: its position among those that were inserted, counted from 1; 0 for a layer of a
            network's own code.

    Raises:
        ValueError: when there is no channel.
    """

    kind: ClassVar[str]
    """Name of the layer in messages."""
    slug: ClassVar[str]
    """The name of its module in the network."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        if num_channels < 1:
            raise ValueError(f"num_channels is {num_channels}, expected at least 1")
        self.num_channels = num_channels
        self.stage = ""
        self.stage_index = 0
