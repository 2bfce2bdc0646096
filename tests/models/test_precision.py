"""Mixed precision: where bfloat16 begins and ends."""

import pytest
import torch
from monai.networks.nets import UNet
from torch import nn

from medfedaug.errors import MedFedAugWarning
from medfedaug.federation import SiteTrainer, run_in_process
from medfedaug.federation.site import trainer as trainers
from medfedaug.models import insert_ffa
from medfedaug.models.execution import run_in_bfloat16

# PyTorch's own convolutions take more than ten times as long as oneDNN's in bfloat16.
pytestmark = pytest.mark.usefixtures("onednn")


def small_unet() -> nn.Module:
    torch.manual_seed(0)
    return UNet(2, 1, 2, (4, 8, 16), (2, 2), norm="batch")


def test_convolutions_see_bfloat16_and_everybody_else_float32():
    net = small_unet()
    seen = []
    convolution = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    convolution.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    plain = net(torch.rand(2, 1, 16, 16))
    out = run_in_bfloat16(net)(torch.rand(2, 1, 16, 16))
    assert seen == [torch.float32, torch.bfloat16]
    assert plain.dtype == out.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    out.sum().backward()
    for tensor in (*net.parameters(), *(p.grad for p in net.parameters()), *net.buffers()):
        assert tensor.dtype in (torch.float32, torch.int64)


def test_an_error_in_the_network_leaves_nothing_switched_on():
    net = run_in_bfloat16(small_unet())
    with pytest.raises(RuntimeError):
        net(torch.rand(2, 3, 16, 16))
    assert not torch.is_autocast_enabled("cpu")
    assert net(torch.rand(2, 1, 16, 16)).dtype == torch.float32


def test_statistics_of_ffa_layers_keep_their_precision():
    """An average with weight 0.99 would stand still in bfloat16."""
    nets = [insert_ffa(small_unet(), prob=1.0) for _ in range(2)]
    run_in_bfloat16(nets[1])
    for net in nets:
        torch.manual_seed(1)
        for _ in range(20):
            net(torch.rand(4, 1, 16, 16))
    first = [next(m for m in net.modules() if type(m).__name__ == "FFALayer") for net in nets]
    assert first[1].running_mean.dtype == torch.float32
    torch.testing.assert_close(first[1].running_mean, first[0].running_mean, rtol=0.02, atol=1e-3)


def test_a_run_sends_float32_and_differs_from_one_in_float32(phantom_dir, tiny_config):
    states = {}
    for precision in ("float32", "bfloat16"):
        config = tiny_config("fedrdn,fedfa+", precision=precision)
        server = run_in_process(config, phantom_dir, ["site_A", "site_B"], "cpu")
        states[precision] = server.state
    assert {value.dtype for value in states["bfloat16"].values()} <= {torch.float32, torch.int64}
    keys = [key for key, value in states["float32"].items() if key.endswith("weight")]
    assert any(not torch.equal(states["float32"][key], states["bfloat16"][key]) for key in keys)
    start, end = (torch.cat([states[p][key].flatten() for key in keys]) for p in states)
    assert (start - end).norm() < 0.2 * start.norm()


@pytest.mark.all_layers
@pytest.mark.parametrize("methods", ["fraug", "fedsr,fpl,fedbn"])
def test_what_methods_take_from_the_network_is_float32(photo_config, tmp_path, methods):
    """Features that hooks see are bfloat16; what is made of them, and sent, must not be."""
    config = photo_config(methods, precision="bfloat16", rounds=1)
    server = run_in_process(config, tmp_path / "photos", ["A", "B", "C"], "cpu")
    assert all(value.dtype in (torch.float32, torch.float64) for value in server.payload.values())
    assert all(bool(value.isfinite().all()) for value in server.state.values())
    losses = [site["train_loss"] for entry in server.rounds for site in entry["sites"].values()]
    assert all(0 < loss < 100 for loss in losses)


@pytest.mark.parametrize(("gain", "chosen"), [(1.05, "float32"), (2.0, "bfloat16")])
def test_a_site_takes_what_is_faster_on_its_machine_and_says_so(
    photo_config, tmp_path, monkeypatch, gain, chosen
):
    """The measurement leaves no trace: the update is that of the chosen precision."""
    measured = trainers.bfloat16_speedup
    ratios = []
    monkeypatch.setattr(
        trainers, "bfloat16_speedup", lambda *args: ratios.append(measured(*args, turns=1)) or gain
    )

    def update(precision):
        trainer = SiteTrainer(photo_config("fedfa", precision=precision), tmp_path / "photos", "cpu")
        trainer.open("A")
        return trainer.train(1).weights

    with pytest.warns(MedFedAugWarning, match=rf"precision auto: {chosen}, since a step in bfloat16 takes"):
        result = update("auto")
    assert all(torch.equal(value, result[key]) for key, value in update(chosen).items())
    assert len(ratios) == 1
    assert 0 < ratios[0] < float("inf")
