"""A participant enrols by one command a side; its key stays, and an exchanged file is refused."""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from nvflare import cli

from medfedaug.cli import console
from medfedaug.errors import ConfigError
from medfedaug.nvflare_jobs.kit.startup import check_startup
from medfedaug.nvflare_jobs.provisioning import enrolment
from medfedaug.nvflare_jobs.provisioning.enrolment import read_request


def aloud(printed: str) -> str:
    """The fingerprint that a command printed, as somebody reads it on the telephone."""
    found = re.findall(r"fingerprint[^:]*: ((?:[0-9A-F]{4} ?){16})", " ".join(printed.split()))
    return found[-1].strip().lower()


@pytest.fixture(autouse=True)
def _nvflare_here(request, monkeypatch):
    """Run NVFlare's commands in this process, except in the test whose hospital has its own Python."""

    def nvflare(command, **_):
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err), suppress(SystemExit):
            patch.setattr(sys, "argv", command[2:])
            cli.main()
        return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())

    if "own_python" not in request.fixturenames:
        found = SimpleNamespace(run=nvflare, DEVNULL=subprocess.DEVNULL)
        monkeypatch.setattr(enrolment, "subprocess", found)


@pytest.fixture
def places(tmp_path, run, monkeypatch):
    """The administrator's project, and a hospital, which is the working folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    project, hospital = tmp_path / "project", tmp_path / "hospital"
    server = ("--server", "fl.example.org", "--port", "9000")
    code, out, err = run("enrol", "project", *server, "--own-keys", project)
    assert code == 0, err
    assert "next: each participant runs medfedaug enrol request NAME" in " ".join(out.split())
    hospital.mkdir()
    monkeypatch.chdir(hospital)
    return project, hospital, tmp_path


@pytest.fixture
def evil(places, run):
    """The project of somebody else."""
    folder = places[2] / "evil"
    assert run("enrol", "project", "--own-keys", folder, "--server", "evil.example.org")[0] == 0
    return folder


@pytest.fixture
def basel(places, run):
    """The open request of a hospital: the file, and the fingerprint as it is read."""
    return asked(run)


@pytest.fixture
def answered(basel, places, tmp_path, run):
    """The signed answer to the request, and the root's fingerprint as it is read."""
    answer, root = signed(run, *basel, places[0])
    (tmp_path / "answer").mkdir()
    return Path(shutil.move(answer, tmp_path / "answer")), root


def asked(run, name="basel", *options):
    """Request at the hospital; the file as it arrives at the administrator, and the fingerprint as read."""
    code, out, err = run("enrol", "request", name, *options)
    assert code == 0, err
    return Path("requests") / name / f"{name}.request.zip", aloud(out)


def signed(run, request, said, project, *options):
    code, out, err = run("enrol", "sign", request, *options, "--project", project, "--fingerprint", said)
    assert code == 0, err
    return request.with_name(request.name.replace("request", "signed")), aloud(out)


@pytest.mark.usefixtures("own_python")
def test_a_hospital_enrols_and_its_key_never_leaves_it(places, run):
    project, hospital, work = places
    request, said = asked(run)
    key = (hospital / "requests/basel/basel.key").read_bytes()
    assert (hospital / "requests/basel").stat().st_mode & 0o077 == 0
    travels = Path(shutil.copy(request, work))
    answer, root = signed(run, travels, said, project)
    for sent in (travels, answer):
        archive = zipfile.ZipFile(sent)
        assert not any(b"PRIVATE KEY" in archive.read(name) for name in archive.namelist())
    code, out, err = run("enrol", "accept", answer, "--fingerprint", root)
    assert code == 0, err
    assert "next: medfedaug site configure basel" in " ".join(out.split())
    kit = hospital / "basel"
    assert (kit / "startup/client.key").read_bytes() == key
    assert not (hospital / "requests/basel").exists(), "the key is in the kit alone"
    target = json.loads((kit / "startup/fed_client.json").read_text())["servers"][0]["service"]["target"]
    assert target == "fl.example.org:9000"
    assert run("site", "configure", kit)[0] == 0
    assert all(finding.ok is not False for finding in check_startup(kit))

    # Three years later: the same commands, and all but startup/ stays.
    (kit / "medfedaug").mkdir()
    (kit / "medfedaug/ledger.sqlite").write_text("what has left")
    settings = (kit / "local/medfedaug.json").read_text()
    before = (kit / "startup/client.crt").read_bytes()
    request, said = asked(run)
    answer, root = signed(run, request, said, project, "--another-key")
    code, out, err = run("enrol", "accept", answer, "--fingerprint", root)
    assert code == 0, err
    assert "next: medfedaug site restart basel" in " ".join(out.split())
    assert (kit / "startup/client.crt").read_bytes() != before
    assert (kit / "startup/client.key").read_bytes() != key
    assert (kit / "local/medfedaug.json").read_text() == settings
    assert (kit / "medfedaug/ledger.sqlite").read_text() == "what has left"
    assert not (kit / "startup.before").exists()
    assert all(finding.ok is not False for finding in check_startup(kit))


@pytest.mark.parametrize(
    ("name", "kind", "file"),
    [
        ("fl.example.org", "server", "fed_server.json"),
        ("lead@example.org", "lead", "fed_admin.json"),
        ("admin@example.org", "admin", "fed_admin.json"),
    ],
)
def test_the_others_enrol_in_the_same_way(places, run, name, kind, file):
    project, hospital, _ = places
    request, said = asked(run, name, "--as", kind, "--port", "9000")
    code, _, err = run("enrol", "sign", request, "--project", project, "--fingerprint", said)
    assert code == 2
    assert "and not site; if that is meant, give --as " + kind in " ".join(err.split())
    assert not list(request.parent.glob("*.signed.zip"))
    answer, root = signed(run, request, said, project, "--as", kind)
    code, _, err = run("enrol", "accept", answer, "--fingerprint", root)
    assert code == 0, err
    assert (hospital / name / "startup" / file).is_file()


def test_a_request_that_was_exchanged_on_its_way_is_not_signed(places, basel, run):
    project, _, work = places
    _, said = basel
    elsewhere = work / "elsewhere"
    forged = run("enrol", "request", "basel", "--requests", elsewhere)
    assert forged[0] == 0
    code, _, err = run(
        *("enrol", "sign", elsewhere / "basel/basel.request.zip", "--project", project),
        *("--fingerprint", said),
    )
    assert code == 2
    assert "differs" in err
    assert not list(work.rglob("*.signed.zip"))


CRAFTED = {
    "nothing": (lambda r, y: (r, y), {}),
    "another name": (lambda r, y: ({**r, "name": "bern"}, y), {}),
    "a server": (lambda r, y: ({**r, "kind": "server", "cert_type": "server"}, y), {}),
    "a lead": (lambda r, y: ({**r, "cert_role": "lead"}, y), {}),
    "an administrator in the list": (lambda r, y: (r, y.replace("client", "admin")), {}),
    "two participants": (lambda r, y: (r, f"{y}\n- name: x@y.org\n  type: admin\n  org: o\n"), {}),
    "code in the list": (lambda r, y: (r, y.replace("basel", "!!python/name:os.system", 1)), {}),
    "another project": (lambda r, y: ({**r, "project": "other"}, y), {}),
    "a path of the identity": (lambda r, y: ({**r, "request_id": "../../x"}, y), {}),
    "a file outside": (lambda r, y: (r, y), {"../../outside": "x"}),
    "a private key": (lambda r, y: (r, y), {"basel.key": "k"}),
}


def test_a_request_that_is_replaced_after_the_comparison_is_not_signed(places, basel, run):
    request, _ = basel
    compared = read_request(request)
    assert run("enrol", "request", "basel", "--requests", places[2] / "elsewhere")[0] == 0
    shutil.copy(places[2] / "elsewhere/basel/basel.request.zip", request)
    with pytest.raises(ConfigError, match="is not the request that was compared"):
        enrolment.sign(compared, places[0])


@pytest.mark.parametrize("crafted", CRAFTED)
def test_a_crafted_request_is_not_signed_even_where_the_telephone_was_forged(places, basel, run, crafted):
    """Its key stays, and its name or its part in the federation differs, or a file is where none belongs."""
    project, _, work = places
    edit, more = CRAFTED[crafted]
    forged = work / "forged.request.zip"
    with zipfile.ZipFile(basel[0]) as before:
        content = {entry: before.read(entry) for entry in before.namelist()}
    request, parts = edit(json.loads(content["request.json"]), content["site.yaml"].decode())
    request["site_yaml_sha256"] = hashlib.sha256(parts.encode()).hexdigest()
    content |= {"request.json": json.dumps(request).encode(), "site.yaml": parts.encode()}
    with zipfile.ZipFile(forged, "w") as after:
        for entry, value in {**content, **more}.items():
            after.writestr(entry.replace("basel", request["name"]), value)
    said = hashlib.sha256(content["request.json"]).hexdigest()
    code, _, err = run("enrol", "sign", forged, "--project", project, "--fingerprint", said)
    assert code == (0 if crafted == "nothing" else 2), err
    assert "Traceback" not in err
    assert bool(list(work.rglob("*.signed.zip"))) is (crafted == "nothing")
    assert not list(work.rglob("outside"))


def test_an_answer_with_another_root_makes_no_kit(places, basel, answered, run, evil):
    _, hospital, _ = places
    _, root = answered
    answer, _ = signed(run, *basel, evil)
    code, _, err = run("enrol", "accept", answer, "--fingerprint", root)
    assert code == 2
    assert "Somebody may have replaced the file" in " ".join(err.split())
    assert not (hospital / "basel").exists()
    assert (hospital / "requests/basel/basel.key").exists()


def test_a_kit_keeps_its_root_until_its_owner_says_otherwise(places, basel, answered, run, evil):
    """A renewal that somebody else's root has signed would hand the site to another server."""
    _, hospital, _ = places
    answer, root = answered
    shutil.copytree("requests", "kept")
    assert run("enrol", "accept", answer, "--fingerprint", root)[0] == 0
    shutil.rmtree("requests", ignore_errors=True)
    shutil.copytree("kept", "requests")
    before = (hospital / "basel/startup/rootCA.pem").read_bytes()
    forged, other = signed(run, *basel, evil)
    code, _, err = run("enrol", "accept", forged, "--fingerprint", other)
    assert code == 2
    assert "nothing is changed. If that is meant, give --another-root" in " ".join(err.split())
    assert (hospital / "basel/startup/rootCA.pem").read_bytes() == before


def test_a_second_key_of_a_name_needs_a_word(places, basel, answered, run):
    project, _, _ = places
    assert run("enrol", "request", "basel", "--requests", "impostor")[0] == 0
    request = Path("impostor/basel/basel.request.zip")
    said = read_request(request).fingerprint
    code, _, err = run("enrol", "sign", request, "--project", project, "--fingerprint", said)
    assert code == 2
    assert "another key of this name was signed before" in " ".join(err.split())
    assert run("enrol", "sign", request, "--project", project, "--fingerprint", said, "--another-key")[0] == 0


@pytest.mark.parametrize("content", [b"", b"PK", b"{}", None])
def test_a_file_that_is_no_request_is_refused_in_one_line(places, run, content):
    project, _, work = places
    path = work / "odd.zip"
    if content is None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("request.json", '{"name": "../../etc"}')
    else:
        path.write_bytes(content)
    for command in (("sign", path, "--project", project), ("accept", path)):
        code, _, err = run("enrol", *command, "--fingerprint", "00")
        assert code == 2
        assert err.startswith("medfedaug: ")
        assert "Traceback" not in err


def test_nothing_is_signed_or_accepted_where_nobody_compares(places, basel, answered, run):
    project, hospital, _ = places
    request, said = basel
    code, out, err = run("enrol", "sign", request, "--project", project)
    assert code == 2
    assert aloud(out) == said
    assert "give --fingerprint" in err
    code, _, err = run("enrol", "accept", answered[0])
    assert code == 2
    assert not (hospital / "basel").exists()


@pytest.mark.parametrize("agrees", [True, False])
def test_a_person_at_a_terminal_compares(places, basel, run, monkeypatch, agrees):
    project, _, _ = places
    request, _ = basel
    questions = []

    def confirm(text, abort):
        questions.append((text, abort))
        if not agrees:
            raise typer.Abort

    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(console, "sys", terminal)
    monkeypatch.setattr(typer, "confirm", confirm)
    code, _, _ = run("enrol", "sign", request, "--project", project)
    assert questions == [("Does the other side read the same on the telephone?", True)]
    assert (code == 0) is agrees
    assert bool(list(request.parent.glob("*.signed.zip"))) is agrees


def test_a_name_that_nvflare_would_not_take_is_refused_before_a_key_is_made(places, run):
    code, _, err = run("enrol", "request", "under_score", "--as", "server")
    assert code == 2
    assert "name=under_score is ill-formatted" in " ".join(err.split())
    assert not [*Path("requests").rglob("*.key")]
