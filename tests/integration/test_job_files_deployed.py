"""Jobs in other configurations than plain JSON, submitted by NVFlare's API to federations that run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_files import SECRET, TOKEN, VARIABLE, Bait, bait, hocon, spoil_files
from rehearsed_hospitals import HOSPITALS, LEAD, SERVER, Rehearsal

# `nvflare job submit` would read the files on the submitter's machine.
SUBMIT = """
import sys
from nvflare.fuel.flare_api.flare_api import new_secure_session
session = new_secure_session(username=sys.argv[2], startup_kit_location=sys.argv[1])
try:
    print("submitted", session.submit_job(sys.argv[3]))
except Exception as error:
    print("refused", error)
finally:
    session.close()
"""
ATTACKS = [("client", "hocon"), ("client", "a variable"), ("server", "hocon"), ("server", "a variable")]


def submit(system: Rehearsal, job: Path) -> list[str]:
    """Submit a job from a machine that has none of the secrets."""
    environment = {name: value for name, value in system.environment.items() if name != VARIABLE}
    arguments = (system.kit(LEAD), LEAD, job)
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=True,
    )
    answer = next(line for line in done.stdout.splitlines() if line.startswith(("submitted", "refused")))
    return answer.split(maxsplit=1)


def apart(job: Path, out: Path, sites: tuple[str, ...]) -> Path:
    """The job with an app for the server and one for the sites, so that the server does not see theirs."""
    shutil.copytree(job, out)
    shutil.copytree(out / "app", out / "app_sites")
    meta = json.loads((out / "meta.json").read_text())
    meta |= {"name": out.name, "deploy_map": {"app": ["server"], "app_sites": list(sites)}}
    (out / "meta.json").write_text(json.dumps(meta))
    return out


def hostile(system: Rehearsal, honest: Path, side: str, attack: str, laid: Bait) -> Path:
    out = system.work / f"hostile/{side}_{attack.replace(' ', '_')}"
    spoilt = spoil_files(honest, system.work / f"spoilt/{out.name}", side, attack, laid)
    job = apart(honest, out, system.hospitals)
    where = out / ("app" if side == "server" else "app_sites")
    shutil.rmtree(where)
    shutil.copytree(spoilt / "app", where)
    return job


def leaked(system: Rehearsal) -> list[Path]:
    """The files of server and lead in which a secret is."""
    folders = [system.kit(name) for name in (SERVER, LEAD)] + [system.work / "downloads"]
    secrets = [text.encode() for text in (SECRET, TOKEN)]
    return [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and any(secret in path.read_bytes() for secret in secrets)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["poc", "provisioned"])
def test_only_plain_json_configures_a_job_of_a_running_federation(mode, tmp_path):
    two = HOSPITALS[:2]
    with bait(tmp_path / "secrets") as laid, Rehearsal(tmp_path / "work", hospitals=two) as system:
        system.environment[VARIABLE] = SECRET
        system.prepare_poc() if mode == "poc" else system.provision()
        system.make_data()
        system.configure(forbid_code=True, only_ours=True)
        system.start_poc() if mode == "poc" else system.start_kits()
        honest = system.export("job", "fedavg", "--classes", "background,lesion")

        for side, attack in ATTACKS:
            verdict, answer = submit(system, hostile(system, honest, side, attack, laid))
            if (side, attack) == ("server", "hocon"):
                assert verdict == "refused"
                assert "only JSON may configure a job here" in answer
                continue
            assert verdict == "submitted", answer
            about = system.outcome(answer)
            assert "FAILED_TO_RUN" in about, about
            assert "job refused: " in about
            assert SECRET not in about
            assert ("server: job refused" in about) == (side == "server")

        job = apart(honest, system.work / "hostile/meta", system.hospitals)
        meta = (job / "meta.json").read_text()
        (job / "meta.json").unlink()
        text = hocon(meta.replace('"resource_spec"', '"classes": [], "resource_spec"', 1), laid)
        (job / "meta.conf").write_text(text)
        verdict, answer = submit(system, job)
        assert verdict == "refused"
        assert "only JSON may configure a job here" in answer

        assert laid.asked == []
        assert leaked(system) == []
        verdict, answer = submit(system, apart(honest, system.work / "honest/job", system.hospitals))
        assert verdict == "submitted"
        system.wait(answer)
        assert (system.collect(answer) / "global_model.pt").is_file()
        system.shut_down()
