"""PartialFed-Adaptive in a whole federation: which layers to load is learned before each round's training."""

from __future__ import annotations

import torch
from reference import UNEVEN, assert_same, copied, descend, entries, mean, pixels
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from medfedaug.data.sites import open_site

RATE, TEMPERATURE, EPOCHS = 0.3, 0.7, 2


def test_sites_learn_what_to_load(federate):
    settings = {"learning_rate": RATE, "temperature": TEMPERATURE, "epochs": EPOCHS}
    run = federate(
        "partialfed_adaptive",
        plan=UNEVEN,
        settings={"partialfed_adaptive": settings},
        network="reference_convolutional",
        local_epochs=2,
    )
    start = run.network()
    model, own, logits, loaded = entries(start), {}, {}, set()
    layers = list(dict.fromkeys(key.rpartition(".")[0] for key in model))
    trainable = {name for name, _ in start.named_parameters()}
    for round_, asked in enumerate(UNEVEN, start=1):
        local = []
        for site in asked:
            batches, begun = run.batches[site, round_], dict(model)
            if site in own:
                theta = logits.get(site, torch.zeros(len(layers), dtype=torch.float64)).requires_grad_()
                adam, draws = torch.optim.Adam([theta], lr=RATE), list(batches.first_draws)
                images = pixels(run, site) / 255
                cases = open_site(run.root / site).cases["training"]
                labels = torch.tensor([run.config.classes.index(case.label) for case in cases])
                network = copied(start).eval()
                for _ in range(EPOCHS):
                    for x, y in zip(images.split(6), labels.split(6), strict=True):
                        uniform = draws.pop(0).double()
                        share = torch.sigmoid((uniform.log() - (1 - uniform).log() + theta) / TEMPERATURE)
                        mixed = {}
                        for key in model:
                            u = share[layers.index(key.rpartition(".")[0])]
                            u = u if key in trainable else u.detach()
                            mixed[key] = u * model[key] + (1 - u) * own[site][key]
                        loss = cross_entropy(functional_call(network, mixed, (x,)), y)
                        (theta.grad,) = torch.autograd.grad(loss, [theta])
                        adam.step()
                logits[site] = theta.detach()
                takes = {name: float(value) >= 0 for name, value in zip(layers, theta, strict=True)}
                loaded |= set(takes.values())
                begun = {k: model[k] if takes[k.rpartition(".")[0]] else own[site][k] for k in model}
                share_loaded = run.server.rounds[round_ - 1]["sites"][site]["partialfed_adaptive/loaded"]
                assert share_loaded == sum(takes.values()) / len(takes)
            trained = descend(copied(start, begun), batches, 0.05)
            own[site] = entries(trained)
            local.append(own[site])
        model = mean(local, [run.server.sites[site] for site in asked])
        assert_same(run.models[round_], model, atol=2e-6)
    assert loaded == {True, False}
