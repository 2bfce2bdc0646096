"""FPL in a whole federation, against Eq. 2 to 12 of Huang et al., CVPR 2023."""

from __future__ import annotations

import torch
from reference import assert_models, federated_averaging, step_down
from torch.nn.functional import cosine_similarity, cross_entropy

PLAN = [tuple("ABCDEF"), tuple("ACDF"), tuple("ABCDEF")]
TEMPERATURE, CONTRAST, CONSISTENCY = 0.5, 0.7, 0.2


def clusters(prototypes):
    """Eq. 4 and 5: the means of the sets that nearest neighbours link."""
    groups = [{i} for i in range(len(prototypes))]
    for i, own in enumerate(prototypes):
        similar = [cosine_similarity(own, other, dim=0) for other in prototypes]
        similar[i] = torch.tensor(-2.0)
        j = int(torch.stack(similar).argmax())
        joined = [group for group in groups if i in group or j in group]
        groups = [group for group in groups if group not in joined] + [set().union(*joined)]
    return [torch.stack([prototypes[i] for i in sorted(group)]).mean(0) for group in groups]


def test_features_are_contrasted_with_clusters_of_prototypes(federate):
    settings = {"fpl": {"temperature": TEMPERATURE, "contrastive": CONTRAST, "consistency": CONSISTENCY}}
    run = federate(
        "fpl",
        plan=PLAN,
        sizes={"A": 5, "B": 10, "C": 5, "D": 5, "E": 5, "F": 10},
        settings=settings,
        network="reference_convolutional",
        local_epochs=2,
    )
    prototypes, numbers = {}, set()

    def train(site, round_, network):
        known = {}
        if round_ > 1:
            for label in (0, 1):
                known[label] = clusters([one[label] for _, one in sorted(prototypes[round_ - 1].items())])
                numbers.add(len(known[label]))
        network.train()
        kept = []
        for x, y in run.batches[site, round_]:
            z = network.encoder(x).mean((2, 3))
            loss = cross_entropy(network.head[2](z), y)
            terms = []
            for feature, label in zip(z, y.tolist(), strict=True):
                if not known:
                    continue
                exponentials = {
                    k: sum((cosine_similarity(feature, c, dim=0) / TEMPERATURE).exp() for c in cs)
                    for k, cs in known.items()
                }
                contrast = -(exponentials[label] / sum(exponentials.values())).log()
                unbiased = torch.stack(known[label]).mean(0)
                terms.append(CONTRAST * contrast + CONSISTENCY * (feature - unbiased).square().sum())
            step_down(network, loss + (torch.stack(terms).mean() if terms else 0.0), 0.05)
            kept.append((z.detach(), y))
        z, y = (torch.cat(part)[-run.server.sites[site] :] for part in zip(*kept, strict=True))
        prototypes.setdefault(round_, {})[site] = [z[y == label].mean(0) for label in (0, 1)]

    assert_models(run, federated_averaging(run, train), atol=5e-6)
    assert max(numbers) > 1
