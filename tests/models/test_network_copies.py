"""Networks that methods change in place, saved whole."""

import copy
import pickle

import pytest
import torch
from monai.networks.nets import resnet18
from torch.utils.hooks import RemovableHandle

from medfedaug.methods import build_methods, parse_methods


@pytest.mark.all_layers
@pytest.mark.parametrize("name", ["dac_sc", "fedfa"])
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
