"""Steps of `make release` and `make dist`: `version NUMBER`, `notes FILE`."""

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def set_version(version: str, root: Path = ROOT, today: datetime.date | None = None) -> None:
    """Write the version into the package, CITATION.cff and SECURITY.md, and above the newest changes."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise SystemExit(f"release: {version} is not a version such as 1.2.3")
    day = (today or datetime.date.today()).isoformat()
    for name, pattern, new in (
        ("CHANGELOG.md", r"(?m)^## Unreleased$", f"## {version} ({day})"),
        ("medfedaug/_version.py", r'__version__ = ".*"', f'__version__ = "{version}"'),
        ("CITATION.cff", r"(?m)^version: .*$", f"version: {version}"),
        ("CITATION.cff", r"(?m)^date-released: .*$", f"date-released: {day}"),
        ("SECURITY.md", r"\(\d+\.\d+ today\)", f"({'.'.join(version.split('.')[:2])} today)"),
    ):
        path = root / name
        text, number = re.subn(pattern, new, path.read_text(encoding="utf-8"))
        if number != 1:
            raise SystemExit(f"release: {name} has {number} places for the version, and one was expected")
        path.write_text(text, encoding="utf-8")


def notes(out: Path, root: Path = ROOT) -> None:
    """Write the newest section of CHANGELOG.md."""
    parts = re.split(r"(?m)^(?=## )", (root / "CHANGELOG.md").read_text(encoding="utf-8"))
    out.write_text(parts[1], encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Run one step."""
    match arguments:
        case ["version", version]:
            set_version(version)
        case ["notes", out]:
            notes(Path(out))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
