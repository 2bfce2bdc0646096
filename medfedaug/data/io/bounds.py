"""Bounds on the numbers of an image's header, for all formats: no scanner writes numbers beyond them."""

from collections.abc import Iterable

_SHORTEST, _LONGEST = 1e-4, 1e3  # edges of a voxel, mm
_LARGEST_SCALE = 1e10


def plausible_edges(edges: Iterable[float]) -> bool:
    """Return whether voxels can have these edges, mm.

    Example:
        >>> plausible_edges((0.5, 0.5, 3)), plausible_edges((0, 1, 1)), plausible_edges((1e9, 1, 1))
        (True, False, False)
    """
    return all(_SHORTEST <= edge <= _LONGEST for edge in edges)


def check_edges(edges: Iterable[float]) -> None:
    """Check the voxel size, mm."""
    edges = [*edges]
    if not plausible_edges(edges):
        text = " x ".join(f"{float(edge):.4g}" for edge in edges)
        raise ValueError(f"its header has voxels of {text} mm, expected {_SHORTEST} to {_LONGEST} mm")


def check_slope(name: str, slope: float) -> None:
    """Check the factor of a header that scales intensities."""
    if not 1 / _LARGEST_SCALE <= abs(slope) <= _LARGEST_SCALE:
        raise ValueError(f"its header scales intensities by {name} {slope:g}")


def check_intercept(name: str, intercept: float) -> None:
    """Check the number that a header adds to intensities."""
    if not abs(intercept) <= _LARGEST_SCALE:
        raise ValueError(f"its header scales intensities by {name} {intercept:g}")
