"""A step of DP-SGD written out, and what it spends."""

import numpy as np
import reference
import torch
from opacus.accountants import RDPAccountant
from PIL import Image
from torch.nn.functional import cross_entropy

from medfedaug.data.sites import open_site
from medfedaug.hospital.privacy.ledger import ORDERS


def by_hand(folder, start, clip):
    """Σ gᵢ min(1, C/‖gᵢ‖) / n over the training photographs, in float64."""
    site = open_site(folder)
    total = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in start.items()}
    cases = site.cases["training"]
    for case in cases:
        image = torch.from_numpy(np.asarray(Image.open(case.image)).transpose(2, 0, 1).copy()).double() / 255
        network = reference.linear().double()
        network.load_state_dict(start)
        label = torch.tensor([site.classes.index(case.label)])
        cross_entropy(network(image[None]), label).backward()
        gradients = {key: p.grad for key, p in network.named_parameters()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        for key, gradient in gradients.items():
            total[key] += gradient * min(1.0, clip / float(norm)) / len(cases)
    return total


def epsilon(*history, delta=1e-5) -> float:
    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps) for noise, rate, steps in history]
    return float(accountant.get_epsilon(delta=delta, alphas=ORDERS))
