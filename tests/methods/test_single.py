"""Single: every site's descent goes on where it stopped, and nothing leaves."""

from reference import UNEVEN, assert_same, copied, descend, entries


def test_every_site_goes_on_with_its_own_model(federate):
    run = federate("single", plan=UNEVEN, local_epochs=2)
    assert all(not model for model in run.models)
    selected = run.server.selected_round
    for site in "ABC":
        network, by_round = run.network(), {}
        for round_ in range(1, 4):
            if (site, round_) in run.batches:
                descend(network, run.batches[site, round_], 0.05)
                assert not run.replies[round_][site].weights
            by_round[round_] = copied(network)
        state = run.sites[site].trainer.network.state_dict()  # what it was tested with
        values = {key: value for key, value in state.items() if value.is_floating_point()}
        assert_same(values, entries(by_round[selected]))
