"""Fine-tuning: descent from the selected model, before the test and never sent."""

from __future__ import annotations

import pytest
import torch
from reference import (
    FINE_TUNING,
    UNEVEN,
    assert_models,
    assert_same,
    copied,
    descend,
    entries,
    federated_averaging,
    same,
)

from medfedaug.config.run import derive_seed
from medfedaug.federation import SiteTrainer, run_in_process
from medfedaug.federation.pooled import run_pooled
from medfedaug.federation.site.local_training import LocalRound, LocalTraining
from medfedaug.tasks import SegmentationTask

SITES = ["site_A", "site_B"]


@pytest.mark.parametrize("epochs", [1, 2])
def test_sites_are_tested_with_the_selected_model_trained_further(federate, epochs):
    run = federate(
        "finetune",
        plan=UNEVEN,
        settings={"finetune": {"epochs": epochs}},
        network="reference_convolutional",
        sizes={"A": 5, "B": 10, "C": 15, "D": 5},
        holdout=("D",),
    )

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    selected = rounds[run.server.selected_round - 1].model
    for site in "ABCD":
        network = copied(run.network(), selected)
        if site != "D":
            later = run.server.selected_round + 1
            batches = run.batches.get((site, FINE_TUNING)) or run.batches[site, later]
            assert len(batches) == epochs * run.server.sites[site] // 6
            descend(network, batches, 0.05)
        state = run.sites[site].trainer.network.state_dict()
        values = {key: value for key, value in state.items() if value.is_floating_point()}
        assert_same(values, entries(network))


def test_fine_tuning_is_local_training_before_the_test(phantom_dir, tiny_config, monkeypatch):
    sites, tested = [*SITES, "site_C"], []
    plain = run_in_process(tiny_config(), phantom_dir, sites, "cpu")
    evaluate = SegmentationTask.evaluate

    def spy(self, network, *args):
        tested.append({key: value.clone() for key, value in network.state_dict().items()})
        return evaluate(self, network, *args)

    monkeypatch.setattr(SegmentationTask, "evaluate", spy)
    config = tiny_config("finetune", settings={"finetune": {"epochs": 2}})
    tuned = run_in_process(config, phantom_dir, sites, "cpu")
    assert same(tuned.state, plain.state)
    assert same(tuned.selection.state, plain.selection.state)
    first, _, unseen = tested[-3:]
    assert all(torch.equal(unseen[key], tuned.selection.state[key]) for key in tuned.shared)

    trainer = SiteTrainer(config, phantom_dir, "cpu")
    trainer.open("site_A")
    trainer.receive({key: tuned.selection.state[key] for key in tuned.shared})
    seed = derive_seed(config.seed, "site_A", "fine-tuning")
    torch.manual_seed(seed)
    loader = trainer.samples.loader(trainer.own_dataset(seed), seed)
    trainer.training.run(loader, LocalRound(config.rounds + 1, 2, 0, seed, config.learning_rate))
    state = trainer.network.state_dict()
    assert all(torch.equal(state[key], first[key]) for key in tuned.shared)
    assert not all(torch.equal(state[key], tuned.selection.state[key]) for key in tuned.shared)


def test_a_pooled_model_is_fine_tuned_on_the_sites_own_images(phantom_dir, tiny_config, monkeypatch):
    sizes = []
    steps = LocalTraining.run

    def counted(self, loader, *args, **kwargs):
        sizes.append(len(loader.dataset))
        return steps(self, loader, *args, **kwargs)

    monkeypatch.setattr(LocalTraining, "run", counted)
    server = run_pooled(tiny_config("pooled,finetune", rounds=1), phantom_dir, SITES, "cpu")
    own = [server.sites[name] for name in SITES]
    assert sizes == [sum(own), *own]
