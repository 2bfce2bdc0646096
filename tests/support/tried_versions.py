"""Versions of the table in docs/stable.md, and of files that pin them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tried() -> list[dict[str, str]]:
    """The rows of the table *Tried with*."""
    section = (ROOT / "docs/stable.md").read_text().split("## Tried with")[1]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], row, strict=True)) for row in lines[1:]]


def pins(path: str) -> dict[str, str]:
    """The versions of a file of constraints."""
    lines = (ROOT / path).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))
