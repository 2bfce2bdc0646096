"""Steps that are captured, on a device whose graph records operations and computes them again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from finished_runs import simulated
from monai.inferers import SliceInferer, SlidingWindowInferer
from torch import nn

from medfedaug.config.machine import Machine
from medfedaug.data.sites import find_sites
from medfedaug.errors import MedFedAugWarning
from medfedaug.federation.site.step_graph import CapturedNetwork, Capturing, StepGraph, of_device
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods import build_methods, method_names, parse_methods
from medfedaug.methods.base import SitePart
from medfedaug.runs.prediction.loaded_run import load_run
from medfedaug.simulate import configure

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
FAST = ("fedfa+,fraug",)
CAPTURED = (
    *FAST,
    *("fedavg", "fedprox", "scaffold", "feddyn", "fedbn", "fedrdn", "fedfa+", "fedfd", "fedfd_a", "fraug"),
    *("fedsr", "fedrod", "fixbn", "gperxan", "dac_sc", "fedwon", "fedrobust", "bin"),
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


@pytest.fixture
def replayed(graphs, monkeypatch):
    """The graphs that were replayed, once for each time."""
    runs = []
    replay = graphs.RecordedGraph.replay
    monkeypatch.setattr(graphs.RecordedGraph, "replay", lambda graph: (runs.append(graph), replay(graph)))
    return runs


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CAPTURED]
)
def test_replayed_steps_are_the_steps_to_the_bit(graphs, setup, method):
    """Five steps of two rounds at two sites: the first of a round is plain, as is a smaller batch."""
    results = graphs.compared(method, setup)
    assert (results["replays"], results["difference"]) == (12, 0)


@pytest.mark.slow
def test_a_network_for_segmentation_is_captured_too(graphs, setup):
    del setup.folders["classification"]
    results = graphs.compared("fedfa+", setup)
    assert (results["replays"], results["difference"]) == (16, 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", PLAIN)
def test_steps_that_differ_or_wait_are_taken_plainly_and_the_reason_is_said(graphs, setup, method):
    with pytest.warns(MedFedAugWarning, match=rf"not captured as CUDA graphs: steps of {method} differ"):
        results = graphs.compared(method, setup)
    assert (results["replays"], results["difference"]) == (0, 0)


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
    results = [layer.weight.detach().cpu(), torch.stack(losses).cpu(), torch.rand(3)]
    return results, part.steps, said


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
        results, counted, said = weights_after(step, [4] * 5, graphs.RecordedGraph(device))
    for one, other in zip(results, plain, strict=True):
        assert torch.equal(one, other)
    assert counted == steps
    assert len(said) == 1
    assert reason in said[0]


def test_batches_of_another_shape_are_taken_plainly_in_between(graphs):
    def noisy(y):
        return y * torch.rand(y.shape, device=y.device)

    with graphs.Recording() as device:
        plain, _, _ = weights_after(noisy, [4, 4, 2, 4, 1, 4])
        results, steps, said = weights_after(noisy, [4, 4, 2, 4, 1, 4], graphs.RecordedGraph(device))
    for one, other in zip(results, plain, strict=True):
        assert torch.equal(one, other)
    assert (steps, said) == (4, [])  # two were replayed, and the capture is none


@pytest.mark.parametrize("size", [(16, 16), (16, 16, 8)], ids=["slices", "windows"])
def test_passes_over_slices_and_windows_are_captured_to_the_bit(graphs, size):
    """The last pass has fewer windows than the first, and is taken as it is."""
    infer = (
        SliceInferer(roi_size=size, sw_batch_size=4, spatial_dim=2)
        if len(size) == 2
        else SlidingWindowInferer(size, sw_batch_size=4, mode="gaussian")
    )
    dims = len(size)
    torch.manual_seed(0)
    layers = nn.Sequential((nn.Conv2d, nn.Conv3d)[dims - 2](1, 2, 3, padding=1), nn.Tanh()).eval()
    image = torch.rand(1, 1, *((16, 16, 22) if dims == 2 else (40, 28, 20)))
    with torch.no_grad(), graphs.Recording():
        plain = infer(image.to(DEVICE), layers.to(DEVICE)).cpu()
        passes = Capturing("passes", "north", DEVICE, "auto", "")
        captured = CapturedNetwork(layers, passes, {})
        graph = captured._repeated.graph
        outputs = [infer(image.to(DEVICE), captured).cpu() for _ in range(2)]
        assert graph.operations
    assert all(torch.equal(one, plain) for one in outputs)
    assert passes.on


@pytest.mark.parametrize(("method", "replays"), [("fedfd_a", 4), ("moex", 0)])
def test_cases_are_scored_with_captured_passes(graphs, setup, replayed, method, replays):
    """Ten images in batches of two, of which the first is taken as it is."""
    data = setup.folders["classification"]
    given = {"rounds": 1, "batch_size": 2, **setup.settings["classification"]}
    config = configure(find_sites(data), methods=tuple(parse_methods(method)), **given)
    scores = []
    for way in ("off", "auto"):
        with graphs.Recording():
            site = SiteTrainer(config, data, str(DEVICE), machine=Machine(graphs=way))
            site.open("one")
            site.prepare()
            torch.manual_seed(0)
            scores.append(site.score(site.samples.evaluation("training"), full=True))
    assert scores[0] == scores[1]
    assert len(replayed) == replays


def test_images_are_predicted_with_captured_passes(graphs, replayed, make_photos, tmp_path, monkeypatch):
    for name in "AB":
        photos = make_photos(name)
    small = ("--network", "lenet5", "--image-size", 28)
    run = load_run(simulated(photos.parent, tmp_path / "run", "fedavg", *small))
    monkeypatch.setenv("MEDFEDAUG_GRAPHS", "auto")
    with graphs.Recording():
        predictions = [
            run.predict(photos / "cat", tmp_path / str(device), device=str(device), probabilities=True).cases
            for device in ("cpu", DEVICE)
        ]
    assert len(replayed) == len(list((photos / "cat").iterdir())) - 1
    assert predictions[0] == predictions[1]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimiser_of_a_gpu_takes_its_step_in_one_operation(kind):
    fusing = kind is not torch.optim.Adagrad  # PyTorch has none for CUDA
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    plain, fused = (kind([weight], lr=0.1, weight_decay=0.01) for weight in weights)
    of_device(plain, torch.device("cpu"))
    of_device(fused, torch.device("cuda"))
    assert not plain.param_groups[0].get("fused")
    assert bool(fused.param_groups[0].get("fused")) == fusing
    fused.param_groups[0]["capturable"] = False  # the weights of this test are on the CPU
    for _ in range(3):
        for weight, optimiser in zip(weights, (plain, fused), strict=True):
            weight.grad = torch.tensor([1.0, -2.0, 0.5])
            optimiser.step()
    torch.testing.assert_close(*weights)
    chosen = torch.optim.SGD([weights[0]], lr=0.1, foreach=True)
    assert not of_device(chosen, torch.device("cuda")).param_groups[0]["fused"]
