"""Add built pages under their version to the folder of all versions.

python docs/publish.py build/html PAGES 0.4.0

PAGES/index.html leads to the newest version, PAGES/versions.json lists them, newest first.
"""

import json
import shutil
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version


def publish(html: Path, pages: Path, version: str) -> list[str]:
    """Replace the pages of one version.

    Returns:
        All versions, newest first; ``dev`` is last.
    """
    shutil.rmtree(pages / version, ignore_errors=True)
    shutil.copytree(html, pages / version)
    names = [path.name for path in pages.iterdir() if (path / "index.html").is_file()]
    versions = sorted((name for name in names if _number(name)), key=Version, reverse=True)
    versions += sorted(set(names) - set(versions))
    (pages / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    (pages / ".nojekyll").touch()  # folders that begin with an underscore are pages too
    (pages / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>medfedaug</title>'
        f'<meta http-equiv="refresh" content="0; url={versions[0]}/">\n'
    )
    return versions


def _number(name: str) -> bool:
    try:
        Version(name)
    except InvalidVersion:
        return False
    return True


if __name__ == "__main__":
    print(*publish(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
