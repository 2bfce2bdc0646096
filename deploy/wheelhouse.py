"""Writes the requirements with SHA-256 of a folder of wheels: `make wheelhouse` calls it.

python deploy/wheelhouse.py FOLDER

FOLDER/requirements.txt names each wheel with its version and hash, so that pip installs these files and no
others; FOLDER/SHA256SUMS is for `sha256sum --check`.
"""

import hashlib
import sys
from pathlib import Path

from packaging.utils import parse_wheel_filename


def describe(folder: Path) -> list[str]:
    """Write both files.

    Returns:
        The lines of the requirements.

    Raises:
        SystemExit: when there is no wheel, something else than wheels, or two versions of a package.
    """
    written = {"requirements.txt", "SHA256SUMS"}
    lines: dict[str, str] = {}
    sums = []
    for path in sorted(folder.iterdir()):
        if path.name in written:
            continue
        if path.suffix != ".whl":
            raise SystemExit(
                f"wheelhouse: {path.name} is not a wheel; a machine without internet cannot build it"
            )
        name, version, _, _ = parse_wheel_filename(path.name)
        if name in lines:
            raise SystemExit(f"wheelhouse: two versions of {name}; empty the folder and repeat")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines[name] = f"{name}=={version} --hash=sha256:{digest}"
        sums.append(f"{digest}  {path.name}")
    if not lines:
        raise SystemExit(f"wheelhouse: {folder} has no wheel")
    (folder / "requirements.txt").write_text("\n".join(lines.values()) + "\n")
    (folder / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    return list(lines.values())


if __name__ == "__main__":
    print(f"{len(describe(Path(sys.argv[1])))} wheels in {sys.argv[1]}")
