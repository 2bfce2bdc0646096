"""Features at the boundary of a region and just outside of it (FedDG)."""

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from medfedaug.functional.passes import working_precision


def boundary_features(z: Tensor, masks: Tensor, outside: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """The mean features at the boundary of each region, and of the background around it (FedDG).

    ::

        h_bd = (Σₓ z(x) b(x)) / (Σₓ b(x)),   h_bg = (Σₓ z(x) o(x)) / (Σₓ o(x))

    where b is the region without its erosion by one pixel, and o its dilation by some pixels without the
    region.

    Args:
        z: features (B, D, h, w), which are resized to the masks' size (bilinear).
        masks: regions (B, R, H, W), 0 and 1.
        outside: the width of the background in pixels.

    Returns:
        Both features, (B, R, D), and a mask of the regions that have a boundary and background, (B, R); the
        features of the others are 0.

    Deviations:
        Erosion and dilation are MONAI's, by squares. Outside of the image a region continues as at the edge,
        so that the edge is no boundary.

    Example:
        >>> mask = torch.zeros(1, 1, 5, 5)
        >>> mask[..., 2, 2] = 1
        >>> at, around, present = boundary_features(mask, mask, outside=1)
        >>> at.flatten().tolist(), around.flatten().tolist(), bool(present)
        ([1.0], [0.0], True)
    """
    # Imported here: reading images needs this package, and MONAI takes seconds.
    from monai.transforms.utils_morphological_ops import dilate, erode

    z, masks = working_precision(z), working_precision(masks)
    if z.shape[2:] != masks.shape[2:]:
        z = interpolate(z, size=masks.shape[2:], mode="bilinear", align_corners=False)
    separate = masks.flatten(0, 1)[:, None]  # as channels, MONAI would erode and dilate them together
    boundary = (separate - cast(Tensor, erode(separate, 3))).view_as(masks)
    around = (cast(Tensor, dilate(separate, 2 * outside + 1)) - separate).view_as(masks)
    present = (boundary.sum(dim=(2, 3)) > 0) & (around.sum(dim=(2, 3)) > 0)
    return _pooled(z, boundary), _pooled(z, around), present


def _pooled(z: Tensor, weights: Tensor) -> Tensor:
    """(B, D, H, W) and (B, R, H, W) -> (B, R, D)."""
    weights = weights.to(z)
    total = torch.einsum("bdhw,brhw->brd", z, weights)
    return total / weights.sum(dim=(2, 3)).clamp_min(1)[..., None]


def class_contrast(h: Tensor, kinds: Tensor, temperature: float) -> Tensor:
    """InfoNCE between features of the same kind and of others (FedDG, NT-Xent).

    ::

        ℓ(m, p) = −log(e^(sₘₚ/τ) / (e^(sₘₚ/τ) + Σ_(q∈Nₘ) e^(s_mq/τ))),
        L = mean_(m,p) ℓ(m, p)

    over all ordered pairs m, p of the same kind, with the cosine s as similarity and Nₘ all features
    of another kind than m.

    Args:
        h: features (N, D).
        kinds: the kind of each, (N,).
        temperature: τ.

    Returns:
        A scalar; 0 where there is no pair, or nothing else.

    Example:
        >>> h = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
        >>> round(float(class_contrast(h, torch.tensor([0, 0, 1]), temperature=1.0)), 4)  # log(1 + e⁻¹)
        0.3133
    """
    h = working_precision(h)
    h = h / h.norm(dim=1, keepdim=True).clamp_min(torch.finfo(h.dtype).eps)
    scores = h @ h.T / temperature
    same = kinds[:, None] == kinds[None]
    pairs = same & ~torch.eye(len(h), dtype=torch.bool, device=h.device)
    # With a single kind nothing is counted. A mask, unlike a branch, does not wait for a GPU.
    several = ~same.all()
    others = scores.masked_fill(same & several, -torch.inf).logsumexp(dim=1, keepdim=True)
    counted = pairs & several
    terms = (torch.logaddexp(scores, others) - scores).masked_fill(~counted, 0)
    return terms.sum() / counted.sum().clamp_min(1)
