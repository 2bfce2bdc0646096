"""Resize images to the size of the network's input."""

import torch


def resize_in_plane(image: torch.Tensor, size: int | None, mode: str = "bilinear") -> torch.Tensor:
    """Resize a photograph, a slice or a volume in plane; the dtype stays.

    Bilinear interpolation is anti-aliased like Pillow's: shrinking averages, like a coarser scan.

    Args:
        image: (C, H, W), or (C, H, W, D), slice by slice; uint8 or floating point, labels also int32 below
            2^24.
        size: pixels in both directions; ``None`` for no change.
        mode: ``"bilinear"``, or ``"nearest-exact"`` for labels.
    """
    if size is None or tuple(image.shape[1:3]) == (size, size):
        return image
    smooth = {"antialias": True} if mode == "bilinear" else {}
    planes = image.permute(3, 0, 1, 2) if image.dim() == 4 else image[None]
    planes = planes.float() if planes.dtype == torch.int32 else planes  # PyTorch interpolates no int32
    resized = torch.nn.functional.interpolate(planes, (size, size), mode=mode, **smooth).to(image.dtype)
    return resized.permute(1, 2, 3, 0) if image.dim() == 4 else resized[0]
