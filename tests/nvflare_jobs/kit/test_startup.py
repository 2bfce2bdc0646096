"""A kit whose certificates or address are wrong is not ready, and its log says why at once."""

import json
import shutil
import socket
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from connect_proxy import connect_proxy
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert, serialize_pri_key
from rehearsed_hospitals import HOSPITALS, SERVER, Rehearsal

from medfedaug.errors import RunFailed
from medfedaug.nvflare_jobs.kit.doctor import examine
from medfedaug.nvflare_jobs.kit.kit import open_kit
from medfedaug.nvflare_jobs.kit.kit_process import ProcessRecord, find_process, find_trouble
from medfedaug.nvflare_jobs.kit.kit_start import restart, start, stop
from medfedaug.nvflare_jobs.kit.startup import check_connection, check_startup

NAME = "hospital-a"


@pytest.fixture
def startup(kits, make_site) -> Path:
    """The ``startup`` of a kit that is ready."""
    kit = open_kit(kits / NAME)
    kit.write(kit.plan({"data": make_site(NAME, cases=(10, 10, 10)), "device": "cpu"}, forbid=True))
    return kit.path / "startup"


@pytest.fixture
def root(provisioned):
    return root_key(provisioned)


def root_key(kits):
    """The key of the project's root, which NVFlare keeps next to the kits."""
    state = json.loads((kits.parent / "state/cert.json").read_text())
    return load_pem_private_key(state["root_pri_key"].encode(), None)


def issue(startup, root, begin=-1, days=360):
    """Put a new certificate, so many days from now, and its key into a kit."""
    key, public = generate_keys()
    start = datetime.now(timezone.utc) + timedelta(days=begin)
    times = {"not_valid_before": start, "valid_days": days}
    certificate = generate_cert(Identity(NAME), Identity("medfedaug"), root, public, **times)
    (startup / "client.crt").write_bytes(serialize_cert(certificate))
    (startup / "client.key").write_bytes(serialize_pri_key(key))


def expired(startup, root):
    issue(startup, root, begin=-30, days=29)


def root_of_another_project(startup, root):
    key, public = generate_keys()
    other = generate_cert(Identity("medfedaug"), Identity("medfedaug"), key, public, ca=True)
    (startup / "rootCA.pem").write_bytes(serialize_cert(other))


def copy_of_another(startup, *names):
    for name in names:
        shutil.copy(startup.parents[1] / "hospital-b/startup" / name, startup)


# The check, its words, and a function of the folder and the root's key.
BROKEN = {
    "no certificate": ("certificate", "No such file", lambda s, r: (s / "client.crt").unlink()),
    "expired": ("certificate", "client.crt expired on", expired),
    "not yet": ("certificate", "is valid from", lambda s, r: issue(s, r, begin=2)),
    "key of another": (
        *("certificate", "client.key is not the key of client.crt"),
        lambda s, r: copy_of_another(s, "client.key"),
    ),
    "root of another project": (
        *("certificate", "client.crt is not signed by rootCA.pem"),
        root_of_another_project,
    ),
    "damaged": (
        *("certificate", "cannot be read"),
        lambda s, r: (s / "client.crt").write_bytes((s / "client.crt").read_bytes()[:200]),
    ),
    "broken JSON": (
        *("startup", "not readable"),
        lambda s, r: (s / "fed_client.json").write_text('{"servers": ['),
    ),
}


def test_a_kit_as_provisioned_has_a_sound_startup(startup):
    found = {check.name: check for check in check_startup(startup.parent)}
    assert {name: check.ok for name, check in found.items()} == {"python3": True, "certificate": True}
    assert "of hospital-a, valid until" in found["certificate"].found


@pytest.mark.parametrize("breakage", BROKEN)
def test_a_broken_startup_is_found(startup, root, breakage):
    name, text, spoil = BROKEN[breakage]
    spoil(startup, root)
    found = [check for check in check_startup(startup.parent) if check.ok is False]
    assert [check.name for check in found] == [name]
    assert text in found[0].found
    assert found[0].advice


def test_a_certificate_that_ends_soon_and_a_key_for_everybody_are_noted(startup, root):
    issue(startup, root, days=21)
    (startup / "client.key").chmod(0o644)
    notes = {check.name: check for check in examine(startup.parent) if check.ok is None}
    assert "client.crt expires in 19 days" in notes["certificate"].found
    assert "can be read by others (mode 644)" in notes["key"].found


def send_to(startup: Path, target: str) -> None:
    file = startup / "fed_client.json"
    values = json.loads(file.read_text())
    values["servers"][0]["service"]["target"] = target
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("target", ["no-such-host.invalid:8002", "localhost", "localhost:99999"])
def test_a_server_that_cannot_be_reached_is_not_ready(startup, run, target):
    send_to(startup, target)
    (found,) = check_connection(startup.parent)
    assert (found.name, found.ok) == ("server", False)
    assert f"{target}: not reachable" in found.found
    code, out, _ = run("site", "doctor", startup.parent)
    assert code == 1
    assert out.endswith("not ready: server\n")


@pytest.fixture
def proxy(monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with connect_proxy() as running:
        monkeypatch.setenv("https_proxy", running.url)
        yield running


@pytest.fixture
def way(startup):
    """The check of the way to a server that listens, without TLS."""
    with socket.create_server(("localhost", 0)) as server:
        file = startup / "fed_client.json"
        values = json.loads(file.read_text())
        values["client"]["connection_security"] = "clear"
        values["servers"][0]["service"]["scheme"] = "grpc"
        file.write_text(json.dumps(values))
        send_to(startup, f"localhost:{server.getsockname()[1]}")
        yield lambda: next(iter(check_connection(startup.parent)))


def test_the_way_is_that_of_grpc_through_the_proxy(way, proxy):
    assert "reachable; the kit says clear" in way().found
    assert [target.partition(":")[0] for target in proxy.asked] == ["localhost"]
    proxy.allows = False
    found = way()
    assert found.ok is False
    assert f"not reachable through https_proxy={proxy.url.removeprefix('http://')}" in found.found
    assert "Tunnel connection failed: 403 Forbidden" in found.found
    assert "no_proxy" in found.advice


@pytest.mark.parametrize("entries", ["localhost", " .example.org , LOCALHOST", "host"])
def test_a_server_that_no_proxy_names_is_asked_directly(way, proxy, monkeypatch, entries):
    monkeypatch.setenv("no_proxy", entries)
    assert "reachable; the kit says clear" in way().found
    assert proxy.asked == []


def test_user_and_password_go_to_the_proxy_and_into_no_message(way, proxy, monkeypatch):
    proxy.password = "kit:se cret"
    address = proxy.url.removeprefix("http://")
    monkeypatch.setenv("https_proxy", f"http://kit:se%20cret@{address}")
    assert "reachable; the kit says clear" in way().found
    monkeypatch.setenv("https_proxy", f"http://kit:wrong@{address}")
    assert "407" in way().found
    assert "wrong" not in way().found


def test_a_proxy_that_is_gone_or_of_another_kind_is_named(way, proxy, monkeypatch):
    proxy.close()
    assert "not reachable through https_proxy=" in way().found
    monkeypatch.setenv("https_proxy", "socks5://127.0.0.1:1080")
    assert "gRPC needs http://HOST:PORT" in way().found


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 1", "has no medfedaug, or no nvflare"),
        ("echo 0.0.1", "has medfedaug 0.0.1; here is"),
        (None, "no python3 is on the PATH"),
    ],
)
def test_another_python3_on_the_path_is_not_ready_and_is_not_started(
    startup, run, tmp_path, monkeypatch, script, words
):
    (tmp_path / "bin").mkdir()
    if script is not None:
        (tmp_path / "bin/python3").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin/python3").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (found,) = [check for check in check_startup(startup.parent) if check.name == "python3"]
    assert found.ok is False
    assert words in found.found
    code, _, err = run("site", "start", startup.parent)
    assert code == 2
    assert words in " ".join(err.split())


@pytest.mark.slow
def test_behind_a_proxy_a_kit_starts_and_says_why_it_is_not_connected(tmp_path, proxy, monkeypatch):
    with Rehearsal(tmp_path / "work", hospitals=HOSPITALS[:2]) as system:
        for name in ("HOME", "PATH"):
            monkeypatch.setenv(name, system.environment[name])
        system.request_kits()  # over gRPC
        system.make_data()
        system.configure()
        kit, target = system.kit(NAME), json.loads((system.kit(NAME) / "startup/fed_client.json").read_text())
        monkeypatch.delenv("https_proxy")
        start(system.kit(SERVER))
        monkeypatch.setenv("https_proxy", proxy.url)
        proxy.allows = False
        with pytest.raises(RunFailed, match=r"does not reach the server: .* 403 Forbidden"):
            start(kit)
        system.until(lambda: find_process(kit) is not None, "the process does not come")
        system.until(lambda: ProcessRecord.load(kit) is not None, "no record")
        assert find_trouble(kit, server=False).startswith("the server has not answered")
        (server,) = [check for check in examine(kit, connect=True) if check.name == "server"]
        assert server.ok is False
        asked, proxy.allows = len(proxy.asked), True
        assert "not answered" not in restart(kit)
        assert set(proxy.asked[asked:]) == {
            target["servers"][0]["service"]["target"]
        }  # gRPC took this way, too
        assert find_trouble(kit, server=False) == ""
        stop(kit)
        stop(system.kit(SERVER))


@pytest.mark.slow
@pytest.mark.usefixtures("own_python")
def test_the_way_to_a_running_server_and_the_log_of_a_site_whose_certificate_has_expired(tmp_path):
    with Rehearsal(tmp_path / "work", hospitals=HOSPITALS[:2]) as system:
        system.provision()
        system.make_data()
        system.configure()
        kit = system.kit(NAME)
        system.switch_on(SERVER)
        root = root_key(system.kits)

        def server(**more) -> tuple[bool | None, str]:
            found = {one.name: one for one in check_connection(kit)}
            return found["server"].ok, found["server"].found

        system.until(lambda: server()[0], "the server does not answer")
        assert f"{SERVER}, its certificate is valid until" in server()[1]
        assert system.medfedaug("site", "doctor", kit).endswith("ready\n")

        before = shutil.copytree(kit / "startup", tmp_path / "startup")
        for breakage, text in (
            ("root of another project", "no TLS connection can be made"),
            ("expired", "the server drops this kit's certificate"),
        ):
            BROKEN[breakage][2](kit / "startup", root)
            assert (server()[0], text in server()[1]) == (False, True), (breakage, server())
            shutil.copytree(before, kit / "startup", dirs_exist_ok=True)
        file = kit / "startup/fed_client.json"
        file.write_text(file.read_text().replace(f'"identity": "{SERVER}"', '"identity": "another"'))
        assert server()[0] is False
        assert f"answers as {SERVER}, and the kit expects another" in server()[1]

        expired(kit / "startup", root)
        system.switch_on(NAME)
        log = system.await_file(kit, "log.txt")
        system.until(lambda: "client.crt expired on" in log.read_text(), "the log says nothing")
        lines = [line for line in log.read_text().splitlines() if "expired on" in line]
        assert len(lines) == 1
        assert "ERROR" in lines[0]
        assert "docs/howto/certificates.md" in lines[0]
