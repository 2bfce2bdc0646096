"""Code a case's annotated classes in its label map, through cropping, flips, padding and batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Decoded(NamedTuple):
    r"""The class of each voxel, 0 if unknown; whether it is known; and the classes annotated, (B, K)."""

    labels: Tensor
    known: Tensor
    annotated: Tensor


@dataclass(frozen=True)
class Annotation:
    r"""Sets of classes that the cases of some sites have annotated, as a code for label maps.

    A voxel of class c, or of an unknown class c = K, in a case with the set s has the value s (K + 1) + c.
    Set 0 has all classes, so that the label map of a complete case is its own code, and padding is known
    background.

    Example:
        >>> import torch
        >>> both = Annotation.of(3, [(True, False, True)])
        >>> code = both.encode(torch.tensor([[0, 2, 3]]), (True, False, True))
        >>> code.tolist()
        [[4, 6, 7]]
        >>> [part.tolist() for part in both.decode(code)]
        [[[0, 2, 0]], [[True, True, False]], [[True, False, True]]]
    """

    # For each set, whether it has each class, the background first, which all have.
    sets: tuple[tuple[bool, ...], ...]
    has_unknown: bool = True  # whether some voxel may be unknown

    @classmethod
    def of(cls, classes: int, sets: Iterable[Sequence[bool]], *, has_unknown: bool = True) -> Annotation:
        """Build from the sets of some cases, in any order."""
        every = (True,) * classes
        return cls((every, *sorted({*map(tuple, sets)} - {every}, reverse=True)), has_unknown)

    @property
    def classes(self) -> int:
        """K, background included."""
        return len(self.sets[0])

    @property
    def unknown(self) -> int:
        """Return the value of an unknown voxel in an uncoded label map."""
        return self.classes

    @property
    def dtype(self) -> torch.dtype:
        """Return the smallest type that holds each code."""
        import torch

        return torch.uint8 if len(self.sets) * (self.classes + 1) <= 256 else torch.int32

    def encode(self, label: Tensor, annotated: Sequence[bool]) -> Tensor:
        """Code the label map of a case: classes, or `unknown`."""
        return label.to(self.dtype) + self.sets.index(tuple(annotated)) * (self.classes + 1)

    def decode(self, codes: Tensor) -> Decoded:
        r"""Decode label maps, (B, \*spatial), of any type."""
        import torch

        codes = codes.long()
        values, numbers = codes % (self.classes + 1), codes // (self.classes + 1)
        known = values != self.unknown
        table = torch.tensor(self.sets, device=codes.device)
        # Padding has set 0, and every case has other voxels than padding.
        return Decoded(values * known, known, table[numbers.flatten(1).amax(dim=1)])
