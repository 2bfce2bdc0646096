"""Resizing images to the size that the network takes."""

from __future__ import annotations

import torch


def resize_in_plane(image: torch.Tensor, size: int | None, mode: str = "bilinear") -> torch.Tensor:
    """Resize a photograph, a slice or a volume in plane; the dtype stays.

    Bilinear interpolation is anti-aliased as Pillow's is: shrinking averages, as a coarser scan would have.

    Args:
        image: (C, H, W), or (C, H, W, D), of which each slice is resized by itself; for interpolation uint8
            as a file has it, or floating point; labels also int32, below 2^24.
        size: pixels in both directions; ``None`` leaves the image as it is, and so does the size that it has.
        mode: ``"bilinear"``, or ``"nearest-exact"`` for labels.
    """
    if size is None or tuple(image.shape[1:3]) == (size, size):
        return image
    smooth = {"antialias": True} if mode == "bilinear" else {}
    planes = image.permute(3, 0, 1, 2) if image.dim() == 4 else image[None]
    known = planes.float() if planes.dtype == torch.int32 else planes  # PyTorch interpolates no int32
    resized = torch.nn.functional.interpolate(known, (size, size), mode=mode, **smooth).to(image.dtype)
    return resized.permute(1, 2, 3, 0) if image.dim() == 4 else resized[0]
