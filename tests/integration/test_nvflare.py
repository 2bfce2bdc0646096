"""The job in NVFlare's simulator: the same arithmetic as without it, and what it leaves behind."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nvflare.apis.fl_context import FLContext
from reference import same
from running import assert_complete, command

from medfedaug.config.run import Execution, RunConfig
from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.federation.messages.messages import Reply, Request
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs import FederationController, MedFedAugRecipe
from medfedaug.nvflare_jobs.job.controller import ServerJob
from medfedaug.nvflare_jobs.job.messages import (
    reply_from_model,
    reply_to_model,
    request_from_model,
    request_to_model,
)
from medfedaug.nvflare_jobs.simulator import simulator
from medfedaug.nvflare_jobs.simulator.simulator import run_in_simulator
from medfedaug.nvflare_jobs.simulator.simulator_process import FAST_START_VARIABLE

SITES = ["site_A", "site_B", "site_C"]


@pytest.fixture(scope="module")
def simulated(phantom_dir, tmp_path_factory):
    """One run of everything, by the command: its folder, output and messages, and the processes' events.

    Statistics are exchanged, there are FFA layers, and norm layers of the sites' own, whose average an unseen
    site has.
    """
    out, kept = tmp_path_factory.mktemp("run") / "out", {}

    def watched(work_dir, **run):
        output = run_in_simulator(work_dir=work_dir, **run)
        for path in work_dir.glob("workspace/*/*/medfedaug/events.jsonl"):
            kept[path.parts[-4]] = path.read_text()
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "run_in_simulator", lambda work_dir, **run: watched(Path(work_dir), **run))
        code, printed, err = command(
            *("simulate", "--data", phantom_dir, "--out", out, "--device", "cpu", "--no-pictures"),
            *("--methods", "fedrdn,fedfa,fedbn", "--set", "fedbn.unseen=average", "--rounds", 3),
            *("--network-args", '{"features": [4, 8, 8, 8, 8, 4]}', "--threads", 1, "--batch-size", 4),
        )
    assert code == 0, err
    return SimpleNamespace(out=out, printed=printed, err=err, kept=kept)


def test_the_command_writes_the_promised_files_and_evaluate_reads_them(simulated, phantom_dir, tmp_path):
    assert "site_C (unseen)" in simulated.printed
    assert "round 3/3  loss" in simulated.err
    assert not [path for path in simulated.out.parent.iterdir() if path.name.startswith(".")]
    assert_complete(simulated.out, phantom_dir, tmp_path / "scores.json")


def test_watch_shows_a_job_from_the_kits_own_files(simulated, tmp_path):
    assert set(simulated.kept) == {"server", *SITES}
    results = json.loads((simulated.out / "results.json").read_text())
    for name in ("server", "site_B"):
        job = tmp_path / name / "job-1/medfedaug"
        job.mkdir(parents=True)
        (job / "events.jsonl").write_text(simulated.kept[name])
        code, out, err = command("site", "watch", tmp_path / name, "--once")
        assert code == 0, err
        last = results["rounds"][2]["sites"]["site_B"]["train_loss"]
        loss = f"{'site_B' if name == 'server' else 'this site'}: training loss"
        assert f"{loss} │ {last:.4f} │ " in re.sub(" +", " ", out)
        assert "round 3 of 3, finished" in out
    (tmp_path / "empty").mkdir()
    assert "no medfedaug job has run here" in command("site", "watch", tmp_path / "empty", "--once")[2]
    assert "no such folder" in command("site", "watch", tmp_path / "nowhere")[2]


def test_simulator_gives_the_weights_of_the_in_process_runner_bit_for_bit(simulated, phantom_dir):
    output = simulated.out
    results = json.loads((output / "results.json").read_text())
    server = run_in_process(RunConfig.from_dict(results["config"]), phantom_dir, SITES, "cpu")
    for file, expected in (("global_model.pt", server.selection.state), ("final_model.pt", server.state)):
        weights = torch.load(output / file, weights_only=True)
        assert weights.keys() == expected.keys()
        different = [key for key in weights if not torch.equal(weights[key], expected[key])]
        assert not different
    other = server.results()
    assert results["test"] == json.loads(json.dumps(other["test"]))
    assert 0 <= results["test"]["unseen"]["site_C"]["dice"] <= 1
    assert results["selected_round"] == other["selected_round"]
    for a, b in zip(results["rounds"], other["rounds"], strict=True):
        assert a["bytes"] == b["bytes"]
        assert a["methods"] == json.loads(json.dumps(b["methods"]))
        for site in ("site_A", "site_B"):
            assert a["sites"][site]["train_loss"] == b["sites"][site]["train_loss"]
            assert a["sites"][site]["val_dice"] == b["sites"][site]["val_dice"]


def test_statistics_were_exchanged(simulated, phantom_dir):
    from medfedaug.data.sites import open_site, site_statistics
    from medfedaug.statistics import load_statistics

    exchanged = load_statistics(simulated.out / "statistics.json")
    assert exchanged == {name: site_statistics(open_site(phantom_dir / name), "scale") for name in SITES[:2]}


def test_a_job_carries_no_code_and_no_path(tmp_path, tiny_config):
    recipe = MedFedAugRecipe(config=tiny_config("fedrdn,fedfa"), name="job")
    recipe.export(job_dir=str(tmp_path))
    files = [path.relative_to(tmp_path / "job") for path in (tmp_path / "job").rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".py", ".pyc", ".pt") or "custom" in path.parts]
    text = "".join((tmp_path / "job" / path).read_text() for path in files)
    assert not re.search(r"\"/(?!/)[a-z]+/", text)
    paths = re.findall(r"\"path\": \"([^\"]+)\"", text)
    assert {"medfedaug.nvflare_jobs.job.controller.FederationController"} <= set(paths)
    assert all(path.startswith(("medfedaug.", "nvflare.")) for path in paths)


def test_messages_survive_the_way():
    weights, payload = {"w": torch.rand(2)}, {"fedfa/enc1/mean": torch.rand(3)}
    for request in (
        Request("prepare"),
        Request(
            "train", 2, weights, once={"fedrdn/mean/A": torch.rand(1)}, payload=payload, selected_round=1
        ),
    ):
        assert request_from_model(request_to_model(request)) == request
    for reply in (
        Reply("prepare", payload=payload, num_samples=4, metrics={"cases": {"test": 1}}),
        Reply("train", 2, weights, payload, 5, {"train_loss": 0.5}),
        Reply("train", 2, {}, {}, 5, {"train_loss": 0.5}),  # nothing is shared
        Reply("train", 2, error="site A: trouble"),
    ):
        assert reply_from_model(reply_to_model(reply)) == reply


def test_views_with_gaps_are_sent_without_them():
    """NVFlare writes tensors as safetensors, which refuses such views and so ends the whole job."""
    values = {"w": torch.arange(12.0).reshape(3, 4).T}
    for message in (
        request_to_model(Request("train", weights=values, once=values, payload=values)),
        reply_to_model(Reply("train", weights=values, payload=values)),
        reply_to_model(Reply("fingerprint", payload=values)),
    ):
        meta = message.meta["medfedaug"]
        for sent in (message.params, message.metrics, meta.get("payload"), meta.get("once")):
            for value in (sent or {}).values():
                assert not torch.is_tensor(value) or value.is_contiguous()


def test_a_late_site_is_prepared_beside_a_round_and_joins_the_next(tiny_config, monkeypatch, tmp_path):
    """The protocol on NVFlare's carrier, with clients that are not there."""
    from medfedaug.federation import FederationServer, protocol
    from medfedaug.nvflare_jobs.job.carrier import NVFlareCarrier, Presence

    pair = {"fedrdn/mean": torch.zeros(1), "fedrdn/std": torch.ones(1), "fedrdn/count": torch.ones(1)}
    server = FederationServer(tiny_config("fedrdn", rounds=4))
    connected, requests, preparing, known = ["A", "B"], [], [], []
    clients = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=name) for name in connected])
    controller = SimpleNamespace(
        get_client_disconnect_time=lambda name: None, fire_event=lambda *args: None, log_warning=print
    )
    context = SimpleNamespace(get_engine=lambda: clients, set_prop=lambda *args, **more: None)
    signal = SimpleNamespace(triggered=False)
    carrier = NVFlareCarrier(
        controller, Execution(), tmp_path / "server.pt", context, signal, 0.01, Presence(), print
    )

    def good(site, request):
        reply = Reply(request.task, request.round, num_samples=1)
        if request.task == "prepare":
            reply.payload = dict(pair)
        elif request.task == "train":
            reply.weights = {key: value.clone() for key, value in request.weights.items()}
        return reply

    def send(request, sites, accept, done=None):
        requests.append((request.task, request.round, list(sites)))
        if done is not None:
            preparing.append((accept, done))
            return None
        for site in sites:
            accept(site, good(site, request))
        if request.task == "train":
            known.append(sorted(key for key in request.once if key.startswith("fedrdn/mean/")))
            if request.round == 1:
                connected.extend(["C", "D"])
            if request.round == 2:  # they were asked before this round, and answer while it goes on
                (take, over) = preparing[0]
                assert take("C", Reply("prepare", num_samples=2, payload=dict(pair)))
                assert not take("D", Reply("prepare", error="site D, /data: no such folder"))
                over(None, None)
        return SimpleNamespace(completion_status=None)  # NVFlare notices later that all have answered

    monkeypatch.setattr(carrier, "_send", send)
    protocol.run(server, carrier)
    assert requests == [
        ("prepare", 0, ["A", "B"]),
        ("train", 1, ["A", "B"]),
        ("prepare", 0, ["C", "D"]),
        ("train", 2, ["A", "B"]),
        ("prepare", 0, ["D"]),  # whoever could not be prepared is asked again
        ("train", 3, ["A", "B", "C"]),
        ("train", 4, ["A", "B", "C"]),  # D has not answered yet, and is not asked twice
        ("validate", 4, ["A", "B", "C"]),
        ("test", 4, ["A", "B", "C"]),
    ]
    assert [len(keys) for keys in known] == [2, 0, 3, 0]  # C is new to all in round 3
    assert server.left_out == {"D": "site D, /data: no such folder"}


@pytest.mark.parametrize("fault", ["code", "nothing", "text"])
def test_whatever_nvflare_delivers_becomes_a_reply(fault):
    from nvflare.apis.shareable import Shareable, make_reply

    from medfedaug.nvflare_jobs.job.carrier import _reply

    result = {"code": make_reply("TASK_ABORTED"), "nothing": None, "text": Shareable({"DXO": "text"})}[fault]
    reply = _reply("A", Request("train", 3), result)
    assert (reply.task, reply.round) == ("train", 3)
    assert reply.error.startswith("site A: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods",
    [
        "scaffold,fedmix,fedavgm",
        "fedsam,moex",
        "fednova,fedbn,mixstyle,fedrobust",
        "fedharmo,partialfed,randaugment",
        "ditto,partialfed,fedfa",
        "feddg_ga,fedfa",
        "single",
    ],
)
def test_nvflare_gives_the_weights_of_the_in_process_runner_bit_for_bit(
    phantom_dir, tiny_config, tmp_path, monkeypatch, methods
):
    if methods == "single":  # in fresh processes, and not in forks of a prepared one
        monkeypatch.setenv(FAST_START_VARIABLE, "0")
    config = tiny_config(methods, rounds=3, augmentation="full")
    output = run_in_simulator(config, phantom_dir, SITES, tmp_path, device="cpu")
    server = run_in_process(config, phantom_dir, SITES, "cpu")
    assert same(torch.load(output / "final_model.pt", weights_only=True), server.state)
    assert same(torch.load(output / "global_model.pt", weights_only=True), server.selection.state)
    results = json.loads((output / "results.json").read_text())
    assert results["test"] == json.loads(json.dumps(server.results()["test"]))


def test_two_jobs_of_one_name_do_not_write_one_checkpoint(tiny_config, tmp_path):
    """NVFlare runs several jobs at a time, and a job is easily submitted twice."""

    class Ended(Exception):
        pass

    def start(carrier):
        controller = FederationController(tiny_config().to_dict(), run_name="twice")
        settings = SiteSettings(state=tmp_path)
        controller.carry(ServerJob(settings, carrier, lambda event: None, tmp_path, FLContext()))

    def end(checkpoint):
        raise Ended

    def first(checkpoint):
        checkpoint.write_bytes(b"of round 5")
        with pytest.raises(ConfigError, match="another job of the name twice is under way"):
            start(end)
        assert checkpoint.read_bytes() == b"of round 5"
        raise Ended

    with pytest.raises(Ended):
        start(first)
    with pytest.raises(Ended):
        start(end)
    (earlier,) = tmp_path.rglob("twice.previous.pt")
    assert earlier.read_bytes() == b"of round 5"
