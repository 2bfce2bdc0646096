"""Classification networks of the papers that MONAI lacks."""

from collections.abc import Sequence
from typing import Any

from monai.networks.layers.factories import Conv, Norm, Pool
from monai.networks.nets import ViT
from monai.networks.nets.swin_unetr import SwinTransformer
from torch import Tensor, nn


class StagedClassifier(nn.Module):
    """Convolutional stages in sequence, each with its pooling if it has one, then a classifier.

    ``head`` maps the features of the last stage, (B, C, *spatial), to logits, (B, classes).
    """

    def __init__(self, stages: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*stages)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, *spatial) -> logits, (B, classes)."""
        logits: Tensor = self.head(self.encoder(x))
        return logits


def _stage(
    spatial_dims: int,
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int,
    padding: int,
    pool: tuple[int, int] | None,
) -> nn.Sequential:
    layers: list[nn.Module] = [
        Conv[Conv.CONV, spatial_dims](in_channels, out_channels, kernel_size, stride, padding),
        Norm[Norm.BATCH, spatial_dims](out_channels),
        nn.ReLU(inplace=True),
    ]
    if pool is not None:
        layers.append(Pool[Pool.MAX, spatial_dims](*pool))
    return nn.Sequential(*layers)


def _head(spatial_dims: int, channels: int, size: int, widths: Sequence[int], classes: int) -> nn.Sequential:
    """Adaptive pooling to `size` in each direction, then fully connected layers with batch norm and ReLU."""
    layers: list[nn.Module] = [Pool[Pool.ADAPTIVEAVG, spatial_dims](size), nn.Flatten()]
    width = channels * size**spatial_dims
    for out in widths:
        layers += [nn.Linear(width, out), nn.BatchNorm1d(out), nn.ReLU(inplace=True)]
        width = out
    return nn.Sequential(*layers, nn.Linear(width, classes))


def alexnet(spatial_dims: int = 2, in_channels: int = 3, out_channels: int = 10) -> StagedClassifier:
    """AlexNet with batch norm (FedFA, ICLR 2023, Table 10): 49.5 MB for RGB images and ten classes.

    Five stages of 64, 192, 384, 256 and 256 channels, the first two and the last with pooling.
    Images are 2D as in the paper, or 3D, and need 63 voxels or more in each direction.
    """
    pool = (3, 2)
    stages = [
        _stage(spatial_dims, in_channels, 64, 11, 4, 2, pool),
        _stage(spatial_dims, 64, 192, 5, 1, 2, pool),
        _stage(spatial_dims, 192, 384, 3, 1, 1, None),
        _stage(spatial_dims, 384, 256, 3, 1, 1, None),
        _stage(spatial_dims, 256, 256, 3, 1, 1, pool),
    ]
    return StagedClassifier(stages, _head(spatial_dims, 256, 6, (1024, 1024), out_channels))


def lenet5(spatial_dims: int = 2, in_channels: int = 1, out_channels: int = 10) -> StagedClassifier:
    """LeNet-5 (LeCun et al., 1998) with today's batch norm, ReLU and max pooling, for 32 x 32 pixels.

    Two stages of 6 and 16 channels, fully connected layers of 120 and 84 units. The arguments are as for
    `alexnet`. The last features of images of another size are pooled to 5 in each direction.
    """
    pool = (2, 2)
    stages = [_stage(spatial_dims, in_channels, 6, 5, 1, 0, pool), _stage(spatial_dims, 6, 16, 5, 1, 0, pool)]
    return StagedClassifier(stages, _head(spatial_dims, 16, 5, (120, 84), out_channels))


class SwinClassifier(nn.Module):
    """Swin transformer for classification, made of the encoder of MONAI's SwinUNETR; Swin-T by default.

    The patch merging between two stages is part of the earlier one; the last stage has none, as in the
    original (Liu et al., ICCV 2021). Its only norm is layer norm.

    Args:
        embed_dim: width of the first stage.
        depths: number of blocks of each of the four stages.
        num_heads: attention heads of each stage.
        window_size: attention window in each direction.
        patch_size: patch in each direction.
        drop_path_rate: stochastic depth of the last block.
    """

    def __init__(
        self,
        spatial_dims: int = 2,
        in_channels: int = 3,
        out_channels: int = 10,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int = 7,
        patch_size: int = 4,
        drop_path_rate: float = 0.2,
    ) -> None:
        super().__init__()
        self.encoder = SwinTransformer(
            in_chans=in_channels,
            embed_dim=embed_dim,
            window_size=(window_size,) * spatial_dims,
            patch_size=(patch_size,) * spatial_dims,
            depths=tuple(depths),
            num_heads=tuple(num_heads),
            drop_path_rate=drop_path_rate,
            patch_norm=True,
            spatial_dims=spatial_dims,
        )
        self.encoder.layers4[0].downsample = None  # type: ignore[assignment]
        # The patch merging at the end of a stage doubles the channels.
        self.widths = tuple(embed_dim * factor for factor in (2, 4, 8, 8))
        self.pool = Pool[Pool.ADAPTIVEAVG, spatial_dims](1)
        self.norm = nn.LayerNorm(self.widths[-1])
        self.head = nn.Linear(self.widths[-1], out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, *spatial) -> logits, (B, classes)."""
        features = self.encoder(x, normalize=False)[-1]
        normalized = self.norm(features.movedim(1, -1)).movedim(-1, 1)
        logits: Tensor = self.head(self.pool(normalized).flatten(1))
        return logits


class ViTClassifier(ViT):
    """MONAI's vision transformer, with its arguments, and with the logits as its only output."""

    def __init__(self, spatial_dims: int = 2, **args: Any) -> None:
        super().__init__(
            spatial_dims=spatial_dims, classification=True, **{"post_activation": "none", **args}
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, *img_size) -> logits, (B, num_classes)."""
        logits: Tensor = super().forward(x)[0]  # type: ignore[no-untyped-call]
        return logits
