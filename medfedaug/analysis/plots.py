"""Figures of runs, drawn with Matplotlib's object interface, which does not change global state."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from medfedaug.analysis.grouping import group_runs
from medfedaug.metrics.registry import find_metric
from medfedaug.metrics.significance import mean_interval
from medfedaug.runs.run import Run

# Okabe and Ito's palette without black and yellow, each of which is invisible on one of the two backgrounds.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")
_Style = tuple[str, Literal["-", "--", "-.", ":"]]
_MOST_SITES = 12
_FEWEST = 3  # patients of an interval; that of two is nearly always the whole axis
WIDTH = 9.0  # inches, of every figure
_COLUMNS, _PANEL_HEIGHT = 3, 2.2


def learning_curves(runs: Sequence[Run]) -> Figure:
    """Draw the score by round: one panel per training site and one for their mean, one line per method.

    With more than a dozen sites, only the mean is drawn. Several seeds of a method are drawn as their mean,
    in a band from the lowest to the highest seed. A dot marks the round whose model was tested.
    """
    groups = group_runs(runs)
    sites = sorted({site for run in runs for site in run.sites})
    sites = sites if len(sites) <= _MOST_SITES else []
    figure, panels = _panels([*sites, "mean of sites"], alike=True)
    for site, panel in zip([*sites, None], panels, strict=True):
        for members, style in zip(groups.values(), _styles(), strict=False):
            trained = [run for run in members if site is None or site in run.sites]
            mean = _line_with_band(panel, [_by_round(run, run.validation(site)) for run in trained], style)
            selected = sorted({run.selected_round for run in trained} & mean.keys())
            panel.plot(selected, [mean[r] for r in selected], "o", color=style[0], markersize=4.5)
    figure.supylabel(f"{find_metric(runs[0].chosen_by).title}, validation", fontsize=10)
    dot = Line2D([], [], linestyle="none", marker="o", markersize=4.5, color="0.5", label="selected round")
    _legend(figure, groups, dot)
    return figure


def site_scores(groups: Mapping[str, Sequence[Run]]) -> Figure:
    """Draw the test score of each method at each site, with its 95% interval over the patients.

    A case counts with the mean of its scores over seeds and folds; the interval is Student's
    (`medfedaug.metrics.significance.mean_interval`), and missing for fewer than three cases.
    """
    metric = find_metric(next(iter(groups.values()))[0].metric)
    sites = sorted({site for members in groups.values() for run in members for site in run.sites})
    step = min(0.18, 0.7 / len(groups))
    figure = Figure(figsize=(WIDTH, 1.0 + len(sites) * max(0.32, 0.16 * len(groups))), layout="constrained")
    panel = figure.add_subplot()
    for index, (members, (colour, _)) in enumerate(zip(groups.values(), _styles(), strict=False)):
        places = [place + (index - (len(groups) - 1) / 2) * step for place in range(len(sites))]
        for place, site in zip(places, sites, strict=True):
            values = [score for run in members if (score := run.sites.get(site)) is not None]
            if not values:
                continue
            panel.plot(sum(values) / len(values), place, "o", color=colour, markersize=6)
            cases: dict[str, list[float]] = {}
            for run in members:
                for case, score in run.case_scores.get(site, {}).items():
                    if score is not None:
                        cases.setdefault(case, []).append(score)
            means = [sum(some) / len(some) for some in cases.values()]
            if len(means) >= _FEWEST and (interval := mean_interval(means, metric.largest)) is not None:
                panel.plot(interval, (place, place), color=colour, linewidth=1.6)
    tidy(panel)
    panel.set_yticks(range(len(sites)), [plain_label(site) for site in sites])
    panel.invert_yaxis()
    if metric.largest:
        low, high = panel.get_xlim()
        panel.set_xlim(max(low, 0.0), min(high, metric.largest))
    panel.set_xlabel(f"{metric.title}, test cases", fontsize=10)
    _legend(figure, groups)
    return figure


def gamma_by_layer(run: Run) -> Figure:
    """Draw the range of γ over the channels by round, one panel per layer.

    γ scales the noise on a channel's statistics by the sites' disagreement on this channel (FedFA+, Eq. 7). A
    band without height means one γ for all channels, so that sites exchange no information. A run without γ
    gives a figure with a note.
    """
    gamma = run.gamma()
    if not gamma:
        figure = Figure(figsize=(WIDTH, 1.2))
        text = f"{run.label}: no method exchanges\nfeature statistics, hence no γ"
        figure.text(0.5, 0.5, text, ha="center", va="center", fontsize=10, parse_math=False)
        return figure
    figure, panels = _panels(list(gamma))
    names = {"gamma_mean": "γ of the means", "gamma_std": "γ of the standard deviations"}
    handles: dict[str, Line2D] = {}
    for panel, spans in zip(panels, gamma.values(), strict=True):
        for name, colour in zip(sorted(spans), PALETTE, strict=False):
            rounds, low, high = zip(*spans[name], strict=True)
            panel.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
            for edge in (low, high):
                # A run of one round has no line, but a marker.
                panel.plot(rounds, edge, color=colour, linewidth=1.2, marker=".", markersize=3)
            handles[name] = Line2D([], [], color=colour, linewidth=4, alpha=0.7, label=names.get(name, name))
    figure.supylabel("γ, lowest to highest channel", fontsize=10)
    figure.legend(
        handles=list(handles.values()), loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    return figure


def _panels(titles: Sequence[str], *, alike: bool = False) -> tuple[Figure, list[Axes]]:
    """Make a panel for each title; ``alike`` gives them one vertical axis, so that sites can be compared."""
    rows = math.ceil(len(titles) / _COLUMNS)
    columns = math.ceil(len(titles) / rows)  # no panel has a row for itself if another division fits
    figure = Figure(figsize=(WIDTH, rows * _PANEL_HEIGHT + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=alike, squeeze=False).ravel().tolist()
    for panel in panels[len(titles) :]:
        panel.remove()
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title(title, fontsize=10, parse_math=False)
        tidy(panel)
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    for panel in panels[: len(titles)][-columns:]:  # the lowest panel of each column
        panel.set_xlabel("round", fontsize=9)
    return figure, panels[: len(titles)]


def tidy(panel: Axes) -> None:
    panel.grid(color="0.5", alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)
    panel.yaxis.set_major_locator(MaxNLocator(5))


def _styles() -> Iterator[_Style]:
    """Return one line style per method: the colours with solid lines first, then with dashed ones."""
    return cycle((colour, dashes) for dashes in _DASHES for colour in PALETTE)


def _by_round(run: Run, values: Sequence[float | None]) -> dict[int, float]:
    return {
        entry["round"]: value for entry, value in zip(run.rounds, values, strict=True) if value is not None
    }


def _line_with_band(panel: Axes, curves: Sequence[dict[Any, float]], style: _Style) -> dict[Any, float]:
    """Draw the mean of the curves, and their range if there are several; return the mean."""
    places = sorted({x for curve in curves for x in curve})
    values = [[curve[x] for curve in curves if x in curve] for x in places]
    mean = [sum(v) / len(v) for v in values]
    colour, dashes = style
    marker = "." if len(places) == 1 else ""  # one round has no line
    panel.plot(places, mean, color=colour, linestyle=dashes, linewidth=1.6, marker=marker)
    if len(curves) > 1:
        low, high = [min(v) for v in values], [max(v) for v in values]
        panel.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    return dict(zip(places, mean, strict=True))


def colours_by_name(names: Iterable[str]) -> dict[str, Any]:
    """Return a colour for each name, in alphabetical order, from a colour map if the palette has too few."""
    distinct = sorted(set(names))
    if len(distinct) <= len(PALETTE):
        return dict(zip(distinct, PALETTE, strict=False))
    shades = colormaps["turbo"](np.linspace(0.02, 0.98, len(distinct)))
    return dict(zip(distinct, map(tuple, shades), strict=True))


def plain_label(name: str) -> str:
    """Escape a name for a figure, in which a dollar sign would start a formula."""
    return name.replace("$", r"\$")


def add_legend(figure: Figure, colours: Mapping[str, Any]) -> None:
    """Name the colours below a figure."""
    handles = [Line2D([], [], color=c, linewidth=3, label=plain_label(name)) for name, c in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the size and the name of a suitable unit for a number of bytes."""
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= size:
            return size, name
    return 1.0, "bytes"


def _repetitions(members: Sequence[Run]) -> str:
    parts = (
        ("seeds", {run.seed for run in members}),
        ("folds", {run.fold for run in members}),
        ("sites left out", {run.held_out for run in members}),
    )
    return " × ".join(f"{len(values)} {name}" for name, values in parts if len(values) > 1)


def _legend(figure: Figure, groups: Mapping[str, Sequence[Run]], *more: Line2D) -> None:
    handles = []
    for (label, members), (colour, dashes) in zip(groups.items(), _styles(), strict=False):
        text = plain_label(label) + (f" ({_repetitions(members)})" if len(members) > 1 else "")
        handles.append(Line2D([], [], color=colour, linestyle=dashes, linewidth=1.6, label=text))
    handles += more
    # Matplotlib cannot wrap a legend. A character of 9 points is about 0.075 inches wide.
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), int(WIDTH / (0.6 + 0.075 * longest))))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
