"""Training loops of a user's own: how a run names one, and where it is.

A loop is a Python script that calls `medfedaug.client.join`. Either an installed package adds it by an entry
point, whose value is the module that is run as the script::

    [project.entry-points."medfedaug.loops"]
    lesion_loop = "lesion_loops.train"

Then a run names it by its name, and a job carries no code. Or it is a file, which the job carries; then a run
names it by its file name and the SHA-256 of its content, ``train.py@2c26b4...``, and no other content is run.
"""

from __future__ import annotations

import hashlib
import re
from importlib.util import find_spec
from pathlib import Path

from medfedaug.errors import ConfigError
from medfedaug.utils import plugins

__all__ = ["check_loop", "find_loop", "loop_reference"]

_FILE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*\.py)@([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


def check_loop(loop: str) -> None:
    """Check that a text names a loop as a run does.

    Raises:
        ConfigError: when it does not.
    """
    if not (_FILE.fullmatch(loop) or _NAME.fullmatch(loop)):
        raise ConfigError(
            f"loop is {loop[:80]!r}; it must be the name of one that a package adds, or FILE.py@SHA-256"
        )


def loop_reference(loop: str) -> tuple[str, Path | None]:
    """Resolve a loop that a user names.

    Args:
        loop: the path of a script, or the name of a loop that an installed package adds.

    Returns:
        How a run names it, and the file for a job to carry, if it is to carry one.

    Raises:
        ConfigError: when there is no such file, or no package adds the name.
    """
    if not loop.endswith(".py"):
        _of_package(loop)
        return loop, None
    path = Path(loop)
    try:
        reference = f"{path.name}@{hashlib.sha256(path.read_bytes()).hexdigest()}"
    except OSError as error:
        raise ConfigError(f"loop {path}: cannot be read ({error.strerror})") from error
    if not _FILE.fullmatch(reference):
        raise ConfigError(
            f"loop {path}: the name of the file goes into the job, with letters of English, digits, '.', '_' "
            "and '-' alone: rename it"
        )
    return reference, path


def find_loop(loop: str, folder: Path) -> Path:
    """The script of a run's loop.

    Args:
        loop: as the run names it.
        folder: where the files of a job with code are.

    Raises:
        ConfigError: when it is not there, has another content, or is of a package that may not be used here.
    """
    if not (carried := _FILE.fullmatch(loop)):
        return _of_package(loop)
    name, digest = carried.groups()
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"loop {name}: the job does not carry it")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != digest:
        raise ConfigError(
            f"loop {name}: the job carries a file with the SHA-256 {found[:12]}..., and was configured for "
            f"{digest[:12]}..."
        )
    return path


def _of_package(name: str) -> Path:
    plugin = plugins.find(plugins.LOOPS, name, ())
    if plugin is None:
        known = ", ".join(plugins.names(plugins.LOOPS, ())) or "none"
        raise ConfigError(f"loop {name!r}: no installed package adds it (those that are added: {known})")
    try:
        spec = find_spec(plugin.entry.module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{plugin.what} cannot be found ({error})") from error
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise ConfigError(f"{plugin.what}: {plugin.entry.module} is no module that can be run as a script")
    return Path(spec.origin)
