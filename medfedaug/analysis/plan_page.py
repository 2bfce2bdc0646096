"""A page with a plan and its reasons."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfedaug.analysis import page

if TYPE_CHECKING:
    from medfedaug.federation.planning.planner import Planned
    from medfedaug.methods.base import Payload


def write_plan_page(path: Path, planned: Planned, fingerprints: Mapping[str, Payload]) -> None:
    """Write the plan and the fingerprints behind it as one HTML file."""
    html, body = page.start_page("A plan for the volumes of a federation")
    prints = {site: {k: v.tolist() for k, v in payload.items()} for site, payload in fingerprints.items()}
    add_plan(body, planned.reasons, prints)
    page.write_page(html, path)


def add_plan(
    body: ET.Element, reasons: Sequence[Sequence[str]], fingerprints: Mapping[str, Mapping[str, Any]]
) -> None:
    """Append the plan to a page."""
    # Imported here: most runs have no plan by fingerprints, and this needs PyTorch.
    from medfedaug.federation.planning.fingerprint import QUANTILES

    page.add(body, "h2", "The plan: decisions and reasons")
    page.table(body, ("decided", "why"), reasons, words=True)
    page.add(body, "h2", "The sites' volumes behind the plan")
    low, _, high = (f"{level:.0%}" for level in QUANTILES)
    note = f"Medians over the training volumes of a site, and in brackets the {low} and {high} quantiles."
    page.add(body, "p", note)
    rows = []
    for site, entry in sorted(fingerprints.items()):
        in_mm = any(entry["spacing"][1])
        shares = ", ".join(f"{share:.2%}" if share >= 0 else "not outlined" for share in entry["foreground"])
        extent = _quantiles(entry["extent"]) + (" mm" if in_mm else " voxels")
        spacing = _quantiles(entry["spacing"]) if in_mm else "not known"
        rows.append((site, f"{entry['cases'][0]:.0f}", extent, spacing, shares))
    head = ("site", "cases", "extent along x, y, z", "edges in mm", "foreground by class")
    page.table(body, head, rows, words=True)


def _quantiles(values: Sequence[Sequence[float]]) -> str:
    low, middle, high = values
    return ", ".join(
        f"{m:.4g} [{a:.4g} to {b:.4g}]" if a != b else f"{m:.4g}"
        for a, m, b in zip(low, middle, high, strict=True)
    )
