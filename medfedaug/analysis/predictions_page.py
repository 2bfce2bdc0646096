"""`write_predictions_page` writes the cases of a prediction on one page, below the model's test score."""

import base64
import io
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from medfedaug.analysis import page
from medfedaug.runs.prediction.predictions_file import Predictions, look_first
from medfedaug.utils.printable import counted

PAGE = "predictions.html"  # name of the page in a folder of predictions

_MOST_PICTURES = 200
_MOST_LEFT_OUT = 100
_PIXELS = 480  # width of a picture
_NOTHING = "–"


def write_predictions_page(out: str | Path) -> Path | None:
    """Write ``predictions.html`` from ``predictions.json`` and the previews in a folder.

    The page needs no other files. It has pictures of the first 200 cases. A folder without a record has none.
    """
    out = Path(out)
    target, record = out / PAGE, Predictions.read(out)
    if not record:
        return None
    page.check_page(target)
    page.write_page(_page(out, record), target)
    return target


def _page(out: Path, record: Mapping[str, Any]) -> ET.Element:
    html, body = page.start_page("Predictions")
    cases, failed = record.get("cases", {}), record.get("failed", {})
    test = record.get("test", {"score": "no test score in this record", "warning": ""})
    if test["warning"]:
        page.add(body, "p", f"Do not rely on these predictions: {test['warning']}.", **{"class": "warning"})
    page.add(body, "p", f"The model: {test['score']}.")
    # The order was tested on label maps of models that had learned something (docs/results/look_first).
    ranked = record.get("task") == "segmentation" and "test" in record and not test["warning"]
    order = list(dict.fromkeys([*(look_first(cases) if ranked else ()), *sorted(cases)]))
    page.add(body, "p", _summary(record, len(cases), len(failed)))
    for name, text in record.get("promises", {}).items():
        page.add(body, "p", f"Promise, for the controlled maps or sets of {name}: {text}.")
    for note in record.get("notes", ()):
        page.remark(body, f"{note[:1].upper()}{note[1:]}.")
    if cases:
        _table(body, order, record, ranked=ranked)
        _pictures(body, out, order, cases)
    if failed:
        section = page.start_section(body, "Not predicted")
        rows = [(name, str(entry.get("error", ""))) for name, entry in sorted(failed.items())]
        page.table(section, ("case", "reason"), rows, words=True)
    if left := record.get("left_out", ()):
        more = f", of which {_MOST_LEFT_OUT} are shown" if len(left) > _MOST_LEFT_OUT else ""
        lines = [f"{one['path']}: {one['reason']}" for one in left[:_MOST_LEFT_OUT]]
        page.details(body, f"{len(left)} files, folders or series left out{more}", ["\n".join(lines)])
    page.remark(
        body,
        "A prediction is the output of a research tool. This page shows images of patients: keep it where "
        "they are.",
    )
    page.end_page(body)
    return html


def _summary(record: Mapping[str, Any], cases: int, failed: int) -> str:
    parts = [counted(cases, "case")]
    parts += [f"{failed} not predicted"] if failed else []
    if methods := record.get("methods"):
        parts.append(f"model trained with {', '.join(methods)}")
    if sha256 := record.get("model", {}).get("sha256"):
        parts.append(f"SHA-256 {str(sha256)[:12]}…")
    if statistics := record.get("statistics"):
        parts.append(f"normalised with the statistics of {statistics.get('of', 'unknown')}")
    return " · ".join(parts)


def _table(body: ET.Element, order: Sequence[str], record: Mapping[str, Any], *, ranked: bool) -> None:
    section = page.start_section(body, "Look at the first ones first" if ranked else "Cases by name")
    cases = record["cases"]
    if record.get("task") == "segmentation":
        header, rows = _label_maps(order, cases, record["classes"][1:], record.get("borrowed", {}))
    else:
        header = ["case", "class", "probability"]
        rows = [
            [name, cases[name]["class"], f"{cases[name]['probabilities'][cases[name]['class']]:.3f}"]
            for name in order
        ]
    for name, row in zip(order, rows, strict=True):
        row.append(str(len(cases[name]["warnings"]) or _NOTHING))
        if record.get("promises"):
            row.append(_promised(cases[name]))
    page.table(section, [*header, "unlike", *(["promise"] if record.get("promises") else [])], rows)
    for text in _explanations(header, record.get("borrowed", {}), ranked=ranked):
        page.remark(section, text)


def _label_maps(
    order: Sequence[str],
    cases: Mapping[str, Mapping[str, Any]],
    classes: Sequence[str],
    borrowed: Collection[str],
) -> tuple[list[str], list[list[str]]]:
    millimetres = all("volume_ml" in entry for entry in cases.values())
    unit, sizes, form = ("ml", "volume_ml", ".1f") if millimetres else ("pixels", "voxels", ".0f")
    named = [f"{name} (borrowed)" if name in borrowed else name for name in classes]
    header = ["case", *(f"{name}, {unit}" for name in named)]
    return header, [[case, *(f"{cases[case][sizes][name]:{form}}" for name in classes)] for case in order]


def _promised(case: Mapping[str, Any]) -> str:
    """Describe the controlled maps, or the set of classes, of a case."""
    if "no_promise" in case:
        return "none"
    if "set" in case:
        return ", ".join(case["set"]) or "empty set"
    sizes = {name: (one.get("volume_ml"), one["voxels"]) for name, one in case.get("controlled", {}).items()}
    return ", ".join(
        f"{name} {v} pixels" if ml is None else f"{name} {ml:.1f} ml" for name, (ml, v) in sizes.items()
    )


def _explanations(header: Sequence[str], borrowed: Collection[str], *, ranked: bool) -> Iterator[str]:
    if "probability" in header:
        yield "Probability: the model's probability of the class; not calibrated."
    if ranked:
        yield "Sorted by how sure the model is of its least sure class: an order, no estimate of the Dice."
    if borrowed:
        yield (
            f"Borrowed: this site outlined {', '.join(borrowed)} in no training case. The model learned how "
            "sure to be of them on other scanners, and the order depends on it."
        )
    yield (
        "Unlike: the number of differences from the federation's images. A case without any can still be "
        "wrong."
    )


def _pictures(
    body: ET.Element, out: Path, order: Sequence[str], cases: Mapping[str, Mapping[str, Any]]
) -> None:
    section = page.start_section(body, "Pictures")
    grid = page.add(section, "div", **{"class": "cases"})
    for number, name in enumerate(order[:_MOST_PICTURES], start=1):
        entry = cases[name]
        frame = page.add(grid, "figure", **{"class": "photo"})
        files = [file for file in entry["written"] if file.startswith("previews/")]
        if files and (out / files[-1]).is_file():
            page.add(frame, "img", src=thumbnail(out / files[-1]), alt=f"prediction of {name}")
        page.add(page.add(frame, "figcaption"), "strong", f"{number}. {name}")
        lost = (f"no promise: {text}" for text in entry.get("no_promise", ()))
        for text in (*entry["warnings"], *entry.get("remarks", ()), *lost):
            page.add(frame, "figcaption", text)
    if len(order) > _MOST_PICTURES:
        text = f"And {len(order) - _MOST_PICTURES} later cases of the table, without pictures here."
        page.add(section, "p", text)


def thumbnail(picture: Path) -> str:
    """Return a small copy of a picture for a page."""
    stream = io.BytesIO()
    with Image.open(picture) as image:
        image.thumbnail((_PIXELS, 4 * _PIXELS))
        image.convert("RGB").save(stream, format="jpeg", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()
