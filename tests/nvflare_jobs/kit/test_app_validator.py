"""Only plain JSON configures a job: none reads the environment, files or network of a site or server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_files import FILES, SECRET, TOKEN, VARIABLE, bait, spoil_files

from medfedaug import __version__
from medfedaug.nvflare_jobs import MedFedAugRecipe
from medfedaug.nvflare_jobs.kit import app_validator

SIDES = ("client", "server")


def job_of(folder: Path, config) -> Path:
    MedFedAugRecipe(config=config, name="job").export(job_dir=str(folder))
    return folder / "job"


@pytest.fixture
def validator(monkeypatch):
    monkeypatch.setattr(app_validator, "close_other_loaders", lambda: None)  # for all of this process
    return app_validator.JsonAppValidator()


@pytest.mark.parametrize("side", SIDES)
def test_a_job_with_any_other_configuration_is_refused(tmp_path, tiny_config, validator, side):
    honest = job_of(tmp_path, tiny_config(classes=("background", "lesion")))
    with bait(tmp_path / "secrets") as laid:
        for number, attack in enumerate(FILES):
            hostile = spoil_files(honest, tmp_path / f"hostile/{number}", side, attack, laid)
            assert validator.validate(str(hostile / "app"))[0].startswith("job refused: "), attack
        assert laid.asked == []
    assert validator.validate(str(honest / "app")) == ("", {})


LOAD = """
from sys import argv
from medfedaug.nvflare_jobs.kit.app_validator import JsonAppValidator
from nvflare.fuel.utils.config_factory import ConfigFactory
if argv[1] == "configured":
    JsonAppValidator()
print(ConfigFactory.load_config("config_fed_client.conf", [argv[2]]).to_dict())
"""


@pytest.mark.parametrize("kit", ["configured", "plain"])
def test_no_process_of_a_kit_reads_environment_files_or_addresses_for_a_job(tmp_path, tiny_config, kit):
    honest = job_of(tmp_path, tiny_config(classes=("background", "lesion")))
    with bait(tmp_path / "secrets") as laid:
        hostile = spoil_files(honest, tmp_path / "hostile", "client", "hocon", laid)
        command = [sys.executable, "-c", LOAD, kit, str(hostile / "app/config")]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, VARIABLE: SECRET})
        read = [SECRET in done.stdout, TOKEN in done.stdout, bool(laid.asked)]
    assert read == [kit == "plain"] * 3
    assert ("NotJson" in done.stderr) is (kit == "configured")


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
