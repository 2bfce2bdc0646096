"""Only plain JSON configures a job: none reads the environment, files or network of a site or server."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_files import FILES, SECRET, TOKEN, VARIABLE, bait, spoil_files

from medfedaug import __version__
from medfedaug.nvflare_jobs import MedFedAugRecipe
from medfedaug.nvflare_jobs.kit import app_validator
from medfedaug.nvflare_jobs.kit.kit import VALIDATOR

SIDES = {"client": "hospital-a", "server": "fl-server.example.org"}
START = Path(__file__).parents[2] / "support/nvflare_start.py"


def job_of(folder: Path, config) -> Path:
    MedFedAugRecipe(config=config, name="job").export(job_dir=str(folder))
    return folder / "job"


def given(*starts: tuple[Path, str, list[Path]]) -> tuple[list[dict[str, str]], str]:
    """The outcome of each job at each kit, which has a process of its own, and all that these printed."""
    apps = [[str(kit), side, *(str(job / "app") for job in jobs)] for kit, side, jobs in starts]
    done = subprocess.run(
        [sys.executable, str(START), json.dumps(apps)],
        capture_output=True,
        text=True,
        env={**os.environ, VARIABLE: SECRET},
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"deployed"')]
    return answers, done.stdout + done.stderr


def odd_jobs(honest: Path, folder: Path) -> list[Path]:
    """Jobs of which a value, a key and a file have what a refusal must not show."""
    jobs = []
    for name in ("value", "key", "file"):
        job = shutil.copytree(honest, folder / name)
        file = job / "app/config/config_fed_client.json"
        content = json.loads(file.read_text())
        if name == "value":
            content["executors"][0]["executor"]["args"]["config"]["classes"][1] = "{of the job}"
        elif name == "key":
            content["x\x1b[2J" + "y" * 500] = "{}"
        else:
            (job / "app/odd\x1b[2J.yml").write_text("text: of the job")
        file.write_text(json.dumps(content))
        jobs.append(job)
    return jobs


@pytest.fixture
def validator(monkeypatch):
    monkeypatch.setattr(app_validator, "close_other_loaders", lambda: None)  # for all of this process
    return app_validator.JsonAppValidator()


def configured(run, kits: Path, side: str) -> Path:
    code, out, err = run("site", "configure", kits / SIDES[side], "--forbid-code")
    assert code == 0, err
    assert f"app_validator: {VALIDATOR}" in out
    return kits / SIDES[side]


@pytest.mark.parametrize("side", SIDES)
def test_a_job_with_any_other_configuration_is_refused(tmp_path, tiny_config, validator, side):
    honest = job_of(tmp_path, tiny_config(classes=("background", "lesion")))
    with bait(tmp_path / "secrets") as laid:
        for number, attack in enumerate(FILES):
            hostile = spoil_files(honest, tmp_path / f"hostile/{number}", side, attack, laid)
            assert validator.validate(str(hostile / "app"))[0].startswith("job refused: "), attack
        assert laid.asked == []
    assert validator.validate(str(honest / "app")) == ("", {})


@pytest.mark.slow  # processes of two kits, in which NVFlare itself reads the jobs
def test_a_kit_refuses_every_other_configuration_in_its_parent_and_in_job_processes(
    run, kits, tmp_path, tiny_config
):
    honest = job_of(tmp_path, tiny_config(classes=("background", "lesion")))
    odd = odd_jobs(honest, tmp_path / "odd")
    starts = []
    with bait(tmp_path / "secrets") as laid:
        for side in SIDES:
            folder = tmp_path / f"hostile/{side}"
            jobs = [spoil_files(honest, folder / str(n), side, a, laid) for n, a in enumerate(FILES)]
            starts.append((configured(run, kits, side), side, [*jobs, honest]))
        starts[0][2].extend(odd)
        answers, printed = given(*starts)
        assert laid.asked == []
    kits_files = [path for kit, _, _ in starts for path in kit.rglob("*") if path.is_file()]
    for secret in (SECRET, TOKEN):
        assert secret not in printed
        assert not any(secret.encode() in path.read_bytes() for path in kits_files)
    count = len(FILES) + 1
    assert len(answers) == 2 * count + len(odd)
    check_answers(answers[:count], "client", starts[0][0])
    check_answers(answers[-count:], "server", starts[1][0])
    # A refusal names file and key, and no value.
    value, key, file = answers[count:-count]
    brace = "config_fed_client.json: executors.0.executor.args.config.classes.1 has a brace"
    assert brace in value["deployed"]
    assert "of the job" not in value["deployed"] + file["deployed"]
    for answer in (key, file):
        assert answer["deployed"].isprintable()
        assert len(answer["deployed"]) < 300


def check_answers(answers: list[dict[str, str]], side: str, kit: Path) -> None:
    for attack, answer in zip(FILES, answers, strict=False):
        assert "job refused: " in answer["deployed"], attack
        assert str(kit) not in answer["deployed"]
        if "hocon" in attack and not FILES[attack].keep:
            assert answer["built"].startswith("NotJson: "), attack  # a job process would not read it either
    assert answers[-1]["deployed"] == ""
    assert json.loads(answers[-1]["built"])["executors" if side == "client" else "workflows"]


def test_a_job_that_would_be_refused_is_not_exported(run, tmp_path):
    classes = ("--classes", "background,{lesion}")
    code, _, err = run("export", "--methods", "fedavg", *classes, "--out", tmp_path / "job")
    assert code == 2
    assert "classes.1: a job has no text with braces" in " ".join(err.split())
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(("exported", "words"), [("9.8.7", "9.8.7"), (None, "None")])
@pytest.mark.parametrize("side", SIDES)
def test_a_job_of_another_version_is_refused_with_both(
    tmp_path, tiny_config, validator, side, exported, words
):
    job = job_of(tmp_path, tiny_config())
    assert validator.validate(str(job / "app")) == ("", {})
    file = job / f"app/config/config_fed_{side}.json"
    content = {**json.loads(file.read_text()), app_validator.VERSION_KEY: exported}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    reason, _ = validator.validate(str(job / "app"))
    assert f"medfedaug {words} exported it, and this machine has {__version__}" in reason


def test_a_job_of_other_packages_needs_no_version(tmp_path, validator):
    (tmp_path / "config").mkdir()
    content = {"workflows": [{"path": "nvflare.app_common.workflows.fedavg.FedAvg", "args": {}}]}
    (tmp_path / "config/config_fed_server.json").write_text(json.dumps(content))
    assert validator.validate(str(tmp_path)) == ("", {})


CONVERTER = "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent"


@pytest.mark.parametrize(
    ("path", "args", "words"),
    [
        (CONVERTER, {"events_to_convert": ["_error_log_available"]}, "no log events"),
        (CONVERTER, {"events_to_convert": ["analytix_log_stats", "_warning_log_available"]}, "no log events"),
        (CONVERTER, {"events_to_convert": ["analytix_log_stats"], "fed_event_prefix": "x."}, "no log events"),
        (CONVERTER, {"events_to_convert": ["analytix_log_stats"]}, ""),
        ("nvflare.app_common.logging.job_log_streamer.JobLogStreamer", {}, "sends a site's logs"),
        (
            "nvflare.app_opt.tracking.mlflow.mlflow_receiver.MLflowReceiver",
            {"tracking_uri": "https://evil.example"},
            "to an address of the job",
        ),
    ],
)
def test_no_component_of_a_job_sends_log_events_or_metrics_elsewhere(tmp_path, validator, path, args, words):
    components = [{"id": "one", "path": path, "args": args}]
    content = {"format_version": 2, "executors": [], "components": components}
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config_fed_client.json").write_text(json.dumps(content))
    reason, _ = validator.validate(str(tmp_path))
    assert (words in reason) if words else not reason


SHELL = """
from sys import argv
from medfedaug.nvflare_jobs.kit.app_validator import JsonAppValidator
from nvflare.private.admin_defs import Message
from nvflare.private.defs import SysCommandTopic
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
if argv[1] == "configured":
    JsonAppValidator()
for processor in ClientRequestProcessors.request_processors:
    if SysCommandTopic.SHELL in processor.get_topics():
        print(processor.process(Message(SysCommandTopic.SHELL, "cat " + argv[2]), None).body)
"""


@pytest.mark.parametrize("kit", ["configured", "plain"])
def test_no_server_reads_files_of_a_site_by_shell_commands(tmp_path, kit):
    """NVFlare's site takes any path, and asks for a right only if the server's message says so."""
    file = tmp_path / "patient.txt"
    file.write_text("of a patient")
    command = [sys.executable, "-c", SHELL, kit, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("of a patient" in done.stdout) is (kit == "plain")
    assert ("answers no such command" in done.stdout) is (kit == "configured")
