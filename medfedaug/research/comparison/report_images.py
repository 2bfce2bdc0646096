"""The sections of the report that need the sites' images and the runs' models: cases with their pictures."""

from __future__ import annotations

import math
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from medfedaug.analysis import page
from medfedaug.analysis.plots import WIDTH
from medfedaug.data.base import Case
from medfedaug.data.io.formats import is_photograph
from medfedaug.data.sites import find_sites, is_federation, is_site, open_site
from medfedaug.errors import DataError, MedFedAugError, first_line
from medfedaug.federation.job_folder import GLOBAL_MODEL
from medfedaug.federation.site.model import SiteModel
from medfedaug.metrics.registry import find_metric
from medfedaug.research.datasets.benchmarks import (
    BENCHMARKS,
    OWN_DATA,
    find_root,
    read_federation,
    write_federation,
)
from medfedaug.runs.evaluate import open_model
from medfedaug.runs.prediction.prediction_image import INK, PAPER, outline, windowed
from medfedaug.runs.run import BASELINE, Run
from medfedaug.tasks import SegmentationTask

_MOST_SITES = 12


def image_sections(
    body: ET.Element, groups: Mapping[str, Sequence[Run]], example: ET.Element, data: str | Path, device: str
) -> None:
    """Append cases of a segmentation, for the first run of each method and at most a dozen sites.

    The test case whose scores by the reference and the best other method differ most goes to ``example``.
    """
    first = [members[0] for members in groups.values()]
    if first[0].config["task"] != "segmentation":
        return
    known = {site for run in first for site in (*run.sites, *run.unseen)}
    with _data_of(first[0], Path(data)) as root:
        single = root.is_dir() and is_site(root) and not is_federation(root)
        limit = first[0].config.get("limit")
        sites = [open_site(root, limit=limit)] if single else find_sites(root, limit=limit)
        folders = [folder for folder in sites if folder.name in known]
        folders = [folders[int(i)] for i in np.linspace(0, len(folders) - 1, min(len(folders), _MOST_SITES))]
        if not folders:
            raise DataError(
                "holds none of the runs' sites", path=data, hint=f"They are {', '.join(sorted(known))}."
            )
    names = {folder.name for folder in folders}
    runs = {f"{label}, {run.name}": run for label, (run, *_) in groups.items()}
    shown = _largest_difference(groups, names)
    outputs = {name: _apply_model(run, data, device, names, shown) for name, run in runs.items()}
    if shown is not None:
        _example(example, shown, {run.label: outputs[name] for name, run in runs.items()})
    case = next(case for cases in folders[0].cases.values() for case in cases)
    slices = "By Dice of the volume. The slice where the truth is largest is shown."
    _cases(body, outputs, "By Dice of the photograph." if is_photograph(case.image) else slices)


@contextmanager
def _data_of(run: Run, data: Path) -> Iterator[Path]:
    """Open the data of a run; a benchmark with the run's own options, including its fold."""
    if run.data not in (*BENCHMARKS, OWN_DATA) or "fraction" not in run.options:
        yield data
        return
    root = read_federation(data)[1] if is_federation(data) else find_root(data, run.data)
    with tempfile.TemporaryDirectory(prefix="medfedaug-data-") as folder:
        write_federation(folder, run.data, root, **run.options)
        yield Path(folder)


class _Difference(NamedTuple):
    """The test case that a reference and another method score most differently."""

    reference: str
    other: str
    site: str
    case: str


def _largest_difference(groups: Mapping[str, Sequence[Run]], sites: Collection[str]) -> _Difference | None:
    """Find the case at the site where the best method and the reference differ most, in that direction."""
    runs = {members[0].label: members[0] for members in groups.values() if members[0].mean is not None}
    if len(runs) < 2:
        return None
    reference = BASELINE if BASELINE in runs else next(iter(runs))
    sign = 1 if find_metric(runs[reference].metric).higher_is_better else -1
    other = max(runs.keys() - {reference}, key=lambda label: sign * (runs[label].mean or 0.0))
    before, after = runs[reference], runs[other]
    gains = _differences(before.sites, after.sites, 1)
    gains = {site: gain for site, gain in gains.items() if site in sites}
    if not gains:
        return None
    site = max(gains, key=lambda name: abs(gains[name]))
    direction = 1 if gains[site] > 0 else -1
    cases = _differences(before.case_scores.get(site, {}), after.case_scores.get(site, {}), direction)
    return _Difference(reference, other, site, max(cases, key=cases.__getitem__)) if cases else None


def _differences(
    before: Mapping[str, float | None], after: Mapping[str, float | None], sign: int
) -> dict[str, float]:
    pairs = {name: (score, after.get(name)) for name, score in before.items()}
    return {name: sign * (b - a) for name, (a, b) in pairs.items() if a is not None and b is not None}


def _example(section: ET.Element, shown: _Difference, outputs: Mapping[str, list[CaseView] | str]) -> None:
    pair = {
        label: view
        for label in (shown.reference, shown.other)
        for view in outputs[label]
        if isinstance(view, CaseView) and not view.rank
    }
    if len(pair) < 2:
        return
    page.figure(
        section,
        example_picture(pair),
        f"Image, truth and the outlines of {shown.reference} and {shown.other}",
        f"Case {shown.case} of site {shown.site}, where {shown.reference} and {shown.other} differ most.",
        photo=True,
    )


def _apply_model(
    run: Run, data: str | Path, device: str, sites: Collection[str], shown: _Difference | None
) -> list[CaseView] | str:
    """Return cases of one run's model on the sites' test images, or the reason of their absence."""
    model = run.path.parent / GLOBAL_MODEL
    if not model.exists():
        return f"{run.path.parent} has no {GLOBAL_MODEL}"
    try:
        with _data_of(run, Path(data)) as root:
            return _views(run, model, root, device, sites, shown) or "no case could be scored"
    except (MedFedAugError, ValueError) as error:  # an error of one run does not stop the page
        return str(error)
    except Exception as error:  # of a network that takes images in another order of axes, or of another size
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"the network cannot run on images as medfedaug prepares them ({reason})"


def _views(
    run: Run, model: Path, data: Path, device: str, sites: Collection[str], shown: _Difference | None
) -> list[CaseView]:
    views: list[CaseView] = []
    limit = run.config.get("limit")
    for opened, complete in open_model(model, data, device=device, limit=limit):
        folder = opened.folder
        if not folder.cases["test"] or folder.name not in {*run.sites, *run.unseen} & {*sites}:
            continue
        cases = {case.name for case in folder.cases["test"]}
        scores = run.scored_by(run.chosen_by).case_scores.get(folder.name, {})
        if not scores.keys() <= cases:
            # With another split, the model may have trained on the cases.
            raise DataError(
                "these are not the test cases that the run was tested with", site=folder.name, path=data
            )
        if complete:
            also = shown.case if shown is not None and shown.site == folder.name else ""
            views += extreme_cases(opened, scores, also)
    return views


def _cases(body: ET.Element, outputs: Mapping[str, list[CaseView] | str], order: str) -> None:
    section = page.start_section(body, "Worst and best case of each site")
    page.remark(section, order)
    for name, output in outputs.items():
        page.add(section, "h3", name)
        if isinstance(output, str):
            page.add(section, "p", f"No picture: {output}.")
            continue
        views = [view for view in output if view.rank]
        cases = (f"{view.rank} at {view.site}: {view.case}, {view.score:.3f}" for view in views)
        page.figure(section, case_picture(views), f"{name}: {'; '.join(cases)}", photo=True)


_TRUTH, _PREDICTION = "#56B4E9", "#E69F00"
_TITLE = 9  # points
_COLUMNS = 4
_SIDE = WIDTH / _COLUMNS  # inches of a panel


@dataclass(frozen=True)
class CaseView:
    """The content of the picture of one case."""

    site: str
    case: str
    rank: str  # "worst", "best" or "only"; empty for another case
    score: float  # Dice of the volume
    image: np.ndarray  # slice (X, Y), or photograph (X, Y, 3), from 0 to 1
    truth: np.ndarray  # label map (X, Y)
    prediction: np.ndarray  # the predicted label map
    downwards: bool = False  # the second axis points down, as in photographs


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
    case = task.evaluation_case(site.folder, chosen)
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
    panels: list[tuple[str, np.ndarray | None, str]] = [("image", None, ""), ("truth", first.truth, _TRUTH)]
    panels += [
        (f"{label}, Dice {view.score:.2f}", view.prediction, _PREDICTION) for label, view in views.items()
    ]
    tall = second.image.shape[1] / second.image.shape[0]
    height = _SIDE * min(tall, 1.5) + 0.3
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=PAPER)
    for place, (title, labels, colour) in enumerate(panels, start=1):
        panel = figure.add_subplot(1, _COLUMNS, place)
        _show(panel, first)
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
            _show(panel, view)
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


def _show(panel: Axes, view: CaseView) -> None:
    panel.axis("off")
    panel.imshow(view.image.swapaxes(0, 1), cmap="gray", vmin=0, vmax=1)
    if not view.downwards:
        panel.invert_yaxis()


def _title(panel: Axes, *lines: str, room: float) -> None:
    text = "\n".join(_shortened(line, room) for line in lines)
    panel.set_title(text, fontsize=_TITLE, color=INK, parse_math=False, y=1.0)


def _shortened(text: str, room: float) -> str:
    """Return the beginning and the end of a name: names of files often differ only at the end."""
    kept = int(room / (0.6 * _TITLE))  # letters, by their usual width
    return text if len(text) <= kept else f"{text[: kept // 2]}…{text[kept // 2 - kept :]}"
