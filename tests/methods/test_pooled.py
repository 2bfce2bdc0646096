"""The two ends that a federation lies between: every site for itself, and all images in one place."""

import json
from dataclasses import replace

import pytest
import torch
from monai.utils import CommonKeys as Keys
from reference import Recorder, assert_same, descend, entries, pixels, same
from running import TINY_NETWORK

from medfedaug.errors import ConfigError
from medfedaug.federation import SiteTrainer
from medfedaug.federation import run_in_process as in_process
from medfedaug.federation.in_process import run_pooled
from medfedaug.federation.site.local_training import LocalTraining
from medfedaug.nvflare_jobs import MedFedAugRecipe
from medfedaug.runs.evaluate import evaluate_model
from medfedaug.runs.load_results import load_run
from medfedaug.simulate import simulate

SITES = ["site_A", "site_B", "site_C"]  # the third has test cases alone


@pytest.fixture(scope="module")
def simulated(phantom_dir, tmp_path_factory):
    from medfedaug.config.run import RunConfig

    runs = {}
    for name in ("fedavg", "single", "pooled"):
        out = tmp_path_factory.mktemp(name) / "out"
        config = RunConfig(methods=({"name": name},), **TINY_NETWORK, rounds=2, batch_size=4)
        simulate(phantom_dir, out, config, engine="inprocess", device="cpu", report=False)
        runs[name] = out
    return runs


def test_a_single_site_is_trained_as_if_there_were_no_other(simulated, phantom_dir):
    """Two rounds without any server, scored as the federation scored them."""
    results = json.loads((simulated["single"] / "results.json").read_text())
    from medfedaug.config.run import RunConfig

    for name in SITES[:2]:
        trainer = SiteTrainer(RunConfig.from_dict(results["config"]), phantom_dir, "cpu")
        trainer.open(name)
        for round_ in (1, 2):
            update = trainer.train(round_)
            result = results["rounds"][round_ - 1]["sites"][name]["train_loss"]
            assert result == update.metrics["train_loss"]
        scores = trainer.evaluate_round("test", results["selected_round"])
        assert results["test"]["sites"][name] == scores
    assert results["test"]["unseen"]["site_C"]["dice"] is None
    assert [entry["bytes_up"] + entry["bytes_down"] for entry in results["rounds"]] == [0, 0]


def test_single_and_pooled_leave_what_a_federation_leaves(simulated, phantom_dir):
    expected = load_run(simulated["fedavg"])
    for name in ("single", "pooled"):
        run = load_run(simulated[name])
        assert run.label == name
        assert run.sites.keys() == expected.sites.keys()
        assert run.unseen.keys() == expected.unseen.keys()
        assert all(run.cases[site] == expected.cases[site] for site in run.sites)
        assert len(run.validation()) == len(expected.validation())
        assert all(score is not None for score in run.validation("site_B"))
        assert all(entry["bytes_up"] == entry["bytes_down"] == 0 for entry in run.rounds)
        again = evaluate_model(simulated[name] / "global_model.pt", phantom_dir, device="cpu")["sites"]
        for site, score in {**run.sites, **run.unseen}.items():
            assert again[site]["dice"] == (pytest.approx(score) if score is not None else None)


def test_pooled_images_are_normalised_as_at_their_site(phantom_dir, tiny_config, monkeypatch):
    seen = []
    steps = LocalTraining.run

    def watched(self, loader, *args):
        seen.append(loader.dataset)
        return steps(self, loader, *args)

    monkeypatch.setattr(LocalTraining, "run", watched)
    run_pooled(tiny_config("pooled,norm", rounds=1), phantom_dir, SITES, "cpu")
    (result,) = seen
    expected = []
    for name in SITES[:2]:
        trainer = SiteTrainer(tiny_config("norm"), phantom_dir, "cpu")
        trainer.open(name)
        expected += [image for batch in trainer.samples.images(trainer.samples.training()) for image in batch]
    assert len(result) == len(expected)
    for i, image in enumerate(expected):
        torch.testing.assert_close(torch.as_tensor(result[i][Keys.IMAGE]), image)


def test_a_pooled_run_resumes_to_the_bit(phantom_dir, tmp_path, tiny_config):
    class Stopped(Exception):
        pass

    def stop(event):
        if event["event"] == "round_started" and event["round"] == 2:
            raise Stopped

    config = tiny_config("pooled", rounds=3)
    whole = run_pooled(config, phantom_dir, SITES, "cpu")
    with pytest.raises(Stopped):
        run_pooled(config, phantom_dir, SITES, "cpu", stop, tmp_path)
    resumed = run_pooled(config, phantom_dir, SITES, "cpu", state_dir=tmp_path, resume=True)
    assert same(resumed.state, whole.state)
    assert resumed.results()["test"] == whole.results()["test"]


def test_what_makes_no_sense_is_refused(phantom_dir, tiny_config):
    with pytest.raises(ConfigError, match=r"a federation requires separate_sites .*, pooled excludes it"):
        in_process(tiny_config("pooled"), phantom_dir, SITES, "cpu")
    with pytest.raises(ConfigError, match=r"a job requires separate_sites .*, pooled excludes it"):
        MedFedAugRecipe(config=tiny_config("pooled"))
    with pytest.raises(ConfigError, match=r"fedprox requires averaged_parameters .*, single excludes it"):
        in_process(tiny_config("single,fedprox"), phantom_dir, SITES, "cpu")


def test_rounds_are_descent_on_everybodys_images(federate):
    federation = federate("fedavg", local_epochs=2)
    methods = ({"name": Recorder.name}, {"name": "pooled"})
    Recorder.batches = {}
    server = run_pooled(replace(federation.config, methods=methods), federation.root, list("ABC"), "cpu")
    network = federation.network()
    assert list(Recorder.batches) == [("A", 1), ("A", 2), ("A", 3)]  # one site trains, on all images
    images = torch.cat([pixels(federation, site) for site in "ABC"]) / 255
    for batches in Recorder.batches.values():
        assert len(batches) == 2 * 36 // 6
        batches.assert_images(images)
        descend(network, batches, 0.05)
    assert_same({key: server.state[key] for key in server.shared}, entries(network))
