"""Training loops of a user's own: the weights of the federation's loop, and what a site lets them do."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from reference import same
from running import command
from script_site import ScriptSite

from medfedaug import client
from medfedaug.config.run import RunConfig
from medfedaug.config.training_scripts import loop_reference
from medfedaug.data.phantom import make_phantom
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation import FederationServer, Request, Site, SiteTrainer, run_in_process
from medfedaug.federation.messages.messages import TRAIN, VALIDATE, Reply
from medfedaug.methods import parse_methods

EXAMPLES = Path(__file__).resolve().parents[1] / "examples/loops"
TORCH, ENGINE = EXAMPLES / "torch_loop_medfedaug.py", EXAMPLES / "monai_engine_medfedaug.py"
SITES = ["site_A", "site_B"]

pytestmark = pytest.mark.usefixtures("onednn")  # scripts in other processes give the same bits


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two sites, whose slices with a lesion make no batch of one."""
    folder = tmp_path_factory.mktemp("loops") / "data"
    make_phantom(folder, sites=2, patients=4, shape=(32, 32, 8))
    return folder


def configured(methods: str = "fedrdn,fedfa+", loop: str | None = None, **changes) -> RunConfig:
    """The job that the examples are written for."""
    values = {
        "network_args": {"features": [8, 16, 32, 64, 128, 8], "norm": "batch"},
        "rounds": 2,
        "batch_size": 4,
        "optimizer": "sgd",
        "learning_rate": 0.05,
        "loop": loop,
    }
    return RunConfig(methods=tuple(parse_methods(methods)), **{**values, **changes})


@pytest.fixture
def scripted(tmp_path, data):
    """`scripted(script, methods="fedavg")`: a site at which a job's script runs."""
    sites = []

    def make(script: Path, config: RunConfig | None = None, **settings) -> ScriptSite:
        site = ScriptSite(tmp_path / f"kit{len(sites)}", data / "site_A", script, **settings)
        sites.append(site)
        site.start(config or configured(loop=loop_reference(str(script))[0]))
        return site

    yield make
    for site in sites:
        site.end()


def requests(config: RunConfig, data: Path):
    """What a server asks site_A in two rounds, with the answers of site_B, which trains by itself."""
    server = FederationServer(config)
    other = Site("site_B", SiteTrainer(config, data / "site_B", "cpu", threads=1))
    own = Site("site_A", SiteTrainer(config, data / "site_A", "cpu", threads=1))
    asked = []

    def ask(request: Request, accept) -> None:
        replies = {site.name: site.answer(request) for site in (own, other)}
        asked.append((request, replies["site_A"]))
        for name, reply in replies.items():
            assert accept(name, reply), reply.error

    ask(server.prepare(), server.accept_preparation)
    server.finish_preparation()
    for _ in range(config.rounds):
        ask(server.start_round(SITES), server.accept)
        server.finish_round()
    ask(server.validate(), server.accept_validation)
    server.finish_validation()
    ask(server.test(), server.accept_test)
    return asked


def assert_same(reply: Reply, expected: Reply) -> None:
    assert not reply.error, reply.error
    assert same(reply.weights, expected.weights)
    assert same(reply.payload, expected.payload)
    assert reply.num_samples == expected.num_samples
    left_out = {"seconds", "train_loss"}
    assert {k: v for k, v in reply.metrics.items() if k not in left_out} == {
        k: v for k, v in expected.metrics.items() if k not in left_out
    }


# ------------------------------------------------------------------ the examples


@pytest.mark.parametrize("script", [TORCH, ENGINE], ids=["torch", "monai"])
def test_an_examples_updates_are_those_of_the_federations_own_loop_bit_for_bit(scripted, data, script):
    expected = requests(configured(), data)
    site = scripted(script)
    for request, reply in expected:
        found = site.answer(request)
        assert_same(found, reply)
        if request.task == TRAIN:
            assert found.metrics["train_loss"] == pytest.approx(reply.metrics["train_loss"], rel=1e-6)
            assert any("fedfa_h/" in key for key in found.payload)


@pytest.mark.slow
def test_lightnings_updates_are_those_of_the_federations_own_loop_bit_for_bit(scripted, data):
    pytest.importorskip("pytorch_lightning")
    site = scripted(EXAMPLES / "lightning_module_medfedaug.py")
    for request, reply in requests(configured(), data):
        assert_same(site.answer(request), reply)


# ------------------------------------------------------------------ what a loop can and cannot do

LOOP = """
import torch
from monai.data import DataLoader, Dataset
from monai.losses import DiceCELoss
from monai.networks.nets import BasicUNet
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, ScaleIntensityd

from medfedaug import client
from medfedaug.utils import plugins

KEYS = ("image", "label")
{first}
network = BasicUNet(2, 1, 2, features=(8, 16, 32, 64, 128, 8), norm="batch")
federation = client.join({join})
load = Compose([LoadImaged(KEYS), EnsureChannelFirstd(KEYS), ScaleIntensityd("image")])
volumes = [load({{key: file[key] for key in KEYS}}) for file in client.files("training")]
slices = [
    {{key: volume[key][..., i] for key in KEYS}}
    for volume in volumes
    for i in volume["label"].flatten(0, 2).any(dim=0).nonzero().flatten().tolist()
]
order = torch.Generator()
loader = DataLoader(
    Dataset(slices, {transform}), batch_size=4, shuffle=True, generator=order, num_workers={workers}
)
criterion = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
for round_ in federation:
    order.manual_seed(round_.seed)
    for batch in loader:
        output = network(batch["image"])
        loss = criterion(output, batch["label"]) + federation.loss_terms(batch, output)
        optimiser.zero_grad()
        loss.backward()
        {before}
        optimiser.step()
        {after}
"""

TIMES_900 = "Compose([lambda item: {**item, 'image': 900 * item['image']}, federation.transform])"


@pytest.fixture
def script(tmp_path):
    """A script: `script(join="network", before="federation.before_step()")`."""

    def write(name="train.py", **parts) -> Path:
        usual = {"first": "", "join": "network", "before": "", "after": "federation.step()"}
        path = tmp_path / name
        path.write_text(LOOP.format(**{**usual, "transform": "federation.transform", "workers": 0, **parts}))
        return path

    return write


@pytest.fixture
def checked(run, data, tmp_path):
    """`checked(script, methods)`: exit code and texts of ``simulate --loop SCRIPT --check``."""
    settings = json.dumps(configured().network_args)
    fixed = ("simulate", "--data", data, "--out", tmp_path / "out", "--network-args", settings, "--check")

    def check(path: Path, methods: str) -> tuple[int, str, str]:
        code, out, err = run(*fixed, "--methods", methods, "--loop", path)
        assert not (tmp_path / "out").exists()
        return code, " ".join(out.split()), " ".join(err.split())

    return check


@pytest.mark.parametrize("methods", ["scaffold", "fedbn,fedprox", "ditto,fedrdn"])
def test_other_methods_give_the_updates_of_the_federations_own_loop_too(scripted, script, data, methods):
    path = script(before="federation.before_step()" if methods == "scaffold" else "")
    site = scripted(path, configured(methods, loop_reference(str(path))[0]))
    for request, reply in requests(configured(methods), data):
        assert_same(site.answer(request), reply)


def refused(scripted, path: Path, methods: str = "fedavg", answers: int = 1, **changes) -> str:
    """The error with which a script's site answers the first request, or one after."""
    config = configured(methods, loop_reference(str(path))[0], **changes)
    site, server = scripted(path, config), FederationServer(config)
    request, reply = server.prepare(), None
    for _ in range(answers):
        reply = site.answer(request)
        request = Request(TRAIN, 1, server.state, run=server.run)
    assert reply is not None
    assert not reply.weights
    return reply.error


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        ("mixup", "mixup changes batches and labels before the step"),
        ("fedsam", "fedsam takes gradients again in the step, which only"),
    ],
)
def test_a_method_whose_local_step_cannot_be_given_away_is_refused(scripted, script, methods, reason):
    assert reason in refused(scripted, script(), methods)


def test_a_script_for_another_job_is_refused_with_what_differs(scripted, script):
    text = refused(scripted, script(join='network, "fedrdn,fedfa"'))
    assert "the script takes part with fedrdn, fedfa, and the job's methods are fedavg" in text
    text = refused(scripted, script(), network_args={"features": [8, 16, 32, 64, 64, 8], "norm": "batch"})
    assert "the given BasicUNet is not the job's network basicunet; name" in text
    assert "name the given one with --network monai.networks.nets.BasicUNet and --network-args" in text


def test_the_last_line_of_a_scripts_error_is_told_in_a_simulation_and_to_no_server(scripted, script):
    path = script(first="raise OSError('no such disk\\nsecret of Meyer')")
    assert "its first round (secret of Meyer); the site's log says why; it has to call" in refused(
        scripted, path
    )
    reference = loop_reference(str(path))[0]
    config = configured("fedavg", reference)
    site = scripted(path, config, **ALLOWED, jobs={"loops": [reference]})
    text = site.answer(FederationServer(config).prepare()).error
    assert "ended before its first round (…); the site's log says why" in text
    assert "Meyer" not in text


@pytest.mark.slow
def test_the_loop_of_the_page_trains_on_a_phantom_as_the_command_writes_it(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[1] / "docs/pipelines.md").read_text(encoding="utf-8")
    text = page.split("\n## A loop of your own\n")[1]
    (tmp_path / "train.py").write_text(text.split("```python\n")[1].split("```")[0])
    call, check = (
        shlex.split(block.split("```")[0].replace("\\\n", "")) for block in text.split("```bash\n")[1:3]
    )
    assert run("phantom", "--out", "data", "--sites", 2, "--patients", 3)[0] == 0
    assert "--check" in check
    for words in (check, [*call, "--no-report"]):
        code, _, err = run(*words[1:], "--device", "cpu")
        assert code == 0, err


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", ["federation.transform", "None"])
def test_a_loop_that_leaves_out_the_transform_sends_nothing(scripted, script, data, workers, transform):
    """The record would say that it trained with the method; images of a loader's processes count too."""
    path = script(transform=transform, workers=workers)
    config = configured("fedrdn", loop_reference(str(path))[0], rounds=1)
    site, server = scripted(path, config), FederationServer(config)
    other = Site("site_B", SiteTrainer(configured("fedrdn", rounds=1), data / "site_B", "cpu", threads=1))
    for name, answer in (("site_A", site.answer), ("site_B", other.answer)):
        assert server.accept_preparation(name, answer(server.prepare()))
    server.finish_preparation()
    reply = site.answer(server.start_round(["site_A"]))
    left_out = (
        "site site_A, round 1: the script's loop trained without federation.transform, in which fedrdn "
        "changes the training images; put it at the end of the transforms of the training data"
    )
    assert reply.error == (left_out if transform == "None" else "")
    assert bool(reply.weights) is (transform != "None")


@pytest.mark.parametrize("methods", ["fedrdn,fedfa+", "fedrdn"])
def test_a_loop_is_checked_with_one_batch_and_without_nvflare(checked, script, methods):
    code, out, err = checked(script(), methods)
    assert code == 0, err
    assert "called; needed by fedrdn" in out
    assert ("called; needed by fedfa_h" in out) is ("fedfa" in methods)
    assert "step called, without the loss" in out.replace("│ ", "")
    assert "the loop is connected: the server takes its update" in out


@pytest.mark.parametrize(
    ("parts", "methods", "problem"),
    [
        ({"transform": "None"}, "fedrdn", "without federation.transform, in which fedrdn changes"),
        ({"after": ""}, "fedavg", "took no step; it has to call step()"),
        ({}, "scaffold", "scaffold corrects the gradients: call before_step()"),
        ({"first": "raise OSError('no such disk')"}, "fedavg", "OSError: no such disk"),
        ({"join": 'network, "fedbn"'}, "fedavg", "the script takes part with fedbn, and the job's methods"),
    ],
)
def test_a_check_names_what_the_loop_lacks(checked, script, parts, methods, problem):
    code, out, err = checked(script(**parts), methods)
    assert code == 2
    assert problem in err
    assert "is connected" not in out


def test_a_check_warns_of_images_on_another_scale_than_the_statistics(checked, script):
    code, _, err = checked(script(transform=TIMES_900), "fedrdn")
    assert code == 0, err
    assert "Scale images as the job does (--intensity scale)" in err


def test_a_check_needs_a_loop(run, data, tmp_path):
    code, _, err = run("simulate", "--data", data, "--out", tmp_path, "--methods", "fedavg", "--check")
    assert (code, "give its file with --loop" in err) == (2, True)


def test_images_on_another_scale_than_the_statistics_are_named_in_the_sites_log(scripted, script):
    path = script(transform=TIMES_900)
    config = configured("fedrdn", loop_reference(str(path))[0])
    site, server = scripted(path, config), FederationServer(config)
    assert not site.answer(server.prepare()).error
    values = {"mean": 0.5, "std": 0.2, "count": 2.0}
    once = {f"fedrdn/{key}/site_A": torch.tensor([value]) for key, value in values.items()}
    reply = site.answer(Request(TRAIN, 1, server.state, once=once, run=server.run))
    assert not reply.error, reply.error
    (log,) = site.kit.rglob("events.jsonl")
    assert "Scale images as the job does (--intensity scale)" in log.read_text()


def test_a_script_that_failed_is_started_again_for_the_next_round(scripted, script, data, tmp_path):
    mark = tmp_path / "mark"
    fail = (
        f"if not __import__('os').path.exists({str(mark)!r}): open({str(mark)!r}, 'w').close(); raise OSError"
    )
    path = script(before=fail)
    site = scripted(path, configured("fedbn", loop_reference(str(path))[0]))
    expected = requests(configured("fedbn"), data)
    assert not site.answer(expected[0][0]).error
    error = site.answer(expected[1][0]).error
    assert "site_A: the training script train.py ended before round 1 was over" in error
    assert "(OSError)" in error  # in a simulation, whose messages leave no site
    assert_same(site.answer(expected[1][0]), expected[1][1])  # the round is repeated
    assert_same(site.answer(expected[2][0]), expected[2][1])


def test_a_pipeline_of_ones_own_brings_its_samples_and_scores(scripted, script, data):
    brought = (
        'network, samples=[{"image": torch.full((1, 16, 16), 0.25 + i), "label": torch.zeros(1, 16, 16)} '
        'for i in range(3)], score=lambda net, split: {f["name"]: 0.5 for f in client.files(split)}'
    )
    path = script(join=brought)
    config = configured("fedrdn,fedfa_h", loop_reference(str(path))[0])
    site, server = scripted(path, config), FederationServer(config)
    reply = site.answer(server.prepare())
    assert reply.num_samples == 3
    torch.testing.assert_close(reply.payload["fedrdn/mean"], torch.tensor([1.25], dtype=torch.float64))
    found = site.answer(Request(VALIDATE, 0, server.state, run=server.run))
    assert found.metrics["dice"] == 0.5
    assert set(found.metrics["cases"].values()) == {0.5}
    site.end()
    path = script(join='network, score=lambda net, split: {"stranger": 1.0}', name="other.py")
    site = scripted(path, configured("fedavg", loop_reference(str(path))[0]))
    server = FederationServer(configured("fedavg"))
    assert not site.answer(server.prepare()).error
    text = site.answer(Request(VALIDATE, 0, server.state, run=server.run)).error
    assert "the script scores 'stranger', which is no validation case of the site" in text


# ------------------------------------------------------------------ what a site lets them do

ALLOWED = {"simulation": False, "privacy": {"min_images": 1}}


def test_no_site_runs_a_script_that_its_rules_do_not_allow(scripted, script, data, tmp_path, caplog):
    mark = tmp_path / "mark"
    path = script(first=f"open({str(mark)!r}, 'w').close()")
    reference = loop_reference(str(path))[0]
    request = FederationServer(configured("fedavg", reference)).prepare()
    site = scripted(path, configured("fedavg", reference), **ALLOWED)
    text = site.answer(request).error
    assert "job refused: its training loop is …, and the site's rule loops allows none" in text
    assert f"its training loop is {reference}, and" in caplog.text
    assert not mark.exists()
    other = reference[:-1] + ("0" if reference[-1] != "0" else "1")
    site = scripted(path, configured("fedavg", reference), **ALLOWED, jobs={"loops": [other]})
    assert f"the site's rule loops allows {other}" in site.answer(request).error
    assert not mark.exists()
    site = scripted(path, configured("fedavg", reference), **ALLOWED, jobs={"loops": [reference]})
    assert not site.answer(request).error
    assert mark.exists()


def test_a_file_with_another_content_than_the_job_was_configured_for_is_not_run(scripted, script, tmp_path):
    mark = tmp_path / "mark"
    path = script()
    reference = loop_reference(str(path))[0]
    path.write_text(f"open({str(mark)!r}, 'w').close()")
    site = scripted(path, configured("fedavg", reference))
    text = site.answer(FederationServer(configured("fedavg")).prepare()).error
    assert "loop train.py: the job carries a file with the SHA-256 " in text
    site = scripted(path, configured("fedavg", f"absent.py@{reference.split('@')[1]}"))
    assert "loop absent.py: the job carries a file with the SHA-256 none" in (
        site.answer(FederationServer(configured("fedavg")).prepare()).error
    )
    assert not mark.exists()


@pytest.mark.parametrize(
    "loop",
    [
        "train.py",
        "../train.py@" + "0" * 64,
        "/etc/train.py@" + "0" * 64,
        "os.system",
        "$import os",
        "train.py@" + "0" * 63,
        "a/b",
        "",
    ],
)
def test_a_job_cannot_name_anything_else_as_its_loop(loop):
    with pytest.raises(ConfigError, match="must be the name of a package's loop, or FILE"):
        configured(loop=loop)


@pytest.fixture
def package(tmp_path, monkeypatch, script) -> Path:
    """An installed package that adds a loop, and says when it is imported."""
    site, mark = tmp_path / "packages", tmp_path / "imported"
    (site / "lesion_loops").mkdir(parents=True)
    (site / "lesion_loops/__init__.py").write_text(f"open({str(mark)!r}, 'w').close()")
    shutil.copy(script(join='network, "fedrdn"'), site / "lesion_loops/train.py")
    info = site / "lesion_loops-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lesion-loops\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[medfedaug.loops]\nlesion_loop = lesion_loops.train\n")
    monkeypatch.syspath_prepend(str(site))
    yield mark
    sys.modules.pop("lesion_loops", None)


def test_a_loop_of_a_package_runs_where_package_and_loop_are_allowed(scripted, package, data):
    config = configured("fedrdn", "lesion_loop")
    request = FederationServer(config).prepare()
    site = scripted(TORCH, config, **ALLOWED, jobs={"loops": ["lesion_loop"]})
    text = site.answer(request).error
    assert "training loop 'lesion_loop' of the package lesion-loops is not allowed here" in text
    assert "--allow-plugin lesion-loops" in text
    site = scripted(TORCH, config, **ALLOWED, plugins=["lesion-loops"])
    assert "its training loop is …, and the site's rule loops allows none" in site.answer(request).error
    assert not package.exists()
    allowed = {"jobs": {"loops": ["lesion_loop"]}, "plugins": ["lesion-loops"]}
    site = scripted(TORCH, config, **{**ALLOWED, "simulation": True}, **allowed)
    for asked, reply in requests(configured("fedrdn"), data):
        assert_same(site.answer(asked), reply)


def test_a_job_says_what_code_it_carries(run, tmp_path, script, package):
    path = script()
    options = ("--methods", "fedavg", "--rounds", 1, "--min-sites", 2)
    code, out, err = run("export", *options, "--loop", path, "--out", tmp_path / "job")
    assert code == 0, err
    reference = loop_reference(str(path))[0]
    assert f"--allow-loop {reference}" in out
    assert (tmp_path / "job/app/custom/train.py").read_bytes() == path.read_bytes()
    code, out, err = run("export", *options, "--loop", "lesion_loop", "--out", tmp_path / "named")
    assert code == 0, err
    assert not (tmp_path / "named/app/custom").exists()
    config = json.loads((tmp_path / "named/app/config/config_fed_client.json").read_text())
    assert config["executors"][0]["executor"]["args"]["config"]["loop"] == "lesion_loop"
    for loop, reason in (("absent", "no installed package adds it"), ("absent.py", "cannot be read")):
        code, _, err = run("export", *options, "--loop", loop, "--out", tmp_path / "other")
        assert (code, reason in err) == (2, True), err


def test_without_nvflare_or_a_job_there_is_no_loop(run, data, tmp_path, script):
    simulate = (
        "simulate",
        "--data",
        data,
        "--methods",
        "fedavg",
        "--loop",
        script(),
        "--out",
        tmp_path / "out",
    )
    code, _, err = run(*simulate, "--engine", "inprocess")
    assert (code, "it needs --engine nvflare" in err) == (2, True), err
    config = configured("fedavg", "some_loop")
    trainer = SiteTrainer(config, data / "site_A", "cpu")
    reply = Site("site_A", trainer).answer(Request(TRAIN, 1, FederationServer(config).state, run="0" * 32))
    assert reply.error == "site site_A: this engine does not run the loop some_loop"
    with pytest.raises(MedFedAugError, match="no job runs this script: start it with"):
        client.join()


# ------------------------------------------------------------------ through NVFlare


@pytest.mark.slow
def test_both_examples_train_in_nvflares_simulator_to_the_weights_of_the_federations_own_loop(data, tmp_path):
    """Site A runs the plain loop, and site B MONAI's engine, in one job."""
    path = tmp_path / "both.py"
    scripts = {"site_A": str(TORCH), "site_B": str(ENGINE)}
    path.write_text(
        "import runpy\n"
        "from medfedaug import client\n"
        f"runpy.run_path({scripts!r}[client._connect()[0].site.name], run_name='__main__')\n"
    )
    out = tmp_path / "out"
    code, _, err = command(
        *("simulate", "--data", data, "--methods", "fedrdn,fedfa+", "--loop", path, "--out", out),
        *("--network-args", '{"features": [8, 16, 32, 64, 128, 8], "norm": "batch"}', "--rounds", 2),
        *("--batch-size", 4, "--optimizer", "sgd", "--lr", 0.05, "--threads", 1, "--device", "cpu"),
        "--no-report",
    )
    assert code == 0, err
    server = run_in_process(configured(), data, SITES, "cpu")
    assert same(torch.load(out / "global_model.pt", weights_only=True), server.selection.state)
    assert same(torch.load(out / "final_model.pt", weights_only=True), server.state)
    results, expected = json.loads((out / "results.json").read_text()), server.results()
    assert results["config"]["loop"] == loop_reference(str(path))[0]
    for site in SITES:
        assert results["test"]["sites"][site]["cases"] == expected["test"]["sites"][site]["cases"]
    assert results["rounds"][1]["sites"]["site_B"]["train_loss"] > 0
