"""`write_prospect` writes the page of a prospect; `answer` returns the sentences of its answer."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from medfedaug.analysis import page
from medfedaug.analysis.fingerprint_distance import KINDS
from medfedaug.analysis.gain_record import FEDAVG, LEAST_FEDERATIONS, SINGLE, Expected
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
    text = [f"What differs most: {reasons[0]}."] if reasons else ["No noticeable difference was found."]
    text += _of_pilot(prospect, site)
    remedy = prospect.remedy
    if remedy != FEDAVG:
        gain = prospect.gains["mean"][remedy][""]
        text.append(
            f"The remedy to try first is {remedy}, expected to gain {_gain_text(gain)} over FedAvg in the "
            "mean of the sites."
        )
    return [*text, *_power(prospect, site)]


def _of_pilot(prospect: Prospect, site: str | None) -> list[str]:
    """Return the result of the pilot; without one, the note that a fingerprint predicts no gain."""
    pilot = prospect.pilot
    if pilot is None:
        return [
            "Fingerprints predict no gain: a pilot measures the gain of training together "
            "(medfedaug prospect --pilot)."
        ]
    where = "in the mean of the sites" if site is None else f"at {site}"
    if site is not None and site not in pilot.sites:
        return [f"The pilot has no score of {site}."]
    ends, gain = pilot.interval(site or ""), -pilot.difference(site or "")
    within = "" if ends is None else f" (95% over test patients: {-ends[1]:+.3f} to {-ends[0]:+.3f})"
    rising = ", and FedAvg still improved: nothing follows from it" if pilot.rising else ""
    text = [
        f"In a pilot of {pilot.rounds} rounds FedAvg scored {gain:+.3f} against training alone "
        f"{where}{within}{rising}."
    ]
    together = prospect.expected(FEDAVG, "mean" if site is None else "site", site or "")
    if together is not None:
        expected = f"{_gain_text(together)} over training alone {where}"
        text.append(f"Another training is expected to gain {expected}.")
    if not any(prospect.gains.get("mean", {})) and not pilot.rising:
        text.append("No gain of a method is predicted from it: no such prediction is known to hold.")
    return text


def _power(prospect: Prospect, site: str | None) -> list[str]:
    patients = sum(one.test_patients for one in prospect.sites if site in (None, one.site))
    smallest = prospect.detectable(patients)
    if smallest is None:
        return []
    group = f"the {patients} test patients of all sites" if site is None else f"your {patients} test patients"
    return [f"With {group} a gain below {smallest:.3f} cannot be distinguished from chance."]


def _gain_text(expected: Expected) -> str:
    return f"{expected.mean:+.3f} (80%: {_ends(expected.interval80)})"


def judged_sentence(prospect: Prospect) -> str:
    """Return the size of the record, and the methods whose predictions after a pilot hold."""
    record = prospect.record
    text = (
        f"The record has {record.number} federations with {prospect.norm} norm, of "
        f"{len(record.families)} families, {counted(record.seeds, 'seed')} each at most."
    )
    if prospect.pilot is None:
        return text
    methods = sorted(
        claim.methods for claim in prospect.claims if claim.level == "mean" and claim.rule is not None
    )
    most = max((claim.judged["federations"] for claim in prospect.claims), default=0)
    if methods:
        return (
            f"{text} With each family left out, predictions of the mean gain after a pilot held and beat "
            f"the yardstick for {', '.join(methods)}."
        )
    if most < LEAST_FEDERATIONS:
        return (
            f"{text} Predictions after a pilot are judged on {LEAST_FEDERATIONS} federations with a second "
            f"seed or more; the record has {most}."
        )
    return f"{text} With each family left out, no prediction after a pilot held and beat the yardstick."


def sentences(prospect: Prospect) -> list[str]:
    """Return the answer for the federation, and its evidence."""
    return [*answer(prospect), judged_sentence(prospect)]


def write_prospect(
    prospect: Prospect, out_html: str | Path, *, site: str | None = None, releases: Sequence[str] = ()
) -> None:
    """Write the page of a prospect."""
    out = Path(out_html)
    page.check_page(out)
    html, body = page.start_page("Should we train together?" if site is None else f"Should {site} join?")
    for sentence in answer(prospect, site):
        page.add(body, "p", sentence, **{"class": "answer"})
    page.remark(body, judged_sentence(prospect))
    for name, reason in prospect.missing.items():
        page.remark(body, f"Without {name}: {reason}")
    if prospect.pilot is not None:
        _pilot(body, prospect.pilot)
    _expected(body, prospect)
    _differences(body, prospect, site)
    _sites(body, prospect)
    _released(body, prospect, releases)
    section = page.start_section(body, "Assumptions")
    for text in (
        "The federations with a second seed are phantoms, trained by small networks: a real federation may "
        "gain more or less. docs/results/prospect has the judged predictions, and their failures.",
        f"Networks have {prospect.norm} norm, and every site trains in every round.",
        "A difference of volumes can be one of patients or of outlines: fingerprints cannot say which.",
        f"Families: {', '.join(prospect.record.families)}.",
    ):
        page.remark(section, text)
    page.end_page(body)
    page.write_page(html, out)


def _pilot(body: ET.Element, pilot: Pilot) -> None:
    section = page.start_section(body, "Measured in the pilot")
    lines = [
        [
            name or "mean",
            *(f"{scores[name] if name else fmean(scores.values()):.3f}" for scores in pilot.scores.values()),
            f"{pilot.difference(name):+.3f}",
            _ends(pilot.interval(name)),
            str(pilot.patients[name][1]) if name in pilot.patients else "–",
        ]
        for name in (*pilot.sites, "")
    ]
    header = ["site", *pilot.scores, f"{SINGLE} minus {FEDAVG}", "95%", "test patients"]
    page.table(section, header, lines)
    state = "still rose" if pilot.rising else "rose no longer"
    page.remark(
        section,
        f"Test scores ({find_metric(pilot.metric).title}) of one small training each, of {pilot.rounds} "
        f"rounds; the validation score of {FEDAVG} {state}. 95%: over other test patients, not over other "
        "trainings. –: a site sent no scores of patients.",
    )


def _expected(body: ET.Element, prospect: Prospect) -> None:
    section = page.start_section(body, "Gain over FedAvg")
    if not prospect.yardsticks:
        page.add(section, "p", f"No federation with {prospect.norm} norm is on record for this task.")
        return
    lines = []
    for methods, yardstick in sorted(prospect.yardsticks.items()):
        gain, needed = prospect.expected(methods), prospect.patients_needed(methods)
        cells = ["–"] * 4
        if gain is not None:
            cells = [f"{gain.mean:+.3f}", _ends(gain.interval80), _ends(gain.interval95)]
            cells.append("more than 2000" if needed is None else str(needed))
        cells += [
            "–" if ends is None else f"0 ± {ends[1]:.3f}"
            for ends in (yardstick.interval80, yardstick.interval95)
        ]
        lines.append([f"{methods} over {SINGLE}" if methods == FEDAVG else methods, *cells])
    header = ["method", "expected", "80%", "95%", "patients needed", "on record, 80%", "on record, 95%"]
    page.table(section, header, lines)
    page.remark(
        section,
        "Differences of test scores in the mean of the sites. Expected: after the pilot, of methods whose "
        "predictions held and beat the yardstick with whole families of recorded federations left out; –: "
        "not known. On record: 80% and 95% of the recorded gains lie within. It is the yardstick, and says "
        "nothing about these sites. –: half of the possible gains or more, or too few federations. Patients "
        "needed: test patients with whom four of five tests would detect a gain as large as the expected "
        f"one. {', '.join(NOT_A_REMEDY[1:])}: for comparison, since it shares images.",
    )
    if gains := {m: by_site[""] for m, by_site in prospect.gains.get("mean", {}).items() if m != FEDAVG}:
        page.figure(
            section,
            partial(interval_picture, gains),
            "80% and 95% interval of the expected gain of each method",
            "Gain in the mean of the sites. Thick: 80% interval, thin: 95% interval, dot: expected.",
            small=True,
        )


def _differences(body: ET.Element, prospect: Prospect, site: str | None) -> None:
    section = page.start_section(body, "Differences between sites")
    unknown = set() if all(one.knows_geometry for one in prospect.sites) else _OF_GEOMETRY
    for group, meaning in _GROUPS.items():
        page.add(section, "h3", f"{group.capitalize()}: {meaning}")
        kinds = {kind: entry for kind, entry in KINDS.items() if entry.group == group}
        # A row for each site: fifty sites have no room as columns of a sheet of paper.
        lines = [
            [name, *("–" if kind in unknown else f"{distances[kind]:.2f}" for kind in kinds)]
            for name, distances in prospect.distances.items()
        ]
        page.table(section, ["site", *map(_named, kinds)], lines)
        meanings = [f"{_named(kind)}: {entry.text} ({entry.unit})" for kind, entry in kinds.items()]
        page.remark(section, f"Mean distance from the other sites, {'; '.join(meanings)}.")
    for reason in prospect.reasons(site):
        page.add(section, "p", f"{reason[0].upper()}{reason[1:]}.")
    page.figure(
        section,
        partial(distance_picture, prospect.distances),
        "Distance of each site from the others, by kind",
        "Each dot is a site. An octave is a factor of 2; deviations are of the images within a site. –: a "
        "site's files lack the size of a voxel.",
    )


def _sites(body: ET.Element, prospect: Prospect) -> None:
    section = page.start_section(body, "Sites")
    lines, with_scanners = [], any(one.scanners for one in prospect.sites)
    for one in prospect.sites:
        cases = f"{one.looked_at} of {one.cases}" if one.looked_at < one.cases else str(one.cases)
        scanners = [scanners_text(one.scanners) or "–"] if with_scanners else []
        lines.append([one.site, str(one.patients), str(one.test_patients), cases, *scanners])
    header = ["site", "patients", "test patients", "cases looked at"]
    page.table(section, [*header, *(["scanners"] if with_scanners else [])], lines)


def _released(body: ET.Element, prospect: Prospect, releases: Sequence[str]) -> None:
    section = page.start_section(body, "Data that leave a site")
    alone = "Nothing left this machine. In a job of several hospitals each would send these means:"
    for line in releases or [alone]:
        page.add(section, "p", line)
    first = prospect.sites[0]
    lines = [
        [name, str(first.entries[name].numel()), quantity.text, quantity.reason]
        for name, quantity in QUANTITIES.items()
        if name in first.entries
    ]
    if "shares" in first.entries:
        number = str(first.entries["shares"].numel())
        lines.append(["shares", number, "one for the class of the image, and 0 for others", "prevalence"])
    scanners = "no mean: manufacturers and models, of a site whose policy names them (by default none)"
    lines.append(["scanners", "–", scanners, "appearance: the scanner may cause the difference"])
    page.table(
        section, ["entry", "numbers", "a mean over the training cases of", "reason"], lines, words=True
    )
    for one in prospect.sites:
        if one.noise:
            text = f"{one.site} added noise of deviation {one.noise:.3g} to each mean, in [0, 1] of its range"
            page.add(section, "p", f"{text}: its distances from others seem larger for it.")


def interval_picture(gains: Mapping[str, Expected], *, width: float = 9.0) -> Figure:
    """Draw intervals of gains, a line for each method."""
    drawing = Figure(figsize=(width, 0.35 * len(gains) + 0.9), layout="constrained")
    panel = drawing.add_subplot()
    tidy(panel)
    order = sorted(gains, key=lambda methods: gains[methods].mean)
    for place, gain in enumerate(map(gains.__getitem__, order)):
        for ends, thickness in ((gain.interval95, 1.5), (gain.interval80, 5.0)):
            if ends is not None:
                panel.plot(ends, (place, place), color="tab:blue", linewidth=thickness, solid_capstyle="butt")
        panel.plot(gain.mean, place, "o", color="white", markeredgecolor="black", markersize=6, zorder=3)
    panel.set_ylim(-0.6, len(order) - 0.4)
    panel.axvline(0, color="0.4", linewidth=1)
    panel.set_yticks(range(len(order)), order, fontsize=9)
    panel.set_xlabel("gain in score over FedAvg", fontsize=9)
    return drawing


def distance_picture(distances: Mapping[str, Mapping[str, float]], *, width: float = 9.0) -> Figure:
    """Draw distances by kind, a dot for each site."""
    columns = legend_columns([*distances], width)
    height = 0.32 * len(KINDS) + 1 + 0.2 * math.ceil(len(distances) / columns)
    drawing = Figure(figsize=(width, height), layout="constrained")
    panel = drawing.add_subplot()
    tidy(panel)
    colours, kinds = colours_by_name(distances), list(KINDS)
    for site, values in distances.items():
        style = {"color": colours[site], "markersize": 6, "alpha": 0.8, "label": plain_label(site)}
        panel.plot([values[kind] for kind in kinds], range(len(kinds)), "o", **style)
    labels = [f"{_named(kind)} ({KINDS[kind].unit})" for kind in kinds]
    panel.set_yticks(range(len(kinds)), labels, fontsize=9)
    panel.invert_yaxis()
    panel.set_xscale("symlog", linthresh=1)
    panel.set_xticks(_TICKS, map(str, _TICKS))
    panel.minorticks_off()
    panel.set_xlim(-0.05, 1.15 * max(1, *(max(values.values()) for values in distances.values())))
    panel.set_xlabel("mean distance from the other sites", fontsize=9)
    drawing.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return drawing


def _named(kind: str) -> str:
    return kind.replace("_", " ")


def _ends(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"{ends[0]:+.3f} to {ends[1]:+.3f}"
