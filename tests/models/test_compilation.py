"""Compiled calls: no graph breaks, the same numbers, and the plain network where compiling fails."""

import copy
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import metrics

from medfedaug.config.machine import Machine
from medfedaug.errors import MedFedAugWarning
from medfedaug.federation import SiteTrainer
from medfedaug.federation.in_process import run_in_process
from medfedaug.methods import build_methods, parse_methods
from medfedaug.methods.base import ServerContext, SiteContext, Step
from medfedaug.models import FFALayer, build_network, ffa_layers
from medfedaug.models.execution import compile_calls


@pytest.fixture
def traced(monkeypatch):
    """Let compiled calls be traced as by any backend, without a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def prepared(name):
    """A network with a method's layers, all active, and its site half after an exchange of one site."""
    torch.manual_seed(0)
    (method,) = build_methods(parse_methods(name))
    network = method.prepare_network(build_network("lenet5", in_channels=3, out_channels=2))
    for layer in ffa_layers(network).values():
        layer.prob = 1.0
    part = method.at_site(SiteContext("A", network))
    server = method.every_round(ServerContext(network, 3))
    server.accept("A", part.every_round.collect())
    part.every_round.apply(server.result())
    return network, part


def losses(network, part):
    """The loss of a training step, and the output of an inference."""
    inputs, targets = (
        torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
        torch.tensor([0, 1]),
    )
    torch.manual_seed(2)
    outputs = network.train()(inputs)
    step = Step(network, inputs, targets, outputs, nn.CrossEntropyLoss())
    part.after_pass(step)
    term = part.loss(step)
    with torch.no_grad():
        return step.task_loss if term is None else step.task_loss + term, network.eval()(inputs)


@pytest.mark.filterwarnings("ignore::medfedaug.errors.MedFedAugWarning")
@pytest.mark.parametrize(
    ("method", "graphs"),
    [
        ("fedfa", 2),
        pytest.param("fedfd_a", 3, marks=pytest.mark.slow),
        pytest.param("fraug", 2, marks=pytest.mark.slow),
    ],
)
def test_a_network_compiles_without_graph_breaks(traced, method, graphs):
    """Training, FedFD's second pass and inference are one graph each, with the numbers of plain calls."""
    network, part = prepared(method)
    plain, other = prepared(method)
    compile_calls(network, "A")
    for ours, expected in zip(losses(network, part), losses(plain, other), strict=True):
        torch.testing.assert_close(ours, expected)
    assert not traced["graph_break"]
    assert traced["stats"]["unique_graphs"] == graphs


class _Layers(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(number))

    def forward(self, features):
        for layer in self.layers:
            features = layer(features)
        return features


def test_ten_different_networks_of_a_class_are_all_compiled(traced):
    for number in range(1, 11):
        network = _Layers(number)
        compile_calls(network, "A")
        network(torch.rand(1, 2))
    assert traced["stats"]["unique_graphs"] == 10


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the inductor needs a C++ compiler")
def test_an_ffa_layer_is_few_kernels():
    """Statistics, modulation and augmentation are fused: a plain pass has some 60 operations."""
    torch._dynamo.reset()
    metrics.reset()
    layer = FFALayer(4, prob=1.0).train()
    torch.compile(layer, fullgraph=True)(torch.rand(2, 4, 8, 8))
    torch._dynamo.reset()
    assert 0 < metrics.generated_kernel_count <= 12


def test_a_failing_compiler_leaves_the_plain_network(monkeypatch):
    def fails(call):
        def compiled(*args):
            raise RuntimeError("no compiler here\nand more")

        return compiled

    monkeypatch.setattr(torch, "compile", fails)
    network, x = nn.Linear(2, 3), torch.ones(1, 2)
    expected = network(x)
    compile_calls(network, "A")
    with pytest.warns(MedFedAugWarning, match="the network is not compiled: no compiler here"):
        assert torch.equal(network(x), expected)
    assert torch.equal(network(x), expected)


class NoBackward(torch.autograd.Function):
    """Changes nothing; no gradient comes back."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("wrong strides\nand more")


def test_a_backward_pass_that_fails_is_repeated_with_the_plain_network(photo_config, tmp_path, monkeypatch):
    def trained(compiled):
        data, machine = tmp_path / "photos", Machine(compile="on" if compiled else "off")
        config = photo_config(rounds=1)
        state = run_in_process(config, data, ["A", "B"], "cpu", machine=machine).state
        return {key: value for key, value in state.items() if "running" not in key}  # saw a batch twice

    monkeypatch.setattr(torch, "compile", lambda call: lambda *args: NoBackward.apply(call(*args)))
    with pytest.warns(MedFedAugWarning, match="the network is not compiled: wrong strides"):
        ours = trained(compiled=True)
    torch.testing.assert_close(ours, trained(compiled=False))


def test_an_error_of_the_network_stays_its_own(traced):
    network = nn.Linear(2, 3)
    compile_calls(network, "A")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        network(torch.ones(1, 5))


def test_a_copy_of_a_compiled_network_is_plain(traced):
    network = nn.Linear(2, 3)
    compile_calls(network, "A")
    other = copy.deepcopy(network)
    other.weight.data.zero_()
    assert torch.equal(other(torch.ones(1, 2))[0], other.bias)


@pytest.mark.all_layers
@pytest.mark.parametrize(
    ("methods", "setting", "compiles"),
    [("fedavg", "on", True), ("fedavg", "auto", False), ("fedavg", "off", False), ("fedmix", "on", False)],
)
def test_the_setting_of_the_machine_decides(
    photo_config, tmp_path, monkeypatch, recwarn, methods, setting, compiles
):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda call: calls.append(call) or call)
    site = SiteTrainer(photo_config(methods), tmp_path / "photos", "cpu", machine=Machine(compile=setting))
    site.open("A")
    assert bool(calls) == compiles
    reported = [str(warning.message) for warning in recwarn if "not compiled" in str(warning.message)]
    assert bool(reported) == (methods == "fedmix")
