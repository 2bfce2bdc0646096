"""Commands, small settings and files that tests of all packages use."""

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

import medfedaug
from medfedaug import cli
from medfedaug.config.run import RunConfig
from medfedaug.federation.composition import Composition
from medfedaug.statistics import load_statistics

LACKING = not all((Path(medfedaug.__file__).parent / layer).is_dir() for layer in ("hospital", "research"))
"""Whether these are tests of the core in a copy without other layers."""
SHARED = Path(__file__).resolve().parents[3] / "shared"
TINY_ARGS = {"channels": [4, 8, 8], "strides": [2, 2], "num_res_units": 0, "act": "relu"}
TINY_NETWORK = {"network": "unet", "network_args": TINY_ARGS}
"""Settings of a U-Net of three levels, a step of which takes a fifth of that of the default, as narrow."""
TINY_OPTIONS = ("--network", "unet", "--network-args", json.dumps(TINY_ARGS))
TINY_AXES = ("network=unet", f"network_args={json.dumps(TINY_ARGS)}")


class Command:
    """The command in this process."""

    def __call__(self, *args) -> tuple[int, str, str]:
        """Call it: exit code, standard output, standard error."""
        out, err, code = io.StringIO(), io.StringIO(), 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["medfedaug", *map(str, args)])
            patch.setattr(cli.err_console, "file", err, raising=False)
            patch.setattr(cli.out_console, "file", out, raising=False)
            try:
                cli.main()
            except SystemExit as stop:
                code = int(stop.code or 0)
        if LACKING and re.search(r"No such command|which this installation lacks", err.getvalue()):
            pytest.skip("needs a layer above the core")
        return code, out.getvalue(), err.getvalue()

    def ok(self, *args) -> str:
        """Call it; it succeeds. Return its standard output."""
        code, out, err = self(*args)
        assert code == 0, f"exit code {code}\n{out}{err}"
        return out

    def refused(self, *args) -> str:
        """Call it; it refuses what it was given. Return its standard error."""
        code, _, err = self(*args)
        assert code == 2, err
        return err


command = Command()


def assert_complete(out: Path, data: Path, again: Path) -> None:
    """A run over the sites of `phantom_dir` left what is promised, and `evaluate` gives the same scores."""
    files = {path.name for path in out.iterdir()}
    assert files >= {"results.json", "global_model.pt", "final_model.pt", "statistics.json", "report.html"}
    results = json.loads((out / "results.json").read_text())
    assert ("nvflare.log" in files) == (results["engine"] == "nvflare")
    assert set(results) >= {"config", "rounds", "selected_round", "test"}
    assert set(results["rounds"][0]) >= {"round", "sites", "bytes_up", "bytes_down"}
    assert set(results["test"]["sites"]) == {"site_A", "site_B"}
    scores = [entry["dice"] for entry in results["test"]["sites"].values()]
    assert results["test"]["mean"]["dice"] == pytest.approx(sum(scores) / 2)
    assert set(load_statistics(out / "statistics.json")) == {"site_A", "site_B"}

    network = Composition(RunConfig.from_dict(results["config"])).network
    network.load_state_dict(torch.load(out / "global_model.pt", weights_only=True))

    code, _, err = command("evaluate", "--model", out / "global_model.pt", "--data", data, "--out", again)
    assert code == 0, err
    evaluated = json.loads(again.read_text())["sites"]
    for site, entry in {**results["test"]["sites"], **results["test"]["unseen"]}.items():
        assert evaluated[site]["cases"] == pytest.approx(entry["cases"], nan_ok=True)
