"""Networks that methods change in place: saved whole, and replicated over devices."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from monai.networks.nets import resnet18
from torch import nn
from torch.utils.hooks import RemovableHandle

from medfedaug.methods import FedWon, GPerXAN, build_methods, parse_methods


def changed(method):
    torch.manual_seed(0)
    return method.prepare_network(
        nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2), nn.Conv2d(4, 2, 1)
        )
    )


def replicated(net):
    """Make a replica as `torch.nn.parallel.replicate` does, with doubled weights and buffers."""
    modules = list(net.modules())
    replicas = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in replicas.items():
        for name, child in module.named_children():
            setattr(replica, name, replicas[child])
        for name, parameter in module.named_parameters(recurse=False):
            setattr(replica, name, 2 * parameter)
        for name, buffer in module.named_buffers(recurse=False):
            replica._buffers[name] = 2 * buffer
    return replicas[net]


@pytest.mark.parametrize("method", [FedWon, GPerXAN])
def test_a_saved_network_computes_the_same_with_weights_of_its_own(method):
    net, x = changed(method()), torch.rand(3, 1, 8, 8)
    other = pickle.loads(pickle.dumps(net))
    assert list(other.state_dict()) == list(net.state_dict())
    assert torch.equal(other(x), net(x))
    expected = net.eval()(x)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert torch.equal(net(x), expected)
    assert not torch.allclose(other.eval()(x), expected)


@pytest.mark.parametrize("method", [FedWon, GPerXAN])
def test_a_replica_computes_with_the_weights_that_it_is_given(method):
    net, x = changed(method()).eval(), torch.rand(3, 1, 8, 8)
    expected = copy.deepcopy(net)
    with torch.no_grad():
        for value in (*expected.parameters(), *expected.buffers()):
            value.mul_(2)
        replica = replicated(net)
        for _ in range(2):
            torch.testing.assert_close(replica(x), expected(x))
        assert not torch.allclose(net(x), expected(x))


@pytest.mark.parametrize("name", ["fedwon", "fedfa"])
def test_hooks_that_come_later_in_another_process_do_not_replace_ours(name, monkeypatch):
    """PyTorch counts hooks from 0 in each process; those of an unpickled network are numbered already."""
    torch.manual_seed(0)
    (method,) = build_methods(parse_methods(name, {"fedfa": {"prob": 1.0}} if name == "fedfa" else None))
    net = method.prepare_network(resnet18(spatial_dims=2, n_input_channels=1, num_classes=2)).train()
    written, x = pickle.dumps(net), torch.rand(3, 1, 32, 32)
    torch.manual_seed(1)
    expected = copy.deepcopy(net)(x)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)  # as in a process that has just begun
    other, called = pickle.loads(written), []
    module = next(m for m in other.modules() if m._forward_hooks or m._forward_pre_hooks)
    ours = [*module._forward_hooks, *module._forward_pre_hooks]
    before = bool(module._forward_pre_hooks)
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    for _ in range(max(ours) + 1):
        register(lambda *_: called.append(None))
    torch.manual_seed(1)
    assert torch.equal(other(x), expected)
    assert len(called) > max(ours)


def test_a_convolution_has_its_weights_again_after_an_error():
    net = changed(FedWon())
    weights = [parameter.data_ptr() for parameter in net.parameters()]
    with pytest.raises(RuntimeError):
        net(torch.rand(1, 2, 8, 8))
    assert [parameter.data_ptr() for parameter in net.parameters()] == weights
    assert net[0].weight is net[0]._parameters["weight"]
