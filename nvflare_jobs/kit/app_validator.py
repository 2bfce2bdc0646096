"""Admission of jobs at a site or server: only plain JSON of this version, and no shell commands.

NVFlare 2.9 parses a job's files, in other formats too, and replaces variables in them, before it calls a
validator (`docs/decisions/index.md`). Therefore no text of a job has a brace, and this module's component
closes the other loaders when it is built: `medfedaug site configure` names it in ``local/resources.json``,
which each process of a server or a site reads before any job.

It closes NVFlare's shell commands (``cat``, ``grep``, ``ls`` of an administrator's console) in the same way,
and the command that reports the kit's folder: only the server checks paths and the administrator's right.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from nvflare.apis.app_validation import AppValidator
from nvflare.fuel.common.excepts import ConfigError as NVFlareConfigError
from nvflare.fuel.utils.config import Config, ConfigFormat, ConfigLoader
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.lighter.tool_consts import NVFLARE_PREFIX

from medfedaug._version import __version__

VERSION_KEY = "medfedaug"  # entry of a job's configuration: the version that exported the job

_CONFIGURATION = ("config/config_fed_client.json", "config/config_fed_server.json")
_CODE = "custom/"
# .json.default too: NVFlare reads it where no .json exists.
_OTHER_SUFFIXES = tuple(suffix for suffix in ConfigFormat.config_ext_formats() if suffix != ".json")


class NotJson(NVFlareConfigError, ValueError):
    """Configuration in another format than JSON.

    The server answers a submission with the text of a `ValueError`. The launcher does not restart a job
    process that ends with NVFlare's error of configurations.
    """


class JsonAppValidator(AppValidator):
    """Refuse a job with any configuration but plain JSON of this version; close other loaders and the shell.

    Another validator of the site is asked next.
    """

    def __init__(self, also: AppValidator | None = None) -> None:
        super().__init__()
        close_other_loaders()
        close_commands()
        self.also = also

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """Check the files of a job on this machine.

        Returns:
            The reason to refuse the job, with file and key but no value of the job; empty where the job is
            admitted.
        """
        problem = next(_problems(Path(app_folder)), "")
        if problem:
            return f"job refused: {problem}", {}
        return self.also.validate(app_folder) if self.also is not None else ("", {})


def keys_with_variables(content: Any) -> Iterator[str]:
    """Yield the paths of texts that NVFlare may take for variables.

    Example:
        >>> list(keys_with_variables({"args": {"classes": ["background", "{$HOME}"]}}))
        ['args.classes.1']
    """
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{key}.{_short(str(part), 40)}", entry) for part, entry in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{key}.{number}", entry) for number, entry in enumerate(value)]
        elif isinstance(value, str) and ("{" in value or "}" in value):
            yield key.removeprefix(".")


def close_other_loaders() -> None:
    """Let NVFlare read only JSON in this process."""
    for kind in ConfigFormat:
        if kind is not ConfigFormat.JSON:
            ConfigFactory._fmt2Loader[kind] = _ClosedLoader(kind)
    ConfigFactory.PyhoconLoader = ConfigFactory.OmegaConfLoader = None


def close_commands() -> None:
    """Let this process, if it is a site's, answer no request for files or paths."""
    # Imported here: commands that only read a kit need none of it.
    from nvflare.private.admin_defs import Message, error_reply
    from nvflare.private.fed.client.shell_cmd import ShellCommandProcessor
    from nvflare.private.fed.client.sys_cmd import ReportEnvProcessor

    def refuse(_self: Any, req: Message, app_ctx: Any) -> Message:
        return error_reply("this site answers no such command")

    ShellCommandProcessor.process = ReportEnvProcessor.process = refuse


class _ClosedLoader(ConfigLoader):
    """Replaces the loader of another format."""

    def load_config(self, file_path: str) -> Config:
        self._refuse(_short(os.path.basename(file_path)))

    def load_config_from_str(self, config_str: str) -> Config:
        self._refuse("a file of the job")

    def load_config_from_dict(self, config_dict: dict[str, Any]) -> Config:
        self._refuse("a part of the job")

    def _refuse(self, content: str) -> NoReturn:
        raise NotJson(f"job refused: {content} is in {self.format.value}; only JSON may configure a job here")


def _problems(app: Path) -> Iterator[str]:
    for path in sorted(app.rglob("*")):
        name = path.relative_to(app).as_posix()
        lower = name.lower()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            yield f"{_short(name)} is not a plain file"
        elif path.is_dir():
            continue
        elif lower.endswith(_OTHER_SUFFIXES):
            yield f"{_short(name)}: only JSON may configure a job here"
        elif name in _CONFIGURATION:
            yield from _content_problems(path, name)
        elif lower.endswith(".json") and not (path.name.startswith(NVFLARE_PREFIX) or name.startswith(_CODE)):
            # NVFlare finds its settings by their names, anywhere below the folder of a kit.
            yield f"{_short(name)}: a job has no JSON but {' and '.join(_CONFIGURATION)}"


def _content_problems(path: Path, name: str) -> Iterator[str]:
    """Find strings in which NVFlare would replace a variable, and a job of another version."""
    try:
        with path.open() as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        yield f"{name} is not readable as JSON ({type(error).__name__})"
        return
    for key in keys_with_variables(content):
        yield f"{name}: {key[-200:]} has a brace: variables are not replaced here"
    version = content.get(VERSION_KEY) if isinstance(content, dict) else None
    if version != __version__:
        text = f"medfedaug {_short(str(version), 40)} exported it, and this machine has {__version__}"
        yield f"{name}: {text}; export it again with one version everywhere"


def _short(text: str, most: int = 120) -> str:
    """Make a job's text printable and short, for a message."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)[-most:]
