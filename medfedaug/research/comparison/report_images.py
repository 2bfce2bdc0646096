"""The sections of the report that need the sites' images and the runs' models."""

import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medfedaug.analysis import page
from medfedaug.data.io.formats import is_photograph
from medfedaug.data.sites import find_sites, is_federation, is_site, open_site
from medfedaug.errors import DataError, MedFedAugError, first_line
from medfedaug.federation.job_folder import GLOBAL_MODEL
from medfedaug.metrics.registry import find_metric
from medfedaug.research.comparison.case_views import (
    CaseView,
    case_picture,
    example_picture,
    extreme_cases,
)
from medfedaug.research.datasets.benchmarks import (
    BENCHMARKS,
    OWN_DATA,
    find_root,
    read_federation,
    write_federation,
)
from medfedaug.runs.evaluate import open_model
from medfedaug.runs.run import BASELINE, Run

_MOST_SITES = 12


def image_sections(
    body: ET.Element,
    groups: Mapping[str, Sequence[Run]],
    example: ET.Element,
    data: str | Path,
    device: str,
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
