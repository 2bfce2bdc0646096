"""FedProx against Li et al., MLSys 2020, Eq. 2."""

from reference import UNEVEN, assert_models, descend, federated_averaging


def test_sites_descend_on_the_loss_and_the_proximal_term(federate):
    mu = 0.7
    run = federate("fedprox", plan=UNEVEN, settings={"fedprox": {"mu": mu}}, local_epochs=3)

    def train(site, round_, network):
        start = [p.detach().clone() for p in network.parameters()]

        def term(net, _x, _y):
            pairs = zip(net.parameters(), start, strict=True)
            return mu / 2 * sum(((p - begun) ** 2).sum() for p, begun in pairs)

        descend(network, run.batches[site, round_], 0.05, term)

    assert_models(run, federated_averaging(run, train))
