"""What a federation survives: sites that raise, hang, die or send rubbish, and a server that is stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import same
from running import TINY_OPTIONS

from medfedaug.config.run import Execution
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation import FederationServer, Request, Site, SiteTrainer, run_in_process
from medfedaug.federation.job_folder import server_checkpoint
from medfedaug.federation.messages.checkpoint import load_checkpoint
from medfedaug.federation.messages.messages import TEST
from medfedaug.federation.site.local_training import LocalTraining
from medfedaug.nvflare_jobs.simulator.simulator import run_in_simulator
from medfedaug.simulate import simulate

FAULTS = Path(__file__).parents[1] / "support/faults"
EVERYTHING = "fedrdn,fedfa+,fedbn"
KEEP_ON = {"fedfa": {"running": "continue"}}


@pytest.fixture
def four_sites(make_site, tmp_path):
    for name in "ABCD":
        make_site(name)
    return tmp_path / "data"


@pytest.fixture
def three_sites(four_sites):
    shutil.rmtree(four_sites / "D")
    return four_sites


def troubles(entry: dict) -> dict[str, str]:
    return {t["site"]: t["reason"] for t in (*entry["refused"], *entry["missing"])}


# ---------------------------------------------------------------- sites


@pytest.mark.slow
def test_sites_that_raise_hang_die_or_send_rubbish_are_left_out_and_named(
    three_sites, tmp_path, tiny_config, faults
):
    faults(
        ["B", "train", 2, "raise", 0],
        ["C", "train", 2, "hang", 5],
        ["A", "train", 3, "nan", 0],
        ["B", "train", 3, "shape", 0],
        ["B", "train", 4, "float8", 0],
        ["C", "train", 4, "metrics", 0],
        ["A", "train", 4, "die", 0],
        ["B", "train", 5, "variance", 0],
    )
    work = tmp_path / "work"
    work.mkdir()
    execution = Execution(threads=1, min_sites=1, grace=3, round_timeout=300)
    config = tiny_config("fedrdn,fedfa", rounds=6)
    output = run_in_simulator(config, three_sites, list("ABC"), work, device="cpu", execution=execution)
    results = json.loads((output / "results.json").read_text())
    first, second, third, fourth, fifth, sixth = map(troubles, results["rounds"])
    assert first == {}
    assert second == {
        "B": "site B: RuntimeError('out of memory, say')",
        "C": "site C did not answer while the others were waited for",
    }
    assert third.keys() == {"A", "B"}
    assert "expected finite values, got" in third["A"]
    assert "model.0.conv.weight: expected shape (4, 1, 3, 3), got (1,)" in third["B"]
    assert fourth.keys() == {"A", "B"}
    assert "float8" in fourth["B"]
    assert results["rounds"][3]["sites"]["C"]["nested"] == {}
    assert fifth.keys() == {"A", "B"}
    assert "expected a variance, 0 or above" in fifth["B"]
    assert sixth.keys() == {"A"}
    # All but the dead one came back.
    last = results["rounds"][-1]["sites"]
    assert {site for site, entry in last.items() if "samples" in entry} == set("BC")
    assert set(results["test"]["sites"]) == set("BC")
    assert set(results["test"]["missing"]) == {"A"}
    for model in ("global_model.pt", "final_model.pt"):
        state = torch.load(output / model, weights_only=True)
        assert all(torch.isfinite(value).all() for value in state.values() if value.is_floating_point())


@pytest.mark.slow
def test_buffered_rounds_go_on_without_a_slow_site_and_use_its_update_when_it_comes(
    four_sites, tmp_path, tiny_config, faults
):
    """Through NVFlare: B dies in its first training, C sleeps through it, A sleeps longer in its fourth."""
    faults(["B", "train", 1, "die", 0], ["C", "train", 1, "hang", 4], ["A", "train", 4, "hang", 12])
    work = tmp_path / "work"
    work.mkdir()
    config, execution = tiny_config("fedrdn,fedfa", rounds=6, buffer=2), Execution(threads=1, grace=3)
    output = run_in_simulator(config, four_sites, list("ABCD"), work, device="cpu", execution=execution)
    results = json.loads((output / "results.json").read_text())
    late = {
        (site, entry["round"]): metrics["staleness"]
        for entry in results["rounds"]
        for site, metrics in entry["sites"].items()
        if "samples" in metrics
    }
    assert all(sum(round_ == n for _, round_ in late) == 2 for n in range(1, 7))
    assert late["C", 4] == 3
    assert not any(site == "B" for site, _ in late)
    assert {"C", "D"} <= results["test"]["sites"].keys()
    assert "B" in results["test"]["missing"]
    state = torch.load(output / "final_model.pt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in state.values() if value.is_floating_point())


def test_a_site_without_data_is_left_out_where_enough_others_are_there(four_sites, tiny_config):
    (four_sites / "B/images/0.nii.gz").unlink()
    with pytest.raises(RunFailed, match=r"min_sites says how many suffice: site B, .*images/0\.nii\.gz"):
        run_in_process(tiny_config(), four_sites, list("ABCD"), "cpu")
    config = tiny_config()
    server = run_in_process(config, four_sites, list("ABCD"), "cpu", execution=Execution(min_sites=3))
    assert set(server.sites) == set("ACD")
    assert "images/0.nii.gz" in server.results()["left_out"]["B"]
    with pytest.raises(RunFailed, match="3 of the sites can train; the federation needs 4"):
        run_in_process(config, four_sites, list("ABCD"), "cpu", execution=Execution(min_sites=4))


# ---------------------------------------------------------------- server and restarts


class Stopped(Exception):
    pass


def stop_after(round_: int):
    """Something kills the process when the next round begins, before its first reply."""

    def on_event(event):
        if event["event"] == "round_started" and event["round"] == round_ + 1:
            raise Stopped

    return on_event


OTHERS = {
    "with updates under way": {"methods": "fedbn,scaffold", "buffer": 1, "limit": None},
    "with frozen entries": {"methods": "fedrdn", "freeze": ("model.0.*",)},
}


@pytest.mark.parametrize(
    "methods",
    [
        *OTHERS,
        EVERYTHING,
        "fedrdn,fedprox,fedavgm",
        "scaffold,fedbn",
        "fednova",
        "ditto,partialfed",
        "feddg_ga,fixbn",
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(phantom_dir, tmp_path, tiny_config, methods):
    changes = {"methods": methods, "rounds": 4, "limit": 1, **OTHERS.get(methods, {})}
    config = tiny_config(settings=KEEP_ON if "fedfa" in methods else None, **changes)
    execution = Execution(site_speed={"site_B": 0.4}) if config.buffer else Execution()
    check_resumed(config, phantom_dir, ["site_A", "site_B", "site_C"], tmp_path, execution)


def test_a_resumed_classification_is_the_uninterrupted_one_to_the_bit(photo_config, tmp_path):
    config = photo_config("fedsr,fpl,fedrobust", rounds=4)
    check_resumed(config, tmp_path / "photos", ["A", "B", "C"], tmp_path / "state")


def check_resumed(config, data, sites, state_dir, execution=Execution()):  # noqa: B008
    given = {"execution": execution}
    whole = run_in_process(config, data, sites, "cpu", **given)
    with pytest.raises(Stopped):
        run_in_process(config, data, sites, "cpu", stop_after(2), state_dir, **given)
    server = run_in_process(config, data, sites, "cpu", state_dir=state_dir, resume=True, **given)
    assert same(server.state, whole.state)
    assert same(server.selection.state, whole.selection.state)
    resumed, expected = server.results(), whole.results()
    assert resumed.pop("run") != expected.pop("run")
    for entry in (*resumed["rounds"], *expected["rounds"]):
        entry.pop("seconds")
        for site in entry["sites"].values():
            site.pop("seconds", None)
    # Sites are sent again what they had been sent once.
    for entry in (resumed["rounds"][2], expected["rounds"][2]):
        entry.pop("bytes_down"), entry.pop("bytes")
    assert resumed == expected


def prepare(server, sites) -> None:
    """What comes before the first round, with each site's answer."""
    for name, site in sites.items():
        server.accept_preparation(name, site.answer(server.prepare()))
    server.finish_preparation()


def make_round(server, sites) -> None:
    """One round, in which every site's update is taken."""
    request = server.start_round()
    for name, site in sites.items():
        reply = site.answer(request)
        assert server.accept(name, reply), reply.error
    server.finish_round()


@pytest.mark.parametrize("methods", [EVERYTHING, "ditto"])
def test_what_a_site_kept_of_later_rounds_has_no_part_in_an_earlier_one(
    phantom_dir, tmp_path, tiny_config, methods
):
    """The server repeats the first round of a site, or tests the model of a round from before it joined."""
    config = tiny_config(methods, rounds=3, settings=KEEP_ON if "fedfa" in methods else None)
    server = FederationServer(config, execution=Execution(min_sites=1))

    def start():
        return Site("site_B", SiteTrainer(config, phantom_dir, "cpu", tmp_path / "site_B"))

    def kept():
        (file,) = (tmp_path / "site_B").glob("*.pt")
        after = load_checkpoint(file)["rounds"][2]
        return {"network": after["network"], **after["methods"]}

    early, late = {"site_A": Site("site_A", SiteTrainer(config, phantom_dir, "cpu"))}, {"site_B": start()}
    prepare(server, {**early, **late})
    make_round(server, early)
    request = server.start_round()
    first, own = late["site_B"].answer(request), kept()
    test = replace(request, task=TEST, round=1)
    scored, restarted = late["site_B"].answer(test), start().answer(test)
    assert not scored.error
    assert scored.metrics == restarted.metrics
    for site in (late["site_B"], start()):
        again = site.answer(request)
        assert same(again.weights, first.weights)
        assert same(again.payload, first.payload)
        assert all(same(entries, own[name]) for name, entries in kept().items())


def test_a_site_that_cannot_read_what_it_kept_never_goes_on_without_it(phantom_dir, tmp_path, tiny_config):
    config = tiny_config("fedbn", rounds=3)
    server = FederationServer(config)

    def start(name):
        return Site(name, SiteTrainer(config, phantom_dir, "cpu", tmp_path / name))

    sites = {name: start(name) for name in ("site_A", "site_B")}
    prepare(server, sites)
    make_round(server, sites)
    request = server.start_round()
    expected = sites["site_A"].answer(request)
    (file,) = (tmp_path / "site_A").glob("*.pt")
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    again = start("site_A")
    for _ in range(2):
        assert "not a checkpoint" in again.answer(request).error
    file.write_bytes(whole)
    assert same(again.answer(request).weights, expected.weights)
    # Without the file it is a site that never trained: its norm layers are the new network's.
    file.unlink()
    fresh = start("site_A")
    assert not fresh.answer(request).error
    assert fresh.trainer.memory.latest(1) == 0


def test_resuming_asks_for_the_same_run(phantom_dir, tmp_path, tiny_config):
    sites = ["site_A", "site_B"]
    run_in_process(tiny_config(), phantom_dir, sites, "cpu", state_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"medfedaug\.pt is of a run with another seed: 0, asked for 1"):
        run_in_process(tiny_config(seed=1), phantom_dir, sites, "cpu", state_dir=tmp_path, resume=True)
    longer = run_in_process(tiny_config(rounds=3), phantom_dir, sites, "cpu", state_dir=tmp_path, resume=True)
    assert same(longer.state, run_in_process(tiny_config(rounds=3), phantom_dir, sites, "cpu").state)


def test_an_untrusted_name_of_a_run_is_no_path(phantom_dir, tmp_path, tiny_config):
    site = Site("site_A", SiteTrainer(tiny_config(), phantom_dir, "cpu", tmp_path))
    assert "not the identity of a run" in site.answer(Request("prepare", run="../../etc")).error


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(ConfigError, match="not a checkpoint"):
        load_checkpoint(path)
    if damage is None:
        torch.save({"format": "medfedaug.checkpoint", "version": 99}, path)
    else:
        path.write_bytes(damage)
    reason = r"checkpoint\.pt: not a checkpoint"
    with pytest.raises(ConfigError, match=reason):
        load_checkpoint(path)


def test_a_checkpoint_runs_no_code(tmp_path):
    class Harm:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "harm"),))

    torch.save({"format": "medfedaug.checkpoint", "version": 1, "rounds": Harm()}, tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "harm").exists()


@pytest.mark.slow  # two simulations; test_a_resumed_run is in process
def test_a_killed_simulation_resumes_to_the_bit(phantom_dir, tmp_path, tiny_config, run):
    """`medfedaug simulate` is killed with all its processes after two rounds, and called again."""
    data, out = tmp_path / "data", tmp_path / "out"
    for site in ("site_A", "site_B"):
        shutil.copytree(phantom_dir / site, data / site)
    config = tiny_config(EVERYTHING, rounds=4, augmentation="full")  # as the command augments own data
    arguments = [
        *("simulate", "--data", str(data), "--out", str(out)),
        *("--methods", EVERYTHING, "--rounds", "4", "--batch-size", "4", "--threads", "1"),
        *TINY_OPTIONS,
        *("--device", "cpu", "--no-report"),
    ]
    command = [sys.executable, "-c", "from medfedaug.cli import main; main()", *arguments]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        checkpoint = server_checkpoint(out / "state")
        deadline = time.monotonic() + 300
        while not (checkpoint.exists() and load_checkpoint(checkpoint)["round"] >= 2):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    code, _, err = run(*arguments)
    assert code == 2
    assert "--resume continues it" in " ".join(err.split())
    code, _, err = run(*arguments, "--resume")
    assert code == 0, err
    assert "resumed after round" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]
    assert sorted(p.name for p in (out / "state").iterdir()) == ["site_A", "site_B"]
    expected = run_in_process(config, data, ["site_A", "site_B"], "cpu")
    assert same(torch.load(out / "final_model.pt", weights_only=True), expected.state)
    assert same(torch.load(out / "global_model.pt", weights_only=True), expected.selection.state)
    # A finished run is not run again.
    before = (out / "results.json").read_bytes()
    code, printed, _ = run(*arguments, "--resume")
    assert code == 0
    assert "site_A" in printed
    assert (out / "results.json").read_bytes() == before


def test_one_process_alone_makes_a_run(phantom_dir, tmp_path, tiny_config):
    out, refused = tmp_path / "out", []
    options = {"engine": "inprocess", "device": "cpu", "report": False}

    def start_another(event):
        for how in ({"overwrite": True}, {"resume": True}):
            with pytest.raises(ConfigError, match="out: another process is making this run") as error:
                simulate(phantom_dir, out, tiny_config(), **options, **how)
            refused.append(error)

    results = simulate(phantom_dir, out, tiny_config(), **options, on_event=start_another)
    assert len(refused) > 4
    assert results["rounds"][-1]["round"] == 2
    assert not list(out.glob(".*"))
    assert simulate(phantom_dir, out, tiny_config(), **options, resume=True) == results


@pytest.mark.slow  # test_too_few_good_updates_end_the_run is in process
def test_a_failed_run_leaves_its_last_good_model(four_sites, tmp_path, tiny_config, faults):
    faults(["B", "train", 3, "raise", 0])
    out, config, sites = tmp_path / "out", tiny_config("fedrdn", rounds=4), ["A", "B"]
    for name in "CD":
        shutil.rmtree(four_sites / name)
    with pytest.raises(
        RunFailed, match=r"round 3: 1 of 2 .*the last good model: .*final_model\.pt; --resume"
    ):
        simulate(four_sites, out, config, device="cpu", report=False)
    expected = run_in_process(tiny_config("fedrdn", rounds=2), four_sites, sites, "cpu")
    assert same(torch.load(out / "final_model.pt", weights_only=True), expected.state)
    assert not (out / "results.json").exists()
    simulate(four_sites, out, config, device="cpu", report=False, engine="inprocess", resume=True)
    whole = run_in_process(config, four_sites, sites, "cpu")
    assert same(torch.load(out / "final_model.pt", weights_only=True), whole.state)


@pytest.mark.parametrize("how", ["stopped", "no memory left"])
def test_a_training_that_breaks_off_is_neither_sent_nor_kept(phantom_dir, tiny_config, monkeypatch, how):
    """A round that failed at a site must leave nothing behind, local norm layers least of all."""
    server = FederationServer(tiny_config("fedbn", rounds=2))
    site, other = (Site("site_A", SiteTrainer(server.config, phantom_dir, "cpu")) for _ in range(2))
    prepare(
        server, {"site_A": site, "site_B": Site("site_B", SiteTrainer(server.config, phantom_dir, "cpu"))}
    )
    answers, steps = iter([False, True] * 2), LocalTraining.run

    def fail(self, *args):
        steps(self, *args)
        raise RuntimeError("no memory left")

    first = server.start_round(["site_A"])
    for request in (first, replace(first, round=2)):
        with monkeypatch.context() as patch:
            if how != "stopped":
                patch.setattr(LocalTraining, "run", fail)
            broken = site.answer(request, should_stop=lambda: how == "stopped" and next(answers))
        assert how in broken.error
        assert not broken.weights
        assert same(site.answer(request).weights, other.answer(request).weights)
