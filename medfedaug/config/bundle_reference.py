"""Allow and find Bundles of this process, by name and content.

A Bundle is code: its configuration holds expressions, and it may have scripts. A job carries only the name
and the content hash of a Bundle. A site runs its own folder, which its administrator has reviewed and allowed
(`medfedaug.hospital.privacy.site_settings.SiteSettings.bundles`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfedaug.errors import ConfigError, config_errors, own
from medfedaug.utils.files import sha256
from medfedaug.utils.validation import check_keys

BUNDLES_VARIABLE = "MEDFEDAUG_BUNDLES"
"""Names a folder that holds Bundles, on a user's own machine."""

PREDICTS = (
    "a run with a Bundle predicts with the Bundle: global_model.pt is its models/model.pt, and its "
    "configs/inference.json says how"
)

# Neither hashed nor copied: the weights that a training leaves, and files of desktops and version control.
_INERT = ("models/model.pt", "models/model.ts", ".DS_Store", "Thumbs.db", ".git")
_COMPILED = (".pyc", ".pyo", ".pyd", ".so", ".dll", ".dylib")
_CACHE = "__pycache__"
_TRAINING = tuple(f"configs/train.{suffix}" for suffix in ("json", "yaml", "yml"))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HASH = re.compile(r"[0-9a-f]{8}( [0-9a-f]{8}){7}")
_REMEDY = "medfedaug site configure KIT --allow-bundle DIR"


@dataclass(frozen=True)
class AllowedBundle:
    """Bundle that this process may use."""

    name: str
    hash: str
    folder: Path

    @property
    def reference(self) -> dict[str, str]:
        """Return name and hash as a job carries them: `medfedaug.config.run.RunConfig.bundle`."""
        return {"name": self.name, "hash": self.hash}

    def to_dict(self) -> dict[str, str]:
        """Return the entry of a site's settings, which has the Bundle's name as its key."""
        return {"folder": str(self.folder), "hash": self.hash}

    @classmethod
    def of(cls, folder: str | Path) -> AllowedBundle:
        """Allow a folder with its present content."""
        path = Path(folder).resolve()
        training_file(path)
        if not _NAME.fullmatch(path.name):
            raise ConfigError(
                f"{path}: the name of a Bundle's folder has letters, digits, '.', '_' and '-': rename it"
            )
        return cls(path.name, content_hash(path), path)

    @classmethod
    def from_settings(cls, values: Mapping[str, Any]) -> dict[str, AllowedBundle]:
        """Read the Bundles of a site's settings, by name."""
        bundles = {}
        for name, entry in values.items():
            if not isinstance(entry, Mapping) or entry.keys() != {"folder", "hash"}:
                raise ConfigError(f"bundles: {name} must be an object with a folder and a hash, got {entry}")
            check_reference({"name": name, "hash": entry["hash"]})
            bundles[name] = cls(name, entry["hash"], Path(entry["folder"]))
        return bundles

    def check(self, folder: Path | None = None) -> None:
        """Check that the folder, or its copy, still has the allowed content."""
        content = content_hash(folder or self.folder)
        if content != self.hash:
            raise ConfigError(
                f"the Bundle {self.name} has changed since it was allowed here (content "
                f"{short_hash(content)}, allowed {short_hash(self.hash)}); look at it, and allow it again: "
                f"{_REMEDY}"
            )

    def verified(self) -> Path:
        """Return a private copy of the allowed content, from which all of the Bundle runs.

        It is made once in a process, checked, and removed when the process ends. Nobody else can write there,
        so nothing changes between the check and the run.
        """
        if self.hash not in _copies:
            copy = tempfile.TemporaryDirectory(prefix="medfedaug-bundle-")  # for this user alone
            shutil.copytree(self.folder, copy.name, symlinks=True, ignore=self._inert, dirs_exist_ok=True)
            Path(copy.name).chmod(0o700)
            self.check(Path(copy.name))
            _copies[self.hash] = copy
        return Path(_copies[self.hash].name)

    def _inert(self, folder: str, names: list[str]) -> list[str]:
        inside = Path(folder).relative_to(self.folder)
        return [name for name in names if _is_inert(inside / name)]


_named: dict[str, AllowedBundle] = {}  # bundles that the user of this process named
_allowed: dict[str, AllowedBundle] | None = None
"""Bundles that the site allows; ``None`` on a user's own machine, where `_named` and the variable count."""
_copies: dict[str, tempfile.TemporaryDirectory[str]] = {}  # private copies by the hash of their content


def content_hash(folder: Path) -> str:
    """Return the SHA-256 of all files of a Bundle, their names and their content.

    A configuration can import, run and read any file of its Bundle. So all files count but `_INERT`, which
    are not in the copy that runs. Compiled code, which nobody can review, and links, which lead elsewhere,
    are refused. The hash has groups of digits, since NVFlare takes a longer one for a secret.
    """
    total = hashlib.sha256()
    with config_errors(f"{own(folder)}: the Bundle cannot be read", OSError):
        for name in sorted(_files(folder, Path())):
            total.update(json.dumps([name, sha256(folder / name)]).encode())
    text = total.hexdigest()
    return " ".join(text[i : i + 8] for i in range(0, len(text), 8))


def _files(folder: Path, inside: Path) -> Iterator[str]:
    for path in (folder / inside).iterdir():
        name = inside / path.name
        if _is_inert(name):
            continue
        problem = ""
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            problem = "a Bundle has no links; put the file itself there"
        elif path.name.lower() == _CACHE or path.name.lower().endswith(_COMPILED):
            problem = "compiled code cannot be looked at in a Bundle; remove it"
        if problem:
            raise ConfigError(f"{own(path)}: {problem}")
        yield from _files(folder, name) if path.is_dir() else [name.as_posix()]


def _is_inert(name: Path) -> bool:
    return name.as_posix() in _INERT or name.name in _INERT


def short_hash(text: str) -> str:
    """Return the first digits of a hash, for messages."""
    return text[:8]


def training_file(folder: Path) -> Path:
    """Return the file of a Bundle that defines its training."""
    for name in _TRAINING:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"{own(folder)}: no Bundle that trains: it has no {_TRAINING[0]}, nor one in YAML")


def check_reference(reference: Mapping[str, Any]) -> None:
    """Check a job's reference to a Bundle: a name that is not a path, and a hash."""
    check_keys("bundle: unknown keys", reference, ("name", "hash"))
    for key, pattern, words in (
        ("name", _NAME, "letters, digits, '.', '_' and '-'"),
        ("hash", _HASH, "eight groups of eight digits"),
    ):
        value = reference.get(key)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ConfigError(f"bundle: the {key} must be {words}, got {str(value)[:80]!r}")


def restrict(bundles: Mapping[str, AllowedBundle] | None) -> None:
    """Restrict this process to the Bundles of a site's settings; ``None`` lifts it."""
    global _allowed
    _allowed = None if bundles is None else dict(bundles)


def allow(folder: str | Path) -> AllowedBundle:
    """Allow a Bundle that the user names in this process, with its present content."""
    bundle = AllowedBundle.of(folder)
    _named[bundle.name] = bundle
    return bundle


def locate(text: str) -> Path:
    """Return the folder of a Bundle from its path, or from its name in the folder ``MEDFEDAUG_BUNDLES``."""
    if Path(text).is_dir():
        return Path(text)
    home = os.environ.get(BUNDLES_VARIABLE)
    if home and _NAME.fullmatch(text) and (Path(home) / text).is_dir():
        return Path(home) / text
    where = f"{home} has none of that name" if home else f"{BUNDLES_VARIABLE} names no folder of Bundles"
    raise ConfigError(f"--bundle {text}: no such folder, and {where}")


def described_data(folder: Path) -> dict[str, Any]:
    """Return task, channels and classes of a Bundle's images, as far as its ``metadata.json`` has them."""
    try:
        formats = json.loads((folder / "configs/metadata.json").read_text())["network_data_format"]
        image, output = formats["inputs"]["image"], formats["outputs"]["pred"]
        classes = output["channel_def"]
        dense = output.get("format") == "segmentation"
        return {
            "task": "segmentation" if dense else "classification",
            "in_channels": int(image["num_channels"]),
            "classes": tuple(str(classes[key]) for key in sorted(classes, key=int)),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def known() -> Iterable[AllowedBundle]:
    """Return the Bundles that this process may use, without those of ``MEDFEDAUG_BUNDLES``."""
    return list((_named if _allowed is None else _allowed).values())


def find(reference: Mapping[str, str]) -> AllowedBundle:
    """Return the Bundle of a run's reference, by name and content.

    On a user's own machine, ``MEDFEDAUG_BUNDLES`` names a folder that may hold it.

    Raises:
        ConfigError: in one line, when it may not be used here, or has another content.
    """
    name, wanted = reference["name"], reference["hash"]
    bundle = (_named if _allowed is None else _allowed).get(name)
    if bundle is None and _allowed is not None:
        raise ConfigError(
            f"the Bundle {name} is not allowed here; the site's administrator allows it with: {_REMEDY}"
        )
    if bundle is None or (_allowed is None and bundle.hash != wanted):
        try:
            bundle = AllowedBundle.of(locate(name))
        except ConfigError as error:
            if bundle is None:
                raise ConfigError(
                    f"the run was made with the Bundle {name} (content {short_hash(wanted)}), which is "
                    f"not here: {BUNDLES_VARIABLE}=DIR names the folder that holds it"
                ) from error
    if bundle.hash != wanted:
        where = "here" if _allowed is None else "allowed here"
        raise ConfigError(
            f"the Bundle {name} that is {where} has another content ({short_hash(bundle.hash)}) than the "
            f"run's ({short_hash(wanted)}): all sites need the same version"
        )
    bundle.check()
    return bundle
