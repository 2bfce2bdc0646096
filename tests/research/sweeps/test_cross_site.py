"""Experiments of the papers: folds, draws, local models at other sites."""

import json
from statistics import fmean

import pytest
import torch
from benchmark_files import write_lgg
from sweeps import OFFICE_PRESET, planned, snapshot

from medfedaug.config.run import RunConfig
from medfedaug.data.splits import fold_patients
from medfedaug.errors import ConfigError
from medfedaug.federation import SiteTrainer
from medfedaug.research.datasets.benchmarks import open_benchmark
from medfedaug.research.sweeps.cross_site import cross_site
from medfedaug.research.sweeps.sweep import run_all
from medfedaug.research.sweeps.tables import write_tables


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
    with pytest.raises(ConfigError, match="fold 6 of 5: a number from 1 to 5"):
        fold_patients("DU", [], 5, 6)


def test_draws_follow_from_the_seed_of_the_run(office, tmp_path):
    runs = planned(office, "fedfa", ["fedfa.prob=0.0,1.0"], seeds=1)
    run_all(runs, OFFICE_PRESET, office, tmp_path / "a", device="cpu")
    torch.rand(7)  # other draws of this process do not matter
    run_all(runs[1:], OFFICE_PRESET, office, tmp_path / "b", device="cpu")
    files = [tmp_path / name / run.folder for name, run in (("a", runs[0]), ("a", runs[1]), ("b", runs[1]))]
    plain, drawn, again = (torch.load(file / "final_model.pt") for file in files)
    assert all(torch.equal(drawn[key], again[key]) for key in drawn)
    assert any(not torch.equal(plain[key], drawn[key]) for key in plain)


def test_the_local_model_of_each_site_is_tested_at_every_site(office, tmp_path):
    runs = planned(office, "fedbn,norm", seeds=1)
    run_all(runs, OFFICE_PRESET, office, tmp_path, device="cpu")
    folder, data = tmp_path / runs[0].folder, tmp_path / runs[0].data_folder("office_caltech_10")
    before = snapshot(folder)
    result = cross_site(folder, data, "cpu")
    record = json.loads((folder / "results.json").read_text())
    assert result["round"] == record["selected_round"] + 1
    config = RunConfig.from_dict(record["config"])

    def trainer(name: str) -> SiteTrainer:
        opened = SiteTrainer(config, data, "cpu", tmp_path / "copy" / name)
        opened.open(name)
        return opened

    # The same by hand for one pair: Amazon's model with its own norm layers, at DSLR.
    state = torch.load(next((folder / "state/amazon").glob("*.pt")), weights_only=True)
    source, target = trainer("amazon"), trainer("dslr")
    model = torch.load(folder / "global_model.pt", weights_only=True)
    source.network.load_state_dict(state["rounds"][record["selected_round"]]["network"], strict=False)
    source.start_round(result["round"], model)
    source.train(result["round"])
    network = source.network.eval()
    right = []
    for case in target.folder.cases["test"]:
        pixels = target.evaluation_transform()({"image": target.folder.load_image(case)})["image"]
        right.append(config.classes[int(network(pixels[None]).argmax())] == case.label)
    assert result["scores"]["amazon"]["dslr"] == pytest.approx(fmean(map(float, right)))
    after = snapshot(folder)
    assert {key: after[key] for key in before} == before
    assert set(after) - set(before) == {str(folder / "cross_site.json")}
    stale = {**result, "scores": {"amazon": {"dslr": 7.0}}}
    for there, read in ((stale, True), ({**stale, "run": "another"}, False), ({**stale, "round": 99}, False)):
        (folder / "cross_site.json").write_text(json.dumps(there))
        assert cross_site(folder, data, "cpu") == (stale if read else result)
    tables, _ = write_tables(runs, OFFICE_PRESET, tmp_path, across=True)
    assert len(tables["cross_site"].body) == 4
    assert "amazon" in (tmp_path / "cross_site.md").read_text()
