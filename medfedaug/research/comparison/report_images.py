"""The sections of the report that need the sites' images and the runs' models."""

import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from medfedaug.analysis import page
from medfedaug.data.folders import is_federation, is_site
from medfedaug.data.io.formats import is_photograph
from medfedaug.data.sites import find_sites, open_site
from medfedaug.errors import DataError, MedFedAugError, first_line
from medfedaug.federation.job_folder import GLOBAL_MODEL
from medfedaug.research.comparison.case_views import (
    CaseView,
    case_picture,
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
from medfedaug.runs.run import Run

_MOST_SITES = 12


def image_sections(
    body: ET.Element,
    groups: Mapping[str, Sequence[Run]],
    data: str | Path,
    device: str,
) -> None:
    """Append cases, for the first run of each method and at most a dozen sites."""
    first = [members[0] for members in groups.values()]
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
    outputs = {name: _apply_model(run, data, device, names) for name, run in runs.items()}
    order = "By the probability that the model gives to the true class."
    if folders[0].task == "segmentation":
        order = "By Dice of the volume. The slice where the truth is largest is shown."
        case = next(case for cases in folders[0].cases.values() for case in cases)
        order = "By Dice of the photograph." if is_photograph(case.image) else order
    _cases(body, outputs, order)


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


def _apply_model(run: Run, data: str | Path, device: str, sites: Collection[str]) -> list[CaseView] | str:
    """Return cases of one run's model on the sites' test images, or the reason of their absence."""
    model = run.path.parent / GLOBAL_MODEL
    if not model.exists():
        return f"{run.path.parent} has no {GLOBAL_MODEL}"
    try:
        with _data_of(run, Path(data)) as root:
            return _views(run, model, root, device, sites) or "no case could be scored"
    except (MedFedAugError, ValueError) as error:  # an error of one run does not stop the page
        return str(error)
    except Exception as error:  # of a network that takes images in another order of axes, or of another size
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"the network cannot run on images as medfedaug prepares them ({reason})"


def _views(run: Run, model: Path, data: Path, device: str, sites: Collection[str]) -> list[CaseView]:
    views: list[CaseView] = []
    limit = run.config.get("limit")
    for opened, complete in open_model(model, data, config=run.path, device=device, limit=limit):
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
            views += extreme_cases(opened, scores)
    return views


def _cases(body: ET.Element, outputs: Mapping[str, list[CaseView] | str], order: str) -> None:
    section = page.start_section(body, "Worst and best case of each site")
    page.remark(section, order)
    for name, views in outputs.items():
        page.add(section, "h3", name)
        if isinstance(views, str):
            page.add(section, "p", f"No picture: {views}.")
            continue
        cases = (f"{view.rank} at {view.site}: {view.case}, {view.score:.3f}" for view in views)
        page.figure(section, partial(case_picture, views), f"{name}: {'; '.join(cases)}", photo=True)
