"""Display a slice of a volume: its window and outlines of label maps."""

import numpy as np
from matplotlib.axes import Axes

PAPER, INK = "#111114", "#e6e6ea"  # dark in every theme, as on a radiologist's screen

_WINDOW = (1, 99.5)  # percentiles that are drawn black and white


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
