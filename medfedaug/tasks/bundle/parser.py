"""``configs/train.json`` of a Bundle: its parts, found as MONAI's trainer and evaluator are given them."""

from __future__ import annotations

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
# What changes a step in ways that are the engine's own, and not those of a part that is used here.
_UNUSABLE = ("prepare_batch", "iteration_update")
_REFERENCE = re.compile(r"@([\w.]+(?:(?:#|::)[\w.]+)*)")


class BundleConfiguration:
    """The training configuration of a Bundle, whose parts are made when they are asked for.

    Making one runs the Bundle's expressions: the caller has looked it up with `content.find`. Neither its
    trainer nor its data set is made, nor anything that only they need. ``bundle_root`` is a private copy of
    the content that was allowed (`content.AllowedBundle.verified`), and ``device`` the CPU.

    Args:
        bundle: which.

    Raises:
        ConfigError: naming file and key.

    Attributes:
        config: the whole configuration, with macros and relative identifiers resolved.
    """

    # Without `__dict__`, in which MONAI's loaders look for transforms to seed: the parser claims to have any
    # attribute.
    __slots__ = ("bundle", "config", "evaluator", "file", "parser", "trainer")

    def __init__(self, bundle: AllowedBundle) -> None:
        folder = bundle.verified()
        self.bundle, self.file = bundle, training_file(folder)
        _importable(folder)
        try:
            values = ConfigParser.load_config_file(str(self.file))
            if not isinstance(values, dict):
                raise ValueError("an object is needed")
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
        """An error that names the Bundle, its file and a key in it."""
        place = key.replace("::", "#")  # as Bundles write it, and their authors look for it
        return ConfigError(f"Bundle {self.bundle.name}: {self.file.name}: {place}: {reason}")

    def _engine(self, kind: str) -> str:
        """The identifier of the trainer, or of the evaluator."""
        for identifier in _ENGINES[kind]:
            found = self.parser.get(identifier)
            if not isinstance(found, Mapping):
                continue
            target = str(found.get("_target_"))
            if target.rpartition(".")[2] != kind or target not in (kind, f"monai.engines.{kind}"):
                raise self.problem(identifier, f"is {target}; only MONAI's {kind} can be replaced by ours")
            for name in _UNUSABLE:
                if found.get(name) is not None:
                    raise self.problem(
                        f"{identifier}#{name}", "a step of its own cannot take part in a federation"
                    )
            return identifier
        raise self.problem(" or ".join(_ENGINES[kind]), "is missing")

    def raw(self, identifier: str) -> Any:
        """Return the entry of an identifier; ``None`` where there is none."""
        return self.parser.get(identifier)

    def follow(self, identifier: str) -> str:
        """The identifier that a reference such as ``@train#dataloader`` leads to."""
        seen = set[str]()
        while identifier not in seen:
            seen.add(identifier)
            found = self.raw(identifier)
            match = _REFERENCE.fullmatch(found.strip()) if isinstance(found, str) else None
            if match is None:
                break
            identifier = match[1]
        return identifier

    def find(self, *path: str) -> str:
        """The identifier of an argument of an argument of an engine, through all references.

        Args:
            *path: such as ``"train#trainer", "train_data_loader", "dataset", "transform"``.

        Raises:
            ConfigError: naming the first one that is missing.
        """
        identifier = path[0]
        for name in path[1:]:
            identifier = f"{self.follow(identifier)}#{name}"
            if self.raw(identifier) is None:
                raise self.problem(identifier, "is missing")
        found = self.follow(identifier)
        if self.raw(found) is None:
            raise self.problem(found, "is missing")
        return found

    def has(self, *path: str) -> bool:
        """Return whether `find` would find an entry."""
        try:
            self.find(*path)
        except ConfigError:
            return False
        return True

    def make(self, identifier: str) -> Any:
        """The part that an identifier stands for, made by MONAI's parser.

        Raises:
            ConfigError: naming the identifier, and why it cannot be made.
        """
        try:
            return self.parser.get_parsed_content(identifier)
        except Exception as error:  # whatever a class does with its arguments, or an expression
            reason: BaseException = error
            while isinstance(reason, RuntimeError) and reason.__cause__ is not None:
                reason = reason.__cause__
            text = withheld(f"{type(reason).__name__}: {first_line(reason)}")
            raise self.problem(identifier, f"cannot be made ({text})") from error

    def component(self, identifier: str, *without: str) -> ConfigComponent:
        """A class with its arguments, to be made with others in the place of some of them.

        Args:
            identifier: of a part with ``_target_``.
            *without: names of arguments that are left out, and not evaluated either.

        Raises:
            ConfigError: when the part names no class.
        """
        found = self.raw(identifier)
        if not isinstance(found, Mapping) or not isinstance(found.get("_target_"), str):
            raise self.problem(identifier, "must have a _target_")
        args = {key: self.make(f"{identifier}#{key}") for key in found if key not in (*without, "_target_")}
        return ConfigComponent({"_target_": found["_target_"], **args}, identifier, self.parser.locator)


_root = ""


def _importable(folder: Path) -> None:
    """Let a Bundle's own modules be imported, in the place of those of the one before it."""
    global _root
    root = str(folder)
    if _root not in ("", root):
        sys.path[:] = [path for path in sys.path if path != _root]
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(f"{_root}{os.sep}"):
                del sys.modules[name]
    _root = root
    sys.dont_write_bytecode = True  # what is imported is the source that was hashed
    if root not in sys.path:
        sys.path.insert(0, root)
        importlib.invalidate_caches()
