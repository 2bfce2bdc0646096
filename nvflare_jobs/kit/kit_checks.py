"""Checks of a kit's files and of its process: what NVFlare would die of, what others could change, what runs.

Each is about one kit on this machine; `medfedaug.nvflare_jobs.kit.doctor` puts them beside those of software
and data.
"""

from __future__ import annotations

import grp
import json
import pwd
import stat
import time
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from logging.config import DictConfigurator

from nvflare.apis.workspace import Workspace
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.security.security import FLAuthorizer
from packaging.requirements import Requirement

from medfedaug.errors import ConfigError, first_line
from medfedaug.nvflare_jobs.kit.kit import Kit
from medfedaug.nvflare_jobs.kit.kit_process import (
    ProcessRecord,
    changes_at_restart,
    find_process,
    settings_at_start,
)
from medfedaug.nvflare_jobs.kit.startup import Check
from medfedaug.privacy.site_settings import SiteSettings
from medfedaug.utils.files import parse_json

_MOST_SHOWN = 4
_EXTRAS = {
    "privacy": "noise, and its account of ε",
    "dicom": "predict on DICOM series",
    "pacs": "import, and predict --dicomweb or --store",
}
"""Extras of the package that commands of a site need, each with what needs it."""


def check_process(kit: Kit) -> Check:
    """Compare the running process of a kit with the files that it would read if it were started now."""
    process, record = find_process(kit.path), ProcessRecord.load(kit.path)
    elsewhere = process is None and record is not None and record.is_alive() and not record.stopping
    if process is None and not elsewhere:
        return Check("process", True, "does not run")
    restart = f"medfedaug restart {kit.path}"
    if process is not None and (record is None or record.pid != process.pid):
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(process.create_time()))
        found = (
            f"runs since {since} without the components of site-config: with NVFlare's launcher, and without "
            "our check of job files; a site's logs go to the server"
        )
        return Check("process", False, found, restart)
    assert record is not None
    changes = changes_at_restart(record.settings, settings_at_start(kit.path))
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started))
    if changes:
        shown = "; ".join(f"{name}: {change}" for name, change in list(changes.items())[:_MOST_SHOWN])
        more = f"; and {len(changes) - _MOST_SHOWN} more" if len(changes) > _MOST_SHOWN else ""
        # A certificate that was renewed serves until the next start.
        ok = None if all(name.startswith("startup/") for name in changes) else False
        return Check("process", ok, f"runs since {since} with other files: {shown}{more}", restart)
    return Check("process", *_standing(kit, record, since))


def _standing(kit: Kit, record: ProcessRecord, since: str) -> tuple[bool | None, str, str]:
    state = f"runs since {since}, with the files as they are"
    if kit.server:
        return True, state, ""
    if record.heard is None:
        return None, f"{state}; the server has not answered so far", "Is the server up?"
    silent = time.time() - record.heard
    if silent > 300:
        return None, f"{state}; the server was last heard from {silent:.0f} s ago", "Is the server up?"
    own = record.settings.get("medfedaug")
    if record.server_version and own != record.server_version:
        found = f"{state}; medfedaug {own} here, {record.server_version} at the server"
        return False, found, f"install the wheel of medfedaug {record.server_version}"
    return True, f"{state}; the server answers", ""


# ------------------------------------------------------------------ files


def check_files(kit: Kit) -> Iterator[Check]:
    """Read the files of ``local`` as NVFlare does when it starts, which would end it with a traceback."""
    local, mend = kit.path / "local", "Correct it; until then the kit does not start."
    for name, problem in (
        ("privacy.json", _privacy(kit)),
        ("authorization.json", _authorization(kit)),
        ("log_config.json", _log(kit)),
        ("resources.json", _components(kit)),
    ):
        if problem:
            yield Check(name, False, f"{local / name}: {problem}", mend)


def _privacy(kit: Kit) -> str:
    try:
        parse_json((kit.path / "local/privacy.json").read_text())
        create_privacy_manager(Workspace(str(kit.path)), names_only=True, is_server=kit.server)
    except FileNotFoundError:
        return ""
    except Exception as error:  # NVFlare's, of any kind
        return _reason(error)
    return ""


def _authorization(kit: Kit) -> str:
    try:
        FLAuthorizer("any", kit.policy())
    except ConfigError:  # another check says it
        return ""
    except Exception as error:
        return _reason(error)
    return ""


def _log(kit: Kit) -> str:
    names = ("log_config.json", "log_config.json.default")
    path = next((p for name in names if (p := kit.path / "local" / name).exists()), None)
    if path is None:
        return "is missing, and so is its default"
    try:
        content = json.loads(path.read_text())
        handlers = content["handlers"]
        known = {handler for one in content["loggers"].values() for handler in one.get("handlers", ())}
        if lost := known - set(handlers):
            return f"no handler {', '.join(sorted(lost))}"
        for handler in handlers.values():
            if "()" not in handler:  # made by a function, which the kit alone may call
                DictConfigurator({}).resolve(handler["class"])
    except KeyError as error:
        return f"has no entry {error}"
    except Exception as error:
        return _reason(error)
    return ""


def _components(kit: Kit) -> str:
    """Find the module of each component, without importing it: that would cost seconds."""
    try:
        resources = kit.resources()
    except ConfigError:
        return ""
    entries = resources.get("components", [])
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        return "components must be a list of objects"
    if not all(isinstance(one.get("id"), str) and one["id"] for one in entries):
        return "a component has no identifier (id)"
    identifiers = [one["id"] for one in entries]
    if twice := sorted({name for name in identifiers if identifiers.count(name) > 1}):
        return f"two components have the identifier {', '.join(twice)}"
    for one in entries:
        module, _, name = str(one.get("path") or one.get("class_path") or "").rpartition(".")
        if "name" in one and not module:
            continue
        try:
            spec = find_spec(module) if module else None
        except (ImportError, ValueError):
            spec = None
        if spec is None or not name:
            return f"component {one.get('id')}: no module {module or one.get('path')!r} is installed"
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"has no entry {error}"
    return f"{first_line(error)} ({type(error).__name__})"


# ------------------------------------------------------------------ who may write


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
            what = f"{entry} can be written by everybody (mode {stat.S_IMODE(status.st_mode):o})"
        elif status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, owner):
            what = f"{entry} can be written by its group (mode {stat.S_IMODE(status.st_mode):o})"
        elif status.st_uid not in (owner, 0):
            what = f"{entry} belongs to another user than the kit (user {status.st_uid})"
            return Check("modes", False, f"{what}: who owns it decides what jobs may do", "Change its owner.")
        else:
            continue
        return Check(
            "modes", False, f"{what}: who writes there decides what jobs may do", f"chmod -R go-w {kit.path}"
        )
    return Check("modes", True, "only the kit's owner can write its files")


def _is_private_group(number: int, user: int) -> bool:
    """Return whether a group is that of one user, as most systems make one for each."""
    if number == 0:
        return True
    try:
        group, owner = grp.getgrgid(number), pwd.getpwuid(user)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and set(group.gr_mem) <= {owner.pw_name}


# ------------------------------------------------------------------ folders


def check_storage(kit: Kit) -> Iterator[Check]:
    """Look for folders that a kit took along by their old paths when it was moved."""
    configure = f"medfedaug site-config --kit {kit.path}"
    try:
        named = kit.folders()
        settings = SiteSettings.load(kit.path)
    except ConfigError:  # other checks say it
        return
    here = kit.path.resolve()
    for name, folder in named.items():
        if not folder.is_relative_to(here):
            is_old = folder.name == name or not folder.parent.is_dir()
            found = f"{name}: {folder} is outside of this kit"
            if is_old:
                yield Check("storage", False, f"{found}, which was moved or copied", configure)
            else:
                yield Check("storage", None, found, "Leave it so if it is meant.")
    state = settings.state
    if not kit.server and state is not None and not state.is_relative_to(kit.path) and not state.is_dir():
        found = f"state: {state} is not there: ledger, pseudonyms and approvals begin anew"
        yield Check("storage", None, found, "Put it back where the site has taken part before.")


# ------------------------------------------------------------------ software


def check_extras() -> Iterator[Check]:
    """Name the extras of the package that commands of a site need and that are not installed."""
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
