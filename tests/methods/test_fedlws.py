"""FedLWS against Shi et al., ICLR 2025: a mean whose layers are shrunk."""

from __future__ import annotations

import pytest
import torch
from reference import UNEVEN, Round, assert_models, copied, descend, entries, mean, same
from small_networks import SEGMENTING
from torch import nn

from medfedaug.federation import run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.methods import FedLWS
from medfedaug.methods.base import RoundMean, ServerContext, SiteUpdate

SITES = ["site_A", "site_B"]
LAYERS = ("encoder.0.0", "encoder.0.1", "encoder.1.0", "encoder.1.1", "head.2")


def flat(model, layer):
    return torch.cat([model[f"{layer}.weight"].flatten(), model[f"{layer}.bias"].flatten()])


@pytest.mark.parametrize(
    "settings",
    [{"beta": 0.8, "least": 0.0, "most": 1.0}, {"beta": 5.0, "least": 0.1, "most": 0.3}],
    ids=["between the limits", "at the limits"],
)
def test_layers_shrink_by_the_disagreement_of_the_sites(federate, settings):
    run = federate(
        "fedlws",
        plan=UNEVEN,
        settings={"fedlws": settings},
        network="reference_convolutional",
        local_epochs=2,
    )
    start = run.network()
    model, rounds, summaries, taus = entries(start), [], [], []
    for round_ in range(1, 4):
        local = {}
        for site in run.took_part(round_):
            network = descend(copied(start, model), run.batches[site, round_], 0.05)
            local[site] = entries(network)
        average = mean(list(local.values()), [run.server.sites[site] for site in local])
        gammas = []
        for layer in LAYERS:
            w, g = flat(model, layer), {k: flat(one, layer) - flat(model, layer) for k, one in local.items()}
            middle = sum(g.values()) / len(g)
            tau = settings["beta"] * sum(float((one - middle).norm()) for one in g.values()) / len(g)
            taus.append(tau)
            tau = min(max(tau, settings["least"]), settings["most"])
            change = flat(average, layer) - w
            gammas.append(float(w.norm() / (w.norm() + tau * change.norm())))
            for key in (f"{layer}.weight", f"{layer}.bias"):
                average[key] = gammas[-1] * average[key]
        model = average
        rounds.append(Round(model, local))
        summaries.append((min(gammas), sum(gammas) / len(gammas)))
    assert_models(run, rounds)
    limits = (settings["least"], settings["most"])
    assert any(not limits[0] <= tau <= limits[1] for tau in taus) == (settings["beta"] == 5.0)
    for record, (smallest, middle) in zip(run.server.rounds, summaries, strict=True):
        assert record["methods"]["fedlws"] == pytest.approx({"smallest": smallest, "mean": middle}, rel=1e-5)


def test_without_shrinking_it_is_fedavg(federate):
    options = {"plan": UNEVEN, "network": "reference_convolutional"}
    run = federate("fedlws", settings={"fedlws": {"beta": 0.0, "least": 0.0}}, **options)
    assert same(run.models[3], federate("fedavg", **options).models[3])


def test_a_layer_of_zeros_is_not_shrunk():
    server = FedLWS().aggregator(ServerContext(nn.Linear(2, 1), 1))
    for site, value in (("A", 1.0), ("B", 3.0)):
        model = {"weight": torch.full((1, 2), value), "bias": torch.full((1,), value)}
        server.accept(SiteUpdate(site, 1, model, {}, 1.0))
    zeros = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}
    average = {key: value + 2 for key, value in zeros.items()}
    assert same(server.result(RoundMean(1, zeros, average, {"A": 1.0, "B": 1.0})), average)


def test_a_layer_with_two_names_is_shrunk_under_both(phantom_dir, tiny_config):
    """In DynUNet a module has two names, and the entries of the second are loaded last."""
    args = {**SEGMENTING["dynunet"], "norm": "batch"}
    config = tiny_config("fedlws", network="dynunet", network_args=args, rounds=1, limit=1)
    state = run_in_process(config, phantom_dir, SITES, "cpu").state
    tensors = {}
    for key, tensor in Composition(config).network.state_dict(keep_vars=True).items():
        tensors.setdefault(tensor, []).append(key)
    several = [keys for keys in tensors.values() if len(keys) > 1]
    assert several
    assert all(torch.equal(state[keys[0]], state[key]) for keys in several for key in keys[1:])
