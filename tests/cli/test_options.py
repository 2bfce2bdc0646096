"""Options that are made from the fields of settings: one text, one place, no flag forgotten."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
import typer
from cli_arguments import simulate_args
from typer.testing import CliRunner

from medfedaug import cli
from medfedaug.cli.options import Given, takes
from medfedaug.config.options import setting, settings
from medfedaug.config.plan import Plan
from medfedaug.config.run import Execution, RunConfig

FOLLOW_FROM_DATA = {"in_channels", "channel_names", "classes"}
FOR_SIMULATIONS = {"limit"}
FOR_JOBS = {"prospect"}


def words(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize(
    ("command", "without"), [("simulate", FOLLOW_FROM_DATA | FOR_JOBS), ("export", FOR_SIMULATIONS)]
)
def test_every_setting_is_an_option(command, without):
    options = {option.name for option in typer.main.get_command(cli.app).commands[command].params}
    settings = {entry.name for cls in (RunConfig, Plan, Execution) for entry in fields(cls)} - {"planning"}
    assert settings - options == without


@pytest.mark.parametrize("cls", [RunConfig, Plan, Execution])
def test_documentation_and_help_have_one_text(run, monkeypatch, cls):
    monkeypatch.setenv("COLUMNS", "1000")
    shown = words(run("simulate", "--help")[1] + run("export", "--help")[1])
    for entry in fields(cls):
        assert words(f"{entry.name}: {entry.metadata['description']}") in words(cls.__doc__)
        if entry.name not in (
            "methods",
            "plan",
            "planning",
            "init",
            "bundle",
            "loop",
        ):  # a specification and files have options of their own
            assert words(entry.metadata["description"]) in shown


def test_a_new_field_is_an_option_by_itself():
    @settings
    class Extended(RunConfig):
        warmup: float = setting(0.5, "Share of the rounds with a smaller learning rate.", at_least=0)

    received = {}

    @takes(Extended, without=("task",))
    def command(*, given: Given) -> None:
        received.update(given[Extended])

    app = typer.Typer()
    app.command()(command)
    arguments = ["--warmup", "0.25", "--classes", "a, b", "--network-args", '{"x": 1}', "--holdout", "DU"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert received["warmup"] == 0.25
    assert received["classes"] == ("a", "b")
    assert received["network_args"] == {"x": 1}
    assert received["holdout"] == ("DU",)
    assert received["rounds"] == RunConfig.rounds
    assert not received.keys() & {"task", "network", "batch_size"}  # they follow from the task
    assert "warmup: Share of the rounds" in Extended.__doc__
    assert "Share of the rounds" in CliRunner().invoke(app, ["--help"]).output


def test_local_steps_reach_a_simulation_and_a_job(run, phantom_dir, tmp_path):
    code, _, err = run(*simulate_args(phantom_dir, tmp_path / "out", "fedavg"), "--local-steps", 2)
    assert code == 0, err
    assert json.loads((tmp_path / "out/results.json").read_text())["config"]["local_steps"] == 2
    code, _, err = run("export", "--methods", "fedavg", "--local-steps", 3, "--out", tmp_path / "job")
    assert code == 0, err
    client = json.loads((tmp_path / "job/app/config/config_fed_client.json").read_text())
    assert client["executors"][0]["executor"]["args"]["config"]["local_steps"] == 3
