"""Draw the gains of methods over FedAvg in all experiments: the table of the results as a picture.

python docs/pictures/gains.py docs/pictures/gains.png

The file has its numbers under `NUMBERS` of its metadata, so that a test can compare them with the table.
"""

from __future__ import annotations

import json
import sys

import matplotlib.pyplot as plt

from medfedaug.analysis.recorded_gains import RecordedGain, recorded_gains

COLOURS = {"better": "#0072b2", "worse": "#d55e00"}  # distinct for colour-blind readers too
AT_SITES = {"better": "#86b9dc", "worse": "#f0b48a"}  # shown at some sites and not elsewhere
OTHER = "0.45"
COLUMNS = (("retina", "LGG"), ("phantom", "Office", "CIFAR", "PACS"))  # medical images, and the others
NUMBERS = "Description"


def numbers() -> str:
    """Return the numbers of the picture."""
    return json.dumps([[one.experiment, one.methods, one.text, one.verdict] for one in recorded_gains()])


def experiments(opened: bool) -> dict[str, list[RecordedGain]]:
    """Return the experiments with verdicts, or the open ones without verdicts."""
    gains: dict[str, list[RecordedGain]] = {}
    for one in recorded_gains():
        if (one.verdict == "open") == opened:
            gains.setdefault(f"{one.experiment} (intervals over {one.over})", []).append(one)
    return gains


def draw(panel: plt.Axes, title: str, gains: list[RecordedGain]) -> None:
    """Draw a row for each combination, the largest gain on top; open rows are hollow and dashed."""
    rows = sorted(gains, key=lambda one: one.gain)
    for height, one in enumerate(rows):
        word, at, _ = one.verdict.partition(" at ")
        colour, opened = (AT_SITES if at else COLOURS).get(word, OTHER), word == "open"
        style = {"linestyle": (0, (2, 1.5)), "linewidth": 1.2} if opened else {"linewidth": 2.2}
        panel.plot(one.interval, [height, height], color=colour, solid_capstyle="butt", **style)
        inside = "white" if opened else colour
        panel.plot(one.gain, height, "o", color=colour, markersize=5, markerfacecolor=inside)
    panel.axvline(0, color="0.2", linewidth=1, zorder=1)
    panel.set_yticks(range(len(rows)), [one.methods for one in rows], fontsize=8, family="monospace")
    panel.set_ylim(-0.7, len(rows) - 0.3)
    panel.set_title(title, fontsize=9, loc="left")
    panel.grid(axis="x", color="0.9", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["right", "top", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=7)


def column(side: plt.Figure, by_name: dict[str, list[RecordedGain]]) -> None:
    """Draw experiments below each other on one scale."""
    heights = [len(gains) + 1.5 for gains in by_name.values()]
    panels = side.subplots(len(by_name), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, gains) in zip(panels, by_name.items(), strict=True):
        draw(panel, name, gains)


def main(out: str) -> None:
    """Draw the picture."""
    figure = plt.figure(figsize=(11, 11.5), layout="constrained")
    verdicts, opened = experiments(opened=False), experiments(opened=True)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 2.1], hspace=0.02)
    top.suptitle(
        "verdicts: better (blue), better at one camera alone (pale blue), no difference shown (grey)",
        fontweight="bold",
    )
    column(top, verdicts)
    bottom.suptitle("open: fewer trainings than a verdict needs, whatever the interval", fontweight="bold")
    sides = bottom.subfigures(1, 2, wspace=0.03)
    for side, names in zip(sides, COLUMNS, strict=True):
        column(side, {name: gains for name, gains in opened.items() if name.startswith(names)})
    figure.supxlabel("gain over FedAvg with its 95% interval: Dice, of natural images accuracy", fontsize=9)
    figure.savefig(out, dpi=110, metadata={NUMBERS: numbers()})


if __name__ == "__main__":
    main(sys.argv[1])
