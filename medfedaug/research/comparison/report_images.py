"""The sections of the report that need the sites' images and the runs' models."""

import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from medfedaug.analysis import page
from medfedaug.config.plan import Plan
from medfedaug.config.run import BY_PLAN
from medfedaug.data.base import Case, SiteFolder, spread
from medfedaug.data.federation import arrange
from medfedaug.data.folders import is_federation, is_site
from medfedaug.data.io.formats import is_photograph
from medfedaug.data.preparation.preparation import Preparation
from medfedaug.data.sites import find_sites, open_site, site_statistics
from medfedaug.errors import DataError, MedFedAugError, first_line
from medfedaug.federation.job_folder import GLOBAL_MODEL, STATISTICS
from medfedaug.metrics.registry import find_metric
from medfedaug.research.comparison.case_views import (
    CaseView,
    case_picture,
    example_picture,
    extreme_cases,
    view_of,
)
from medfedaug.research.comparison.features import SiteFeatures
from medfedaug.research.comparison.intensities import MIDDLE, intensity_histograms, sample_intensities
from medfedaug.research.datasets.benchmarks import (
    BENCHMARKS,
    OWN_DATA,
    find_root,
    read_federation,
    write_federation,
)
from medfedaug.runs.evaluate import open_model
from medfedaug.runs.run import BASELINE, Run
from medfedaug.statistics import ChannelStatistics, load_statistics

LocalFeatures = Mapping[Path, Mapping[str, SiteFeatures]]
"""Features of the sites' local models by the file of their run and the site that trained them."""

# Enough to show a distribution: cases per site and task, and features per site.
_CASES = {"segmentation": 10, "classification": 100}
_MOST_SITES = 12


@dataclass
class _ModelOutput:
    """Cases and features of one run's model on the sites' test images, or the reason of their absence."""

    views: list[CaseView] = field(default_factory=list)
    example: CaseView | None = None
    features: SiteFeatures = field(default_factory=SiteFeatures)
    trouble: str = ""
    without_features: str = ""


def image_sections(
    body: ET.Element,
    groups: Mapping[str, Sequence[Run]],
    example: ET.Element,
    data: str | Path,
    device: str,
    local_features: LocalFeatures | None,
) -> None:
    """Append intensities, features and cases, for the first run of each method and at most a dozen sites.

    The test case whose scores by the reference and the best other method differ most goes to ``example``.
    """
    first = [members[0] for members in groups.values()]
    known = {site for run in first for site in (*run.sites, *run.unseen)}
    with data_of(first[0], Path(data)) as root:
        single = root.is_dir() and is_site(root) and not is_federation(root)
        limit = first[0].config.get("limit")
        sites = [open_site(root, limit=limit)] if single else find_sites(root, limit=limit)
        names, classes = first[0].config.get("channel_names", ()), first[0].config["classes"]
        folders = arrange([folder for folder in sites if folder.name in known], names, classes)
        folders = [folders[int(i)] for i in np.linspace(0, len(folders) - 1, min(len(folders), _MOST_SITES))]
        if not folders:
            raise DataError(
                "holds none of the runs' sites", path=data, hint=f"They are {', '.join(sorted(known))}."
            )
        _intensities(body, first, folders)
    names = {folder.name for folder in folders}
    runs = {f"{label}, {run.name}": run for label, (run, *_) in groups.items()}
    shown = _largest_difference(groups, names)
    outputs = {name: _apply_model(run, data, device, names, shown) for name, run in runs.items()}
    if shown is not None:
        _example(example, shown, {run.label: outputs[name].example for name, run in runs.items()})
    local = None
    if local_features is not None:
        local = {name: local_features.get(run.path, {}) for name, run in runs.items()}
    _features(body, outputs, local)
    order = "By the probability that the model gives to the true class."
    if folders[0].task == "segmentation":
        order = "By Dice of the volume. The slice where the truth is largest is shown."
        order = "By Dice of the photograph." if _of_photographs(folders) else order
    _cases(body, outputs, order)


@contextmanager
def data_of(run: Run, data: Path) -> Iterator[Path]:
    """Open the data of a run; a benchmark with the run's own options, including its fold."""
    if run.data not in (*BENCHMARKS, OWN_DATA) or "fraction" not in run.options:
        yield data
        return
    root = read_federation(data)[1] if is_federation(data) else find_root(data, run.data)
    with tempfile.TemporaryDirectory(prefix="medfedaug-data-") as folder:
        write_federation(folder, run.data, root, **run.options)
        yield Path(folder)


def _intensities(body: ET.Element, runs: Sequence[Run], folders: Sequence[SiteFolder]) -> None:
    section = page.start_section(body, "Intensities by site, before and after FedRDN", folded=True)
    # From a run that normalises, if any does, since the pairs describe its images.
    run = next((run for run in runs if run.input.normalised_by), runs[0])
    runs = [run, *(other for other in runs if other is not run)]
    intensity = "raw" if run.input.scaling == "none" else "scale"
    plan = Plan.from_dict(run.config.get("plan", {}))
    if run.input.normalised_by != BY_PLAN:
        plan = replace(plan, normalisation=None, ct_intensities=None)
    prepared = Preparation(plan, run.config.get("image_size"))
    unseen = [folder.name for folder in folders if not any(folder.name in run.sites for run in runs)]
    statistics = _statistics(runs, folders, intensity, prepared)
    samples = {}
    segmented = folders[0].task == "segmentation"
    for folder in folders:
        cases = folder.cases["training"] or folder.cases["test"]
        images = (
            folder.prepared_image(case, intensity, prepared) for case in spread(cases, _CASES[folder.task])
        )
        samples[folder.name] = sample_intensities(images, foreground=segmented)
    photographs = _of_photographs(folders)
    dark = ""
    if segmented:
        part, whole = ("pixels", "photograph") if photographs else ("voxels", "volume")
        dark = f"; and {part} that are darker than the mean of their {whole}, such as the surroundings"
    channels = ("red", "green", "blue") if photographs else run.config.get("channel_names", ())
    page.figure(
        section,
        partial(intensity_histograms, samples, statistics, unseen=unseen, channels=channels),
        "Histograms of the sites' intensities as stored, and as FedRDN makes them at test and in training",
        f"Intensities from the site's devices ({run.input.scaled}); normalised with the site's own mean and "
        "deviation, as at test; and with the pairs of all sites in equal parts, from which training draws. "
        "The more the sites' curves overlap, the less their devices distinguish them. Left out: the lowest "
        f"{MIDDLE[0]:g}% and the highest {100 - MIDDLE[1]:g}% of the values, which the axis does not show; "
        f"the tops of peaks that would hide the rest, such as saturated pixels{dark}.",
    )


def _of_photographs(folders: Sequence[SiteFolder]) -> bool:
    cases = [case for folder in folders for split in folder.cases.values() for case in split]
    return any(is_photograph(case.image) for case in cases[:1])


def _statistics(
    runs: Sequence[Run], folders: Sequence[SiteFolder], intensity: str, prepared: Preparation
) -> dict[str, ChannelStatistics]:
    """Return the exchanged pairs of all training sites, and computed pairs of other sites."""
    files = [run.path.parent / STATISTICS for run in runs]
    saved = next((load_statistics(file) for file in files if file.exists()), {})
    known = {site: saved[site] for site in saved if any(site in run.sites for run in runs)}
    return known | {f.name: site_statistics(f, intensity, prepared) for f in folders if f.name not in known}


@dataclass(frozen=True)
class _Difference:
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


def _example(section: ET.Element, shown: _Difference, views: Mapping[str, CaseView | None]) -> None:
    pair = {label: view for label in (shown.reference, shown.other) if (view := views.get(label)) is not None}
    if len(pair) < 2:
        return
    page.figure(
        section,
        partial(example_picture, pair),
        f"Image, truth and the outlines of {shown.reference} and {shown.other}",
        f"Case {shown.case} of site {shown.site}, where {shown.reference} and {shown.other} differ most.",
        photo=True,
    )


def _apply_model(
    run: Run, data: str | Path, device: str, sites: Collection[str], shown: _Difference | None
) -> _ModelOutput:
    model = run.path.parent / GLOBAL_MODEL
    if not model.exists():
        return _ModelOutput(trouble=f"{run.path.parent} has no {GLOBAL_MODEL}")
    try:
        with data_of(run, Path(data)) as root:
            return _output(run, model, root, device, sites, shown)
    except (MedFedAugError, ValueError) as error:  # an error of one run does not stop the page
        return _ModelOutput(trouble=str(error))
    except Exception as error:  # of a network that takes images in another order of axes, or of another size
        reason = f"{type(error).__name__}: {first_line(error)}"
        return _ModelOutput(trouble=f"the network cannot run on images as medfedaug prepares them ({reason})")


def _output(
    run: Run, model: Path, data: Path, device: str, sites: Collection[str], shown: _Difference | None
) -> _ModelOutput:
    output, limit = _ModelOutput(), run.config.get("limit")
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
        if not complete:
            continue
        output.views += extreme_cases(opened, scores)
        if shown is not None and shown.site == folder.name:
            output.example = view_of(opened, shown.case, scores)
        name = folder.name + (" (unseen)" if folder.name in run.unseen else "")
        try:
            output.features.add(opened, opened.network, example_cases(folder), name)
        except ValueError as error:  # stages that are not known, or no slice with foreground
            output.without_features = str(error)
    return output


def example_cases(folder: SiteFolder) -> Sequence[Case]:
    """Return the test cases of a site whose features are drawn."""
    return spread(folder.cases["test"], _CASES[folder.task])


def _features(
    body: ET.Element,
    outputs: Mapping[str, _ModelOutput],
    local: Mapping[str, Mapping[str, SiteFeatures]] | None,
) -> None:
    section = page.start_section(body, "Features by site", folded=True)
    on = (
        "by t-SNE, whose axes have no meaning, with alignment of the features of a class and uniformity of "
        "all (both: lower is better). The local model of a site is the global one after one more round of "
        "its training"
        if local is not None
        else "on two principal components with the share of the variance that each carries"
    )
    text = f"Test images in the last stage of the encoder, averaged over space, {on}. A colour is a site: "
    page.remark(section, f"{text}the network distinguishes sites that lie apart.")
    for name, output in outputs.items():
        if len(output.features) < 3:
            page.add(section, "h3", name)
            reason = output.trouble or output.without_features or "too few images"
            page.add(section, "p", f"No picture: {reason}.")
        else:
            _draw_features(section, name, output.features, "pca" if local is None else "tsne")
        for source, features in (local or {}).get(name, {}).items():
            if len(features) >= 3:
                _draw_features(section, f"{name}, local model of {source}", features, "tsne")


def _draw_features(section: ET.Element, name: str, features: SiteFeatures, method: str) -> None:
    page.add(section, "h3", name)
    if method == "tsne":
        page.add(section, "p", f"{features.measures()}.")
    page.figure(
        section,
        lambda width: features.picture(method, min(width, 6)),
        f"Features by site, {name}",
        small=True,
    )


def _cases(body: ET.Element, outputs: Mapping[str, _ModelOutput], order: str) -> None:
    section = page.start_section(body, "Worst and best case of each site")
    page.remark(section, order)
    for name, output in outputs.items():
        page.add(section, "h3", name)
        if not output.views:
            page.add(section, "p", f"No picture: {output.trouble or 'no case could be scored'}.")
            continue
        cases = (f"{view.rank} at {view.site}: {view.case}, {view.score:.3f}" for view in output.views)
        page.figure(section, partial(case_picture, output.views), f"{name}: {'; '.join(cases)}", photo=True)
