"""All messages that reach the server of a provisioned federation while a job asks its sites for events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rehearsed_hospitals import HOSPITALS, PATIENT, SERVER, Rehearsal

SUPPORT = Path(__file__).parents[1] / "support"
SECRETS = {PATIENT, "train_loss", "dataset.json", "Traceback"}
SCORE, ANSWER = "val_dice", "num_samples"


@pytest.mark.slow
def test_the_server_hears_answers_and_events_of_sites_that_allow_them(tmp_path):
    """Sites A and B run a job with a tracker; only A's administrator has allowed its events."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    with Rehearsal(tmp_path / "work", hospitals=HOSPITALS[:2]) as system:
        recorded, secrets = tmp_path / "recorded.jsonl", {*SECRETS, str(tmp_path)}
        system.environment |= {
            "PYTHONPATH": str(SUPPORT),
            "RECORDED": str(recorded),
            "RECORDED_TEXTS": json.dumps([*sorted(secrets), SCORE, ANSWER]),
        }
        system.provision()
        system.make_data()
        system.configure(only_ours=True)
        system.configure_site(HOSPITALS[0], "--tracking")
        resources = system.kit(SERVER) / "local/resources.json"
        content = json.loads(resources.read_text())
        recorder = {"id": "recorder", "path": "message_recorder.MessageRecorder", "args": {}}
        content["components"].append(recorder)
        resources.write_text(json.dumps(content))
        system.start_kits()
        system.wait(system.submit(system.export("job", "fedrdn", "--tracking", "tensorboard")))
    messages = [json.loads(line) for line in recorded.read_text().splitlines()]
    heard = {name: [{*m["found"]} for m in messages if m["from"].startswith(name)] for name in HOSPITALS[:2]}
    for of_site in heard.values():
        assert any(ANSWER in found for found in of_site)  # what is sent can be read
        assert not [found for found in of_site if found & secrets]
    # An event has a score, and no number of samples.
    assert [name for name in heard if {SCORE} in heard[name]] == [HOSPITALS[0]]
