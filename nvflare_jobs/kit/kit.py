"""Write and check medfedaug's entries in the ``local`` folder of an NVFlare kit.

A kit has files ``local/*.json.default``. A file without that suffix replaces the default completely. A file
that is written here keeps the other entries of the current one.
"""

import copy
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medfedaug._version import __version__
from medfedaug.config.options import to_json
from medfedaug.errors import ConfigError, DataError, config_errors
from medfedaug.hospital.privacy import (
    JOBS_FOLDER,
    LEDGER_FILE,
    JobBook,
    PrivacyLedger,
    PrivacyPolicy,
    Pseudonyms,
)
from medfedaug.hospital.privacy.site_settings import SETTINGS_FILE, SiteSettings
from medfedaug.utils.files import parse_json, write_text

# NVFlare builds the classes of this list with arguments from the job. An entry that ends with a dot would
# allow everything below it, including every function and class that a module there has imported.
_SERVER = (
    "medfedaug.nvflare_jobs.job.controller.FederationController",
    "medfedaug.nvflare_jobs.job.comparison.ComparisonController",
)
_SITE = (
    "medfedaug.nvflare_jobs.job.executor.SiteExecutor",
    "medfedaug.nvflare_jobs.job.comparison.ComparisonExecutor",
)
_ENFORCEMENT = "class_list_enforcement_mode"


def allowed_classes(server: bool) -> list[str]:
    """List the classes that a job without code may name at the server, or at a site."""
    return [*(_SERVER if server else _SITE)]


def restrict_classes(resources: dict[str, Any], server: bool) -> list[str]:
    """Allow only `allowed_classes`; return the changes in words."""
    before, after = resources.get("class_allow_list", "NVFlare's own"), allowed_classes(server)
    changes = []
    if before != after:
        resources["class_allow_list"] = after
        changes.append(f"class_allow_list: the {len(after)} classes of medfedaug's jobs")
    if resources.get(_ENFORCEMENT, "enforce") != "enforce":
        del resources[_ENFORCEMENT]
        changes.append(f"{_ENFORCEMENT}: enforce")
    return changes


LAUNCHER = "medfedaug.nvflare_jobs.kit.launcher.RestartingLauncher"
VALIDATOR = "medfedaug.nvflare_jobs.kit.app_validator.JsonAppValidator"
_DEFAULT_LAUNCHER = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
_STATUS = {"medfedaug_status": "medfedaug.nvflare_jobs.kit.kit_status.KitStatus"}
OWN_COMPONENTS: dict[bool, dict[str, str]] = {
    True: {**_STATUS, "medfedaug_lost_jobs": "medfedaug.nvflare_jobs.kit.lost_jobs.LostJobs"},
    False: {**_STATUS, "medfedaug_rejoin": "medfedaug.nvflare_jobs.kit.rejoin.JobRejoiner"},
}
"""Components of this package in the server's (``True``) and in a site's parent process, by their identifiers.

NVFlare builds them from ``local/resources.json``, without arguments, before it takes any job."""

_CONFIGURED_BY = "medfedaug"  # entry of ``local/resources.json``: the version that configured the kit

_SERVER_SETTINGS = {"plugins", "bundles"}
"""Settings of a site that a server has too: it builds the same methods and networks."""

# NVFlare's default folder for the jobs and snapshots of all servers of a machine.
_SHARED_FOLDER = "/tmp/nvflare/"

# The rights of the default policy. A role with one expression for all rights gets them one by one, since such
# an expression precedes any single right.
_RIGHTS = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "shell_commands")


@dataclass
class KitFile:
    """JSON file of a kit, its new content, and the changes in words."""

    path: Path
    wanted: dict[str, Any]
    changes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Kit:
    """The kit of a server or of a site, made by NVFlare's provisioning or POC mode."""

    path: Path
    server: bool

    @property
    def name(self) -> str:
        """The site's name at the server and in the data folder; the kit's folder may have another name."""
        file = "fed_server.json" if self.server else "fed_client.json"
        startup = _read(self.path / "startup" / file) or {}
        return str((startup.get("client") or {}).get("fqsn") or self.path.resolve().name).rsplit(".", 1)[-1]

    def plan(self, changes: Mapping[str, Any] | None = None, *, forbid: bool = False) -> list[KitFile]:
        """Return the files that medfedaug needs, with the changes to each, without writing them.

        Args:
            changes: new settings of the site, in the JSON form of
                `medfedaug.hospital.privacy.site_settings.SiteSettings`; its groups keep their other
                settings. Plug-ins and Bundles are added to the allowed ones; a new Bundle replaces one of
                the same name.
        """
        files = [self._resources()]
        changes = {name: value for name, value in (changes or {}).items() if value not in ({}, (), [])}
        changes = {k: v.resolve() if isinstance(v, Path) else v for k, v in changes.items()}
        if changes.get("data") and not (self.path / changes["data"]).is_dir():
            raise ConfigError(f"{changes['data']}: no such folder")
        if self.server and (of_sites := {k: v for k, v in changes.items() if k not in _SERVER_SETTINGS}):
            names = (", ".join(v) if isinstance(v, Mapping) else name for name, v in of_sites.items())
            raise ConfigError(f"{self.path}: a server has no {', '.join(names)} of its own")
        if not self.server or changes:
            files.append(self._settings(to_json(changes)))
        private = any((file.wanted.get("privacy") or {}).get("epsilon") is not None for file in files)
        if forbid or private:  # code has no bound, and would leave the account of ε aside
            files.append(self._policy())
        return files

    def write(self, files: Iterable[KitFile]) -> None:
        """Write the files that have changes, each whole or not at all."""
        for file in files:
            if file.changes:
                # An administrator's link stays a link.
                write_text(os.path.realpath(file.path), json.dumps(file.wanted, indent=2) + "\n")

    def policy(self) -> dict[str, Any]:
        """The current authorization policy."""
        return _in_force(self.path / "local/authorization.json") or {}

    def missing(self) -> list[str]:
        """The changes that `medfedaug site configure` of this version makes to ``local/resources.json``."""
        return self._resources().changes

    def folders(self) -> dict[str, Path]:
        """The server's folders of jobs and of snapshots, by their names; a site has none."""
        arguments = self._storage(_in_force(self.path / "local/resources.json") or {})
        return {name: Path(str(values[key])) for name, (values, key) in arguments.items()}

    def job_book(self) -> JobBook:
        """The jobs that have come to the site."""
        return JobBook(self.state_folder() / JOBS_FOLDER)

    def pseudonyms(self) -> Pseudonyms:
        """Return the pseudonyms of the site's cases."""
        return Pseudonyms.of_site(self.state_folder())

    def ledger(self) -> PrivacyLedger:
        """The account of the site's releases."""
        return PrivacyLedger(self.state_folder().parent / LEDGER_FILE)

    def bind_account(self, files: Iterable[KitFile]) -> None:
        """Write next to the site's images, if they exist, which ledger counts the releases about them."""
        # Commands that only read the kit answer at once without these.
        from medfedaug.data.sites import open_site
        from medfedaug.federation.site.data_folder import resolve_data_folder
        from medfedaug.hospital.privacy.ledger import bind_account

        content = next(file.wanted for file in files if file.path == self.path / SETTINGS_FILE)
        settings = SiteSettings.load(self.path, content=content)
        assert settings.state is not None  # a kit always has one
        try:
            site = open_site(resolve_data_folder(self.name, settings.data), name=self.name)
        except DataError:  # the folder is filled later, or `doctor` names the problem
            return
        bind_account(PrivacyLedger(settings.state / LEDGER_FILE), site)

    def state_folder(self) -> Path:
        """The folder of a site's state."""
        if self.server:
            raise ConfigError(f"{self.path}: is the server's kit; name a site's")
        state = SiteSettings.load(self.path).state
        assert state is not None  # a kit always has one
        return state / self.name

    def _resources(self) -> KitFile:
        file = self._file("resources.json")
        if file.wanted.get(_CONFIGURED_BY) != __version__:
            file.wanted[_CONFIGURED_BY] = __version__
            file.changes.append(f"{_CONFIGURED_BY}: {__version__}")
        file.changes += restrict_classes(file.wanted, self.server)
        present = file.wanted.get("app_validator")
        if (present or {}).get("path") != VALIDATOR:  # it asks the site's present one next
            file.wanted["app_validator"] = {"path": VALIDATOR, "args": {"also": present} if present else {}}
            file.changes.append(f"app_validator: {VALIDATOR}")
        self._add_components(file)
        for component in file.wanted.get("components", []):
            if not self.server and component.get("path") == _DEFAULT_LAUNCHER:
                component.update(path=LAUNCHER, args={})
                file.changes.append(f"{component.get('id')}: {LAUNCHER}")
        if not self.server and file.wanted.get("allow_log_streaming") is not False:
            # A site's log has names of cases and files.
            file.wanted["allow_log_streaming"] = False
            file.changes.append("allow_log_streaming: false")
        self._own_folders(file)
        return file

    def _add_components(self, file: KitFile) -> None:
        """Add the components of this package first: NVFlare builds them in this order."""
        components = file.wanted.get("components", [])
        present = {component.get("path") for component in components}
        missing = {name: path for name, path in OWN_COMPONENTS[self.server].items() if path not in present}
        if missing:
            added = [{"id": name, "path": path, "args": {}} for name, path in missing.items()]
            rest = [component for component in components if component.get("id") not in missing]
            file.wanted["components"] = [*added, *rest]
            file.changes += [f"{name}: {path}" for name, path in missing.items()]

    def _own_folders(self, file: KitFile) -> None:
        """Move the server's storage into its kit from a shared folder, or an earlier place."""
        for name, (values, key) in self._storage(file.wanted).items():
            before, after = Path(str(values[key])), self.path.resolve() / name
            if before != after and (str(before).startswith(_SHARED_FOLDER) or before.name == name):
                values[key] = str(after)
                file.changes.append(f"{name}: {after}")

    def _storage(self, resources: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
        """Return the arguments with the server's folders of jobs and of snapshots, by the folders' names."""
        if not self.server:
            return {}
        snapshots = resources.get("snapshot_persistor") or {}
        storage = (snapshots.get("args") or {}).get("storage") or {}
        places = [("snapshot-storage", storage.get("args") or {}, "root_dir")]
        places += [("jobs-storage", c.get("args") or {}, "uri_root") for c in resources.get("components", [])]
        return {name: (values, key) for name, values, key in places if values.get(key)}

    def _settings(self, changes: Mapping[str, Any]) -> KitFile:
        path = self.path / SETTINGS_FILE
        before = _read(path) or {}
        SiteSettings.from_dict(before, path)
        limits = {} if self.server else {"privacy": {"min_images": PrivacyPolicy().min_images}}
        wanted: dict[str, Any] = {**limits, **copy.deepcopy(before)}
        for name, value in changes.items():
            if isinstance(value, Mapping):
                value = {**wanted.get(name, {}), **value}
            elif name == "plugins":
                value = list(dict.fromkeys([*wanted.get(name, []), *value]))
            wanted[name] = value
        SiteSettings.from_dict(wanted, path)
        changed = [f"{key}: {json.dumps(value)}" for key, value in wanted.items() if before.get(key) != value]
        return KitFile(path, wanted, changed)

    def _policy(self) -> KitFile:
        file = self._file("authorization.json")
        file.wanted, roles = forbid_code(file.wanted)
        file.changes = [f"permissions.{role}.byoc: none" for role in roles]
        return file

    def _file(self, name: str) -> KitFile:
        path = self.path / "local" / name
        if (content := _in_force(path)) is None:
            raise ConfigError(f"{path}: is missing, and so is {name}.default; provision the kit again")
        return KitFile(path, content)


def open_kit(path: str | Path) -> Kit:
    """Open the kit of a server or of a site."""
    for kind in ("server", "client"):
        if (Path(path) / f"startup/fed_{kind}.json").is_file():
            return Kit(Path(path), server=kind == "server")
    raise ConfigError(
        f"{path}: not an NVFlare kit of a server or a site; name the folder that holds 'startup' and 'local'"
    )


def forbid_code(policy: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a policy under which no job carries code, and the roles that had this right before.

    It is not enough to set the right ``byoc`` of the role ``lead``: the project administrator's role has one
    expression for all rights.
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


def _in_force(path: Path) -> dict[str, Any] | None:
    content = _read(path)
    return _read(path.with_name(f"{path.name}.default")) if content is None else content


def _read(path: Path) -> dict[str, Any] | None:
    problem = config_errors(f"{path}: not readable as a JSON object", ValueError, TypeError)
    with problem, suppress(FileNotFoundError):
        return dict(parse_json(path.read_text()))
    return None
