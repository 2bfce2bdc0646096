"""Imports without garbage collection, which is on again whatever happens."""

from __future__ import annotations

import gc
import io
import sys
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from shlex import quote

import torch

from medfedaug import cli
from medfedaug.cli import loading
from medfedaug.cli.loading import importing


def test_collection_is_off_while_importing_and_on_again_after_a_failed_import():
    assert gc.isenabled()
    with suppress(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    with importing():
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_compiling_at_every_start_is_told_once_with_its_remedy(tmp_path, monkeypatch):
    packages = Path(torch.__file__).parents[1]
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))

    def said(forbidden: bool) -> str:
        loading._warn_of_compiling.cache_clear()
        monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
        monkeypatch.setattr(cli.err_console, "file", written := io.StringIO(), raising=False)
        for _ in range(2):
            with importing():
                pass
        return "".join(written.getvalue().split())

    told = said(True)
    assert told.count("PYTHONDONTWRITEBYTECODEisset") == 1
    assert "".join(f"python -m compileall -q {quote(str(packages))}".split()) in told
    assert said(False) == ""
    compiled = Path(cache_from_source(packages / "torch/__init__.py"))
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert said(True) == ""
