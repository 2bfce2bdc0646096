"""Custom training loops: their names in a run, and their scripts.

A loop is a Python script that calls `medfedaug.client.join`. An installed package adds one by an entry point,
whose value is the module to run as the script::

    [project.entry-points."medfedaug.loops"]
    lesion_loop = "lesion_loops.train"

A run then has its name, and the job carries no code. Otherwise the job carries the file, and the run has its
file name and the SHA-256 of its content, ``train.py@2c26b4...``; no other content runs.
"""

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from medfedaug.errors import ConfigError, config_errors
from medfedaug.utils import plugins
from medfedaug.utils.files import sha256

__all__ = ["check_loop", "find_loop", "loop_reference"]

_FILE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*\.py)@([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


def check_loop(loop: str) -> None:
    """Check the name of a loop in a run."""
    if not (_FILE.fullmatch(loop) or _NAME.fullmatch(loop)):
        raise ConfigError(
            f"loop is {loop[:80]!r}; it must be the name of a package's loop, or FILE.py@SHA-256"
        )


def loop_reference(loop: str) -> tuple[str, Path | None]:
    """Resolve a loop that a user names.

    Returns:
        The loop's name in a run, and the file that the job carries, if any.
    """
    if not loop.endswith(".py"):
        _of_package(loop)
        return loop, None
    path = Path(loop)
    with config_errors(f"loop {path}: cannot be read", OSError):
        reference = f"{path.name}@{sha256(path)}"
    if not _FILE.fullmatch(reference):
        raise ConfigError(
            f"loop {path}: the file's name goes into the job and may have English letters, digits, '.', '_' "
            "and '-' only: rename it"
        )
    return reference, path


def find_loop(loop: str, folder: Path) -> Path:
    """Return the script of a run's loop."""
    if not (match := _FILE.fullmatch(loop)):
        return _of_package(loop)
    name, expected = match.groups()
    path = folder / name
    digest = sha256(path) if path.is_file() else "none"
    if digest != expected:
        raise ConfigError(
            f"loop {name}: the job carries a file with the SHA-256 {digest[:12]}..., and was configured for "
            f"{expected[:12]}..."
        )
    return path


def _of_package(name: str) -> Path:
    plugin = plugins.find(plugins.LOOPS, name, ())
    if plugin is None:
        known = ", ".join(plugins.names(plugins.LOOPS, ())) or "none"
        raise ConfigError(f"loop {name!r}: no installed package adds it (packages add: {known})")
    spec = None
    with suppress(ImportError, ValueError):
        spec = find_spec(plugin.entry.module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise ConfigError(f"{plugin.what}: {plugin.entry.module} cannot run as a script")
    return Path(spec.origin)
