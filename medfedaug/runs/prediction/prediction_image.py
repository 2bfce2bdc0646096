"""The picture of one predicted case: the slice with the largest structure, plain and with its outlines."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from medfedaug.utils.files import write_atomic

PAPER, INK = "#111114", "#e6e6ea"  # dark in every theme, as on a radiologist's screen

_WINDOW = (1, 99.5)  # percentiles that are drawn black and white
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2")
_WIDTH, _ROOM = 7.0, 0.7  # inches; the second for title and legend
_DPI = 100
# Directions of the axes of a picture: the patient's right side is on the left, head and front are above.
_RIGHTWARDS, _UPWARDS = ("L", "P"), ("S", "A")


def draw_label_map(image: Tensor, label: Tensor, classes: Sequence[str], affine: Any = None) -> Figure:
    """Draw a slice of a volume, or a photograph, twice: plain, and with the outlines of the label map.

    The slice along the last axis with the most foreground voxels is drawn, or the middle one if all are
    background. With an affine it has the orientation of radiologists, marked by letters; without one it is
    drawn as stored.

    Args:
        image: (C, X, Y, Z), from 0 to 1; three channels of one slice are colours.
        label: (1, X, Y, Z).
        affine: (4, 4), from voxels to millimetres in RAS; ``None`` for a photograph.
    """
    sizes = (label[0] > 0).sum(dim=(0, 1))
    index = int(sizes.argmax()) if bool(sizes.any()) else label.shape[-1] // 2
    colour = affine is None and len(image) == 3
    channels = image[:, :, :, index].permute(1, 2, 0).numpy()
    plane = channels if colour else windowed(channels[:, :, 0])
    labels, edges, sides = label[0, :, :, index].numpy(), (1.0, 1.0), ("", "")
    if affine is None:
        plane, labels = plane[:, ::-1], labels[:, ::-1]  # rows of a photograph run downwards
    else:
        plane, labels, edges, sides = _oriented(plane, labels, np.asarray(affine, dtype=float))
    height = _WIDTH / 2 * plane.shape[1] * edges[1] / (plane.shape[0] * edges[0])
    figure = _figure(min(height, 2 * _WIDTH) + _ROOM)
    for number in (1, 2):
        panel = figure.add_subplot(1, 2, number)
        panel.axis("off")
        panel.imshow(
            plane.swapaxes(0, 1), cmap="gray", vmin=0, vmax=1, origin="lower", aspect=edges[1] / edges[0]
        )
        letter = partial(panel.text, transform=panel.transAxes, color=INK, fontsize=9)
        letter(0.02, 0.5, sides[0], ha="left", va="center")
        letter(0.5, 0.98, sides[1], ha="center", va="top")
    values = [value for value in np.unique(labels) if value]
    for value in values:
        outline(figure.axes[1], (labels == value).astype(int), _colour(value), 1.4)
    depth = label.shape[-1]
    title = f"slice {index + 1} of {depth}" if depth > 1 else ""
    if not values:
        title = f"{title}: nothing found".removeprefix(": ")
    figure.axes[0].set_title(title, color=INK, fontsize=9)
    if values:
        figure.legend(
            handles=[Line2D([], [], color=_colour(v), linewidth=2, label=classes[v]) for v in values],
            loc="outside lower center",
            frameon=False,
            fontsize=9,
            labelcolor=INK,
            ncols=min(len(values), 4),
        )
    return figure


def draw_classified(image: Tensor, probabilities: Mapping[str, float]) -> Figure:
    """Draw a photograph with its class above and the most probable ones below."""
    height = min(_WIDTH * image.shape[1] / image.shape[2], 2 * _WIDTH)
    figure = _figure(height + _ROOM)
    panel = figure.add_subplot()
    panel.axis("off")
    panel.imshow(image.permute(1, 2, 0).numpy())
    ranked = sorted(probabilities.items(), key=lambda entry: -entry[1])[:3]
    title = "   ".join(f"{name} {p:.2f}" for name, p in ranked)
    panel.set_title(title, color=INK, fontsize=10, parse_math=False)
    return figure


def windowed(plane: np.ndarray) -> np.ndarray:
    """Scale a plane to [0, 1], and clip its darkest and brightest voxels."""
    low, high = np.percentile(plane, _WINDOW)
    return np.clip((plane - low) / max(high - low, 1e-12), 0, 1)


def outline(panel: Axes, labels: np.ndarray, colour: str, width: float) -> None:
    """Draw the edges of the structures in a label map, (X, Y), the first axis to the right."""
    padded = np.pad(labels, 1)  # close outlines at the border
    places = [np.arange(-1, n + 1) for n in labels.shape]
    for label in np.unique(labels[labels > 0]):
        panel.contour(*places, (padded == label).T, levels=[0.5], colors=[colour], linewidths=width)


def write_picture(path: Path, figure: Figure) -> None:
    """Write a figure as PNG."""
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None}))


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), layout="constrained", facecolor=PAPER)


def _colour(value: int) -> str:
    return _COLOURS[(int(value) - 1) % len(_COLOURS)]


def _oriented(
    plane: np.ndarray, labels: np.ndarray, affine: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[float, float], tuple[str, str]]:
    """Turn a slice to the orientation of radiologists.

    Returns:
        The plane and its label map, first axis to the right and second upwards; the edges of a pixel along
        both; and the letters for the left and the upper side.
    """
    letters = nibabel.aff2axcodes(affine)[:2]  # where the first two axes point to
    edges = np.linalg.norm(affine[:3, :2], axis=0).tolist()
    upright = "SI" if any(letter in "SI" for letter in letters) else "AP"
    if letters[0] in upright:
        plane, labels, letters, edges = plane.T, labels.T, letters[::-1], edges[::-1]
    flips = tuple(
        slice(None, None, 1 if letter in wanted else -1)
        for letter, wanted in zip(letters, (_RIGHTWARDS, _UPWARDS), strict=True)
    )
    left = "R" if letters[0] in "RL" else "A"
    above = "S" if letters[1] in "SI" else "A"
    return plane[flips], labels[flips], (edges[0], edges[1]), (left, above)
