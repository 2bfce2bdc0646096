"""FedSAM against Qu et al., ICML 2022: the gradient at the worst weights nearby."""

import torch
from reference import UNEVEN, assert_models, federated_averaging, same
from torch import nn
from torch.nn.functional import cross_entropy

from medfedaug.methods.base import Step
from medfedaug.research.methods.fedsam import gradients_nearby


def test_each_step_is_along_the_gradient_at_the_worst_weights_nearby(federate):
    rho = 0.3
    run = federate("fedsam", plan=UNEVEN, settings={"fedsam": {"rho": rho}}, local_epochs=2)

    def train(site, round_, net):
        net.train()
        for x, y in run.batches[site, round_]:
            parameters = list(net.parameters())
            g = torch.autograd.grad(cross_entropy(net(x), y), parameters)
            buffers = [buffer.clone() for buffer in net.buffers()]
            length = torch.sqrt(sum((one**2).sum() for one in g))
            with torch.no_grad():
                for p, one in zip(parameters, g, strict=True):
                    p += rho * one / length
            worst = torch.autograd.grad(cross_entropy(net(x), y), parameters)
            with torch.no_grad():
                for p, one, other in zip(parameters, g, worst, strict=True):
                    p -= rho * one / length + 0.05 * other
                # Running statistics are those of the weights that the step begins with.
                for buffer, value in zip(net.buffers(), buffers, strict=True):
                    buffer.copy_(value)

    assert_models(run, federated_averaging(run, train))


def test_a_gradient_of_zero_leaves_the_weights_where_they_are():
    network = nn.Linear(2, 1)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    x = torch.zeros(1, 2)
    step = Step(network, x, network(x).detach(), network(x))

    def again():
        network.zero_grad()
        ((network(x) - step.targets) ** 2).mean().backward()

    again()
    gradients_nearby(step, again, 0.05)
    assert same(network.state_dict(), before)
    assert all(float(p.grad.abs().max()) == 0 for p in network.parameters())
