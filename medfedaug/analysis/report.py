"""`write_report`: runs on one HTML page that needs nothing else, neither files nor a network."""

from __future__ import annotations

import base64
import io
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from medfedaug._version import __version__
from medfedaug.analysis.plots import byte_unit, gamma_by_layer, learning_curves, metric_by_bytes
from medfedaug.analysis.runs import Run, group_runs, load_run
from medfedaug.analysis.tables import summary_table
from medfedaug.files import write_atomic

__all__ = ["write_report"]

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1b1f; --soft: #5c5c66; --line: #d5d5dc; --page: #fff; --band: #f5f5f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6ea; --soft: #a3a3ad; --line: #3a3a42; --page: #17171a; --band: #212126 }
  img { filter: invert(.9) hue-rotate(180deg) } /* black lines become white, the colours keep their hue */
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1rem 1rem 3rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0 }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
p { margin: .5rem 0 } .soft, figcaption { color: var(--soft); font-size: .875rem }
.wide { overflow-x: auto; margin: .6rem 0 }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  overflow-wrap: normal }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page) }
thead th { background: var(--band); vertical-align: bottom; font-weight: 600 }
thead th:first-child { background: var(--band) }
table.words td { text-align: left } table.words th { text-align: left }
table.words td:last-child { min-width: 12rem; overflow-wrap: anywhere }
figure { margin: 1rem 0 }
img { width: 100%; height: auto; display: block } figure.small img { max-width: 38rem }
@media (max-width: 600px) {
  th, td { padding: .3rem .45rem } th:first-child, td:first-child { max-width: 7.5rem }
}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_WIDE, _NARROW = 9.0, 4.0  # inches; a phone shows the narrow figure at about its size


def write_report(run_dirs: Sequence[str | Path], out_html: str | Path) -> Path:
    """Write one page about one or more runs: scores, learning curves, γ, bytes, refusals, configuration.

    Args:
        run_dirs: the runs' folders.
        out_html: the page to write; replaced as a whole.

    Returns:
        ``out_html``.

    Raises:
        DataError: for a ``results.json`` that is missing or malformed.
        ConfigError: for runs that cannot be compared.
        StorageError: when the page cannot be written.
    """
    runs = [load_run(folder) for folder in run_dirs]
    page = _page(runs).encode("utf-8", "replace")
    out = Path(out_html)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, lambda file: file.write(page))
    return out


def _page(runs: Sequence[Run]) -> str:
    # An element tree escapes every text and attribute by itself: names come from other people's files.
    groups = group_runs(runs)
    html = ET.Element("html", lang="en")
    head = _add(html, "head")
    _add(head, "meta", charset="utf-8")
    _add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    _add(head, "meta", **{"http-equiv": "Content-Security-Policy", "content": _POLICY})
    title = "Federated training: " + ", ".join(groups)
    _add(head, "title", title)
    _add(head, "style", _STYLE)
    body = _add(html, "body")
    _add(body, "h1", title)
    _add(body, "p", _lead(runs))
    for section in (_scores, _curves, _traffic, _gamma, _refusals, _runs, _configuration):
        section(_add(body, "section"), groups)
    _add(body, "p", f"medfedaug {__version__}", **{"class": "soft"})
    return "<!DOCTYPE html>\n" + ET.tostring(html, encoding="unicode", method="html") + "\n"


def _lead(runs: Sequence[Run]) -> str:
    data = sorted({str(run.context["data"]) for run in runs if "data" in run.context})
    sites = sorted({site for run in runs for site in run.sites})
    unseen = sorted({site for run in runs for site in run.unseen} - set(sites))
    parts = [f"{len(runs)} run{'s' * (len(runs) > 1)}"]
    parts += [f"data {', '.join(data)}"] if data else []
    parts += [f"training sites {', '.join(sites)}"]
    parts += [f"unseen {', '.join(unseen)}"] if unseen else []
    return " · ".join(parts)


def _scores(section: ET.Element, groups: dict[str, list[Run]]) -> None:
    table = summary_table([run for members in groups.values() for run in members])
    _add(section, "h2", f"{table.metric.capitalize()} on the test cases")
    # No break within "± 0.012" or an interval, so that narrow columns break before them.
    body = [[cell.replace("± ", "±\u00a0").replace(", ", ",\u00a0") for cell in line] for line in table.body]
    _table(section, table.header, [[old[0], *new[1:]] for old, new in zip(table.body, body, strict=True)])
    for note in table.notes:
        _add(section, "p", note, **{"class": "soft"})


def _curves(section: ET.Element, groups: dict[str, list[Run]]) -> None:
    runs = [run for members in groups.values() for run in members]
    _add(section, "h2", f"{runs[0].metric.capitalize()} on the validation cases, by round")
    if not any(value is not None for run in runs for value in run.validation()):
        _add(section, "p", "No round has a validation score.")
        return
    caption = "A dot marks the round whose model was tested."
    if any(len(members) > 1 for members in groups.values()):
        caption += " Several seeds: their mean, in a band from the lowest to the highest."
    _figure(section, lambda width: learning_curves(runs, width=width), "Validation score by round", caption)


def _traffic(section: ET.Element, groups: dict[str, list[Run]]) -> None:
    runs = [run for members in groups.values() for run in members]
    _add(section, "h2", "Bytes")
    lines = []
    for label, members in groups.items():
        run = members[0]
        turns = max(1, len(run.rounds) * len(run.sites))
        parts: dict[str, list[int]] = {}
        for entry in run.rounds:
            for part, sizes in entry.get("bytes", {}).items():
                total = parts.setdefault(part, [0, 0])
                total[0] += sizes.get("up", 0)
                total[1] += sizes.get("down", 0)
        for part, (up, down) in parts.items():
            lines.append([label, part, *map(_size, (up / turns, down / turns, up + down))])
    if not lines:
        _add(section, "p", "The runs did not record what was sent.")
        return
    header = ["method", "part", "up, a site and round", "down, a site and round", "all sites, whole run"]
    _table(section, header, lines)
    _add(
        section,
        "p",
        "Content only, without the engine's framing; means over the rounds.",
        **{"class": "soft"},
    )
    if any(value is not None for run in runs for value in run.validation()):
        alt = "Mean validation score against the bytes sent so far"
        _figure(section, lambda width: metric_by_bytes(runs, width=min(width, 6)), alt, small=True)


def _gamma(section: ET.Element, groups: dict[str, list[Run]]) -> None:
    _add(section, "h2", "γ by layer")
    shown = {label: members[0] for label, members in groups.items() if members[0].gamma()}
    if not shown:
        _add(section, "p", "No method of these runs exchanges feature statistics, hence there is no γ.")
        return
    _add(
        section,
        "p",
        "γ scales the noise on a channel's statistics by how much the sites disagree on that channel. A band "
        "from the lowest to the highest channel; a band without height would be one γ for all channels.",
        **{"class": "soft"},
    )
    for label, run in shown.items():
        _add(section, "h3", f"{label}, seed {run.seed}")
        _figure(section, partial(_draw_gamma, run), f"γ by layer, {label}")


def _draw_gamma(run: Run, width: float) -> Figure:
    return gamma_by_layer(run, width=width)


def _refusals(section: ET.Element, groups: dict[str, list[Run]]) -> None:
    _add(section, "h2", "Refused updates")
    lines = [
        [
            label,
            str(run.seed),
            str(entry["round"]),
            str(refusal.get("site", "")),
            str(refusal.get("reason", "")),
        ]
        for label, members in groups.items()
        for run in members
        for entry in run.rounds
        for refusal in entry.get("refused", [])
    ]
    if lines:
        _table(section, ["method", "seed", "round", "site", "reason"], lines, words=True)
    else:
        _add(section, "p", "None.")


def _runs(section: ET.Element, groups: dict[str, list[Run]]) -> None:
    _add(section, "h2", "Runs")
    lines = []
    for label, members in groups.items():
        for run in members:
            seconds = run.context.get("seconds")
            lines.append(
                [
                    label,
                    str(run.seed),
                    str(len(run.rounds)),
                    str(run.selected_round),
                    "–" if run.mean is None else f"{run.mean:.4f}",
                    f"{seconds / 60:.1f} min" if isinstance(seconds, int | float) else "–",
                    str(run.context.get("engine", "–")),
                ]
            )
    header = [
        "method",
        "seed",
        "rounds",
        "selected round",
        f"mean test {members[0].metric}",
        "time",
        "engine",
    ]
    _table(section, header, lines)


def _configuration(section: ET.Element, groups: dict[str, list[Run]]) -> None:
    _add(section, "h2", "Configuration")
    first = {label: members[0].config for label, members in groups.items()}
    lines = []
    for key in dict.fromkeys(key for config in first.values() for key in config):
        if key == "seed":
            continue  # told run by run above
        values = {label: _plain(config.get(key)) for label, config in first.items()}
        if len(set(values.values())) == 1:
            lines.append([key, next(iter(values.values()))])
        else:
            lines += [[f"{key} ({label})", value] for label, value in values.items()]
    _table(section, ["setting", "value"], lines, words=True)


def _plain(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(v, dict) and "name" in v for v in value) and value:
        return ", ".join(v["name"] + (f" {json.dumps(v['args'])}" if v.get("args") else "") for v in value)
    if value is None or value in ([], {}):
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _size(number: float) -> str:
    size, unit = byte_unit(number)
    return f"{number / size:.4g} {unit}"


def _add(parent: ET.Element, tag: str, text: str | None = None, **attributes: str) -> ET.Element:
    child = ET.SubElement(parent, tag, attributes)
    child.text = text
    return child


def _table(
    parent: ET.Element, header: Sequence[str], body: Iterable[Sequence[str]], *, words: bool = False
) -> None:
    wide = _add(parent, "div", **{"class": "wide"})
    table = _add(wide, "table", **({"class": "words"} if words else {}))
    line = _add(_add(table, "thead"), "tr")
    for cell in header:
        _add(line, "th", cell, scope="col")
    rows = _add(table, "tbody")
    for cells in body:
        line = _add(rows, "tr")
        for cell in cells:
            _add(line, "td", cell)


def _figure(
    parent: ET.Element, draw: Callable[[float], Figure], alt: str, caption: str = "", *, small: bool = False
) -> None:
    """Draw for a wide and for a narrow window; the browser shows the one that fits."""
    figure = _add(parent, "figure", **({"class": "small"} if small else {}))
    picture = _add(figure, "picture")
    _add(picture, "source", media="(max-width: 600px)", srcset=_svg(draw(_NARROW)))
    _add(picture, "img", src=_svg(draw(_WIDE)), alt=alt)
    if caption:
        _add(figure, "figcaption", caption)


def _svg(figure: Figure) -> str:
    stream = io.BytesIO()
    # The same runs give the same page: no date, and names drawn from a fixed salt.
    with matplotlib.rc_context({"svg.hashsalt": "medfedaug"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()
