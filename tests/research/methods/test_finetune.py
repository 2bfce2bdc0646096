"""Fine-tuning: descent from the selected model, before the test and never sent."""

from reference import (
    FINE_TUNING,
    UNEVEN,
    assert_models,
    assert_same,
    copied,
    descend,
    entries,
    federated_averaging,
)

from medfedaug.federation.in_process import run_pooled
from medfedaug.federation.site.local_training import LocalTraining

SITES = ["site_A", "site_B"]


def test_sites_are_tested_with_the_selected_model_trained_further(federate):
    epochs = 2
    run = federate(
        "finetune",
        plan=UNEVEN,
        settings={"finetune": {"epochs": epochs}},
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
