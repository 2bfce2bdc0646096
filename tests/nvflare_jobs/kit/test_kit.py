"""NVFlare's kits as `medfedaug site configure` leaves them."""

import json
from pathlib import Path

import pytest
from hospitals import Hospital
from nvflare.fuel.sec.authz import AuthzContext, Person, parse_policy_config
from nvflare.security.security import COMMAND_CATEGORIES

from medfedaug import __version__
from medfedaug.errors import ConfigError
from medfedaug.federation.messages.messages import Request
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.kit.kit import LAUNCHER, OWN_COMPONENTS, allowed_classes, forbid_code, open_kit


def content(kit: Path, name: str) -> dict:
    return json.loads((kit / "local" / name).read_text())


def test_a_sites_kit_gets_what_is_missing_and_keeps_the_rest(run, kits, tmp_path):
    kit, data = kits / "hospital-a", tmp_path / "data"
    data.mkdir()
    before = content(kit, "resources.json.default")
    code, out, err = run("site", "configure", kit, "--data", data, "--min-images", 20, "--state", tmp_path)
    assert code == 0, err
    for word in ("class_allow_list", LAUNCHER, "min_images", str(data)):
        assert word in out
    after = content(kit, "resources.json")
    assert after["class_allow_list"] == allowed_classes(server=False)
    own = [{"id": name, "path": path, "args": {}} for name, path in OWN_COMPONENTS[False].items()]
    assert after["components"][: len(own)] == own
    others = after["components"][len(own) :]
    changed = [(a, b) for a, b in zip(before["components"], others, strict=True) if a != b]
    assert [(a["id"], b) for a, b in changed] == [
        ("process_launcher", {"id": "process_launcher", "path": LAUNCHER, "args": {}})
    ]
    assert after.pop("allow_log_streaming") is False  # it is not there, or true, by default
    for key in before.keys() - {"class_allow_list", "components", "allow_log_streaming"}:
        assert after[key] == before[key]
    assert content(kit, "medfedaug.json") == {
        "privacy": {"min_images": 20},
        "data": str(data.resolve()),
        "state": str(tmp_path.resolve()),
    }
    assert content(kit, "authorization.json")["permissions"]["lead"]["byoc"] == "none"


def test_a_site_limits_the_memory_of_prepared_images(run, kits, tmp_path, monkeypatch):
    for name in ("MEDFEDAUG_MEMORY", "MEDFEDAUG_CACHE"):
        monkeypatch.delenv(name, raising=False)
    kit = kits / "hospital-a"
    code, _, err = run("site", "configure", kit, "--memory", 0.5, "--cache", tmp_path / "prepared")
    assert code == 0, err
    settings = SiteSettings.load(kit)
    assert (settings.max_bytes, settings.cache) == (2**29, tmp_path / "prepared")
    assert run("site", "configure", kit, "--memory", 0)[0] == 0
    assert content(kit, "medfedaug.json")["memory"] == 0
    assert content(kit, "medfedaug.json")["cache"] == str(tmp_path / "prepared")
    before = (kit / "local/medfedaug.json").read_bytes()
    code, _, err = run("site", "configure", kit, "--memory", "inf")
    assert code == 2
    assert "memory must be a finite number" in err
    assert (kit / "local/medfedaug.json").read_bytes() == before
    code, _, err = run("site", "configure", kits / "fl-server.example.org", "--memory", 0)
    assert code == 2
    assert "a server has no memory of its own" in " ".join(err.split())


def test_site_configure_is_idempotent_and_keeps_what_it_is_not_asked_to_change(run, kits, tmp_path):
    kit = kits / "hospital-b"
    assert run("site", "configure", kit, "--device", "cuda:1", "--min-images", 30)[0] == 0
    settings = kit / "local/medfedaug.json"
    settings.write_text(
        json.dumps({"device": "cuda:1", "privacy": {"min_images": 30, "cases_per_patient": 2}})
    )
    files = {path: path.read_bytes() for path in (kit / "local").iterdir()}
    code, out, _ = run("site", "configure", kit)
    assert code == 0
    assert "nothing to change" in out
    assert {path: path.read_bytes() for path in (kit / "local").iterdir()} == files
    assert run("site", "configure", kit, "--min-images", 12)[0] == 0
    assert content(kit, "medfedaug.json") == {
        "privacy": {"min_images": 12, "cases_per_patient": 2},
        "device": "cuda:1",
    }


def test_check_says_what_is_missing_and_writes_nothing(run, kits):
    kit = kits / "hospital-a"
    files = {path.name for path in (kit / "local").iterdir()}
    code, out, _ = run("site", "configure", kit, "--check")
    assert code == 1
    for word in ("class_allow_list", "process_launcher", "min_images", "permissions.lead.byoc"):
        assert word in out
    assert {path.name for path in (kit / "local").iterdir()} == files
    assert run("site", "configure", kit, "--allow-code")[0] == 0
    assert not (kit / "local/authorization.json").exists()
    assert run("site", "configure", kit)[0] == 0
    assert run("site", "configure", kit, "--check")[0] == 0


def test_the_servers_kit_gets_the_allow_list_and_a_job_store_of_its_own(run, kits):
    kit = kits / "fl-server.example.org"
    assert "/tmp/nvflare" in (kit / "local/resources.json.default").read_text()
    code, _, err = run("site", "configure", kit)
    assert code == 0, err
    text = (kit / "local/resources.json").read_text()
    assert "/tmp/nvflare" not in text
    assert str(kit / "jobs-storage") in text
    assert str(kit / "snapshot-storage") in text
    assert content(kit, "resources.json")["class_allow_list"] == allowed_classes(server=True)
    assert LAUNCHER not in text
    assert not (kit / "local/medfedaug.json").exists()
    code, _, err = run("site", "configure", kit, "--device", "cpu")
    assert code == 2
    assert "a server has no device of its own" in err


@pytest.mark.parametrize("command", ["start", "restart"])
def test_a_kit_of_another_version_or_none_is_not_started(run, kits, command):
    kit = kits / "hospital-a"
    assert "not configured: run medfedaug site configure" in run.refused("site", command, kit)
    run.ok("site", "configure", kit)
    values = {**content(kit, "resources.json"), "medfedaug": "9.8.7"}
    (kit / "local/resources.json").write_text(json.dumps(values))
    assert f"lacks medfedaug: {__version__}" in run.refused("site", command, kit)


def test_a_moved_servers_storage_moves_along(run, kits, tmp_path):
    kit = kits / "fl-server.example.org"
    assert run("site", "configure", kit)[0] == 0
    moved = kit.rename(tmp_path / "moved")
    code, out, _ = run("site", "configure", moved)
    assert code == 0
    assert f"jobs-storage: {moved / 'jobs-storage'}" in " ".join(out.split())
    assert open_kit(moved).folders() == {name: moved / name for name in ("jobs-storage", "snapshot-storage")}


@pytest.mark.parametrize("entries", [["*"], ["medfedaug.", "medfedaug.nvflare_jobs."]])
@pytest.mark.parametrize("name", ["hospital-a", "fl-server.example.org"])
def test_a_kit_allows_the_classes_of_our_jobs_and_nothing_else(run, kits, name, entries):
    kit = kits / name
    values = content(kit, "resources.json.default")
    values |= {"class_allow_list": entries, "class_list_enforcement_mode": "warn"}
    (kit / "local/resources.json").write_text(json.dumps(values))
    assert "not ready: kit" in run("site", "doctor", kit, "--offline")[1]
    assert "class_allow_list" in run("site", "configure", kit, "--check")[1]
    run.ok("site", "configure", kit)
    now = content(kit, "resources.json")
    assert now["class_allow_list"] == allowed_classes(server=name.startswith("fl-"))
    assert "class_list_enforcement_mode" not in now
    run.ok("site", "configure", kit, "--check")


def permitted(policy: dict, role: str, right: str) -> bool:
    parsed, error = parse_policy_config(policy, COMMAND_CATEGORIES)
    assert not error
    return parsed.evaluate("hospital_a", AuthzContext(right, Person("who", "coordination", role)))[0]


def test_no_role_may_send_code_and_all_keep_their_other_rights(kits):
    default = content(kits / "hospital-a", "authorization.json.default")
    policy, roles = forbid_code(default)
    assert roles == ["project_admin", "lead"]
    rights = {*COMMAND_CATEGORIES, *COMMAND_CATEGORIES.values()}
    assert len(rights) > 20
    for role in default["permissions"]:
        assert not permitted(policy, role, "byoc")
        for right in rights:
            assert permitted(policy, role, right) == permitted(default, role, right), (role, right)
    assert permitted(default, "project_admin", "byoc")
    assert forbid_code(policy) == (policy, [])


def test_a_site_with_an_account_runs_no_code_of_jobs(kits):
    """Code would send what it likes, past noise and account."""
    files = open_kit(kits / "hospital-a").plan({"privacy": {"epsilon": 8.0}})
    (policy,) = (file.wanted for file in files if file.path.name == "authorization.json")
    assert not any(permitted(policy, role, "byoc") for role in policy["permissions"])


@pytest.mark.parametrize("name", ["nowhere", ".", "lead@example.org"])
def test_a_folder_that_is_no_sites_kit_is_refused(kits, name):
    with pytest.raises(ConfigError, match="not an NVFlare kit of a server or a site"):
        open_kit(kits / name)


def test_a_setting_that_pytorch_does_not_know_is_answered_in_one_line(tmp_path, tiny_config, phantom_dir):
    site = Hospital(tmp_path / "site_A", phantom_dir / "site_A")
    site.set(data=str(phantom_dir / "site_A"), device="gpu")
    site.start(tiny_config(), "job")
    error = site.answer(Request("prepare", run="a" * 32)).error
    assert error == "site site_A: RuntimeError while its settings were opened; the site's own log says more"
    assert "gpu" in site.logged[0]
