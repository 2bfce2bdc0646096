"""`write_prospect`: the page of a prospect, and the sentences of its answer."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from medfedaug._version import __version__
from medfedaug.analysis.calibration_table import FEDAVG
from medfedaug.analysis.fingerprint_distance import KINDS
from medfedaug.analysis.gain_prediction import Expected
from medfedaug.analysis.page import add, check_page, figure, start_page, table, write_page
from medfedaug.analysis.plots import colours_by_name, legend_columns, tidy
from medfedaug.analysis.prediction_judge import LEAST_FEDERATIONS
from medfedaug.analysis.prospect import NOT_A_REMEDY, Prospect
from medfedaug.config.scanners import scanners_text
from medfedaug.data.quality.image_fingerprint import QUANTITIES

__all__ = ["agreement", "answer", "judged_sentence", "sentences", "write_prospect"]

_TICKS = (0, 0.5, 1, 2, 5, 10, 20, 50)

_UNLIKE = (
    "These sites are unlike anything measured: no federation of the calibration table is near them, and the "
    "intervals are wider for it."
)

_OF_GEOMETRY = {"resolution", "field_of_view"}
_GROUPS = {
    "appearance": "the same things look different: harmonise (norm, FedRDN), or train against it (FedFA)",
    "structure": "the patients differ: let each site keep layers of its own (FedBN, Ditto)",
    "labels": "the readers, or the patients, differ: compare outlines on a few cases, and agree on them",
}


def answer(prospect: Prospect, site: str | None = None) -> list[str]:
    """Return the three sentences of the answer, for one site or for the federation."""
    whom = "the sites in the mean" if site is None else site
    together = prospect.together
    if site is not None:
        together = prospect.over_single["site"].get(FEDAVG, {}).get(site)
    reasons = prospect.reasons(site)
    differ = f" What differs most: {reasons[0]}." if reasons else ""
    if not prospect.is_predicted:
        task = prospect.sites[0].task
        return [f"No gain is predicted: the calibration table has too few federations of {task}.{differ}"]
    found = []
    if together is None:
        found.append("The calibration table does not say what training together gains over training alone.")
    elif not prospect.is_shown(FEDAVG, "mean" if site is None else "site"):
        found.append(
            "Fingerprints do not tell whether training together is better than training alone: their "
            "predictions did not hold where whole families were left out. Try it with medfedaug compare."
        )
    else:
        gain, within = _told(prospect, together, FEDAVG, "mean" if site is None else "site")
        found.append(
            f"Training together is expected to change the score of {whom} by {gain} over training "
            f"alone{within}."
        )
    remedy, since = prospect.remedy, f", since {reasons[0]}" if reasons else ""
    if remedy == FEDAVG:
        found.append(
            f"No method is predicted, with skill, to surely gain over FedAvg: begin with FedAvg.{differ}"
        )
    else:
        gain, within = _told(prospect, prospect.gains["mean"][remedy][""], remedy, "mean")
        found.append(
            f"The remedy to try first is {remedy}, expected to gain {gain} over FedAvg{within}{since}."
        )
    found += _power(prospect, site)
    return found


def agreement(prospect: Prospect, measured: Mapping[str, float]) -> list[str]:
    """Compare predicted with measured gains over FedAvg in the mean of the sites, a line for each method.

    Args:
        prospect: the prediction.
        measured: by methods.
    """
    found = []
    for methods, gain in measured.items():
        expected = prospect.gains["mean"].get(methods, {}).get("")
        if expected is None or expected.interval80 is None:
            continue
        low, high = expected.interval80
        agrees = "agrees" if low <= gain <= high else "does not agree"
        caveat = "" if prospect.holds(methods) else ", and it is not shown that such intervals hold"
        found.append(
            f"{methods}: predicted {low:+.3f} to {high:+.3f} (80%), measured {gain:+.3f}: {agrees}{caveat}"
        )
    return found


def _power(prospect: Prospect, site: str | None) -> list[str]:
    asked = [one for one in prospect.sites if site in (None, one.site)]
    patients = sum(one.test_patients for one in asked)
    smallest = prospect.detectable(patients)
    if smallest is None:
        return []
    whose = "all sites" if site is None else "your"
    of = f"the {patients} test patients of {whose}" if site is None else f"your {patients} test patients"
    return [f"With {of} a gain below {smallest:.3f} will not be told from chance."]


def _told(prospect: Prospect, expected: Expected, methods: str, level: str) -> tuple[str, str]:
    """Return the text of a gain: a size where there is skill, an interval where it holds, and a caveat."""
    if not prospect.holds(methods, level) or expected.interval80 is None:
        return f"{expected.mean:+.3f}", ", of which it is not shown that intervals hold"
    if prospect.has_skill(methods, level):
        return f"{expected.mean:+.3f} (80%: {_ends(expected.interval80)})", ""
    return f"{_ends(expected.interval80)} (80%)", "; fingerprints do not tell where in between"


def judged_sentence(prospect: Prospect) -> str:
    """Say of how many federations the table is, and of which claims the judge found that they hold."""
    table = prospect.table
    if not prospect.is_predicted:
        return "What differs between the sites is measured, and needs no table."
    text = (
        f"The calibration table has {table.number} federations of {len(table.families)} families, "
        f"{table.seeds} seed{'s' * (table.seeds != 1)} each at most."
    )
    shown = sorted(
        methods for (methods, level), one in prospect.judged.items() if level == "mean" and one.holds
    )
    most = max((one.federations for one in prospect.judged.values()), default=0)
    if shown:
        return f"{text} With whole families left out, intervals of the mean gain held for {', '.join(shown)}."
    if most < LEAST_FEDERATIONS:
        return (
            f"{text} Coverage is judged on {LEAST_FEDERATIONS} federations or more, and there are {most}: "
            "take the numbers as a first guess."
        )
    return f"{text} With whole families left out, the intervals of no gain held: take the numbers as a guess."


def sentences(prospect: Prospect) -> list[str]:
    """Return the answer for the federation, and how far to trust it."""
    unlike = [_UNLIKE] if prospect.is_unlike else []
    return [*answer(prospect), *unlike, judged_sentence(prospect)]


def write_prospect(
    prospect: Prospect,
    out_html: str | Path,
    *,
    site: str | None = None,
    releases: Sequence[str] = (),
) -> None:
    """Write the page.

    Args:
        prospect: the numbers.
        out_html: the page.
        site: whose page it is; by default that of who has all data.
        releases: lines about what left the site; by default nothing did.

    Raises:
        ConfigError: where another file is there.
        StorageError: when it cannot be written.
    """
    out = Path(out_html)
    check_page(out)
    html, body = start_page("Should we train together?" if site is None else f"Should {site} join?")
    for sentence in answer(prospect, site):
        add(body, "p", sentence, **{"class": "answer"})
    if prospect.is_unlike:
        add(body, "p", _UNLIKE, **{"class": "answer"})
    add(body, "p", judged_sentence(prospect), **{"class": "soft"})
    for name, reason in prospect.missing.items():
        add(body, "p", f"Without {name}: {reason}", **{"class": "soft"})
    _expected(add(body, "section"), prospect)
    _differences(add(body, "section"), prospect, site)
    _sites(add(body, "section"), prospect)
    _released(add(body, "section"), prospect, releases)
    _assumed(add(body, "section"), prospect)
    add(body, "p", f"medfedaug {__version__}", **{"class": "soft"})
    write_page(html, out)


def _expected(section: ET.Element, prospect: Prospect) -> None:
    add(section, "h2", "Expected gain over FedAvg")
    means = {methods: found[""] for methods, found in prospect.gains["mean"].items()}
    if not means:
        add(section, "p", "The calibration table has no method beside FedAvg for this task.")
        return
    worst = prospect.gains["worst"]
    lines = []
    shown = {methods: gain for methods, gain in means.items() if prospect.is_shown(methods)}
    if rest := sorted(means.keys() - shown.keys()):
        add(section, "p", f"Nothing is shown of the gain of {'; '.join(rest)}.")
    if not shown:
        return
    for methods, gain in sorted(shown.items(), key=lambda one: -one[1].mean):
        needed, skill = prospect.patients_needed(methods), prospect.has_skill(methods)
        of_worst = worst[methods][""].mean if prospect.has_skill(methods, "worst") else None
        lines.append(
            [
                methods,
                f"{gain.mean:+.3f}" if skill else "–",
                _ends(gain.interval80),
                _ends(gain.interval95),
                "–" if of_worst is None else f"{of_worst:+.3f}",
                "–" if not skill else "more than 2000" if needed is None else str(needed),
                "yes" if prospect.holds(methods) else "no",
                "yes" if prospect.has_skill(methods) else "no",
            ]
        )
    header = ["method", "mean of the sites", "80%", "95%", "worst site", "patients needed"]
    table(section, [*header, "shown to hold", "skill"], lines)
    add(
        section,
        "p",
        "Differences of test scores; the JSON has all predictions. Worst "
        "site: gain of the score of the site that has the lowest. Patients needed: test patients with whom a "
        "gain as large as the expected one would be found in four of five tests. Shown to hold: the "
        "intervals held on federations whose whole family was left out. Skill: predictions of these erred "
        "less than always saying 0, by two standard errors. –: nothing is shown, or too few federations for "
        "such an interval. "
        f"{', '.join(NOT_A_REMEDY)}: for comparison, and no way of training together without sharing images.",
        **{"class": "soft"},
    )
    skilled = [methods for methods in shown if prospect.has_skill(methods)]
    figure(
        section,
        lambda width: interval_picture(shown, skilled, width=width),
        "80% and 95% interval of the gain of each method",
        "Gain in the mean of the sites. Thick: 80% interval, thin: 95% interval, dot: expected with skill.",
        small=True,
    )


def _differences(section: ET.Element, prospect: Prospect, site: str | None) -> None:
    add(section, "h2", "Where the sites differ")
    unknown = set() if all(one.knows_geometry for one in prospect.sites) else _OF_GEOMETRY
    for group, advice in _GROUPS.items():
        add(section, "h3", f"{group.capitalize()}: {advice}")
        kinds = {kind: entry for kind, entry in KINDS.items() if entry.group == group}
        # A row for each site: there may be fifty, and a sheet of paper has no room for as many columns.
        lines = [
            [name, *("–" if kind in unknown else f"{apart[kind]:.2f}" for kind in kinds)]
            for name, apart in prospect.distances.items()
        ]
        table(section, ["site", *map(_named, kinds)], lines)
        meanings = [f"{_named(kind)}: {entry.text} ({entry.unit})" for kind, entry in kinds.items()]
        add(section, "p", f"Mean distance from the other sites, {'; '.join(meanings)}.", **{"class": "soft"})
    for reason in prospect.reasons(site):
        add(section, "p", f"{reason[0].upper()}{reason[1:]}.")
    figure(
        section,
        lambda width: distance_picture(prospect.distances, width=width),
        "Distance of each site from the others, by kind",
        "Each dot is a site. An octave is a factor of 2; deviations are those of the images within a site. "
        "–: a site's files do not say how large a voxel is.",
    )


def _sites(section: ET.Element, prospect: Prospect) -> None:
    add(section, "h2", "Sites")
    lines, named = [], any(one.scanners for one in prospect.sites)
    for one in prospect.sites:
        alone = prospect.over_single["site"].get(FEDAVG, {}).get(one.site)
        looked = f"{one.looked_at} of {one.cases}" if one.looked_at < one.cases else str(one.cases)
        skill, shown = (tell(FEDAVG, "site") for tell in (prospect.has_skill, prospect.is_shown))
        gain = f"{alone.mean:+.3f}" if alone is not None and skill else "–"
        ends = _ends(alone.interval80) if alone is not None and shown else "–"
        scanners = [scanners_text(one.scanners) or "–"] if named else []
        lines.append([one.site, str(one.patients), str(one.test_patients), looked, gain, ends, *scanners])
    header = ["site", "patients", "test patients", "cases looked at", "FedAvg over single", "80%"]
    table(section, [*header, *(["scanners"] if named else [])], lines)


def _released(section: ET.Element, prospect: Prospect, releases: Sequence[str]) -> None:
    add(section, "h2", "What leaves a site")
    if not releases:
        add(
            section,
            "p",
            "Nothing left this machine. In a job of several hospitals each would send these means:",
        )
    for line in releases:
        add(section, "p", line)
    first = prospect.sites[0]
    lines = [
        [name, str(first.entries[name].numel()), quantity.text, quantity.reason]
        for name, quantity in QUANTITIES.items()
        if name in first.entries
    ]
    if "shares" in first.entries:
        number = str(first.entries["shares"].numel())
        lines.append(["shares", number, "one for the class of the image, and 0 for others", "prevalence"])
    lines.append(
        [
            "scanners",
            "–",
            "no mean: manufacturers and models, of a site whose policy names them (by default none)",
            "appearance: what differs between sites may be the scanner",
        ]
    )
    table(section, ["entry", "numbers", "a mean over the training cases of", "reason"], lines, words=True)
    noisy = [one for one in prospect.sites if one.noise]
    for one in noisy:
        text = f"{one.site} added noise: each mean in [0, 1] of its range has a deviation of {one.noise:.3g}"
        add(section, "p", f"{text}, and its distances from others seem larger for it.")
    if noisy:
        most = max(one.from_noise for found in prospect.gains["mean"].values() for one in found.values())
        add(
            section,
            "p",
            f"By this noise alone a predicted gain in the mean of the sites varies by {most:.3f} (deviation) "
            "at most; the intervals are as much wider.",
        )


def _assumed(section: ET.Element, prospect: Prospect) -> None:
    add(section, "h2", "What was assumed")
    for text in (
        "The federations of the calibration table are of phantoms and small networks: a real federation may "
        "gain more or less. docs/results/prospect has what was judged, and where it fails.",
        "Networks have batch norm; scores are Dice of segmentation; every site trains in every round.",
        "A difference of volumes can be one of patients or of outlines: fingerprints tell neither.",
        f"Families: {', '.join(prospect.table.families)}.",
    ):
        add(section, "p", text, **{"class": "soft"})


def interval_picture(
    found: Mapping[str, Expected], skilled: Collection[str], *, width: float = 9.0
) -> Figure:
    """Intervals of gains, a line for each method.

    Args:
        found: by methods.
        skilled: methods whose expected gain has a dot.
        width: of the figure, inches.
    """
    drawing = Figure(figsize=(width, 0.35 * len(found) + 0.9), layout="constrained")
    panel = drawing.add_subplot()
    tidy(panel)
    order = sorted(found, key=lambda methods: found[methods].mean)
    for place, methods in enumerate(order):
        one = found[methods]
        for ends, thick in ((one.interval95, 1.5), (one.interval80, 5.0)):
            if ends is not None:
                panel.plot(ends, (place, place), color="tab:blue", linewidth=thick, solid_capstyle="butt")
        if methods in skilled:
            panel.plot(one.mean, place, "o", color="white", markeredgecolor="black", markersize=6, zorder=3)
    panel.set_ylim(-0.6, len(order) - 0.4)
    panel.axvline(0, color="0.4", linewidth=1)
    panel.set_yticks(range(len(order)), order, fontsize=9)
    panel.set_xlabel("gain in score over FedAvg", fontsize=9)
    return drawing


def distance_picture(apart: Mapping[str, Mapping[str, float]], *, width: float = 9.0) -> Figure:
    """Distances by kind, a dot for each site.

    Args:
        apart: by site and kind.
        width: of the figure, inches.
    """
    columns = legend_columns([*apart], width)
    height = 0.32 * len(KINDS) + 1 + 0.2 * math.ceil(len(apart) / columns)
    drawing = Figure(figsize=(width, height), layout="constrained")
    panel = drawing.add_subplot()
    tidy(panel)
    colours, kinds = colours_by_name(apart), list(KINDS)
    for site, values in apart.items():
        panel.plot(
            [values[kind] for kind in kinds],
            range(len(kinds)),
            "o",
            color=colours[site],
            markersize=6,
            alpha=0.8,
            label=site.replace("$", r"\$"),
        )
    labels = [f"{_named(kind)} ({KINDS[kind].unit})" for kind in kinds]
    panel.set_yticks(range(len(kinds)), labels, fontsize=9)
    panel.invert_yaxis()
    panel.set_xscale("symlog", linthresh=1)
    panel.set_xticks(_TICKS, map(str, _TICKS))
    panel.minorticks_off()
    panel.set_xlim(-0.05, 1.15 * max(1, *(max(values.values()) for values in apart.values())))
    panel.set_xlabel("mean distance from the other sites", fontsize=9)
    drawing.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return drawing


def _named(kind: str) -> str:
    return kind.replace("_", " ")


def _ends(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"{ends[0]:+.3f} to {ends[1]:+.3f}"
