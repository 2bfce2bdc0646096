"""The modules of the package and their files."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def modules() -> dict[str, Path]:
    names = {}
    for folder, _, files in os.walk(ROOT / "medfedaug", followlinks=True):
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names[".".join(part for part in parts if part != "__init__")] = path.resolve()
    return dict(sorted(names.items()))
