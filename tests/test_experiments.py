"""Presets, sweeps that continue where they stopped, and their tables beside the published numbers."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from monai.fl.utils.constants import ExtraItems
from monai.fl.utils.exchange_object import ExchangeObject
from test_benchmark_data import OFFICE, write_fedbn, write_lgg

from medfedaug.config import RunConfig
from medfedaug.data import images
from medfedaug.data.benchmarks import open_benchmark
from medfedaug.data.memory import DecodedMemory, keep_decoded
from medfedaug.data.splits import fold_patients
from medfedaug.errors import ConfigError, DataError
from medfedaug.experiments.cross_site import cross_site
from medfedaug.experiments.presets import PRESETS
from medfedaug.experiments.sweep import parse_axis, parse_methods_list, plan, run_all
from medfedaug.experiments.tables import write_tables
from medfedaug.federation import SiteTrainer
from medfedaug.methods import FedFA
from medfedaug.methods.base import SiteContext
from medfedaug.models import build_network
from medfedaug.tasks import make_task

OFFICE_PRESET = PRESETS["office_caltech_10"]
TINY = ("network=lenet5", "image_size=32", "batch_size=4")


@pytest.fixture(scope="module")
def office(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("files") / "office_caltech_10"
    write_fedbn(root, "office_caltech_10", OFFICE, train=11, test=3)
    return root


def planned(root: Path, methods="fedavg fedrdn", axes=(), preset=OFFICE_PRESET, **options):
    options = {"seeds": 2, "scale": 0.005, "threads": 1, **options}
    axes = [parse_axis(text) for text in (*TINY, *axes)]
    return plan(preset, root, parse_methods_list([methods]), axes=axes, **options)


# --- Plans ------------------------------------------------------------------------------------------------


def test_values_of_an_axis_are_json_fractions_or_text():
    assert parse_axis("fedfa.prob=0.1,0.5").values == (0.1, 0.5)
    assert parse_axis("fedfa.stages=[1],[1,2]").values == ([1], [1, 2])
    assert parse_axis('network_args={"norm":"group"},{}').values == ({"norm": "group"}, {})
    assert parse_axis("fedfa.variance=client,random").values == ("client", "random")
    assert parse_axis("fraction=1/6,1").values == (1 / 6, 1)
    for text in ("fedfa.prob", "=1", "fedfa.prob=", "fedfa.prob=1,,2"):
        with pytest.raises(ConfigError, match="write NAME=VALUE"):
            parse_axis(text)


def test_a_plan_goes_seed_by_seed_and_names_only_what_differs(office):
    runs = plan(
        OFFICE_PRESET,
        office,
        ["fedavg", "fedrdn,fedfa"],
        seeds=2,
        axes=[parse_axis("fedfa.prob=0.1,0.5"), parse_axis("fraction=1/6,1"), parse_axis("local_epochs=1")],
    )
    first = [
        "fedavg/fraction=0.1667/seed-0",
        "fedavg/base/seed-0",
        "fedrdn,fedfa/fedfa.prob=0.1,fraction=0.1667/seed-0",
        "fedrdn,fedfa/fedfa.prob=0.1/seed-0",
        "fedrdn,fedfa/fedfa.prob=0.5,fraction=0.1667/seed-0",
        "fedrdn,fedfa/fedfa.prob=0.5/seed-0",
    ]
    assert [str(run.folder) for run in runs] == first + [text.replace("seed-0", "seed-1") for text in first]
    assert [spec["args"] for spec in runs[2].config.methods] == [{}, {"prob": 0.1}]
    assert runs[2].data == {"fraction": 1 / 6}
    assert str(runs[2].data_folder("office_caltech_10")) == "data/office_caltech_10_fraction-0.1667"
    assert str(runs[3].data_folder("office_caltech_10")) == "data/office_caltech_10"
    for run in runs:
        assert {**run.config.to_dict(), **OFFICE_PRESET.config} == run.config.to_dict()


def test_scale_holdout_and_network_are_told_in_the_folder(office):
    runs = planned(office, "fedavg", seeds=1, scale=0.1, holdout=["all"], limit=3)
    assert [run.held_out for run in runs] == list(OFFICE)
    config = runs[1].config
    assert (config.rounds, config.holdout, config.limit) == (40, ("caltech",), 3)
    assert runs[1].folder.parts[1].endswith("image_size=32,network=lenet5,scale=0.1,limit=3,without=caltech")
    prostate = PRESETS["prostate_mri"]
    own = prostate.config["network_args"]
    norm = parse_axis('network_args={"norm":"group"}')
    with pytest.raises(DataError, match="not there, and prostate_mri needs it"):
        plan(prostate, office, ["fedavg"], axes=[norm])
    run = plan(replace(prostate, benchmark="office_caltech_10", data={}), office, ["fedavg"], axes=[norm])[0]
    assert run.config.network_args == {**own, "norm": "group"}
    assert run.folder.parts[1] == "network_args=norm-group"


def test_a_preset_of_domain_generalisation_leaves_each_site_out_and_tests_all_of_it(office):
    preset = replace(OFFICE_PRESET, holdout=True, whole_site=True)
    runs = planned(office, "fedavg", preset=preset, seeds=1)
    assert [run.data for run in runs] == [{"unseen": site} for site in OFFICE]
    assert runs[0].config.holdout == ("amazon",)
    sites = open_benchmark("office_caltech_10", office, **runs[0].data)
    assert [len(cases) for cases in sites[0].cases.values()] == [0, 0, 14]
    assert len(planned(office, "fedavg", preset=preset, seeds=1, holdout=["none"])) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": ["fedfa.prob=0.1"]}, "--set fedfa.prob: fedfa is not among the methods"),
        ({"axes": ["speed=3"]}, "--set speed: neither METHOD.ARG nor one of network, network_args"),
        ({"axes": ["rounds=1", "rounds=2"]}, "rounds is set twice"),
        ({"axes": ["seed=3"]}, "--set seed: neither"),
        ({"methods": "fedrdn,norm"}, "both normalise the input"),
        ({"methods": "fedsomething"}, "unknown method 'fedsomething'"),
        ({"holdout": ["Basel"]}, "cannot hold out 'Basel'; the sites that train are amazon"),
        ({"folds": 5}, "folds are of patients, and office_caltech_10 has none"),
        ({"scale": 2.0}, "scale is a share"),
        ({"axes": ["learning_rate=-1"]}, "learning_rate must be positive"),
        ({"axes": ["learning_rate=fast"]}, "learning_rate must be a number, got 'fast'"),
        ({"axes": ["rounds=ten"]}, "rounds must be a whole number, got 'ten'"),
        ({"axes": ["momentum=true"]}, "momentum must be a number, got True"),
        ({"axes": ["fraction=2"]}, "fraction must be above 0 and at most 1"),
        ({"axes": ["fraction=half"]}, "fraction is a share of the training cases"),
        ({"methods": "fedfa", "axes": ["fedfa.stages=[1],[9]"]}, "unknown stage 9"),
        ({"methods": "fedavg fedfd_prompt"}, "prompts go into MONAI's ViT"),
    ],
)
def test_plans_that_cannot_be(office, options, message):
    with pytest.raises(ConfigError, match=message):
        planned(office, **options)


# --- Runs -------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def scores(folder: Path):
    results = json.loads((folder / "results.json").read_text())
    return results["test"], [entry["sites"]["dslr"]["train_loss"] for entry in results["rounds"]]


def test_a_sweep_that_was_stopped_continues_and_leaves_finished_runs_alone(office, tmp_path, monkeypatch):
    runs = planned(office)
    assert len(runs) == 4
    assert runs[0].config.rounds == 2
    opened = []
    monkeypatch.setattr(
        images.Image, "open", lambda path, open_=images.Image.open: opened.append(path) or open_(path)
    )
    run_all(runs, OFFICE_PRESET, office, tmp_path / "whole", device="cpu")
    assert len(opened) == len(set(opened)) == 4 * 14  # all runs share what was decoded

    rounds = []

    def stop(event):
        rounds.append(event["event"])
        if rounds.count("round_finished") == 4:  # after the second run's first round was saved
            raise Stopped

    out = tmp_path / "stopped"
    with pytest.raises(Stopped):
        run_all(runs, OFFICE_PRESET, office, out, device="cpu", on_event=stop)
    first, second = out / runs[0].folder, out / runs[1].folder
    assert (first / "results.json").exists()
    assert not (second / "results.json").exists()
    before, events = snapshot(first), []
    assert run_all(runs, OFFICE_PRESET, office, out, device="cpu", on_event=events.append) == {}
    assert snapshot(first) == before
    assert [e["round"] for e in events if e["event"] == "resumed"] == [1]
    for run in runs:
        assert scores(out / run.folder) == scores(tmp_path / "whole" / run.folder)
    log = [json.loads(line)["event"] for line in Path(f"{second}.log").read_text().splitlines()]
    assert log.count("resumed") == 1
    everything, events = {str(run.folder): snapshot(out / run.folder) for run in runs}, []
    run_all(runs, OFFICE_PRESET, office, out, device="cpu", on_event=events.append)
    assert {event["event"] for event in events} == {"run"}
    assert {str(run.folder): snapshot(out / run.folder) for run in runs} == everything


def test_a_run_that_fails_is_named_and_the_others_are_made(office, tmp_path):
    runs = planned(office, "fedavg fedprox", ["fedprox.mu=1e38"], seeds=1)
    events = []
    failed = run_all(runs, OFFICE_PRESET, office, tmp_path, device="cpu", on_event=events.append)
    assert list(failed) == [runs[1].folder]
    assert "round 1: 0 of 4 needed updates" in failed[runs[1].folder]
    _, notes = write_tables(runs, OFFICE_PRESET, tmp_path)
    assert notes[0] == "UNFINISHED: 1 of 2 runs."
    assert notes[0] in (tmp_path / "table.md").read_text()
    with pytest.raises(ConfigError, match="several jobs need --engine inprocess"):
        run_all(runs, OFFICE_PRESET, office, tmp_path, engine="nvflare", jobs=2)


def test_a_sweep_in_process_runs_where_nvflare_is_not_installed(office, tmp_path):
    script = f"""
import sys
sys.modules["nvflare"] = None  # importing it raises
from pathlib import Path
from medfedaug.experiments.presets import PRESETS
from medfedaug.experiments.sweep import parse_axis, plan, run_all
from medfedaug.experiments.tables import write_tables
axes = [parse_axis(text) for text in {TINY!r}]
preset = PRESETS["office_caltech_10"]
runs = plan(preset, {str(office)!r}, ["fedavg"], seeds=1, axes=axes, scale=0.001, threads=1)
assert run_all(runs, preset, {str(office)!r}, Path({str(tmp_path)!r}), device="cpu") == {{}}
write_tables(runs, preset, {str(tmp_path)!r})
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_a_sweep_that_is_stopped_takes_its_processes_along(office, tmp_path):
    """Or they would go on, and the next sweep would write to the same folders."""
    command = [
        *(sys.executable, "-m", "medfedaug.cli", "benchmark", "office_caltech_10", "--data", str(office)),
        *("--methods", "fedavg", "fedprox", "--out", str(tmp_path), "--jobs", "2", "--device", "cpu"),
        *("--set", *TINY),
    ]
    command[1:3] = ["-c", "from medfedaug.cli import main; main()"]
    for stop in (signal.SIGINT, signal.SIGKILL):
        sweep = subprocess.Popen(
            command,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        while sweep.poll() is None and not any(
            "round_finished" in log.read_text() for log in tmp_path.glob("*/*/*.log")
        ):
            time.sleep(0.2)
        assert sweep.poll() is None
        sweep.send_signal(stop)  # to it alone, as from a scheduler
        sweep.wait(120)
        for _ in range(100):
            try:
                os.killpg(sweep.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.2)
        else:
            os.killpg(sweep.pid, signal.SIGKILL)
            pytest.fail("processes are left")
        for log in tmp_path.glob("*/*/*.log"):
            log.unlink()


@pytest.mark.slow
def test_two_jobs_give_what_one_gives(office, tmp_path):
    runs = planned(office)
    for jobs in (1, 2):
        assert run_all(runs, OFFICE_PRESET, office, tmp_path / str(jobs), device="cpu", jobs=jobs) == {}
    for run in runs:
        assert scores(tmp_path / "1" / run.folder) == scores(tmp_path / "2" / run.folder)


def test_what_does_not_fit_in_memory_is_decoded_again(office):
    memory = DecodedMemory(max_bytes=100)
    big, small = torch.zeros(40), torch.zeros(20)
    for _ in range(3):
        assert memory.get(("big",), lambda: big) is big
        assert torch.equal(memory.get(("small",), lambda: small), small)
    assert (memory.decodings, memory.num_bytes) == (4, 80)
    site = open_benchmark("office_caltech_10", office)[0]
    case = site.cases["test"][0]
    with keep_decoded(2**20) as kept:
        first = site.load_image(case)
        assert site.load_image(case) is first
        torch.testing.assert_close(site.load_image(case, "scale"), first / 255)
        assert (kept.decodings, kept.num_bytes) == (1, first.numel())
    assert site.load_image(case) is not first


# --- Tables -----------------------------------------------------------------------------------------------


def pretend(run, out: Path, values: dict[str, float], unseen: dict[str, float] | None = None) -> None:
    folder = out / run.folder
    folder.mkdir(parents=True)
    score = {
        group: {site: {"accuracy": value} for site, value in (found or {}).items()}
        for group, found in (("sites", values), ("unseen", unseen))
    }
    content = {
        "config": run.config.to_dict(),
        "rounds": [
            {"round": 1, "sites": {site: {"train_loss": 1.0, "val_accuracy": 0.5} for site in values}}
        ],
        "selected_round": 1,
        "test": {**score, "mean": {"accuracy": fmean(values.values())}},
        "data": run.data_folder("office_caltech_10").name,
        "engine": "inprocess",
    }
    (folder / "results.json").write_text(json.dumps(content))


def read_csv(path: Path) -> dict[str, dict[str, str]]:
    return {row["method"]: row for row in csv.DictReader(path.open())}


def test_the_table_and_the_published_numbers_by_hand(office, tmp_path):
    runs = plan(OFFICE_PRESET, office, ["fedavg", "fedfa+"], seeds=3)
    ours = {"fedavg": (0.70, 0.72, 0.77), "fedfa+": (0.80, 0.81, 0.91)}
    for run in runs:
        mean = ours[run.methods][run.seed]
        pretend(run, tmp_path, dict(zip(OFFICE, (mean - 0.1, mean + 0.1, mean, mean), strict=True)))
    write_tables(runs, OFFICE_PRESET, tmp_path)
    rows = read_csv(tmp_path / "table.csv")
    row = rows["fedfa + fedfa_h"]
    assert float(row["amazon"]) == pytest.approx(fmean(v - 0.1 for v in ours["fedfa+"]))
    assert float(row["mean_std"]) == pytest.approx(stdev(ours["fedfa+"]))
    differences = [a - b for a, b in zip(ours["fedfa+"], ours["fedavg"], strict=True)]
    t = fmean(differences) / (stdev(differences) / 3**0.5)
    assert float(row["difference"]) == pytest.approx(fmean(differences))
    assert float(row["p"]) == pytest.approx(1 - t / (2 + t * t) ** 0.5)  # Student's t, two degrees of freedom
    published = read_csv(tmp_path / "published.csv")
    assert set(published) == {"fedavg", "fedfa+"}
    assert float(published["fedfa+"]["mean_published"]) == 0.848
    assert float(published["fedfa+"]["dslr_published"]) == 0.909
    assert float(published["fedfa+"]["mean"]) == pytest.approx(0.84)
    text = (tmp_path / "published.md").read_text()
    assert "FedFA+ Table 3, FEDFA+: the sites' mean is 84.7." in text
    assert "| fedavg | 0.630 ± 0.036 / 0.844 |" in text
    assert "| -0.055 | FedFA+ Table 3 |" in text
    assert "0.840" in (tmp_path / "table.tex").read_text()
    assert "FedFA+ Table 1" in (tmp_path / "report.html").read_text()
    assert "REDUCED" not in text
    # A release before did not record the data's options, and the plan knows them.
    assert "data_options" not in json.loads((tmp_path / runs[0].folder / "results.json").read_text())


def test_reduced_runs_are_marked_wherever_they_stand_beside_the_papers(office, tmp_path):
    runs = plan(OFFICE_PRESET, office, ["fedavg"], seeds=2, scale=0.1)
    for run in runs:
        pretend(run, tmp_path, dict.fromkeys(OFFICE, 0.7))
    write_tables(runs, OFFICE_PRESET, tmp_path)
    for name in ("table", "published"):
        for kind in (".md", ".tex"):
            assert "method (REDUCED: scale=0.1)" in (tmp_path / name).with_suffix(kind).read_text()
        assert read_csv(tmp_path / f"{name}.csv")["fedavg"]["reduced"] == "scale=0.1"
    assert "(REDUCED: scale=0.1)</h1>" in (tmp_path / "report.html").read_text()
    other = plan(OFFICE_PRESET, office, ["fedavg"], seeds=1, axes=[parse_axis("image_size=64")])
    pretend(other[0], tmp_path / "other", dict.fromkeys(OFFICE, 0.7))
    tables, notes = write_tables(other, OFFICE_PRESET, tmp_path / "other")
    assert "published" not in tables
    assert "Not the protocol's, in all runs: image_size=64." in notes


def test_a_site_left_out_alone_has_no_mean_beside_the_papers(office, tmp_path):
    runs = plan(OFFICE_PRESET, office, ["fedavg"], seeds=1, holdout=["dslr"])
    pretend(runs[0], tmp_path, dict.fromkeys(["amazon", "caltech", "webcam"], 0.9), {"dslr": 0.4})
    tables, _ = write_tables(runs, OFFICE_PRESET, tmp_path)
    (row,) = tables["published"].rows
    assert row.sites["dslr"][0].mean == 0.4
    assert row.mean.mean is None
    assert tables["table"].sites == ("dslr",)


def test_sites_left_out_in_turn_make_one_row_beside_the_papers(office, tmp_path):
    runs = plan(OFFICE_PRESET, office, ["fedavg"], seeds=2, holdout=["all"])
    for run in runs:
        others = {site: 0.9 for site in OFFICE if site != run.held_out}
        pretend(run, tmp_path, others, {run.held_out: 0.1 * OFFICE.index(run.held_out) + 0.01 * run.seed})
    write_tables(runs, OFFICE_PRESET, tmp_path)
    row = read_csv(tmp_path / "table.csv")["fedavg"]
    assert float(row["webcam"]) == pytest.approx(0.305)
    assert float(row["mean"]) == pytest.approx(0.155)
    assert float(row["mean_std"]) == pytest.approx(stdev((0.15, 0.16)))
    published = read_csv(tmp_path / "published.csv")["fedavg"]
    assert (published["published_in"], float(published["mean_published"])) == ("FedFA+ Table 6", 0.604)
    assert "when it was left out of training" in (tmp_path / "table.md").read_text()


# --- Experiments ------------------------------------------------------------------------------------------


def test_over_all_folds_every_patient_is_tested_once_and_never_trains_meanwhile(tmp_path):
    write_lgg(tmp_path)
    tested: dict[int, list[str]] = {}
    for seed in (0, 1):
        for fold in range(1, 6):
            sites = {
                s.name: s
                for s in open_benchmark("lgg_multisite", tmp_path, folds=5, fold=fold, fold_seed=seed)
            }
            parts = [{case.name for case in split} for split in sites["DU"].cases.values()]
            assert [len(part) for part in parts] == [6, 2, 2]
            assert len(set().union(*parts)) == 10
            tested.setdefault(seed, []).extend(sorted(parts[2]))
            assert not sites["EZ"].trains
            assert len(sites["EZ"].cases["test"]) == 1
    assert sorted(tested[0]) == sorted(tested[1]) == [f"TCGA_DU_{4941 + i}_19960909" for i in range(10)]
    assert tested[0] != tested[1]
    with pytest.raises(ConfigError, match="site CS has 5 patients, too few for 6 folds"):
        open_benchmark("lgg_multisite", tmp_path, folds=6)
    with pytest.raises(ConfigError, match="one of 1 to 5: 6 of 5"):
        fold_patients("DU", [], 5, 6)


def test_folds_of_a_sweep_lie_apart_by_seed(tmp_path):
    write_lgg(tmp_path / "lgg_multisite")
    runs = plan(PRESETS["lgg_multisite"], tmp_path, ["fedavg"], seeds=2, folds=5)
    assert len(runs) == 10
    assert str(runs[6].folder) == "fedavg/fold=2of5/seed-1"
    assert str(runs[6].data_folder("lgg_multisite")) == "data/seed-1/lgg_multisite_folds-5_fold-2"
    assert runs[6].data == {"folds": 5, "fold": 2, "fold_seed": 1}


def test_noise_on_the_statistics_of_fedfa_is_gaussian_and_leaves_no_negative_deviation():
    method = FedFA(noise=0.3)
    network = method.prepare_network(build_network("alexnet", in_channels=3, out_channels=2)).train()
    site = method.at_site(SiteContext("A", network))
    site.start_round()
    network(torch.rand(4, 3, 64, 64))
    plain = {
        key: value.clone() for key, value in FedFA().at_site(SiteContext("A", network)).collect().items()
    }
    torch.manual_seed(3)
    noisy = site.collect()
    torch.manual_seed(3)
    for stage in site.layers:
        drawn = [torch.randn_like(plain[f"{stage}/mean"]) for _ in range(2)]
        torch.testing.assert_close(noisy[f"{stage}/mean"], plain[f"{stage}/mean"] + 0.3 * drawn[0])
        torch.testing.assert_close(
            noisy[f"{stage}/std"], (plain[f"{stage}/std"] + 0.3 * drawn[1]).clamp_min(0)
        )
    assert plain.keys() == noisy.keys()
    with pytest.raises(ConfigError, match="noise cannot be negative"):
        FedFA(noise=-1.0)


def test_noise_follows_from_the_seed_of_the_run(office, tmp_path):
    runs = planned(office, "fedfa", ["fedfa.noise=0,0.2", "fedfa.prob=1.0"], seeds=1)
    for name in ("a", "b"):
        run_all(runs, OFFICE_PRESET, office, tmp_path / name, device="cpu")
        torch.rand(7)  # what else draws in this process does not matter
    models = [[torch.load(tmp_path / n / r.folder / "final_model.pt") for n in "ab"] for r in runs]
    for a, b in models:
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert any(not torch.equal(models[0][0][key], models[1][0][key]) for key in models[0][0])


def test_the_local_model_of_each_site_is_tested_at_every_site(office, tmp_path):
    runs = planned(office, "fedbn,norm", seeds=1)
    run_all(runs, OFFICE_PRESET, office, tmp_path, device="cpu")
    folder, data = tmp_path / runs[0].folder, tmp_path / runs[0].data_folder("office_caltech_10")
    before = snapshot(folder)
    found = cross_site(folder, data, "cpu")
    record = json.loads((folder / "results.json").read_text())
    assert found["round"] == record["selected_round"] + 1
    config = RunConfig.from_dict(record["config"])

    def trainer(name: str) -> SiteTrainer:
        opened = SiteTrainer(config, data, "cpu", tmp_path / "copy" / name)
        opened.initialize({ExtraItems.CLIENT_NAME: name})
        return opened

    # The same by hand for one pair: Amazon's model with its own norm layers, at DSLR.
    state = torch.load(next((folder / "state/amazon").glob("*.pt")), weights_only=True)
    source, target = trainer("amazon"), trainer("dslr")
    model = torch.load(folder / "global_model.pt", weights_only=True)
    source.network.load_state_dict(state["rounds"][record["selected_round"]]["network"], strict=False)
    source.train(ExchangeObject(weights=model), {"round": found["round"]})
    network = source.network.eval()
    right = []
    for case in target.folder.cases["test"]:
        pixels = target.evaluation_transform()({"image": target.folder.load_image(case)})["image"]
        right.append(config.classes[int(network(pixels[None]).argmax())] == case.label)
    assert found["scores"]["amazon"]["dslr"] == pytest.approx(fmean(map(float, right)))
    after = snapshot(folder)
    assert {key: after[key] for key in before} == before
    assert set(after) - set(before) == {str(folder / "cross_site.json")}
    tables, _ = write_tables(runs, OFFICE_PRESET, tmp_path, across=True)
    assert len(tables["cross_site"].body) == 4
    assert "amazon" in (tmp_path / "cross_site.md").read_text()


# --- What presets need of a run ---------------------------------------------------------------------------


def trained(office: Path, **changes) -> dict[str, torch.Tensor]:
    runs = planned(office, "fedavg", seeds=1)
    config = replace(
        runs[0].config, task="classification", in_channels=3, classes=("bird", "tiger"), **changes
    )
    trainer = SiteTrainer(config, office / "amazon", "cpu")
    trainer.initialize({ExtraItems.CLIENT_NAME: "amazon"})
    start = {key: value.clone() for key, value in trainer.network.state_dict().items()}
    trainer.train(ExchangeObject(), {"round": 1})
    return {**{f"start {k}": v for k, v in start.items()}, **trainer.network.state_dict()}


def same(a, b) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


def test_steps_in_place_of_epochs(office):
    # Six images in batches of four: two steps an epoch.
    assert same(trained(office, local_steps=4), trained(office, local_epochs=2))
    assert same(trained(office, local_steps=2, local_epochs=7), trained(office, local_epochs=1))
    assert not same(trained(office, local_steps=3), trained(office, local_epochs=2))


def test_weight_decay_is_an_l2_term_of_the_gradient(office):
    plain, decayed = (trained(office, local_steps=1, weight_decay=w) for w in (0.0, 0.5))
    key = next(key for key in plain if key.endswith("weight") and not key.startswith("start"))
    expected = plain[key] - 0.01 * 0.5 * plain[f"start {key}"]
    torch.testing.assert_close(decayed[key], expected)


def test_augmentation_takes_the_label_map_along():
    config = RunConfig(augmentation="flip_rotate")
    augment = make_task(config, normalised=True).augmentation()
    image = torch.zeros(1, 32, 32)
    image[0, 4:12, 18:26] = 1.0
    sample = {"image": image, "label": image.to(torch.uint8)}
    augment.set_random_state(0)
    (turned,) = augment([sample])
    assert turned["label"].dtype == torch.uint8
    assert not torch.equal(turned["label"], sample["label"])
    assert (turned["image"].round() != turned["label"]).float().mean() < 0.01


@pytest.mark.parametrize(("task", "axis"), [("segmentation", 1), ("classification", 2)])
def test_left_and_right_are_exchanged(task, axis):
    augment = make_task(RunConfig(task=task, augmentation="flip"), normalised=True).augmentation()
    image = torch.rand(1, 4, 4)
    (out,) = augment([{"image": image, "label": image if task == "segmentation" else torch.tensor(1)}])
    assert torch.equal(out["image"], image.flip(axis) if augment.flips[0] else image)
    augment.set_random_state(0)
    drawn = [augment([{"image": image, "label": image}])[0]["image"] for _ in range(8)]
    assert {torch.equal(x, image) for x in drawn} == {True, False}
    assert make_task(RunConfig(task=task), normalised=True).augmentation() is None


# --- The command ------------------------------------------------------------------------------------------


def test_the_list_names_every_protocol_and_whether_its_data_are_there(run, office):
    code, out, _ = run("benchmark", "--list", "--data", office.parent)
    assert code == 0
    for preset in PRESETS.values():
        there = "there" if preset.benchmark == "office_caltech_10" else "NOT there"
        assert f"{preset.name}  data: {there}\n" in out
        told = (preset.benchmark, preset.protocol, preset.config["network"], preset.schedule, preset.source)
        assert " · ".join(told) in out
    code, out, _ = run("benchmark", "tiny_imagenet_dir0.3", "--list")
    assert "Table 1 has 500 rounds and 0.05 of the sites" in out
    assert "http://cs231n.stanford.edu/tiny-imagenet-200.zip" in out


def test_missing_data_are_named_with_their_address_and_layout(run, tmp_path):
    code, _, err = run(
        "benchmark", "fedfd_a_vlcs", "--data", tmp_path, "--methods", "fedavg", "--out", tmp_path / "out"
    )
    assert code == 2
    assert (
        "not there, and vlcs needs it. Get the files from https://github.com/fmcarlucci/JigenDG#vlcs" in err
    )
    assert "Expected there: {CALTECH,LABELME,PASCAL,SUN}/" in err
    assert not (tmp_path / "out").exists()
    code, _, err = run("benchmark", "Office", "--data", tmp_path, "--methods", "fedavg", "--out", tmp_path)
    assert code == 2
    assert "did you mean office_caltech_10 or fedrdn_office_caltech_10 or fedfd_a_officehome" in err
    assert "--methods needs a value" in run("benchmark", "femnist", "--methods", "--data", tmp_path)[2]
    arguments = (
        "benchmark",
        "office_caltech_10",
        "--data",
        tmp_path,
        "--methods",
        "fedavg",
        "--out",
        tmp_path,
    )
    assert "not there" in run(*arguments)[2]
    assert "a benchmark needs NAME, --data, --methods and --out" in run("benchmark", "femnist")[2]


def test_the_command_runs_combinations_in_a_row_and_says_that_it_was_reduced(run, office, tmp_path):
    arguments = (
        *("benchmark", "office_caltech_10", "--data", office.parent, "--out", tmp_path, "--device", "cpu"),
        *("--methods", "fedavg", "fedrdn,fedfa", "--seeds", 1, "--scale", 0.001, "--threads", 1),
        "--no-pictures",
        *("--set", *TINY, "fedfa.prob=0.1,0.5", "--fraction", "1/2", "1"),
    )
    code, out, err = run(*arguments)
    assert code == 0, err
    assert (
        "6/6 fedrdn,fedfa/batch_size=4,fedfa.prob=0.5,image_size=32,network=lenet5,scale=0.001/seed-0" in err
    )
    assert "UNFINISHED" not in out
    for name in ("table.md", "table.csv", "table.tex", "report.html"):
        text = (tmp_path / name).read_text()
        assert name == "table.csv" or "REDUCED, not the paper" in text
    assert len(list(tmp_path.glob("*/*/seed-0/results.json"))) == 6
    reduced = json.loads((next(tmp_path.glob("fedavg/*/seed-0")) / "results.json").read_text())
    assert reduced["config"]["rounds"] == 1
    assert reduced["data_options"]["fraction"] in (0.5, 1.0)
    code, out, err = run("report", tmp_path, "--out", tmp_path / "again.html")
    assert code == 0, err
    assert "data.fraction=0.5" in out.replace("\n", "")
    assert reduced["config"]["network"] == "lenet5"
