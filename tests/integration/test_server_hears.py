"""All messages that reach the server of a provisioned federation whose lead and server ask for more."""

import json
from pathlib import Path

import pytest
from attacks import spoil
from rehearsed_hospitals import HOSPITALS, PATIENT, SERVER, Rehearsal

SUPPORT = Path(__file__).parents[1] / "support"
SECRETS = {PATIENT, "train_loss", "dataset.json", "Traceback", "SPOKEN"}
SCORE, ANSWER = "val_dice", "num_samples"

TALKATIVE = """
import logging, sys, warnings
from nvflare.apis.fl_component import FLComponent
from medfedaug.methods.base import Method, SitePart

class Site(SitePart):
    def start_round(self):
        for speak in (print, warnings.warn, logging.getLogger().critical, FLComponent().logger.error):
            speak("SPOKEN by a method")
        print("SPOKEN by a method", file=sys.stderr)
    def metrics(self):
        return {"SPOKEN": 1.0}

class Talkative(Method):
    name = "talkative"
    def at_site(self, context): return Site()
"""

EVENTS = {
    "path": "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent",
    "args": {"events_to_convert": ["_error_log_available", "_info_log_available"], "fed_event_prefix": "f."},
}


def install(folder: Path) -> Path:
    """A package with a method that speaks on every channel that a method has."""
    metadata = folder / "talkative-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "talkative.py").write_text(TALKATIVE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: talkative\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[medfedaug.methods]\ntalkative = talkative:Talkative\n")
    return folder


@pytest.mark.slow
def test_the_server_hears_answers_alone(tmp_path, monkeypatch):
    """A method speaks into logs, warnings, streams and metrics.

    The server asks for files, paths and errors, and a job of the lead for log events.
    """
    with Rehearsal(tmp_path / "work", hospitals=HOSPITALS[:2]) as system:
        recorded, asked = tmp_path / "recorded.jsonl", tmp_path / "asked.jsonl"
        secrets = {*SECRETS, str(tmp_path)}
        package = install(tmp_path / "site-packages")
        monkeypatch.syspath_prepend(str(package))
        system.make_data()
        files = {name: str(folder / "dataset.json") for name, folder in system.data.items()}
        system.environment |= {
            "PYTHONPATH": f"{SUPPORT}:{package}",
            "RECORDED": str(recorded),
            "RECORDED_TEXTS": json.dumps([*sorted(secrets), SCORE, ANSWER]),
            "ASKED": str(asked),
            "ASKED_FILES": json.dumps(files),
        }
        system.provision()
        system.configure()
        for name in (SERVER, *system.hospitals):
            system.configure_site(name, "--allow-plugin", "talkative")
        resources = system.kit(SERVER) / "local/resources.json"
        content = json.loads(resources.read_text())
        for path in ("message_recorder.MessageRecorder", "hostile_server.HostileServer"):
            content["components"].append({"id": path, "path": path, "args": {}})
        resources.write_text(json.dumps(content))
        system.start_kits()
        job = system.export("job", "fedrdn,talkative")
        refused = system.outcome(system.submit(spoil(job, tmp_path / "listening", "client", EVENTS)))
        system.wait(system.submit(job))
        logs = [path.read_text(errors="replace") for path in system.kit(HOSPITALS[0]).rglob("*log*.txt")]
    assert "FINISHED:COMPLETED" not in refused
    assert any("SPOKEN" in log for log in logs)  # it did speak
    messages = [json.loads(line) for line in recorded.read_text().splitlines()]
    heard = {name: [{*m["found"]} for m in messages if m["from"].startswith(name)] for name in HOSPITALS[:2]}
    for of_site in heard.values():
        assert any(ANSWER in found for found in of_site)  # what is sent can be read
        assert not [found for found in of_site if found & secrets]
    assert not any({SCORE} in found for found in heard.values()), "an event has a score alone"
    answers = [json.loads(line) for line in asked.read_text().splitlines()]
    assert {answer["from"] for answer in answers} == {*HOSPITALS[:2]}
    shell = [answer["body"] for answer in answers if answer["topic"] == "sys.shell"]
    assert len(shell) == 6
    assert all("answers no such command" in body for body in shell)
    assert not [answer for answer in answers for text in secrets if text in answer["body"]]
