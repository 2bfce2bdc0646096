"""Bundles at hospitals: a site runs what it allowed, by name and content. Nothing of a job is evaluated."""

import importlib.util
import json
import py_compile
import shutil
import stat
from dataclasses import replace

import bundles
import pytest
from hospitals import Deployment, Hospital

from medfedaug.config import bundle_reference
from medfedaug.config.run import RunConfig
from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, MedFedAugError, RunFailed
from medfedaug.federation import Request
from medfedaug.methods import parse_methods
from medfedaug.nvflare_jobs import MedFedAugRecipe, SiteExecutor
from medfedaug.nvflare_jobs.kit.doctor import examine
from medfedaug.simulate import configure
from medfedaug.tasks.bundle.parser import BundleConfiguration

LOOSE = {"privacy": {"min_images": 1}}


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "data"
    make_phantom(root, sites=2, patients=3, shape=(20, 20, 8), seed=0)
    return root


@pytest.fixture
def lead(tmp_path):
    """The Bundle of who submits the job."""
    return bundles.write(tmp_path / "lead/spleen", bundles.volumes())


@pytest.fixture
def config(lead, phantom) -> RunConfig:
    return configure(find_sites(phantom), bundle=lead, methods=tuple(parse_methods("fedrdn,fedfa")), rounds=1)


@pytest.fixture
def hospitals(tmp_path, phantom, lead):
    """Two, each with a copy of its own of the Bundle, which it allows."""
    sites = []
    for name in ("site_A", "site_B"):
        own = shutil.copytree(lead, tmp_path / f"at {name}/spleen")
        allowed = {"spleen": bundle_reference.AllowedBundle.of(own).to_dict()}
        hospital = Hospital(tmp_path / "kits" / name, phantom / name, **LOOSE, bundles=allowed)
        hospital.bundle, hospital.data = own, phantom / name
        sites.append(hospital)
    return sites


def answer(hospital, config):
    hospital.start(config, "job")
    return hospital.answer(Request("prepare", run="a" * 32))


def test_sites_run_their_own_copies_of_a_bundle_that_they_allowed(hospitals, config):
    federation = Deployment(hospitals)
    server = federation.run(config)
    assert set(server.results()["test"]["sites"]) == {"site_A", "site_B"}
    assert list(server.results()["test"]["mean"]) == ["mean_dice", "accuracy"]
    assert not server.left_out


def test_a_site_with_another_version_refuses_by_name_and_the_others_go_on_if_they_may(hospitals, config):
    other = hospitals[1]
    train = other.bundle / "configs/train.json"
    train.write_text(train.read_text().replace('"prob": 0.5', '"prob": 0.4'))
    allowed = {"spleen": bundle_reference.AllowedBundle.of(other.bundle).to_dict()}
    other.set(data=str(other.data), device="cpu", **LOOSE, bundles=allowed)
    with pytest.raises(RunFailed, match=r"site_B: job refused: the Bundle spleen .*other content"):
        Deployment(hospitals).run(config)
    reply = answer(other, config)
    assert str(other.bundle) not in reply.error


def test_a_bundle_that_is_not_allowed_is_refused_though_it_lies_where_the_environment_says(
    hospitals, config, lead, monkeypatch
):
    monkeypatch.setenv("MEDFEDAUG_BUNDLES", str(lead.parent))
    hospitals[0].set(data=str(hospitals[0].data), device="cpu", **LOOSE)
    error = answer(hospitals[0], config).error
    assert "the Bundle … is not allowed here" in error
    assert "--allow-bundle" in error


# ------------------------------------------------------------------ what a job may say


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that an attack would write."""
    path = tmp_path / "marker"
    monkeypatch.setenv("MARKER", str(path))
    return path


ATTACKS = {
    "an expression": lambda m: {"name": f"$__import__('os').system('touch {m}')"},
    "an import": lambda m: {"name": "$import os"},
    "a target as the name": lambda m: {"name": {"_target_": "os.system", "command": f"touch {m}"}},
    "a target": lambda m: {"_target_": "os.system", "command": f"touch {m}"},
    "a path": lambda m: {"name": "../lead/spleen"},
    "an absolute path": lambda m: {"name": str(m.parent / "lead/spleen")},
    "a variable": lambda m: {"name": "$MARKER"},
    "a variable in braces": lambda m: {"name": "${HOME}"},
    "a reference": lambda m: {"name": "@network"},
    "a macro": lambda m: {"name": f"%{m.parent}/lead/spleen/configs/train.json"},
    "another folder": lambda m: {"folder": str(m.parent / "lead/spleen")},
    "an address": lambda m: {"name": "https://example.org/spleen"},
    "a line": lambda m: {"name": "spleen\n$import os"},
    "an expression as the hash": lambda m: {"hash": f"$__import__('os').system('touch {m}')"},
    "no hash": lambda m: {"hash": None},
}


def test_nothing_of_what_a_job_says_of_a_bundle_is_evaluated(config, marker):
    for attack, change in ATTACKS.items():
        job = {**config.to_dict(), "bundle": {**config.bundle, **change(marker)}}
        for made in (SiteExecutor, MedFedAugRecipe):
            with pytest.raises(ConfigError, match="bundle") as caught:
                made(config=job)
            assert "\n" not in str(caught.value), attack
        assert not marker.exists(), attack


OTHER = {
    "network_args": {"channels": "$import os"},
    "loss_args": {"_target_": "os.system", "command": "touch $MARKER"},
    "loss": "$__import__('os').system('touch $MARKER')",
    "optimizer": "os.system",
}


def test_no_other_setting_of_a_job_reaches_the_bundles_parser(config, marker):
    for field, value in OTHER.items():
        with pytest.raises(MedFedAugError):
            SiteExecutor(config={**config.to_dict(), field: value})
        assert not marker.exists(), field


def test_what_a_job_may_still_say_beside_a_bundle_is_never_parsed(hospitals, config, marker):
    """Names of classes are free text, and so are patterns of frozen entries."""
    text = f"$__import__('os').system('touch {marker}')"
    odd = replace(config, classes=("background", text), freeze=(text,))
    error = answer(hospitals[0], odd).error
    assert error
    assert not marker.exists()
    spoilt = {**config.to_dict(), "network": text}
    assert RunConfig.from_dict(spoilt).network == "spleen"


def test_a_sites_rules_hold_for_jobs_with_bundles_too(hospitals, config):
    def with_rules(**rules):
        hospital = hospitals[0]
        allowed = {"spleen": bundle_reference.AllowedBundle.of(hospital.bundle).to_dict()}
        hospital.set(data=str(hospital.data), device="cpu", **LOOSE, jobs=rules, bundles=allowed)
        return answer(hospital, replace(config, rounds=2)).error

    assert not with_rules()
    assert "its rounds are …, and the site's rule max_rounds" in with_rules(max_rounds=1)
    assert "max_model_mb" in with_rules(max_model_mb=0.001)


# ------------------------------------------------------------------ the commands


def test_site_configure_allows_a_bundle_doctor_shows_it_and_jobs_tells_of_it(
    run, kits, lead, hospitals, config, phantom
):
    for name in ("hospital-a", "fl-server.example.org"):
        kit = kits / name
        out = run.ok("site", "configure", kit, "--allow-bundle", lead)
        assert 'bundles: {"spleen": ' in out
        assert "nothing to change" in run("site", "configure", kit, "--allow-bundle", lead)[1]
        check = next(check for check in examine(kit) if check.name == "bundle spleen")
        assert check.ok is True
        assert bundle_reference.short_hash(config.bundle["hash"]) in check.found
    (lead / "configs/more.json").write_text("{}")
    check = next(check for check in examine(kit) if check.name == "bundle spleen")
    assert check.ok is False
    assert "has changed since it was allowed" in check.found
    err = run.refused("site", "configure", kit, "--allow-bundle", phantom)
    assert "no Bundle that trains" in " ".join(err.split())
    answer(hospitals[0], replace(config, rounds=7))
    run.ok("site", "jobs", hospitals[0].kit)


def test_export_writes_name_and_hash_and_nothing_else_of_a_bundle(run, lead, tmp_path, monkeypatch):
    channels = {"0": "background", "1": "spleen"}
    formats = {
        "inputs": {"image": {"num_channels": 1}},
        "outputs": {"pred": {"format": "segmentation", "channel_def": channels}},
    }
    (lead / "configs/metadata.json").write_text(json.dumps({"network_data_format": formats}))
    monkeypatch.setenv("MEDFEDAUG_BUNDLES", str(lead.parent))
    job = tmp_path / "jobs/job"
    run.ok("export", "--bundle", "spleen", "--methods", "fedrdn,fedfa", "--out", job)
    files = [path for path in job.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json"}
    text = "".join(path.read_text() for path in files)
    assert "_target_" not in text
    assert str(lead) not in text
    sent = json.loads((job / "app/config/config_fed_client.json").read_text())
    config = sent["executors"][0]["executor"]["args"]["config"]
    assert config["bundle"] == bundle_reference.AllowedBundle.of(lead).reference
    assert config["classes"] == ["background", "spleen"]
    assert (config["batch_size"], config["learning_rate"], config["plan"]["spatial_dims"]) == (2, 0.02, 3)


# ------------------------------------------------------------------ what runs is what was looked at


def losses(folder, value: str):
    """A module of a Bundle, whose configuration imports it."""
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / "scripts/__init__.py").touch()
    module = folder / "scripts/own_losses.py"
    module.write_text(f"SAID = {value!r}\n")
    return module


MORE = {
    "a module": "scripts/new.py",
    "code beside the weights": "models/net.py",
    "a hidden file": ".more.py",
    "a module without a console": "eval/more.pyw",
    "text that an expression reads": "docs/expression.txt",
    "weights by another name": "models/pretrained.pt",
    "a hidden folder": ".hidden/more.py",
}


def test_every_file_of_a_bundle_counts(hospitals, config):
    for kind, name in MORE.items():
        path = hospitals[0].bundle / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1")
        assert "spleen has changed since it was allowed here" in answer(hospitals[0], config).error, kind
        path.unlink()


def test_compiled_code_in_a_bundle_is_refused_by_name(hospitals, config):
    for name in ("scripts/__pycache__/own.pyc", "docs/own.pyc", "models/own.so", "own.PYD"):
        path = hospitals[0].bundle / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x7fELF")
        error = answer(hospitals[0], config).error
        assert "compiled code cannot be looked at in a Bundle; remove it" in error, name
        with pytest.raises(ConfigError, match="compiled code"):
            bundle_reference.AllowedBundle.of(hospitals[0].bundle)
        path.unlink()


def test_a_link_in_a_bundle_is_refused(hospitals, config, tmp_path):
    (tmp_path / "elsewhere.py").write_text("")
    for target in (tmp_path / "elsewhere.py", tmp_path):
        link = hospitals[0].bundle / "link"
        link.symlink_to(target)
        assert "a Bundle has no links" in answer(hospitals[0], config).error
        link.unlink()
    assert not answer(hospitals[0], config).error


def test_a_bundle_runs_from_the_bytes_that_were_hashed(lead, tmp_path):
    """A module that is changed after the check, and bytecode in the place of its source, do not run."""
    module = losses(lead, "as it was allowed")
    train = json.loads((lead / "configs/train.json").read_text())
    train["said"] = "$__import__('scripts.own_losses', fromlist=['SAID']).SAID"
    (lead / "configs/train.json").write_text(json.dumps(train))
    allowed = bundle_reference.AllowedBundle.of(lead)
    configuration = BundleConfiguration(allowed)
    module.write_text("SAID = 'changed since'\n")
    hostile = tmp_path / "hostile.py"
    hostile.write_text("SAID = 'from bytecode'\n")
    for cached in (module, allowed.verified() / "scripts/own_losses.py"):
        assert not list(cached.parent.glob("__pycache__"))
    py_compile.compile(
        str(hostile),
        importlib.util.cache_from_source(str(module)),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    assert configuration.make("said") == "as it was allowed"
    assert configuration.make("bundle_root") != str(lead)
    assert stat.S_IMODE(allowed.verified().stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="compiled code"):
        allowed.check()
    shutil.rmtree(module.parent / "__pycache__")
    with pytest.raises(ConfigError, match="has changed since it was allowed here"):
        allowed.check()


def test_what_is_not_hashed_is_not_there_when_a_bundle_runs(lead):
    for name in ("models/model.pt", ".DS_Store", ".git/hooks/own.py"):
        (lead / name).parent.mkdir(parents=True, exist_ok=True)
        (lead / name).write_text("1")
    allowed = bundle_reference.AllowedBundle.of(lead)
    (lead / "models/model.pt").write_text("2")
    allowed.check()
    names = {path.relative_to(allowed.verified()).as_posix() for path in allowed.verified().rglob("*")}
    assert "configs/train.json" in names
    assert not names & {"models/model.pt", ".DS_Store", ".git", ".git/hooks/own.py"}
