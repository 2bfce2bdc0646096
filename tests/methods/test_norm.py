"""Conventional normalisation: every site with its own statistics, in training and at test."""

from reference import UNEVEN, assert_models, assert_tested, descend, federated_averaging, pixels, statistics

from medfedaug.data.sites import open_site, site_statistics
from medfedaug.simulate import simulate
from medfedaug.statistics import load_statistics


def test_sites_normalise_with_their_own_statistics(federate):
    sizes = {"A": 5, "B": 10, "C": 15, "D": 5}
    run = federate("norm", plan=UNEVEN, sizes=sizes, holdout=("D",))
    for (site, _), batches in run.batches.items():
        images = pixels(run, site)
        mean, std = statistics(images)
        batches.assert_images((images - mean) / std)

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    model = rounds[run.server.selected_round - 1].model
    for site in sizes:
        mean, std = statistics(pixels(run, site))  # of an unseen site, without training, alike
        assert_tested(run, site, model, lambda images, mean=mean, std=std: (images - mean) / std)


def test_a_simulation_writes_the_statistics_that_its_sites_used(phantom_dir, tiny_config, tmp_path):
    """They stay at the sites, and who predicts for a site later needs them."""
    config = tiny_config("norm", rounds=1, limit=2, settings={"norm": {"over": "foreground"}})
    simulate(phantom_dir, tmp_path / "out", config, engine="inprocess", device="cpu", report=False)
    written = load_statistics(tmp_path / "out/statistics.json")
    folder = open_site(phantom_dir / "site_A", limit=2)
    used = site_statistics(folder, "scale", over="foreground")
    assert written["site_A"] == used != site_statistics(folder, "scale")
