"""Worst and best test case of a site, with image, truth and prediction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path

from medfedaug.data.base import Case
from medfedaug.data.io.formats import is_photograph
from medfedaug.federation.site.model import SiteModel
from medfedaug.runs.slice_image import INK, PAPER, outline, windowed
from medfedaug.tasks import SegmentationTask

_TRUTH, _PREDICTION = "#56B4E9", "#E69F00"
_TITLE = 9  # points


@dataclass(frozen=True)
class CaseView:
    """The content of the picture of one case.

    Attributes:
        rank: ``"worst"``, ``"best"`` or ``"only"``; empty for another case.
        score: Dice of the volume, or probability of the true class.
        image: slice (X, Y), or photograph (H, W, 3), of a segmentation (X, Y, 3), from 0 to 1.
        truth: label map (X, Y), or the name of the class.
        prediction: the predicted label map or class.
        downwards: the second axis of a segmentation points down, as in photographs.
    """

    site: str
    case: str
    rank: str
    score: float
    image: np.ndarray
    truth: np.ndarray | str
    prediction: np.ndarray | str
    downwards: bool = False


def extreme_cases(site: SiteModel, scores: Mapping[str, float | None], also: str = "") -> list[CaseView]:
    """Return the worst and the best test case of a site, by Dice or by the probability of the true class.

    The recorded scores rank volumes. Of a volume, it takes the slice with the largest true region, so that
    the choice does not depend on the prediction. A single case is returned once; without a scored case the
    list is empty. The volume ``also`` follows, without a rank.
    """
    site.network.eval()
    if not isinstance(site.task, SegmentationTask):
        return _photographs(site)
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


@torch.no_grad()
def _photographs(site: SiteModel) -> list[CaseView]:
    assert site.samples is not None
    classes = site.config.classes
    ranked: list[tuple[float, str, Case, str, str]] = []
    cases = site.folder.cases["test"]
    for start in range(0, len(cases), site.config.batch_size):
        chunk = cases[start : start + site.config.batch_size]
        for inputs, targets in site.samples.batches(site.samples.of_cases(chunk)):
            shares = site.network(inputs).softmax(dim=1).cpu()
            for case, share, target in zip(chunk, shares, targets, strict=True):
                truth, guess = classes[int(target)], classes[int(share.argmax())]
                ranked.append((float(share[int(target)]), case.name, case, truth, guess))
    views = []
    for rank, (score, name, case, truth, guess) in _ends(sorted(ranked, key=lambda entry: entry[:2])):
        pixels = site.folder.load_image(case, "scale").numpy().transpose(1, 2, 0)
        views.append(CaseView(site.name, name, rank, score, pixels, truth, guess))
    return views


def _ends(ranked: Sequence[tuple]) -> list[tuple[str, tuple]]:
    if len(ranked) < 2:
        return [("only", entry) for entry in ranked]
    return [("worst", ranked[0]), ("best", ranked[-1])]


def example_picture(views: Mapping[str, CaseView], *, width: float = 9.0) -> Figure:
    """Draw one slice four times: plain, with the truth, and with the outline of each of two methods."""
    (first, second), columns = views.values(), 2 if width < 5 else 4
    panels: list[tuple[str, np.ndarray | str | None, str]] = [
        ("image", None, ""),
        ("truth", first.truth, _TRUTH),
    ]
    panels += [
        (f"{label}, Dice {view.score:.2f}", view.prediction, _PREDICTION) for label, view in views.items()
    ]
    tall = second.image.shape[1] / second.image.shape[0]
    height = 4 // columns * (width / columns * min(tall, 1.5) + 0.3)
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    for place, (title, labels, colour) in enumerate(panels, start=1):
        panel = figure.add_subplot(4 // columns, columns, place)
        panel.axis("off")
        panel.imshow(first.image.swapaxes(0, 1), cmap="gray", vmin=0, vmax=1)
        if not first.downwards:
            panel.invert_yaxis()
        if isinstance(labels, np.ndarray):
            outline(panel, labels, colour, 1.5)
        _title(panel, title, room=72 * 0.95 * width / columns)
    return figure


def case_picture(views: Sequence[CaseView], *, width: float = 9.0) -> Figure:
    """Draw cases side by side. A slice is drawn twice: plain, and with the outlines of truth and prediction.

    The background is dark in every theme, so that greys look as on a radiologist's screen. Slices are drawn
    as stored, with the first axis to the right and the second upwards, and photographs upright.
    """
    if not views:
        raise ValueError("no case to draw")
    per_case = 1 if isinstance(views[0].truth, str) else 2  # panels per case
    columns = 2 if width < 5 else 4
    per_row = min(2, columns // per_case)  # the worst and best case of a site share a row if there is room
    places: list[int] = []
    for index, view in enumerate(views):
        place = places[-1] + 1 if places else 0
        other_site = index > 0 and view.site != views[index - 1].site
        places.append(math.ceil(place / per_row) * per_row if other_site else place)
    rows = math.ceil((places[-1] + 1) * per_case / columns)
    # Slices are drawn with their first axis to the right, photographs with their second.
    tallest = max(v.image.shape[per_case - 1] / v.image.shape[2 - per_case] for v in views)
    height = rows * (width / columns * min(tallest, 1.5) + (0.65 if per_case == 1 else 0.5)) + 0.5
    layout = ConstrainedLayoutEngine(h_pad=0.08, rect=(0, 0, 1, 1 - 0.1 / height))
    figure = Figure(figsize=(width, height), layout=layout, facecolor=PAPER)
    # Points of a title before it reaches the next one.
    room = 72 * (0.95 if per_case == 1 else 0.78) * width / columns
    for view, place in zip(views, places, strict=True):
        panels = [figure.add_subplot(rows, columns, place * per_case + k + 1) for k in range(per_case)]
        for panel in panels:
            panel.axis("off")
        score = f"Dice {view.score:.3f}" if per_case == 2 else f"p = {view.score:.2f}"
        head = f"{view.rank} at {view.site}"
        if isinstance(view.truth, str) or isinstance(view.prediction, str):
            panels[0].imshow(view.image)
            outcome = "right" if view.truth == view.prediction else f"taken for {view.prediction}"
            _title(panels[0], f"{head}, {score}", str(view.truth), outcome, room=room)
        else:
            for panel in panels:
                panel.imshow(view.image.swapaxes(0, 1), cmap="gray", vmin=0, vmax=1)
                if not view.downwards:
                    panel.invert_yaxis()
            outline(panels[1], view.truth, _TRUTH, 1.8)
            outline(panels[1], view.prediction, _PREDICTION, 1.1)
            _title(panels[0], head, score, room=room)
            _title(panels[1], "case", view.case, room=room)
    if per_case == 2:
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
    font = FontProperties(size=_TITLE)
    kept, short = len(text), text
    while kept > 2 and text_to_path.get_text_width_height_descent(short, font, ismath=False)[0] > room:
        kept -= 1
        short = f"{text[: kept // 2]}…{text[kept // 2 - kept :]}"
    return short
