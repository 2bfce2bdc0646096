"""Steps that are captured, on a device whose graph records operations and computes them again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from medfedaug.errors import MedFedAugWarning
from medfedaug.federation.site.step_graph import StepGraph
from medfedaug.methods import build_methods, method_names, parse_methods
from medfedaug.methods.base import SitePart

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
FAST = ("fedfa+,fraug",)
CAPTURED = (
    *FAST,
    *("fedavg", "fedprox", "scaffold", "feddyn", "fedbn", "fedrdn", "fedfa+", "fedfd", "fedfd_a", "fraug"),
    *("fedsr", "fedrod", "fixbn", "gperxan", "dac_sc", "fedwon", "fedrobust"),
)
DEVICE = torch.device("lazy:0")
PLAIN = ("ditto", "mixup", "fedsam", "fpl")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def graphs(monkeypatch):
    """The script's module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import step_graphs

    yield step_graphs
    for name in ("step_graphs", "pretended_gpu", "measure"):
        sys.modules.pop(name, None)


@pytest.fixture
def setup(graphs, tmp_path):
    return graphs.pretended(tmp_path)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CAPTURED]
)
def test_replayed_steps_are_the_steps_to_the_bit(graphs, setup, method):
    """Five steps of two rounds at two sites: the first of a round is plain, as is a smaller batch."""
    found = graphs.compared(method, setup)
    assert (found["replays"], found["difference"]) == (12, 0)


@pytest.mark.slow
def test_a_network_for_segmentation_is_captured_too(graphs, setup):
    del setup.folders["classification"]
    found = graphs.compared("fedfa+", setup)
    assert (found["replays"], found["difference"]) == (16, 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", PLAIN)
def test_steps_that_differ_or_wait_are_taken_plainly_and_the_reason_is_said(graphs, setup, method):
    with pytest.warns(MedFedAugWarning, match=rf"not captured as CUDA graphs: steps of {method} differ"):
        found = graphs.compared(method, setup)
    assert (found["replays"], found["difference"]) == (0, 0)


def test_each_method_that_says_so_is_among_those_that_are_compared():
    classes = {name: [build_methods(parse_methods(name))] for name in method_names() if "+" not in name}
    said = {name for name, ((method,),) in classes.items() if method.capturable}
    assert said <= {*CAPTURED, "fedfa", "fedfa_h"}


class Counting(SitePart):
    """As a method that keeps something in Python."""

    def __init__(self) -> None:
        self.steps = 0


def weights_after(step, batches, graph=None):
    """Train a linear layer; return its weights, losses and random numbers."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 1, bias=False).to(DEVICE)
    part, optimiser = Counting(), torch.optim.SGD(layer.parameters(), lr=0.1)

    def take(x):
        part.steps += 1
        layer.zero_grad()
        loss = step(layer(x)).mean()
        loss.backward()
        optimiser.step()
        return loss.detach()

    said = []
    way = StepGraph(take, graph, [part], said.append) if graph is not None else take
    losses = [way(torch.ones(size, 3).to(DEVICE) * (k + 1)) for k, size in enumerate(batches)]
    found = [layer.weight.detach().cpu(), torch.stack(losses).cpu(), torch.rand(3)]
    return found, part.steps, said


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda y: y * torch.rand(()), "draws random numbers on the CPU"),
        (lambda y: y * float(y.mean().item()), "not permitted when stream is capturing: _local_scalar_dense"),
        (lambda y: y[y > -100], "not permitted when stream is capturing: a mask as index"),
        (lambda y: y * torch.tensor(2.0, device=y.device), "from the CPU"),
        (lambda y: y * y.cpu().to(y.device), "to the CPU"),
    ],
)
def test_a_step_that_cannot_be_captured_leaves_no_trace(graphs, step, reason):
    with graphs.Recording() as device:
        plain, steps, _ = weights_after(step, [4] * 5)
        found, counted, said = weights_after(step, [4] * 5, graphs.RecordedGraph(device))
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)
    assert counted == steps
    assert len(said) == 1
    assert reason in said[0]


def test_batches_of_another_shape_are_taken_plainly_in_between(graphs):
    def noisy(y):
        return y * torch.rand(y.shape, device=y.device)

    with graphs.Recording() as device:
        plain, _, _ = weights_after(noisy, [4, 4, 2, 4, 1, 4])
        found, steps, said = weights_after(noisy, [4, 4, 2, 4, 1, 4], graphs.RecordedGraph(device))
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)
    assert (steps, said) == (4, [])  # two were replayed, and the capture is none
