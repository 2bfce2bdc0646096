"""Methods and networks of other packages: the page's example, and packages that cannot be used."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from installed_package import installed as installed
from installed_package import package as package
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError
from medfedaug.federation import FederationServer, Request, run_in_process
from medfedaug.federation.job_folder import EVENTS, JOB_FOLDER
from medfedaug.hospital.privacy.site_settings import SETTINGS_FILE
from medfedaug.methods import build_methods, method_names, parse_methods
from medfedaug.models import build_network, network_names
from medfedaug.nvflare_jobs import FederationController, SiteExecutor
from medfedaug.nvflare_jobs.job.messages import reply_from_model, request_to_model
from medfedaug.nvflare_jobs.kit.doctor import examine
from medfedaug.nvflare_jobs.kit.kit import open_kit
from medfedaug.utils import plugins

PACKAGE, SITES = "lesion-methods", ["site_A", "site_B"]


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    sys.modules.pop("lesion_methods", None)


@pytest.fixture
def config(package) -> RunConfig:
    return RunConfig(
        methods=tuple(parse_methods("cautious,fedrdn")),
        network="small_unet",
        network_args={"width": 4},
        rounds=1,
        batch_size=4,
    )


@pytest.mark.slow
def test_the_pages_method_and_network_run_and_change_the_model(config, phantom_dir):
    server = run_in_process(config, phantom_dir, SITES, "cpu")
    plain = {**config.to_dict(), "methods": parse_methods("fedrdn")}
    mean = run_in_process(RunConfig.from_dict(plain), phantom_dir, SITES, "cpu")
    assert any(not torch.equal(mean.state[key], server.state[key]) for key in mean.state)


def test_a_method_of_a_package_is_listed_and_built_like_any_other(package):
    assert "cautious" in method_names()
    assert "small_unet" in network_names()
    assert "lesion_methods" not in sys.modules
    (method,) = build_methods(parse_methods("cautious"))
    assert type(method).__module__ == "lesion_methods"
    assert sum(p.numel() for p in build_network("small_unet", width=2).parameters()) > 0
    with pytest.raises(ConfigError, match="cautious has no argument trim"):
        build_methods(parse_methods("cautious", {"cautious": {"trim": 1}}))


# ------------------------------------------------------------------ what a site allows


@pytest.fixture
def restricted(package):
    plugins.restrict([])
    return package


def test_a_name_that_is_not_allowed_is_refused_with_the_remedy_and_not_imported(restricted):
    remedy = r"cautious.* of the package lesion-methods is not allowed here.*--allow-plugin lesion-methods$"
    with pytest.raises(ConfigError, match=remedy):
        build_methods([{"name": "cautious"}])
    with pytest.raises(ConfigError, match="'small_unet' of the package lesion-methods is not allowed"):
        FederationServer(RunConfig(network="small_unet"))
    assert "cautious" not in method_names()
    assert "small_unet" not in network_names()
    assert "lesion_methods" not in sys.modules
    plugins.restrict(["Lesion_Methods"])  # as pip, whatever the spelling
    assert build_methods([{"name": "cautious"}])


def execute(kit: Path, config: RunConfig):
    """What the job process of a site answers to the first request."""
    context = SimpleNamespace(
        get_identity_name=lambda: "site_A",
        get_job_id=lambda: "job",
        get_workspace=lambda: SimpleNamespace(
            get_root_dir=lambda: str(kit),
            get_run_dir=lambda job: str(kit / job),
            get_job_meta_path=lambda job: str(kit / job / "meta.json"),
            get_startup_kit_dir=lambda: str(kit / "startup"),
            get_app_dir=lambda job: str(kit / job / "app"),
        ),
        get_prop=lambda *args, **how: None,
    )
    executor = SiteExecutor(config=config.to_dict())
    executor.log_error = lambda *args, **how: None
    request = FLModelUtils.to_shareable(request_to_model(Request("prepare")))
    answer = executor.execute("prepare", request, context, SimpleNamespace(triggered=False))
    return reply_from_model(FLModelUtils.from_shareable(answer))


def test_a_site_runs_what_its_own_settings_allow_and_nothing_else(run, kits, config, phantom_dir):
    kit = kits / "hospital-a"
    limits = ("--min-images", 1)
    assert run("site", "configure", kit, "--data", phantom_dir / "site_A", *limits)[0] == 0
    sys.modules.pop("lesion_methods")
    reply = execute(kit, config)
    assert "method 'cautious' of the package lesion-methods is not allowed here" in reply.error
    assert "lesion_methods" not in sys.modules
    out = run.ok("site", "configure", kit, "--allow-plugin", PACKAGE)
    assert 'plugins: ["lesion-methods"]' in out
    assert "nothing to change" in run("site", "configure", kit, "--allow-plugin", PACKAGE)[1]
    reply = execute(kit, config)
    assert not reply.error
    assert reply.num_samples > 0


def test_the_page_of_a_job_is_of_what_the_site_allows(run, kits, config):
    kit = kits / "hospital-a"
    open_kit(kit).job_book().note(config)
    out = run.ok("site", "jobs", kit)
    page = " ".join(out.split())
    assert "it cannot run here (method 'cautious' of the package lesion-methods is not allowed here" in page


@pytest.fixture
def at_the_server(kits, config, monkeypatch):
    """Runs the job's controller in a server's kit, and says why the job ended and what its events are."""

    def control(kit):
        ended = []
        workspace = SimpleNamespace(get_root_dir=lambda: str(kit), get_run_dir=lambda job: str(kit / job))
        engine = SimpleNamespace(get_workspace=lambda: workspace)
        context = SimpleNamespace(
            get_engine=lambda: engine, get_job_id=lambda: "job", set_prop=lambda *args, **how: None
        )
        controller = FederationController(config.to_dict())
        monkeypatch.setattr(controller, "system_panic", lambda reason, fl_ctx: ended.append(reason))
        monkeypatch.setattr(controller, "log_exception", lambda fl_ctx, text: None)
        controller.start_controller(context)
        controller.control_flow(Signal(), context)
        return ended, [json.loads(line) for line in (kit / "job" / JOB_FOLDER / EVENTS).open()]

    return control


def test_the_server_of_a_federation_asks_its_own_settings(at_the_server, kits):
    sys.modules.pop("lesion_methods", None)
    (reason,), events = at_the_server(kits / "fl-server.example.org")
    assert "'cautious' of the package lesion-methods is not allowed here" in reason
    assert events[-1] == {"event": "failed", "message": reason}
    assert "lesion_methods" not in sys.modules


def test_a_job_says_why_it_ended_where_the_servers_settings_cannot_be_read(at_the_server, kits):
    kit = kits / "fl-server.example.org"
    (kit / SETTINGS_FILE).write_text("{")
    (reason,), events = at_the_server(kit)
    assert str(kit / SETTINGS_FILE) in reason
    assert events == [{"event": "failed", "message": reason}]


def test_doctor_names_the_packages_and_what_jobs_may_use_of_them(run, kits, package):
    def the(kit):
        return next(check for check in examine(kit) if check.name == f"plugin {PACKAGE}")

    for name in ("hospital-a", "fl-server.example.org"):
        kit = kits / name
        assert run("site", "configure", kit, "--allow-plugin", PACKAGE)[0] == 0
        assert the(kit).found == "cautious, small_unet: jobs may use them"
        assert "lesion_methods" not in sys.modules
    assert json.loads((kit / "local/medfedaug.json").read_text()) == {"plugins": [PACKAGE]}


# ------------------------------------------------------------------ packages that cannot be used

SOURCE = """
from medfedaug.methods import Method

class Fine(Method):
    name = "fine"

class Impostor(Method):
    name = "fedavg"

class Loud(Method):
    name = "LoudOne"

text = "no method"
"""


def make(folder: Path, package: str, methods: dict[str, str], networks: dict[str, str] | None = None) -> None:
    """What installing a package leaves, without pip."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = ["[medfedaug.methods]", *(f"{name} = {value}" for name, value in methods.items())]
    lines += ["[medfedaug.networks]", *(f"{name} = {value}" for name, value in (networks or {}).items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / "odd_source.py").write_text(SOURCE)
    (folder / "odd_exit.py").write_text("raise SystemExit(3)\n")
    (folder / "odd_crash.py").write_text("raise RuntimeError('no such\\nlibrary')\n")


@pytest.fixture
def odd(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "odd"
    methods = {
        **{"fine": "odd_source:Fine", "fedavg": "odd_source:Impostor", "fedfa+": "odd_source:Fine"},
        **{"gone": "odd_nowhere:Fine", "leaves": "odd_exit:Fine", "breaks": "odd_crash:Fine"},
        **{"nothing": "odd_source:Missing", "words": "odd_source:text", "other": "odd_source:Fine"},
        **{"twice": "odd_source:Fine", "LoudOne": "odd_source:Loud"},
    }
    networks = {"basicunet": "odd_source:text", "unknown_net": "odd_crash:net", "text_net": "odd_source:text"}
    make(folder, "odd-one", methods, networks)
    make(folder, "odd-two", {"twice": "odd_source:Fine"})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", r"'gone' of the package odd-one cannot be loaded \(ModuleNotFoundError: .*odd_nowhere"),
        ("leaves", r"odd-one cannot be loaded \(SystemExit: 3\)$"),
        ("breaks", r"odd-one cannot be loaded \(RuntimeError: no such\)$"),
        ("nothing", r"odd-one cannot be loaded \(AttributeError"),
        ("words", r"odd-one: 'no method' must be a `Method` whose `name` is 'words'"),
        ("other", r"odd-one: <class '.*Fine'> must be a `Method` whose `name` is 'other'"),
        ("twice", r"'twice' is added by odd-one and odd-two; uninstall one package"),
    ],
)
def test_a_package_that_cannot_be_used_is_named_in_one_line(odd, name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build_methods(parse_methods(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unknown_net", r"'unknown_net' of the package odd-one cannot be loaded \(RuntimeError: no such\)"),
        ("text_net", "network text_net: 'str' object is not callable"),
    ],
)
def test_a_network_that_cannot_be_used_is_named_in_one_line(odd, name, words):
    with pytest.raises(ConfigError, match=words):
        FederationServer(RunConfig(methods=tuple(parse_methods("fedprox")), network=name))


def test_broken_packages_disturb_nobody_who_does_not_use_them(odd):
    assert build_methods(parse_methods("fine,fedrdn,fedfa+"))  # the last has a name of odd-one, too
    plugins.restrict([])
    assert build_methods(parse_methods("fedavg"))
    environment = {**os.environ, "PYTHONPATH": str(odd)}
    command = [sys.executable, "-m", "medfedaug", "simulate", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
