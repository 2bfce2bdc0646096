"""The files that a site keeps for itself: nobody else reads them, and what killed writers left goes."""

import os
import stat
import subprocess
import sys
import time

import pytest
from hospitals import Deployment, Hospital

from medfedaug.federation import FederationServer
from medfedaug.federation.messages.messages import Request
from medfedaug.utils.files import write_atomic

FREE = {"allow_limit": True}

KILLED = """
import os, signal, sys
from medfedaug.utils.files import write_atomic

def write(file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

write_atomic(sys.argv[1], write, private=True)
"""


@pytest.fixture
def deployment(make_site, tmp_path):
    settings = {"privacy": {"min_images": 3}, "jobs": FREE}
    for name in "AB":
        make_site(name, cases=(8, 1, 1))
    return Deployment([Hospital(tmp_path / "kits" / n, tmp_path / "data" / n, **settings) for n in "AB"])


def kept(deployment):
    """Everything in the states of the sites, but the empty files of locks."""
    files = [
        file
        for hospital in deployment.hospitals.values()
        for file in (hospital.kit / "medfedaug").rglob("*")
        if file.is_file() and not file.name.endswith("lock")
    ]
    assert {file.suffix for file in files} >= {".sqlite", ".pt", ".json", ".key"}, files
    return files


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_no_file_of_a_site_is_open_to_others_for_a_moment(deployment, tiny_config, monkeypatch):
    """Ledger, checkpoints, jobs and key; seen from within the writing of each file."""
    seen, replace = {}, os.replace

    def watched(source, target):
        seen[str(target)] = mode(type(deployment.hospitals["A"].kit)(source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    before = os.umask(0)
    try:
        deployment.run(tiny_config("fedbn", rounds=2))
    finally:
        os.umask(before)
    own = {path: mode_bits for path, mode_bits in seen.items() if "/kits/" in path}
    assert any(path.endswith("ledger.sqlite") for path in own)
    assert {path: oct(mode_bits) for path, mode_bits in own.items() if mode_bits != 0o600} == {}
    files = kept(deployment)
    assert {str(file): oct(mode(file)) for file in files if mode(file) != 0o600} == {}
    # So are the folders in which a site's own are.
    assert all(not mode(file.parent) & 0o077 for file in files)


def test_files_that_others_could_read_are_closed_by_the_next_job(deployment, tiny_config):
    config = tiny_config("fedbn", rounds=1)
    deployment.run(config)
    for file in kept(deployment):
        if file.suffix == ".sqlite":
            file.chmod(0o644)
    deployment.run(config)
    assert {str(file) for file in kept(deployment) if mode(file) != 0o600} == set()


def killed(path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -9
    (left,) = path.parent.glob(f".{path.name}.*")
    return left


def test_what_a_killed_writer_left_is_removed_at_the_next_start_and_nothing_else(deployment, tiny_config):
    deployment.run(tiny_config("fedbn", rounds=1))
    (key,) = deployment.hospitals["A"].kit.rglob("pseudonyms.key")
    state = key.parent
    jobs = next(file.parent for file in state.rglob("*.json"))
    left = [
        killed(key),
        killed(jobs / f"{'a' * 64}.json"),
        killed(next(state.rglob("*.pt")).with_name(f"{'b' * 32}.pt")),
    ]
    for file in left:  # by a process that was killed two hours ago
        os.utime(file, (time.time() - 7200,) * 2)
    others = [state / ".notes.pt", state / "model.pt.deadbeef", state / ".notes.txt.deadbeef"]
    for file in others:
        file.write_text("somebody's")
    # One that a process is writing at this moment.
    busy = []

    def write(file):
        busy.extend(state.glob(".busy.key.*"))
        deployment.run(tiny_config("fedbn", rounds=1, seed=1))
        assert busy[0].exists()
        file.write(b"whole")

    write_atomic(state / "busy.key", write, private=True)
    assert (state / "busy.key").read_bytes() == b"whole"
    assert [file for file in left if file.exists()] == []
    assert all(file.exists() for file in others)


@pytest.mark.parametrize(
    ("methods", "settings"), [("fedbn", {"fedbn": {"unseen": "average"}}), ("fedavg", {}), ("fedbn", {})]
)
def test_layers_that_stay_do_not_leave_by_a_later_job_with_other_settings(
    deployment, tiny_config, methods, settings
):
    """A server names the run of an earlier job in one whose method sends what the earlier one kept."""
    server = deployment.run(tiny_config("fedbn", rounds=2))
    site = deployment.hospitals["A"]
    (file,) = (site.kit / "medfedaug/A").glob(f"{server.run}.pt")
    before = file.read_bytes()
    later = tiny_config(methods, rounds=3, learning_rate=1e-9, settings=settings)
    site.start(later, "later")
    weights = {key: value.clone() for key, value in FederationServer(later).state.items()}
    for request in (Request("prepare", run=server.run), Request("train", 3, weights=weights, run=server.run)):
        reply = site.answer(request)
        assert f"run {server.run} has other settings here" in reply.error
        assert not reply.weights
        assert not reply.payload
    assert file.read_bytes() == before


def test_a_run_with_more_rounds_goes_on(deployment, tiny_config):
    server = deployment.run(tiny_config("fedbn", rounds=1))
    site = deployment.hospitals["A"]
    site.start(tiny_config("fedbn", rounds=2), "later")
    assert site.answer(Request("prepare", run=server.run)).error == ""
