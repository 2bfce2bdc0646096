"""`intensity_histograms` draws the intensities of images, before and after FedRDN."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from medfedaug.analysis.plots import add_legend, colours_by_name, tidy
from medfedaug.statistics import ChannelStatistics, usable_pairs

# Values of an image, and images' worth of values of a site: a histogram of more looks the same.
_VALUES, _IMAGES = 20_000, 25
_BINS = 60
MIDDLE = (0.5, 99.5)
"""Percentiles between which the axis shows the values."""
_MIN_SPAN = 1e-6
_TITLES = ("as stored", "at test: own pair", "in training: a random site's pair")


def sample_intensities(images: Iterable[Tensor], *, foreground: bool = False, seed: int = 0) -> np.ndarray:
    """Sample intensities of a site's images, at most 20,000 per image and 500,000 in total.

    Args:
        images: (C, *spatial), one at a time.
        foreground: uses only voxels with a channel that is brighter than its mean over the image. This
            excludes the air around a patient, which is often most of a volume.

    Returns:
        The sample, (N, C), float32.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for image in images:
        values = image.flatten(1).float().numpy().T
        if foreground:
            values = values[(values > values.mean(axis=0, dtype=np.float64)).any(axis=1)]
        samples.append(_at_most(_VALUES, values, rng))
    if not sum(map(len, samples)):
        raise ValueError("no intensity to draw")
    return _at_most(_IMAGES * _VALUES, np.concatenate(samples), rng)


def _at_most(number: int, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if len(values) <= number:
        return values
    return values[rng.choice(len(values), number, replace=False, shuffle=False)]


def _normalised(values: np.ndarray, pairs: Iterable[ChannelStatistics]) -> np.ndarray:
    return np.concatenate([(values - pair.mean.numpy()) / pair.std.numpy() for pair in pairs])


def intensity_histograms(
    samples: Mapping[str, np.ndarray],
    statistics: Mapping[str, ChannelStatistics],
    *,
    unseen: Collection[str] = (),
    channels: Sequence[str] = (),
    width: float = 9.0,
) -> Figure:
    """Draw histograms of the sites' intensities: as stored, and after FedRDN at test and in training.

    At test the images of a site are normalised with its own pair (FedRDN Eq. 8). In training they are
    normalised with the pair of a random site (Eq. 7), so the histogram is the mixture over all pairs in equal
    parts. A peak of single values, such as saturated pixels, is cut off if it would hide the rest.

    Args:
        samples: intensities by site, (N, C) each, from `sample_intensities`.
        unseen: sites that do not train and exchange no pair; they are drawn as stored and at test.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> samples = {"A": rng.normal(100, 20, (500, 1)), "B": rng.normal(300, 90, (500, 1))}
        >>> pairs = {"A": ChannelStatistics([100.0], [20.0], 5), "B": ChannelStatistics([300.0], [90.0], 5)}
        >>> [panel.get_title() for panel in intensity_histograms(samples, pairs).axes]
        ['as stored', 'at test: own pair', "in training: a random site's pair"]
    """
    numbers = {values.shape[1] for values in samples.values()} | {s.num_channels for s in statistics.values()}
    if not samples or len(numbers) != 1:
        raise ValueError(f"expected samples and statistics of one number of channels, got {sorted(numbers)}")
    if lacking := sorted(samples.keys() - statistics.keys()):
        raise ValueError(f"site {lacking[0]} has no pair")
    exchanged = {site: pair for site, pair in statistics.items() if site not in unseen}
    views: tuple[dict[str, np.ndarray], ...] = ({**samples}, {}, {})
    for site, values in samples.items():
        pair = statistics[site]
        views[1][site] = _normalised(values, usable_pairs({site: pair}, pair).values())
        if site not in unseen:
            views[2][site] = _normalised(values, usable_pairs(exchanged, pair).values())
    number = numbers.pop()
    names = [*channels] if len(channels) == number else [f"channel {index}" for index in range(number)]
    narrow = width < 5
    rows, columns = (3 * number, 1) if narrow else (number, 3)
    figure = Figure(figsize=(width, rows * (1.7 if narrow else 2.3) + 0.5), layout="constrained")
    colours = colours_by_name(samples)
    for channel in range(number):
        for index, (title, view) in enumerate(zip(_TITLES, views, strict=True)):
            panel = figure.add_subplot(rows, columns, channel * 3 + index + 1)
            panel.set_title(title + (f", {names[channel]}" if number > 1 else ""), fontsize=10, y=1.0)
            tidy(panel)
            panel.set_yticks([])  # the height of a density has no meaning
            panel.spines["left"].set_visible(False)
            # The same axis for both views after FedRDN, so that they can be compared.
            together = [views[0]] if index == 0 else views[1:]
            intensities = [values[:, channel] for part in together for values in part.values()]
            low, high = np.percentile(np.concatenate(intensities), MIDDLE)
            span = low, max(high, low + _MIN_SPAN)
            _draw({site: values[:, channel] for site, values in view.items()}, span, colours, panel)
            panel.set_xlabel("intensity" if index == 0 else "normalised intensity", fontsize=9)
    add_legend(figure, colours, width)
    return figure


def _draw(
    samples: Mapping[str, np.ndarray], span: tuple[float, float], colours: Mapping[str, Any], panel: Axes
) -> None:
    """Draw the histograms of a channel; a peak of single values that hides the others is cut off."""
    tallest, top = 0.0, 0.0
    for site, values in samples.items():
        heights, edges = np.histogram(values, _BINS, span, density=True)
        panel.stairs(heights, edges, color=colours[site], fill=True, alpha=0.12)
        panel.stairs(heights, edges, color=colours[site], linewidth=1.4)
        # The median of five bins ignores a peak of one or two bins.
        medians = np.median(np.lib.stride_tricks.sliding_window_view(heights, 5), axis=1)
        tallest, top = max(tallest, heights.max()), max(top, medians.max())
    panel.set_ylim(0, 1.05 * (tallest if tallest < 3 * top or not top else 1.5 * top))
