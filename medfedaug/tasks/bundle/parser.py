"""``configs/train.json`` of a Bundle: the parts of MONAI's trainer and evaluator."""

import importlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monai.bundle import ConfigComponent, ConfigParser

from medfedaug.config.bundle_reference import AllowedBundle, training_file
from medfedaug.errors import ConfigError, first_line, withheld

TRAINER, EVALUATOR = "SupervisedTrainer", "SupervisedEvaluator"
_ENGINES = {TRAINER: ("train#trainer", "trainer"), EVALUATOR: ("validate#evaluator", "evaluator")}
# Arguments of an engine that change its step; the federation's trainer has its own step.
_UNUSABLE = ("prepare_batch", "iteration_update")
_REFERENCE = re.compile(r"@([\w.]+(?:(?:#|::)[\w.]+)*)")


class BundleConfiguration:
    """The training configuration of a Bundle, whose parts are made on request.

    Making one runs the Bundle's expressions: the caller has found it by `bundle_reference.find`. Its trainer
    and data set are never made, nor parts that only they need. ``bundle_root`` is a private copy of the
    allowed content (`AllowedBundle.verified`), and ``device`` the CPU.

    Args:
        bundle: the Bundle.

    Attributes:
        config: the whole configuration, with macros and relative identifiers resolved.
    """

    # Without `__dict__`, which MONAI's loaders search for transforms to seed: the parser claims to have any
    # attribute.
    __slots__ = ("bundle", "config", "evaluator", "file", "parser", "trainer")

    def __init__(self, bundle: AllowedBundle) -> None:
        folder = bundle.verified()
        self.bundle, self.file = bundle, training_file(folder)
        _importable(folder)
        try:
            values: Any = ConfigParser.load_config_file(str(self.file))
            values["bundle_root"] = str(folder)
            if "device" in values:
                values["device"] = "$torch.device('cpu')"
            self.parser = ConfigParser(values)
            self.parser.parse(True)
        except Exception as error:  # of JSON, YAML and MONAI's parser
            raise self.problem(str(self.file.name), first_line(error)) from error
        self.config: Any = self.parser.config
        self.trainer = self._engine(TRAINER)
        self.evaluator = self._engine(EVALUATOR)

    def problem(self, key: str, reason: str) -> ConfigError:
        """Build an error that names the Bundle, its file and a key in it."""
        place = key.replace("::", "#")  # as in Bundles' files
        return ConfigError(f"Bundle {self.bundle.name}: {self.file.name}: {place}: {reason}")

    def _engine(self, kind: str) -> str:
        """Return the identifier of the trainer, or of the evaluator."""
        for identifier in _ENGINES[kind]:
            entry = self.parser.get(identifier)
            if not isinstance(entry, Mapping):
                continue
            target = str(entry.get("_target_"))
            if target not in (kind, f"monai.engines.{kind}"):
                raise self.problem(identifier, f"is {target}; only MONAI's {kind} can be replaced by ours")
            for name in _UNUSABLE:
                if entry.get(name) is not None:
                    raise self.problem(f"{identifier}#{name}", "a custom step is not supported")
            return identifier
        raise self.problem(" or ".join(_ENGINES[kind]), "is missing")

    def raw(self, identifier: str) -> Any:
        """Return the entry of an identifier, if any."""
        return self.parser.get(identifier)

    def follow(self, identifier: str) -> str:
        """Return the target of a reference such as ``@train#dataloader``."""
        seen = set[str]()
        while identifier not in seen:
            seen.add(identifier)
            entry = self.raw(identifier)
            match = _REFERENCE.fullmatch(entry.strip()) if isinstance(entry, str) else None
            if match is None:
                break
            identifier = match[1]
        return identifier

    def find(self, *path: str, required: bool = True) -> str:
        """Return the identifier of a nested argument of an engine, through all references; empty if none."""
        identifier = path[0]
        for name in path[1:]:
            identifier = self.follow(f"{identifier}#{name}")
            if self.raw(identifier) is None:
                if required:
                    raise self.problem(identifier, "is missing")
                return ""
        return identifier

    def make(self, identifier: str) -> Any:
        """Make the part of an identifier by MONAI's parser."""
        try:
            return self.parser.get_parsed_content(identifier)
        except Exception as error:  # any error of a class or an expression
            raise self.problem(identifier, f"cannot be made ({reason_of(error)})") from error

    def component(self, identifier: str, *without: str) -> ConfigComponent:
        """Return a class with its arguments, to be completed by others."""
        entry = self.raw(identifier)
        args = {key: self.make(f"{identifier}#{key}") for key in entry if key not in (*without, "_target_")}
        return ConfigComponent({"_target_": entry["_target_"], **args}, identifier, self.parser.locator)


def reason_of(error: BaseException) -> str:
    """Return kind and first line of the error behind MONAI's, without what may be a patient's."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return withheld(f"{type(error).__name__}: {first_line(error)}")


_root = ""


def _importable(folder: Path) -> None:
    """Let a Bundle's modules be imported, instead of the previous Bundle's modules."""
    global _root
    root = str(folder)
    if _root not in ("", root):
        sys.path[:] = [path for path in sys.path if path != _root]
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(f"{_root}{os.sep}"):
                del sys.modules[name]
    _root = root
    sys.dont_write_bytecode = True  # imports read the hashed source
    if root not in sys.path:
        sys.path.insert(0, root)
        importlib.invalidate_caches()
