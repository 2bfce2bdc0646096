"""Options that are made from the fields of settings: one text, one place, no flag forgotten."""

import json
import re
import shlex
from dataclasses import fields
from functools import cache

import pytest
import typer
from running import TINY_OPTIONS
from typer.testing import CliRunner

from medfedaug import cli
from medfedaug.cli.app import GROUPS, LAYERS, register
from medfedaug.cli.options import Given, takes
from medfedaug.config.options import setting, settings
from medfedaug.config.plan import Plan
from medfedaug.config.run import Execution, RunConfig

FOLLOW_FROM_DATA = {"in_channels", "channel_names", "classes"}
FOR_SIMULATIONS = {"limit", "site_speed"}
FOR_SEARCHES = {"tested"}
ARGS = ("simulate", "--engine", "inprocess", "--device", "cpu", "--no-report")


def words(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize(
    ("command", "without"),
    [("simulate", FOLLOW_FROM_DATA | FOR_SEARCHES), ("export", FOR_SIMULATIONS | FOR_SEARCHES)],
)
def test_every_setting_is_an_option(command, without):
    options = {option.name for option in typer.main.get_command(cli.app).commands[command].params}
    settings = {entry.name for cls in (RunConfig, Plan, Execution) for entry in fields(cls)} - {"planning"}
    assert settings - options == without | FOR_SEARCHES


@pytest.mark.parametrize("cls", [RunConfig, Plan, Execution])
def test_documentation_and_help_have_one_text(run, monkeypatch, cls):
    monkeypatch.setenv("COLUMNS", "1000")
    shown = words(run("simulate", "--help-all")[1] + run("export", "--help-all")[1])
    for entry in fields(cls):
        assert words(f"{entry.name}: {entry.metadata['description']}") in words(cls.__doc__)
        if entry.metadata["flags"] is not None and entry.name not in ("holdout", "task"):
            text = entry.metadata["description"]
            assert words(text.partition(". ")[0].rstrip(".").replace("`", "")) in shown


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


@cache
def every_command():
    """Return all commands by their names, those of groups too."""
    found = {}
    for name, command in typer.main.get_command(cli.app).commands.items():
        for inner, one in getattr(command, "commands", {"": command}).items():
            found[f"{name} {inner}".strip()] = one
    return found


@pytest.mark.parametrize("name", every_command())
def test_help_ends_with_an_example_that_the_command_takes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("data/site_A", "hospitals", "hospital-a", "runs/fedrdn"):  # which the examples name
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/fedrdn/results.json").touch()
    command = every_command()[name]
    assert len(command.epilog) <= 78, "one line, to be copied"
    example = shlex.split(command.epilog.removeprefix(f"Example: medfedaug {name}").partition(" > ")[0])
    assert not command.make_context(name, example).args
    assert not re.search(r"\S\n\S", command.help), "a break in the source would be one on the screen"


@pytest.mark.parametrize("name", ["", *GROUPS, *every_command()])
def test_a_help_has_at_most_sixty_lines(run, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = run(*name.split(), "--help")
    assert code == 0
    assert len(out.splitlines()) <= 60


def test_a_copy_without_the_other_layers_has_the_commands_of_the_core(monkeypatch):
    for layer in ("hospital", "research"):
        monkeypatch.setitem(LAYERS, layer, "medfedaug.nowhere")
    register(app := typer.Typer())
    core = set(typer.main.get_command(app).commands)
    assert {"simulate", "evaluate", "predict", "report", "bundle", "init", "plan"} <= core
    assert not core & {"site", "enrol", "export", "import", "benchmark", "compare", "datasets"}
    predict = typer.main.get_command(app).commands["predict"]
    assert "--dimse" not in {flag for option in predict.params for flag in option.opts}


@pytest.mark.parametrize("name", every_command())
def test_every_command_has_help_all(run, name):
    command = every_command()[name]
    rare = [one for one in command.params if getattr(one, "hidden", False) and one.name != "help_all"]
    shown, full = (run.ok(*name.split(), option) for option in ("--help", "--help-all"))
    assert (shown == full) is (not rare)


def test_help_all_shows_what_help_leaves_out_once(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    short, full, again = (run("simulate", option)[1] for option in ("--help", "--help-all", "--help"))
    assert "--staleness" not in short
    assert "--staleness" in full
    assert again == short


def test_a_file_gives_what_is_not_given_and_set_gives_rare_settings(run, phantom_dir, tmp_path):
    file = tmp_path / "run.yml"
    file.write_text("methods: [{name: fedavg}]\nmomentum: 0.5\nseed: 3\nrounds: 7\nplan: {overlap: 0.25}\n")
    options = ("--config", file, "--rounds", 1, "--set", "image_size=32", *TINY_OPTIONS)
    code, _, err = run(*ARGS, "--data", phantom_dir, "--out", tmp_path / "a", *options)
    assert code == 0, err
    config = json.loads((tmp_path / "a/results.json").read_text())["config"]
    assert (config["momentum"], config["seed"], config["rounds"], config["image_size"]) == (0.5, 3, 1, 32)
    assert config["plan"]["overlap"] == 0.25
    # The record of a run is such a file.
    code, _, err = run(
        *ARGS, "--data", phantom_dir, "--out", tmp_path / "b", "--config", tmp_path / "a/results.json"
    )
    assert code == 0, err
    assert json.loads((tmp_path / "b/results.json").read_text())["config"] == config
    job = ("export", "--config", tmp_path / "a/results.json", "--out", tmp_path / "job")
    code, _, err = run(*job)
    assert code == 0, err
    client = json.loads((tmp_path / "job/app/config/config_fed_client.json").read_text())
    assert client["executors"][0]["executor"]["args"]["config"]["momentum"] == 0.5


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("roundes: 3", (), "unknown keys roundes (did you mean rounds?)"),
        ("[1", (), "not readable as YAML or JSON"),
        ("3", (), "names and values are needed"),
        ("plan: 3", (), "plan must be an object"),
        ("rounds: {a: 1}", ("--methods", "fedavg"), "rounds must be a whole number"),
        ("init: abc", ("--methods", "fedavg"), "--init is missing"),
        ("rounds: 3", (), "--methods is missing"),
        ("rounds: 3", ("--methods", "fedavg", "--set", "imagesize=3"), "did you mean image_size"),
        (
            "rounds: 3",
            ("--methods", "fedavg", "--set", "image_size=big"),
            "image_size must be a whole number",
        ),
        ("rounds: 3", ("--methods", "fedavg", "--set", "image_size"), "write METHOD.ARG=VALUE"),
        ("bundle: {name: nowhere, hash: x}", ("--methods", "fedavg"), "nowhere"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(run, phantom_dir, tmp_path, text, options, words):
    (tmp_path / "run.yml").write_text(text)
    out = ("--data", phantom_dir, "--out", tmp_path / "out", "--config", tmp_path / "run.yml")
    code, _, err = run(*ARGS, *out, *options)
    assert code == 2
    assert words in " ".join(err.split())
    assert "Traceback" not in err
