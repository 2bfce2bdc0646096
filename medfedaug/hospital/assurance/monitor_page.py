"""`write_monitor_page`: the course of a site's cases, and the cases that stand out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from medfedaug.analysis import page
from medfedaug.analysis.plots import PALETTE, WIDTH, tidy
from medfedaug.analysis.predictions_page import thumbnail
from medfedaug.hospital.assurance.monitoring import DISTANCE, Monitor
from medfedaug.utils.printable import counted

PAGE = "monitor.html"  # name of the page in the folder of a monitor

_MOST_CASES = 100
_LEAST = 1e-4  # share of an alarm below which the course is drawn at the edge
_REMARK = (
    "The rules compare images and predictions with the accepted cases. They do not say whether a prediction "
    "is right; a harmless change, such as older patients, gives an alarm too. The rates hold if cases are "
    "independent: several images of one patient are not. This page names cases: keep it where they are."
)


def conclusions(monitor: Monitor) -> list[str]:
    """Return what the two rules say, in sentences; the first one answers."""
    drift, accepted = monitor.drift, len(monitor.reference)
    seen, now = (counted(len(cases), "case") for cases in (monitor.cases, monitor.shown))
    rates = {rule: f"{rate:g} per thousand cases" for rule, rate in monitor.rates.items()}
    by_chance = min(1.0, len(monitor.cases) * monitor.rates["drift"] / 1000)
    answer = f"No drift found in {seen} after {accepted} accepted ones."
    if drift:
        answer = f"Drift, seen at case {drift.case} ({drift.date}): {', '.join(drift.measures)}."
    times = max(monitor.shares.values())
    evidence = (
        f"Rule over time: the evidence is {f'{times:.2g}' if times < 1000 else 'over 1000'} times the limit. "
        f"Without a change, an alarm within {seen} has a probability of at most {by_chance:.2g} "
        f"({rates['drift']})."
    )
    expected = len(monitor.shown) * monitor.rates["case"] / 1000
    single = (
        f"Rule by case: {len(monitor.outside(monitor.shown))} of {now} in this call stand out. Without a "
        f"change, at most {expected:.2g} are expected ({rates['case']})."
    )
    if accepted < monitor.needed:
        single = (
            f"Rule by case: off. {rates['case']} need {monitor.needed} accepted cases; {accepted} allow "
            f"{1000 / (accepted + 1):.3g} or more (--case-rate)."
        )
    return [answer, evidence, single] if monitor.cases else [f"{accepted} cases are accepted.", single]


def write_monitor_page(out: Path, monitor: Monitor, entries: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write ``monitor.html`` to a folder; ``predicted`` in it has the pictures of this call's ``entries``."""
    html, body = page.start_page("Do new images look like the accepted ones?")
    answer, *texts = conclusions(monitor)
    page.add(body, "p", answer, **{"class": "warning" if monitor.drift else "answer"})
    for text in texts:
        page.add(body, "p", text)
    if monitor.cases:
        alt = "p-value of each case, and the evidence for a drift, by case"
        caption = (
            "Above, a case on or below the line stands out. Below, 1 is an alarm of the rule over time. "
            "Cases are in the order in which they came."
        )
        page.figure(page.start_section(body, "The course"), _draw_course(monitor), alt, caption)
    if outside := monitor.outside(monitor.cases)[: -_MOST_CASES - 1 : -1]:
        section = page.start_section(body, "Cases that stand out")
        rows = [[case.name, case.date, f"{case.p:.3g}", monitor.differences(case)] for case in outside]
        page.table(section, ("case", "added", "p", "what differs most"), rows, words=True)
        grid = page.add(section, "div", **{"class": "cases"})
        for case in monitor.outside(monitor.shown)[:_MOST_CASES]:
            for file in entries[case.name]["written"] if case.name in entries else ():
                if file.startswith("previews/") and (out / "predicted" / file).is_file():
                    frame = page.add(grid, "figure", **{"class": "photo"})
                    picture = thumbnail(out / "predicted" / file)
                    page.add(frame, "img", src=picture, alt=f"prediction of {case.name}")
                    page.add(frame, "figcaption", case.name)
    section, shares = page.start_section(body, "Measures"), monitor.shares
    columns = [np.array([case.values for case in cases]) for cases in (monitor.reference, monitor.shown)]
    medians = [[f"{m:.3g}" for m in np.median(c, axis=0)] if len(c) else ["–"] * len(shares) for c in columns]
    names = monitor.measures
    rows = [
        [name, medians[0][j], monitor.range(j), medians[1][j], f"{shares[name]:.2g}"]
        for j, name in enumerate(names)
    ]
    header = ("measure", "accepted: median", "range", "this call: median", "evidence for a drift")
    page.table(section, header, [*rows, [DISTANCE, "–", "–", "–", f"{shares[DISTANCE]:.2g}"]])
    page.remark(section, _REMARK)
    page.end_page(body)
    page.write_page(html, out / PAGE)
    return out / PAGE


def _draw_course(monitor: Monitor) -> Figure:
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    numbers = range(1, len(monitor.cases) + 1)
    upper.plot(numbers, [case.p for case in monitor.cases], "o", color=PALETTE[0], markersize=4)
    lower.plot(numbers, [max(case.share, _LEAST) for case in monitor.cases], ".-", color=PALETTE[0])
    texts = ("p of the case", "evidence for a drift")
    for panel, text, limit in zip((upper, lower), texts, (monitor.rates["case"] / 1000, 1), strict=True):
        tidy(panel)
        panel.set_yscale("log")
        panel.set_ylabel(text, fontsize=9)
        panel.axhline(limit, color=PALETTE[1], linestyle="--", linewidth=1)
    upper.yaxis.set_minor_formatter(NullFormatter())
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    lower.set_xlabel("case", fontsize=9)
    return figure
