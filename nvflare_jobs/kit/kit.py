"""Writes or checks what medfedaug needs in the ``local`` folder of a site's NVFlare kit.

A kit has files ``local/*.json.default``. A file without that suffix replaces the default completely. The
files that are written here start from the current file and change only single entries.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medfedaug.config.options import to_json
from medfedaug.errors import ConfigError, DataError
from medfedaug.nvflare_jobs.kit import allowed
from medfedaug.privacy import JOBS_FOLDER, LEDGER_FILE, JobBook, PrivacyLedger, PrivacyPolicy, Pseudonyms
from medfedaug.privacy.site_settings import SETTINGS_FILE, SiteSettings
from medfedaug.utils.files import parse_json, write_text

LAUNCHER = "medfedaug.nvflare_jobs.launcher.RestartingLauncher"
VALIDATOR = "medfedaug.nvflare_jobs.app_validator.JsonAppValidator"
DEFAULT_LAUNCHER = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
OWN_COMPONENTS: dict[bool, dict[str, str]] = {
    True: {
        "medfedaug_status": "medfedaug.nvflare_jobs.kit_status.KitStatus",
        "medfedaug_certificates": "medfedaug.nvflare_jobs.startup.CertificateWatch",
        "medfedaug_lost_jobs": "medfedaug.nvflare_jobs.lost_jobs.LostJobs",
    },
    False: {
        "medfedaug_status": "medfedaug.nvflare_jobs.kit_status.KitStatus",
        "medfedaug_certificates": "medfedaug.nvflare_jobs.startup.CertificateWatch",
        "medfedaug_rejoin": "medfedaug.nvflare_jobs.rejoin.JobRejoiner",
    },
}
"""Components of this package in the server's (``True``) and in a site's parent process, by their identifiers.

NVFlare builds them from ``local/resources.json``, without arguments, before it takes any job."""

_OF_A_SERVER = {"plugins", "bundles"}
"""Settings of a site that a server has too: it builds the same methods and networks."""

# NVFlare's default folder for the jobs and snapshots of all servers of a machine.
_SHARED_FOLDER = "/tmp/nvflare/"

# The rights that the default policy names. A role with one expression for all rights gets them one by one,
# since NVFlare uses such an expression before any single right.
_RIGHTS = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "shell_commands")


@dataclass
class KitFile:
    """JSON file of a kit: its current and its wanted content.

    Args:
        path: its path.
        found: its content, or that of the default; ``None`` if there is neither.
        wanted: the content that is needed.
        changes: what is missing in ``found``, in words.
    """

    path: Path
    found: dict[str, Any] | None
    wanted: dict[str, Any]
    changes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Kit:
    """The kit of a server or of a site, made by NVFlare's provisioning or POC mode.

    Args:
        path: its folder.
        server: whether it is the server's.
    """

    path: Path
    server: bool

    @property
    def name(self) -> str:
        """The site's name at the server and in the data folder. The kit's folder may have another name."""
        file = "fed_server.json" if self.server else "fed_client.json"
        startup = _read(self.path / "startup" / file) or {}
        return str((startup.get("client") or {}).get("fqsn") or self.path.resolve().name).rsplit(".", 1)[-1]

    def plan(
        self, changes: Mapping[str, Any] | None = None, *, forbid: bool = False, only: bool = False
    ) -> list[KitFile]:
        """The files that medfedaug needs, with the changes to each. Nothing is written.

        Args:
            changes: settings of the site that change, as `medfedaug.privacy.site_settings.SiteSettings` has
                them in JSON; its groups keep what is not named. Plug-ins and Bundles are allowed in addition
                to those that are set; of Bundles with one name, the new one from now on.
            forbid: refuse jobs that carry code.
            only: allow only jobs of this package.

        Raises:
            ConfigError: naming the file that cannot be used, or a setting that a server does not have.
        """
        files = [self._resources(only)]
        changes = {name: value for name, value in (changes or {}).items() if value not in ({}, (), [])}
        changes = {k: v.resolve() if isinstance(v, Path) else v for k, v in changes.items()}
        if changes.get("data") and not (self.path / changes["data"]).is_dir():
            raise ConfigError(f"{changes['data']}: no such folder")
        own = {name: value for name, value in changes.items() if name not in _OF_A_SERVER}
        if self.server and own:
            named = (", ".join(value) if isinstance(value, Mapping) else name for name, value in own.items())
            raise ConfigError(f"{self.path}: a server has no {', '.join(named)} of its own")
        if not self.server or changes:
            files.append(self._settings(to_json(changes)))
        if forbid:
            files.append(self._policy())
        return files

    def write(self, files: Iterable[KitFile]) -> None:
        """Write the files that have changes, each whole or not at all: they hold what the site allows.

        Raises:
            StorageError: naming the file that cannot be written; what it held is still there.
        """
        for file in files:
            if file.changes:
                # Through a link, which is the administrator's own, and stays.
                write_text(os.path.realpath(file.path), json.dumps(file.wanted, indent=2) + "\n")

    def policy(self) -> dict[str, Any]:
        """The current authorization policy."""
        return _in_force(self.path / "local/authorization.json") or {}

    def resources(self) -> dict[str, Any]:
        """The current resources."""
        return _in_force(self.path / "local/resources.json") or {}

    def launchers(self) -> list[str]:
        """The class paths of launchers of job processes. NVFlare needs exactly one."""
        paths = (str(component.get("path", "")) for component in _components(self.resources()))
        return [path for path in paths if path.endswith("Launcher")]

    def lacking_components(self) -> list[str]:
        """The class paths of `OWN_COMPONENTS` that the kit does not have."""
        found = {component.get("path") for component in _components(self.resources())}
        return [path for path in OWN_COMPONENTS[self.server].values() if path not in found]

    def folders(self) -> dict[str, Path]:
        """The server's folders of jobs and of snapshots, by their names; a site has none."""
        places = self._storage(self.resources())
        return {name: Path(str(values[key])) for name, (values, key) in places.items()}

    def job_book(self) -> JobBook:
        """The jobs that the site has seen."""
        return JobBook(self.state_folder() / JOBS_FOLDER)

    def pseudonyms(self) -> Pseudonyms:
        """Return the pseudonyms of the site's cases.

        Raises:
            ConfigError: for a server's kit, or settings or a key that cannot be read.
        """
        return Pseudonyms.of_site(self.state_folder())

    def ledger(self) -> PrivacyLedger:
        """The account of what has left the site."""
        return PrivacyLedger(self.state_folder().parent / LEDGER_FILE)

    def bind_account(self, files: Iterable[KitFile]) -> None:
        """Write beside the site's images which ledger counts the releases about them, once they are there."""
        # Commands that only read the kit answer at once without these.
        from medfedaug.data.sites import open_site
        from medfedaug.federation.site.data_folder import resolve_data_folder
        from medfedaug.privacy.account_mark import bind_account

        content = next(file.wanted for file in files if file.path == self.path / SETTINGS_FILE)
        settings = SiteSettings.load(self.path, content=content)
        assert settings.state is not None  # a kit always has one
        try:
            site = open_site(resolve_data_folder(self.name, settings.data), name=self.name)
        except DataError:  # the folder is filled later, or `doctor` names what is wrong with it
            return
        bind_account(PrivacyLedger(settings.state / LEDGER_FILE), site)

    def state_folder(self) -> Path:
        """The folder of what a site keeps."""
        if self.server:
            raise ConfigError(f"{self.path}: is the server's kit; name a site's")
        state = SiteSettings.load(self.path).state
        assert state is not None  # a kit always has one
        return state / self.name

    def _resources(self, only: bool) -> KitFile:
        path = self.path / "local/resources.json"
        found = _in_force(path)
        if found is None:
            raise ConfigError(f"{path}: is missing, and so is {path.name}.default; provision the kit again")
        file = KitFile(path, found, copy.deepcopy(found))
        self._classes(file, only)
        self._validator(file)
        self._add_components(file)
        for component in _components(file.wanted):
            if not self.server and component.get("path") == DEFAULT_LAUNCHER:
                component.update(path=LAUNCHER, args={})
                file.changes.append(f"{component.get('id')}: {LAUNCHER}")
        if not self.server and sends_logs(file.wanted):
            # A site's log names its cases and files.
            file.wanted["allow_log_streaming"] = False
            file.changes.append("allow_log_streaming: false")
        self._own_folders(file)
        return file

    def _classes(self, file: KitFile, only: bool) -> None:
        """Allow the classes of this package one by one, and remove entries that allow more of it."""
        assert file.found is not None
        before = allowed.allow_list(file.found)
        after = allowed.wanted(before, self.server, only)
        if before != after:
            file.wanted["class_allow_list"] = after
            file.changes += [f"class_allow_list: {entry}" for entry in after if entry not in before]
            gone = [entry for entry in before if entry not in after]
            shown = ", ".join(gone) if len(gone) <= 3 else f"{len(gone)} other entries"
            file.changes += [f"class_allow_list: without {shown}"] if gone else []
        if only and file.wanted.pop("class_list_enforcement_mode", "enforce") != "enforce":
            file.changes.append("class_list_enforcement_mode: enforce")

    def _validator(self, file: KitFile) -> None:
        """Admit jobs in plain JSON alone; a validator of the site's own is asked next."""
        present = file.wanted.get("app_validator")
        if not validates_json(file.wanted):
            file.wanted["app_validator"] = {"path": VALIDATOR, "args": {"also": present} if present else {}}
            file.changes.append(f"app_validator: {VALIDATOR}")

    def _add_components(self, file: KitFile) -> None:
        """Add the components of this package first: NVFlare builds them in this order."""
        found = {component.get("path") for component in _components(file.wanted)}
        missing = {name: path for name, path in OWN_COMPONENTS[self.server].items() if path not in found}
        added = [{"id": name, "path": path, "args": {}} for name, path in missing.items()]
        others = [c for c in file.wanted.get("components", []) if c.get("id") not in missing]
        if added:
            file.wanted["components"] = [*added, *others]
            file.changes += [f"{name}: {path}" for name, path in missing.items()]

    def _own_folders(self, file: KitFile) -> None:
        """Bring the server's storage into its kit from a folder that all servers share, or an old place."""
        for name, (values, key) in self._storage(file.wanted).items():
            folder, own = Path(str(values[key])), self.path.resolve() / name
            if folder != own and (str(folder).startswith(_SHARED_FOLDER) or folder.name == name):
                values[key] = str(own)
                file.changes.append(f"{name}: {own}")

    def _storage(self, resources: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
        """The arguments that name the server's folders of jobs and of snapshots, by the folders' names."""
        if not self.server:
            return {}
        snapshots = resources.get("snapshot_persistor") or {}
        storage = (snapshots.get("args") or {}).get("storage") or {}
        places = [("snapshot-storage", storage.get("args") or {}, "root_dir")]
        places += [("jobs-storage", one.get("args") or {}, "uri_root") for one in _components(resources)]
        return {name: (values, key) for name, values, key in places if values.get(key)}

    def _settings(self, changes: Mapping[str, Any]) -> KitFile:
        path = self.path / SETTINGS_FILE
        found = _read(path)
        if found is not None:
            SiteSettings.from_dict(found, path)
        limits = {} if self.server else {"privacy": {"min_images": PrivacyPolicy().min_images}}
        wanted: dict[str, Any] = {**limits, **copy.deepcopy(found or {})}
        for name, value in changes.items():
            if isinstance(value, Mapping):
                value = {**wanted.get(name, {}), **value}
            elif name == "plugins":
                value = list(dict.fromkeys([*wanted.get(name, []), *value]))
            wanted[name] = value
        SiteSettings.from_dict(wanted, path)
        before = found or {}
        changed = [f"{key}: {json.dumps(value)}" for key, value in wanted.items() if before.get(key) != value]
        return KitFile(path, found, wanted, changed)

    def _policy(self) -> KitFile:
        path = self.path / "local/authorization.json"
        found = _in_force(path)
        if found is None:
            raise ConfigError(f"{path}: is missing, and so is {path.name}.default; provision the kit again")
        wanted, roles = forbid_code(found)
        changes = [f"permissions.{role}.byoc: none" for role in roles]
        return KitFile(path, found, wanted, changes)


def open_kit(path: str | Path) -> Kit:
    """Open the kit of a server or of a site."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder")
    startup = path / "startup"
    for file, server in (("fed_server.json", True), ("fed_client.json", False)):
        if (startup / file).is_file():
            if not (path / "local").is_dir():
                raise ConfigError(f"{path}: the kit has no folder 'local'; provision it again")
            return Kit(path, server)
    if (startup / "fed_admin.json").is_file():
        raise ConfigError(f"{path}: is an administrator's kit; name the server's or a site's")
    raise ConfigError(
        f"{path}: is not an NVFlare kit (no startup/fed_client.json or fed_server.json); name the folder "
        "that holds 'startup' and 'local'"
    )


def validates_json(resources: Mapping[str, Any]) -> bool:
    """Return whether a server or site with these resources refuses jobs that are not plain JSON."""
    found = resources.get("app_validator")
    return isinstance(found, dict) and found.get("path") == VALIDATOR


def sends_logs(resources: Mapping[str, Any]) -> bool:
    """Return whether a site with these resources sends the logs of its jobs to the server."""
    return resources.get("allow_log_streaming") is not False


def forbid_code(policy: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A policy under which nobody may send a job that carries code.

    It is not enough to set the right ``byoc`` of the role ``lead``: the project administrator's role has one
    expression for all rights.

    Returns:
        The policy, and the roles that had this right before.
    """
    wanted, roles = copy.deepcopy(policy), []
    for role, rights in wanted.get("permissions", {}).items():
        if not isinstance(rights, dict):
            wanted["permissions"][role] = {**dict.fromkeys(_RIGHTS, rights), "byoc": "none"}
            roles.append(role)
        elif rights.get("byoc", "none") != "none":
            rights["byoc"] = "none"
            roles.append(role)
    return wanted, roles


def _components(resources: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in resources.get("components", []) if isinstance(entry, dict)]


def _in_force(path: Path) -> dict[str, Any] | None:
    content = _read(path)
    return _read(path.with_name(f"{path.name}.default")) if content is None else content


def _read(path: Path) -> dict[str, Any] | None:
    if path.exists() and not path.is_file():  # a FIFO would be waited for
        raise ConfigError(f"{path}: is no file")
    try:
        content = parse_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a JSON object is needed, got {type(content).__name__}")
    return content
