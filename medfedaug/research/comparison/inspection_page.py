"""`write_inspection` writes the findings about the sites' data, on one page and as JSON."""

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from medfedaug.analysis import page
from medfedaug.analysis.plots import WIDTH, add_legend, colours_by_name, plain_label, tidy
from medfedaug.data.base import SPLITS, plain_name
from medfedaug.errors import ConfigError
from medfedaug.research.comparison.inspection import SiteInspection
from medfedaug.research.comparison.shift import Measure, OddSite, Shift, odd_sites, site_shift
from medfedaug.runs.folder import check_replaces
from medfedaug.runs.prediction.prediction_image import INK, PAPER
from medfedaug.utils.files import write_json
from medfedaug.utils.printable import counted

_PERCENT = (1, 25, 50, 75, 99)
_MOST_ODD = 100  # on the page
_MOST_PAIRS = 30
_MOST_SITES = 12  # in figures
_MOST_PICTURES = 24


def federation_shift(sites: Sequence[SiteInspection]) -> Shift | None:
    """Compute the shift between inspected sites (`medfedaug.research.comparison.shift.site_shift`)."""
    return site_shift(_in_federations_order(sites, "pairs"))


def differing_sites(sites: Sequence[SiteInspection]) -> list[OddSite]:
    """Return the sites whose images or structures differ from those of the others, each with its numbers."""
    pairs, contrasts = (_in_federations_order(sites, name) for name in ("pairs", "contrasts"))
    by_name, classes = {site.name: site for site in sites}, _structures(sites)
    channels = max((values.shape[1] for values in pairs.values()), default=0)
    measures = []
    for channel in range(channels):
        of = f" of channel {channel}" if channels > 1 else ""
        of_images = {n: (by_name[n].owners, v[:, channel]) for n, v in pairs.items() if channel < v.shape[1]}
        for place, what in enumerate((f"mean intensity{of}", f"spread of the intensities{of}")):
            values = {name: _by_patient(o, v[:, place]) for name, (o, v) in of_images.items()}
            measures.append(Measure(what, values))
        for name, of_sites in classes.items():
            signs = {
                site: _by_patient(by_name[site].labelled, contrasts[site][:, channel, index - 1])
                for site, index in of_sites.items()
                if channel < contrasts[site].shape[1]
            }
            measures.append(Measure(f"{name}{of and f' in channel {channel}'}", signs, sign=True))
    for name, of_sites in classes.items():
        sizes = {
            site: _by_patient(by_name[site].labelled, np.where(share > 0, share, np.nan))
            for site, index in of_sites.items()
            for share in [by_name[site].shares[:, index]]
        }
        measures.append(Measure(f"share of the voxels that are {name}", sizes))
    return odd_sites(measures)


def _structures(sites: Sequence[SiteInspection]) -> dict[str, dict[str, int]]:
    """Return the places of each class but the background in the lists of the sites with label maps."""
    places: dict[str, dict[str, int]] = {}
    for site in sites:
        for index, name in enumerate(site.classes[1:], start=1) if site.labelled else ():
            places.setdefault(name, {})[site.name] = index
    return places


def _by_patient(owners: Sequence[Hashable], values: np.ndarray) -> np.ndarray:
    by_owner: dict[Hashable, list[float]] = {}
    for owner, value in zip(owners, values.tolist(), strict=True):
        if not np.isnan(value):
            by_owner.setdefault(owner, []).append(value)
    return np.array([np.mean(of_owner) for of_owner in by_owner.values()])


def _in_federations_order(sites: Sequence[SiteInspection], name: str) -> dict[str, np.ndarray]:
    """Return an array of each site by the channels of the site with the most; NaN in a missing channel."""
    known = {site.name: values for site in sites if len(values := getattr(site, name))}
    channels = {s.name: [plain_name(c) for c in s.channel_names] for s in sites if s.name in known}
    names = max(channels.values(), key=len, default=[])
    for site, own in channels.items():
        if own != names and set(own) <= set(names) and len(own) == known[site].shape[1]:
            n, _, last = known[site].shape
            ordered = np.full((n, len(names), last), np.nan)
            ordered[:, [names.index(channel) for channel in own]] = known[site]
            known[site] = ordered
    return known


def write_inspection(sites: Sequence[SiteInspection], out_html: str | Path, intensity: str = "scale") -> Path:
    """Write the findings as one page, and as JSON next to it.

    The page names cases: it is for owners of the data. The JSON, ``inspect.json`` for ``inspect.html``, names
    none.
    """
    out = Path(out_html)
    record = out.with_suffix(".json")
    page.check_page(out)
    if out == record:
        raise ConfigError(f"{out}: the page needs another name than {record}, which is beside it")
    check_replaces(record, "a record of inspect", "sites", "shift", "intensity")
    shift = federation_shift(sites)
    page.write_page(_page(sites, shift, intensity), out)
    write_json(record, inspection_record(sites, shift, intensity))
    return record


def inspection_record(sites: Sequence[SiteInspection], shift: Shift | None, intensity: str) -> dict[str, Any]:
    """Return the findings as JSON types, without names of cases and files."""
    return {
        "intensity": intensity,
        "shift": None if shift is None else shift.shift,
        "shift_by_chance": None if shift is None else shift.chance,
        "pairs": [
            {"sites": list(p.sites), "statistics": p.statistics, "chance": p.chance}
            for p in (shift.pairs if shift else ())
        ],
        "differing": [asdict(odd) for odd in differing_sites(sites)],
        "sites": {site.name: _site_record(site) for site in sites},
    }


def _site_record(site: SiteInspection) -> dict[str, Any]:
    mean, std = (site.pairs[..., k].mean(axis=0).tolist() if len(site.pairs) else [] for k in (0, 1))
    return {
        "task": site.task,
        "cases": site.splits,
        "patients": site.patients,
        "shapes": {_by(shape): count for shape, count in site.shapes.items()},
        "voxel_edges_mm": {_by(edges): count for edges, count in site.edges.items()},
        "axes": dict(site.axes),
        "channel_names": list(site.channel_names),
        **({} if site.annotated is None else {"labelled": list(site.annotated)}),
        "channels": {str(number): count for number, count in site.channels.items()},
        "mean": mean,
        "std": std,
        "percentiles_as_stored": [
            dict(zip(map(str, _PERCENT), values, strict=True)) for values in _percentiles(site.stored)
        ],
        "class_shares": site.voxels,
        "cases_with_class": site.present,
        "odd": dict(Counter(odd.kind for odd in site.odd)),
    }


def _percentiles(quantiles: np.ndarray) -> list[list[float]]:
    """Return by channel the percentiles of all images in equal parts."""
    if not len(quantiles):
        return []
    together = quantiles.transpose(1, 0, 2).reshape(quantiles.shape[1], -1)
    return np.percentile(together, _PERCENT, axis=1).T.tolist()


def _page(sites: Sequence[SiteInspection], shift: Shift | None, intensity: str) -> ET.Element:
    html, body = page.start_page("Data of the sites" if len(sites) > 1 else f"Data of {sites[0].name}")
    cases = sum(sum(site.splits.values()) for site in sites)
    odd = sum(len(site.odd) for site in sites)
    page.add(body, "p", f"{counted(len(sites), 'site')} · {cases} cases · odd: {odd}")
    shown = [site for site in sites if site.thumbnails][:_MOST_SITES]
    _thumbnails(body, {site.name: next(iter(site.thumbnails.values())) for site in shown})
    for append in (_odd, _cases, _classes, _intensities):
        append(body, sites)
    _shift(body, sites, shift, intensity)
    page.remark(body, "This page names cases, and is for owners of the data; the JSON next to it names none.")
    page.end_page(body)
    return html


def _cases(body: ET.Element, sites: Sequence[SiteInspection]) -> None:
    section = page.start_section(body, "Cases and geometry")
    geometry = any(site.edges for site in sites)  # which photographs lack
    header = ["site", *SPLITS, "patients", "size", *(["voxel size, mm", "axes"] if geometry else [])]
    lines = [
        [
            site.name,
            *(str(site.splits.get(split, 0)) for split in SPLITS),
            str(site.patients),
            _range(site.shapes),
            *([_range(site.edges), _counted(site.axes)] if geometry else []),
            _counted(site.channels),
            str(len(site.odd)),
        ]
        for site in sites
    ]
    page.table(section, [*header, "channels", "odd"], lines)
    text = "Size and voxel size: the range along each axis. –: the files lack the voxel size."
    page.remark(section, text if geometry else "Size: the range along each axis.")


def _classes(body: ET.Element, sites: Sequence[SiteInspection]) -> None:
    section = page.start_section(body, "Classes")
    names = list(dict.fromkeys(name for site in sites for name in site.voxels))
    if not names:
        page.add(section, "p", "No case could be read.")
        return
    of = "voxels" if any(site.task == "segmentation" for site in sites) else "images"
    lines = []
    for site in sites:
        cells = [
            f"{site.voxels[name]:.2%} ({site.present[name]})" if name in site.voxels else "–"
            for name in names
        ]
        lines.append([site.name, *cells])
    page.table(section, ["site", *names], lines)
    text = f"Share of the {of}, mean over the cases, and in brackets the number of cases with a class."
    page.remark(section, text)


def _intensities(body: ET.Element, sites: Sequence[SiteInspection]) -> None:
    section = page.start_section(body, "Intensities as stored")
    lines = [
        [site.name, str(channel), *(f"{value:.4g}" for value in values)]
        for site in sites
        for channel, values in enumerate(_percentiles(site.stored))
    ]
    page.table(section, ["site", "channel", *(f"{percent}%" for percent in _PERCENT)], lines)
    page.remark(
        section, "Percentiles over the training images, or the test images of a site that does not train."
    )


def _shift(body: ET.Element, sites: Sequence[SiteInspection], shift: Shift | None, intensity: str) -> None:
    section = page.start_section(body, "How far apart the sites are")
    if shift is None:
        page.add(section, "p", "Nothing to compare: it takes two sites whose images have channels in common.")
        return
    sentence = shift.sentence
    page.add(section, "p", sentence[0].upper() + sentence[1:])
    pairs = _in_federations_order(sites, "pairs")
    for odd in differing_sites(sites):
        page.add(section, "p", str(odd))
    ranked = sorted(shift.pairs, key=lambda pair: pair.statistics, reverse=True)
    lines = [
        [" – ".join(pair.sites), f"{pair.statistics:.2f}", f"{pair.chance:.2f}"]
        for pair in ranked[:_MOST_PAIRS]
    ]
    page.table(section, ["sites", "statistics", "by chance"], lines)
    if len(ranked) > _MOST_PAIRS:
        page.add(section, "p", f"And {len(ranked) - _MOST_PAIRS} pairs that are nearer: see the JSON.")
    scaling = "as stored"
    if intensity == "scale":
        scaling = "with each volume scaled to [0, 1] and photographs divided by 255"
    page.remark(
        section,
        "Statistics: distance between the sites' mean pairs (mean and standard deviation of each channel), "
        "in standard deviations of the images within a site, root mean square over the components; "
        "by chance: this distance between sites that do not differ. Of images "
        f"{scaling}. The shift is the mean of the statistics' distances over all pairs of sites.",
    )
    names = list(pairs)
    names = [names[int(i)] for i in np.linspace(0, len(names) - 1, min(len(names), _MOST_SITES))]
    page.figure(
        section,
        pair_picture({name: pairs[name] for name in names}),
        "Mean and standard deviation of each image, by site",
        "Each dot is an image, each cross a site's mean.",
    )


def _odd(body: ET.Element, sites: Sequence[SiteInspection]) -> None:
    section = page.start_section(body, "Odd cases")
    lines = [[site.name, odd.case or "–", odd.kind, odd.reason] for site in sites for odd in site.odd]
    if not lines:
        page.add(section, "p", "None.")
        return
    page.table(section, ["site", "case", "kind", "reason"], lines[:_MOST_ODD], words=True)
    if len(lines) > _MOST_ODD:
        page.add(section, "p", f"And {len(lines) - _MOST_ODD} more.")
    pictures = {
        f"{site.name}, {odd.case}": site.thumbnails[odd.case]
        for site in sites
        for odd in site.odd
        if odd.case in site.thumbnails
    }
    _thumbnails(section, dict([*pictures.items()][:_MOST_PICTURES]))


def _thumbnails(parent: ET.Element, pictures: dict[str, np.ndarray]) -> None:
    if pictures:
        alt = f"Images of {', '.join(pictures)}"
        page.figure(parent, thumbnail_picture(pictures), alt, photo=True)


def thumbnail_picture(pictures: dict[str, np.ndarray]) -> Figure:
    """Draw small pictures in rows, each below its name."""
    columns = min(len(pictures), 6)
    rows = -(-len(pictures) // columns)
    side = WIDTH / 6
    drawing = Figure(figsize=(columns * side, rows * (side + 0.2)), layout="constrained", facecolor=PAPER)
    for place, (name, pixels) in enumerate(pictures.items(), start=1):
        panel = drawing.add_subplot(rows, columns, place)
        panel.axis("off")
        panel.imshow(pixels, cmap="gray", vmin=0, vmax=255)
        panel.set_title(plain_label(name), fontsize=8, color=INK, y=1.0, wrap=True)
    return drawing


def pair_picture(pairs: dict[str, np.ndarray]) -> Figure:
    """Draw mean and standard deviation of each image (dot) and each site (cross), one panel per channel."""
    number = max(values.shape[1] for values in pairs.values())
    columns = min(number, 3)
    rows = -(-number // columns)
    drawing, colours = Figure(figsize=(WIDTH, rows * 2.8 + 0.5), layout="constrained"), colours_by_name(pairs)
    for channel in range(number):
        panel = drawing.add_subplot(rows, columns, channel + 1)
        tidy(panel)
        if number > 1:
            panel.set_title(f"channel {channel}", fontsize=10, y=1.0)
        for site, values in pairs.items():
            if channel < values.shape[1]:
                panel.plot(*values[:, channel].T, ".", color=colours[site], markersize=4, alpha=0.5)
        for site, values in pairs.items():
            if channel < values.shape[1]:
                panel.plot(*values[:, channel].mean(axis=0), "X", color=colours[site], markersize=9, mec="w")
        panel.set_xlabel("mean", fontsize=9)
        panel.set_ylabel("standard deviation", fontsize=9)
    add_legend(drawing, colours)
    return drawing


def _by(numbers: Sequence[float]) -> str:
    return " x ".join(f"{number:g}" for number in numbers)


def _range(counts: Counter[Any]) -> str:
    """Return the range along each axis, such as ``"96 x 80–96 x 12"``, for each number of axes."""
    ranges = []
    for length in sorted({len(numbers) for numbers in counts}):
        columns = zip(*(numbers for numbers in counts if len(numbers) == length), strict=True)
        ends = [(min(column), max(column)) for column in columns]
        ranges.append(
            "\u00a0x\u00a0".join(f"{low:g}" if low == high else f"{low:g}–{high:g}" for low, high in ends)
        )
    return "; ".join(ranges) or "–"


def _counted(counts: Counter[Any]) -> str:
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(f"{value} ({count})" for value, count in counts.most_common()) or "–"
