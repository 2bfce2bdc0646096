"""A page that shows a plan and why it is so."""

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
    """Write the plan and the fingerprints that it was made of as one HTML file."""
    html, body = page.start_page("A plan for the volumes of a federation")
    prints = {site: {k: v.tolist() for k, v in found.items()} for site, found in fingerprints.items()}
    add_plan(body, planned.reasons, prints)
    page.write_page(html, path)


def add_plan(
    body: ET.Element, reasons: Sequence[Sequence[str]], fingerprints: Mapping[str, Mapping[str, Any]]
) -> None:
    """Append the plan to a page."""
    # Imported here: most runs have no plan of their own, and a plan needs PyTorch.
    from medfedaug.federation.planning.fingerprint import QUANTILES

    page.add(body, "h2", "The plan: what was decided, and why")
    page.table(body, ("decided", "why"), reasons, words=True)
    page.add(body, "h2", "The sites' volumes, of which it was made")
    low, _, high = (f"{level:.0%}" for level in QUANTILES)
    note = f"Medians over the training volumes of a site, and in brackets the {low} and {high} quantiles."
    page.add(body, "p", note)
    rows = []
    for site, found in sorted(fingerprints.items()):
        spacing = _quantiles(found["spacing"]) if any(found["spacing"][1]) else "not known"
        shares = ", ".join(f"{share:.2%}" if share >= 0 else "not outlined" for share in found["foreground"])
        if "extent" in found:
            unit = "mm" if any(found["spacing"][1]) else "voxels"
            extent = f"{_quantiles(found['extent'])} {unit}"
        else:  # of a run that was planned before 0.4
            extent = f"{_quantiles(found['size'])} voxels"
        rows.append((site, f"{found['cases'][0]:.0f}", extent, spacing, shares))
    head = ("site", "cases", "extent along x, y, z", "edges in mm", "foreground by class")
    page.table(body, head, rows, words=True)


def _quantiles(values: Sequence[Sequence[float]]) -> str:
    low, middle, high = values
    return ", ".join(
        f"{m:.4g} [{a:.4g} to {b:.4g}]" if a != b else f"{m:.4g}"
        for a, m, b in zip(low, middle, high, strict=True)
    )
