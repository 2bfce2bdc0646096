"""`write_prospect`: the page of a prospect, and the sentences of its answer."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from medfedaug.analysis.fingerprint_distance import KINDS
from medfedaug.analysis.gain_record import FEDAVG, LEAST_FEDERATIONS, SINGLE, Expected
from medfedaug.analysis.page import (
    add,
    check_page,
    end_page,
    figure,
    remark,
    start_page,
    start_section,
    table,
    write_page,
)
from medfedaug.analysis.pilot import Pilot
from medfedaug.analysis.plots import colours_by_name, legend_columns, plain_label, tidy
from medfedaug.analysis.prospect import NOT_A_REMEDY, Prospect
from medfedaug.config.scanners import scanners_text
from medfedaug.data.quality.image_fingerprint import QUANTITIES
from medfedaug.metrics.registry import find_metric
from medfedaug.utils.printable import counted

_TICKS = (0, 0.5, 1, 2, 5, 10, 20, 50)

_OF_GEOMETRY = {"resolution", "field_of_view"}
_GROUPS = {
    "appearance": "the same things look different",
    "structure": "the patients differ",
    "labels": "the readers, or the patients, differ: compare outlines on a few cases, and agree on them",
}


def answer(prospect: Prospect, site: str | None = None) -> list[str]:
    """Return the sentences of the answer, for one site or for the federation."""
    reasons = prospect.reasons(site)
    found = [f"What differs most: {reasons[0]}."] if reasons else ["No noticeable difference was found."]
    found += _of_pilot(prospect, site)
    remedy = prospect.remedy
    if remedy != FEDAVG:
        gain = prospect.gains["mean"][remedy][""]
        found.append(
            f"The remedy to try first is {remedy}, expected to gain {_told(gain)} over FedAvg in the mean of "
            "the sites."
        )
    return [*found, *_power(prospect, site)]


def _of_pilot(prospect: Prospect, site: str | None) -> list[str]:
    """Say what the pilot measured; without one, that a fingerprint predicts no gain."""
    pilot = prospect.pilot
    if pilot is None:
        return [
            "Fingerprints predict no gain: what training together brings is measured by a pilot "
            "(medfedaug prospect --pilot)."
        ]
    whom = "in the mean of the sites" if site is None else f"at {site}"
    if site is not None and site not in pilot.sites:
        return [f"The pilot has no score of {site}."]
    ends, gain = pilot.interval(site or ""), -pilot.difference(site or "")
    within = "" if ends is None else f" (95% over test patients: {-ends[1]:+.3f} to {-ends[0]:+.3f})"
    rising = ", and FedAvg still improved: nothing follows from it" if pilot.rising else ""
    found = [
        f"In a pilot of {pilot.rounds} rounds FedAvg's score differed by {gain:+.3f} from that of training "
        f"alone {whom}{within}{rising}."
    ]
    together = prospect.expected(FEDAVG, "mean" if site is None else "site", site or "")
    if together is not None:
        found.append(f"Another training is expected to gain {_told(together)} over training alone {whom}.")
    if not any(prospect.gains.get("mean", {})) and not pilot.rising:
        found.append("No gain of a method is predicted from it: no such prediction is known to hold.")
    return found


def _power(prospect: Prospect, site: str | None) -> list[str]:
    asked = [one for one in prospect.sites if site in (None, one.site)]
    patients = sum(one.test_patients for one in asked)
    smallest = prospect.detectable(patients)
    if smallest is None:
        return []
    whose = "all sites" if site is None else "your"
    of = f"the {patients} test patients of {whose}" if site is None else f"your {patients} test patients"
    return [f"With {of} a gain below {smallest:.3f} cannot be distinguished from chance."]


def _told(expected: Expected) -> str:
    return f"{expected.mean:+.3f} (80%: {_ends(expected.interval80)})"


def judged_sentence(prospect: Prospect) -> str:
    """Say of how many federations the record is, and which predictions after a pilot hold."""
    record = prospect.record
    text = (
        f"The record has {record.number} federations with {prospect.norm} norm, of "
        f"{len(record.families)} families, {counted(record.seeds, 'seed')} each at most."
    )
    if prospect.pilot is None:
        return text
    said = sorted(one.methods for one in prospect.claims if one.level == "mean" and one.rule is not None)
    most = max((one.judged["federations"] for one in prospect.claims), default=0)
    if said:
        return (
            f"{text} With each family left out, predictions of the mean gain after a pilot held and beat "
            f"the yardstick for {', '.join(said)}."
        )
    if most < LEAST_FEDERATIONS:
        return (
            f"{text} Predictions after a pilot are judged on {LEAST_FEDERATIONS} federations with a second "
            f"seed or more, and there are {most}."
        )
    return f"{text} With each family left out, no prediction after a pilot held and beat the yardstick."


def sentences(prospect: Prospect) -> list[str]:
    """Return the answer for the federation, and what it rests on."""
    return [*answer(prospect), judged_sentence(prospect)]


def write_prospect(
    prospect: Prospect,
    out_html: str | Path,
    *,
    site: str | None = None,
    releases: Sequence[str] = (),
) -> None:
    """Write the page."""
    out = Path(out_html)
    check_page(out)
    html, body = start_page("Should we train together?" if site is None else f"Should {site} join?")
    for sentence in answer(prospect, site):
        add(body, "p", sentence, **{"class": "answer"})
    remark(body, judged_sentence(prospect))
    for name, reason in prospect.missing.items():
        remark(body, f"Without {name}: {reason}")
    if prospect.pilot is not None:
        _pilot(body, prospect.pilot)
    _expected(body, prospect)
    _differences(body, prospect, site)
    _sites(body, prospect)
    _released(body, prospect, releases)
    _assumed(body, prospect)
    end_page(body)
    write_page(html, out)


def _pilot(body: ET.Element, pilot: Pilot) -> None:
    section = start_section(body, "Measured in the pilot")
    lines = [
        [
            name or "mean",
            *(f"{fmean(of.values()) if not name else of[name]:.3f}" for of in pilot.scores.values()),
            f"{pilot.difference(name):+.3f}",
            _ends(pilot.interval(name)),
            str(pilot.patients[name][1]) if name in pilot.patients else "–",
        ]
        for name in (*pilot.sites, "")
    ]
    header = ["site", *pilot.scores, f"{SINGLE} minus {FEDAVG}", "95%", "test patients"]
    table(section, header, lines)
    state = "still rose" if pilot.rising else "rose no longer"
    remark(
        section,
        f"Test scores ({find_metric(pilot.metric).title}) of one small training each, of {pilot.rounds} "
        f"rounds; the validation score of {FEDAVG} {state}. 95%: over other test patients, not over other "
        "trainings. –: a site sent no scores of patients.",
    )


def _expected(body: ET.Element, prospect: Prospect) -> None:
    section = start_section(body, "Gain over FedAvg")
    if not prospect.yardsticks:
        add(section, "p", f"No federation with {prospect.norm} norm is on record for this task.")
        return
    lines = []
    for methods, yardstick in sorted(prospect.yardsticks.items()):
        gain, needed = prospect.expected(methods), prospect.patients_needed(methods)
        lines.append(
            [
                f"{methods} over {SINGLE}" if methods == FEDAVG else methods,
                "–" if gain is None else f"{gain.mean:+.3f}",
                *(["–"] * 2 if gain is None else map(_ends, (gain.interval80, gain.interval95))),
                "–" if gain is None else "more than 2000" if needed is None else str(needed),
                *(_around(found) for found in (yardstick.interval80, yardstick.interval95)),
            ]
        )
    header = ["method", "expected", "80%", "95%", "patients needed", "on record, 80%", "on record, 95%"]
    table(section, header, lines)
    remark(
        section,
        "Differences of test scores in the mean of the sites. Expected: after the pilot, of methods whose "
        "predictions held and beat the yardstick with whole families of recorded federations left out; –: "
        "not known. On record: 80% and 95% of the recorded gains lie within. It is the yardstick, and says "
        "nothing about these sites. –: half of the possible gains or more, or too few federations. Patients "
        "needed: test patients with whom a gain as large as the expected one would be "
        f"found in four of five tests. {', '.join(NOT_A_REMEDY[1:])}: for comparison, and no way of training "
        "together without sharing images.",
    )
    if shown := {m: found[""] for m, found in prospect.gains.get("mean", {}).items() if m != FEDAVG}:
        figure(
            section,
            partial(interval_picture, shown),
            "80% and 95% interval of the expected gain of each method",
            "Gain in the mean of the sites. Thick: 80% interval, thin: 95% interval, dot: expected.",
            small=True,
        )


def _differences(body: ET.Element, prospect: Prospect, site: str | None) -> None:
    section = start_section(body, "Where the sites differ")
    unknown = set() if all(one.knows_geometry for one in prospect.sites) else _OF_GEOMETRY
    for group, meaning in _GROUPS.items():
        add(section, "h3", f"{group.capitalize()}: {meaning}")
        kinds = {kind: entry for kind, entry in KINDS.items() if entry.group == group}
        # A row for each site: there may be fifty, and a sheet of paper has no room for as many columns.
        lines = [
            [name, *("–" if kind in unknown else f"{apart[kind]:.2f}" for kind in kinds)]
            for name, apart in prospect.distances.items()
        ]
        table(section, ["site", *map(_named, kinds)], lines)
        meanings = [f"{_named(kind)}: {entry.text} ({entry.unit})" for kind, entry in kinds.items()]
        remark(section, f"Mean distance from the other sites, {'; '.join(meanings)}.")
    for reason in prospect.reasons(site):
        add(section, "p", f"{reason[0].upper()}{reason[1:]}.")
    figure(
        section,
        partial(distance_picture, prospect.distances),
        "Distance of each site from the others, by kind",
        "Each dot is a site. An octave is a factor of 2; deviations are those of the images within a site. "
        "–: a site's files do not say how large a voxel is.",
    )


def _sites(body: ET.Element, prospect: Prospect) -> None:
    section = start_section(body, "Sites")
    lines, named = [], any(one.scanners for one in prospect.sites)
    for one in prospect.sites:
        looked = f"{one.looked_at} of {one.cases}" if one.looked_at < one.cases else str(one.cases)
        scanners = [scanners_text(one.scanners) or "–"] if named else []
        lines.append([one.site, str(one.patients), str(one.test_patients), looked, *scanners])
    header = ["site", "patients", "test patients", "cases looked at"]
    table(section, [*header, *(["scanners"] if named else [])], lines)


def _released(body: ET.Element, prospect: Prospect, releases: Sequence[str]) -> None:
    section = start_section(body, "What leaves a site")
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
    for one in prospect.sites:
        if one.noise:
            text = f"{one.site} added noise of deviation {one.noise:.3g} to each mean, in [0, 1] of its range"
            add(section, "p", f"{text}: its distances from others seem larger for it.")


def _assumed(body: ET.Element, prospect: Prospect) -> None:
    section = start_section(body, "What was assumed")
    for text in (
        "The federations with a second seed are phantoms, trained by small networks: a real federation may "
        "gain more or less. docs/results/prospect has what was judged, and where it fails.",
        f"Networks have {prospect.norm} norm, and every site trains in every round.",
        "A difference of volumes can be one of patients or of outlines: fingerprints cannot say which.",
        f"Families: {', '.join(prospect.record.families)}.",
    ):
        remark(section, text)


def interval_picture(found: Mapping[str, Expected], *, width: float = 9.0) -> Figure:
    """Intervals of gains, a line for each method."""
    drawing = Figure(figsize=(width, 0.35 * len(found) + 0.9), layout="constrained")
    panel = drawing.add_subplot()
    tidy(panel)
    order = sorted(found, key=lambda methods: found[methods].mean)
    for place, methods in enumerate(order):
        one = found[methods]
        for ends, thick in ((one.interval95, 1.5), (one.interval80, 5.0)):
            if ends is not None:
                panel.plot(ends, (place, place), color="tab:blue", linewidth=thick, solid_capstyle="butt")
        panel.plot(one.mean, place, "o", color="white", markeredgecolor="black", markersize=6, zorder=3)
    panel.set_ylim(-0.6, len(order) - 0.4)
    panel.axvline(0, color="0.4", linewidth=1)
    panel.set_yticks(range(len(order)), order, fontsize=9)
    panel.set_xlabel("gain in score over FedAvg", fontsize=9)
    return drawing


def distance_picture(apart: Mapping[str, Mapping[str, float]], *, width: float = 9.0) -> Figure:
    """Distances by kind, a dot for each site."""
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
            label=plain_label(site),
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


def _around(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"0 ± {ends[1]:.3f}"


def _ends(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"{ends[0]:+.3f} to {ends[1]:+.3f}"
