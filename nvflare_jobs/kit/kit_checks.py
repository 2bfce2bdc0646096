"""Checks of a kit's files and of its process on this machine.

`medfedaug.nvflare_jobs.kit.doctor` runs them with checks of software and data.
"""

import grp
import json
import pwd
import stat
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from logging.config import DictConfigurator

from nvflare.apis.workspace import Workspace
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.security.security import FLAuthorizer
from packaging.requirements import Requirement

from medfedaug.errors import ConfigError, first_line
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.kit.kit import Kit
from medfedaug.nvflare_jobs.kit.kit_process import (
    ProcessRecord,
    changes_at_restart,
    find_process,
    settings_at_start,
)
from medfedaug.nvflare_jobs.kit.startup import Check
from medfedaug.utils.files import parse_json

_MOST_SHOWN = 4
_EXTRAS = {
    "privacy": "noise, and its account of ε",
    "dicom": "predict on DICOM series",
    "pacs": "import, and predict --dicomweb or --store",
}
"""Extras of the package that commands of a site need, with their use."""


def check_process(kit: Kit) -> Check:
    """Compare the running process of a kit with the files that a restart would read."""
    process, record = find_process(kit.path), ProcessRecord.load(kit.path)
    elsewhere = process is None and record is not None and record.is_alive() and not record.stopping
    if process is None and not elsewhere:
        return Check("process", True, "does not run")
    restart = f"medfedaug site restart {kit.path}"
    if process is not None and (record is None or record.pid != process.pid):
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(process.create_time()))
        text = (
            f"runs since {since} without the components of site configure: with NVFlare's launcher, and "
            "without our check of job files; a site's logs go to the server"
        )
        return Check("process", False, text, restart)
    assert record is not None
    changes = changes_at_restart(record.settings, settings_at_start(kit.path))
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started))
    if changes:
        text = "; ".join(f"{name}: {change}" for name, change in list(changes.items())[:_MOST_SHOWN])
        more = f"; and {len(changes) - _MOST_SHOWN} more" if len(changes) > _MOST_SHOWN else ""
        # A renewed certificate takes effect at the next start; until then the old one serves.
        ok = None if all(name.startswith("startup/") for name in changes) else False
        return Check("process", ok, f"runs since {since} with other files: {text}{more}", restart)
    return _connection(kit, record, f"runs since {since}, with the files as they are")


def _connection(kit: Kit, record: ProcessRecord, text: str) -> Check:
    if kit.server:
        return Check("process", True, text)
    if record.heard is None:
        return Check("process", None, f"{text}; the server has not answered so far", "Is the server up?")
    silent = time.time() - record.heard
    if silent > 300:
        text = f"{text}; the server was last heard from {silent:.0f} s ago"
        return Check("process", None, text, "Is the server up?")
    version = record.settings.get("medfedaug")
    if record.server_version and version != record.server_version:
        text = f"{text}; medfedaug {version} here, {record.server_version} at the server"
        return Check("process", False, text, f"install the wheel of medfedaug {record.server_version}")
    return Check("process", True, f"{text}; the server answers")


def check_files(kit: Kit) -> Iterator[Check]:
    """Read the files of ``local`` as NVFlare does at its start, where an error would end it."""
    for name, problem in (
        ("privacy.json", _privacy),
        ("authorization.json", _authorization),
        ("log_config.json", _log),
        ("resources.json", _components),
    ):
        try:
            text = problem(kit)
        except ConfigError:  # another check reports it
            continue
        except KeyError as error:
            text = f"has no entry {error}"
        except Exception as error:  # NVFlare raises any kind
            text = f"{first_line(error)} ({type(error).__name__})"
        if text:
            text = f"{kit.path / 'local' / name}: {text}"
            yield Check(name, False, text, "Correct it; until then the kit does not start.")


def _privacy(kit: Kit) -> str:
    path = kit.path / "local/privacy.json"
    if path.exists():
        parse_json(path.read_text())
        create_privacy_manager(Workspace(str(kit.path)), names_only=True, is_server=kit.server)
    return ""


def _authorization(kit: Kit) -> str:
    FLAuthorizer("any", kit.policy())
    return ""


def _log(kit: Kit) -> str:
    names = ("log_config.json", "log_config.json.default")
    path = next((p for name in names if (p := kit.path / "local" / name).exists()), None)
    if path is None:
        return "is missing, and so is its default"
    content = json.loads(path.read_text())
    handlers = content["handlers"]
    used = {handler for logger in content["loggers"].values() for handler in logger.get("handlers", ())}
    if missing := used - set(handlers):
        return f"no handler {', '.join(sorted(missing))}"
    for handler in handlers.values():
        if "()" not in handler:  # a function, which the kit alone may call
            DictConfigurator({}).resolve(handler["class"])
    return ""


def _components(kit: Kit) -> str:
    """Find the module of each component, without importing it: that would cost seconds."""
    entries = kit.resources().get("components", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return "components must be a list of objects"
    if not all(isinstance(entry.get("id"), str) and entry["id"] for entry in entries):
        return "a component has no identifier (id)"
    counts = Counter(entry["id"] for entry in entries)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        return f"two components have the identifier {', '.join(twice)}"
    for entry in entries:
        module, _, name = str(entry.get("path") or entry.get("class_path") or "").rpartition(".")
        if "name" in entry and not module:
            continue
        try:
            spec = find_spec(module) if module else None
        except (ImportError, ValueError):
            spec = None
        if spec is None or not name:
            return f"component {entry['id']}: no module {module or entry.get('path')!r} is installed"
    return ""


def check_modes(kit: Kit) -> Check:
    """Look for files of a kit that other users of this machine may write."""
    folders = [kit.path, kit.path / "local", kit.path / "startup"]
    entries = [*folders, *(entry for folder in folders[1:] for entry in sorted(folder.iterdir()))]
    owner = kit.path.stat().st_uid
    for entry in entries:
        if entry.is_symlink() and not entry.exists():
            return Check("modes", False, f"{entry} is a link to nothing", f"rm {entry}")
        status = entry.stat()
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            text = f"{entry} can be written by everybody (mode {stat.S_IMODE(status.st_mode):o})"
        elif status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, owner):
            text = f"{entry} can be written by its group (mode {stat.S_IMODE(status.st_mode):o})"
        elif status.st_uid not in (owner, 0):
            text = f"{entry} belongs to another user than the kit (user {status.st_uid})"
            return Check("modes", False, f"{text}: who owns it decides what jobs may do", "Change its owner.")
        else:
            continue
        text = f"{text}: who writes there decides what jobs may do"
        return Check("modes", False, text, f"chmod -R go-w {kit.path}")
    return Check("modes", True, "only the kit's owner can write its files")


def _is_private_group(number: int, user: int) -> bool:
    """Return whether a group has only this user, as on most systems, or is root's."""
    if number == 0:
        return True
    try:
        group, owner = grp.getgrgid(number), pwd.getpwuid(user)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and set(group.gr_mem) <= {owner.pw_name}


def check_storage(kit: Kit) -> Iterator[Check]:
    """Look for old paths of folders in a kit that was moved."""
    try:
        folders, state = kit.folders(), SiteSettings.load(kit.path).state
    except ConfigError:  # other checks report it
        return
    for name, folder in folders.items():
        if not folder.is_relative_to(kit.path.resolve()):
            text = f"{name}: {folder} is outside of this kit"
            if folder.name == name or not folder.parent.is_dir():
                advice = f"medfedaug site configure {kit.path}"
                yield Check("storage", False, f"{text}, which was moved or copied", advice)
            else:
                yield Check("storage", None, text, "Leave it so if it is meant.")
    if not kit.server and state is not None and not state.is_relative_to(kit.path) and not state.is_dir():
        text = f"state: {state} is not there: ledger, pseudonyms and approvals begin anew"
        yield Check("storage", None, text, "Put it back where the site has taken part before.")


def check_extras() -> Iterator[Check]:
    """Report extras that commands of a site need and that are not installed."""
    for extra, use in _EXTRAS.items():
        missing = []
        for line in metadata.requires("medfedaug") or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
                continue
            try:
                metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                missing.append(requirement.name)
        if missing:
            advice = f"pip install 'medfedaug[{extra}]', if this machine does that."
            yield Check(f"extra {extra}", None, f"{', '.join(missing)}: missing for {use}", advice)
