"""State that stays at a site: a new process trains its next round as the old one, to the bit."""

import pytest
from reference import same

from medfedaug.federation import SiteTrainer, run_in_process

PHOTOS = [("fedrobust", {"matrix", "shift"}), ("fraug", {"means", "seen", "steps", "rtnet"})]


@pytest.mark.all_layers
@pytest.mark.parametrize(("name", "keys"), PHOTOS)
def test_a_new_process_trains_as_the_old_one(photo_config, tmp_path, name, keys):
    config = photo_config(name)

    def open_trainer(states):
        trainer = SiteTrainer(config, tmp_path / "photos", "cpu", states)
        trainer.open("A")
        trainer.enter_run("0" * 32)
        return trainer

    def second_round(trainer):
        trainer.start_round(2, update.weights, update.payload)
        return trainer.train(2)

    steady = open_trainer(tmp_path / "states")
    update = steady.train(1)
    restarted = open_trainer(tmp_path / "states")
    expected, actual = second_round(steady), second_round(restarted)
    state = steady.parts[name].state()
    assert {key.split("/")[0] for key in state} == keys
    assert same(restarted.parts[name].state(), state)
    assert same(actual.weights, expected.weights)
    forgetful = open_trainer(tmp_path / "elsewhere")
    second_round(forgetful)
    assert not same(forgetful.parts[name].state(), state)


@pytest.mark.all_layers
def test_an_interrupted_run_continues_with_the_servers_state(phantom_dir, tiny_config, tmp_path):
    sites = ["site_A", "site_B"]
    whole = run_in_process(tiny_config("fedavgm", rounds=2), phantom_dir, sites, "cpu")
    run_in_process(tiny_config("fedavgm", rounds=1), phantom_dir, sites, "cpu", state_dir=tmp_path)
    config = tiny_config("fedavgm", rounds=2)
    again = run_in_process(config, phantom_dir, sites, "cpu", state_dir=tmp_path, resume=True)
    assert same(whole.state, again.state)
