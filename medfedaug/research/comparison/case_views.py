"""Worst and best test case of a site of a segmentation, with image, truth and prediction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from medfedaug.analysis.plots import WIDTH
from medfedaug.data.base import Case
from medfedaug.data.io.formats import is_photograph
from medfedaug.federation.site.model import SiteModel
from medfedaug.runs.prediction.prediction_image import INK, PAPER, outline, windowed
from medfedaug.tasks import SegmentationTask

_TRUTH, _PREDICTION = "#56B4E9", "#E69F00"
_TITLE = 9  # points
_COLUMNS = 4
_SIDE = WIDTH / _COLUMNS  # inches of a panel


@dataclass(frozen=True)
class CaseView:
    """The content of the picture of one case.

    Attributes:
        rank: ``"worst"``, ``"best"`` or ``"only"``; empty for another case.
        score: Dice of the volume.
        image: slice (X, Y), or photograph (X, Y, 3), from 0 to 1.
        truth: label map (X, Y).
        prediction: the predicted label map.
        downwards: the second axis points down, as in photographs.
    """

    site: str
    case: str
    rank: str
    score: float
    image: np.ndarray
    truth: np.ndarray
    prediction: np.ndarray
    downwards: bool = False


def extreme_cases(site: SiteModel, scores: Mapping[str, float | None], also: str = "") -> list[CaseView]:
    """Return the worst and the best test case of a site, by the recorded Dice.

    Of a volume, it takes the slice with the largest true region, so that the choice does not depend on the
    prediction. A single case is returned once; without a scored case the list is empty. The volume ``also``
    follows, without a rank.
    """
    site.network.eval()
    assert isinstance(site.task, SegmentationTask)
    cases, task = {case.name: case for case in site.folder.cases["test"]}, site.task
    ranked = sorted((score, name) for name, score in scores.items() if score is not None)
    chosen = [*_ends(ranked), *(("", entry) for entry in ranked if entry[1] == also)]
    return [_volume(site, task, cases[name], rank, score) for rank, (score, name) in chosen]


def _volume(site: SiteModel, task: SegmentationTask, chosen: Case, rank: str, score: float) -> CaseView:
    folder = replace(site.folder, cases={**site.folder.cases, "test": (chosen,)})
    (case,) = task.evaluation_cases(folder, "test")
    image = case.image if case.placement is None else case.placement.back(case.image)
    truth, transform = case.label, site.evaluation_transform()
    ((_, predicted),) = task.outputs(site.network, [case], transform, site.config.batch_size)
    index = int((truth > 0).sum(dim=(0, 1, 2)).argmax())
    photograph = is_photograph(chosen.image)
    if photograph and len(image) == 3:
        pixels = site.folder.load_image(chosen, "scale")[..., 0].permute(1, 2, 0).numpy()
    else:
        pixels = windowed(image[0, :, :, index].numpy())
    return CaseView(
        site=site.name,
        case=chosen.name,
        rank=rank,
        score=score,
        image=pixels,
        truth=truth[0, :, :, index].numpy(),
        prediction=predicted[0, :, :, index].cpu().numpy(),
        downwards=photograph,
    )


def _ends(ranked: Sequence[tuple]) -> list[tuple[str, tuple]]:
    if len(ranked) < 2:
        return [("only", entry) for entry in ranked]
    return [("worst", ranked[0]), ("best", ranked[-1])]


def example_picture(views: Mapping[str, CaseView]) -> Figure:
    """Draw one slice four times: plain, with the truth, and with the outline of each of two methods."""
    first, second = views.values()
    panels: list[tuple[str, np.ndarray | None, str]] = [
        ("image", None, ""),
        ("truth", first.truth, _TRUTH),
    ]
    panels += [
        (f"{label}, Dice {view.score:.2f}", view.prediction, _PREDICTION) for label, view in views.items()
    ]
    tall = second.image.shape[1] / second.image.shape[0]
    height = _SIDE * min(tall, 1.5) + 0.3
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=PAPER)
    for place, (title, labels, colour) in enumerate(panels, start=1):
        panel = figure.add_subplot(1, _COLUMNS, place)
        panel.axis("off")
        panel.imshow(first.image.swapaxes(0, 1), cmap="gray", vmin=0, vmax=1)
        if not first.downwards:
            panel.invert_yaxis()
        if labels is not None:
            outline(panel, labels, colour, 1.5)
        _title(panel, title, room=72 * 0.95 * _SIDE)
    return figure


def case_picture(views: Sequence[CaseView]) -> Figure:
    """Draw cases side by side, each twice: plain, and with the outlines of truth and prediction.

    The background is dark in every theme, so that greys look as on a radiologist's screen. Slices are drawn
    as stored, with the first axis to the right and the second upwards, and photographs upright.
    """
    places: list[int] = []
    for index, view in enumerate(views):
        place = places[-1] + 1 if places else 0
        other_site = index > 0 and view.site != views[index - 1].site
        places.append(math.ceil(place / 2) * 2 if other_site else place)  # a site has a row of its own
    rows = places[-1] // 2 + 1
    tallest = max(view.image.shape[1] / view.image.shape[0] for view in views)
    height = rows * (_SIDE * min(tallest, 1.5) + 0.5) + 0.5
    layout = ConstrainedLayoutEngine(h_pad=0.08, rect=(0, 0, 1, 1 - 0.1 / height))
    figure = Figure(figsize=(WIDTH, height), layout=layout, facecolor=PAPER)
    room = 72 * 0.78 * _SIDE  # points of a title before it reaches the next one
    for view, place in zip(views, places, strict=True):
        panels = [figure.add_subplot(rows, _COLUMNS, 2 * place + k) for k in (1, 2)]
        for panel in panels:
            panel.axis("off")
            panel.imshow(view.image.swapaxes(0, 1), cmap="gray", vmin=0, vmax=1)
            if not view.downwards:
                panel.invert_yaxis()
        outline(panels[1], view.truth, _TRUTH, 1.8)
        outline(panels[1], view.prediction, _PREDICTION, 1.1)
        _title(panels[0], f"{view.rank} at {view.site}", f"Dice {view.score:.3f}", room=room)
        _title(panels[1], "case", view.case, room=room)
    marks = (("truth", _TRUTH), ("prediction", _PREDICTION))
    figure.legend(
        handles=[Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in marks],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return figure


def _title(panel: Axes, *lines: str, room: float) -> None:
    text = "\n".join(_shortened(line, room) for line in lines)
    panel.set_title(text, fontsize=_TITLE, color=INK, parse_math=False, y=1.0)


def _shortened(text: str, room: float) -> str:
    """Return the beginning and the end of a name: names of files often differ only at the end."""
    kept = int(room / (0.6 * _TITLE))  # letters, by their usual width
    return text if len(text) <= kept else f"{text[: kept // 2]}…{text[kept // 2 - kept :]}"
