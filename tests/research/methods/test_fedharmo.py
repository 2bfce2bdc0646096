"""FedHarmo against Jiang et al., AAAI 2022: amplitudes of all sites, and flat minima."""

import numpy as np
import pytest
import torch
from monai.utils import CommonKeys as Keys
from reference import UNEVEN, assert_models, federated_averaging, pixels
from torch import nn
from torch.nn.functional import cross_entropy

from medfedaug.errors import DataError, RunFailed
from medfedaug.federation import Site, SiteTrainer, run_in_process
from medfedaug.federation.messages.messages import PREPARE, TRAIN, Request
from medfedaug.federation.server.output import write_run
from medfedaug.methods.base import ServerContext, SiteContext
from medfedaug.research.methods.fedharmo import (
    FedHarmo,
    NormalizeAmplitude,
    amplitude_spectrum,
    normalise_amplitude,
)
from medfedaug.runs.evaluate import evaluate_model


def test_images_take_on_the_average_amplitudes_and_minima_are_flat(federate):
    alpha = 0.2
    run = federate("fedharmo", plan=UNEVEN, settings={"fedharmo": {"perturbation": alpha}})
    images = {site: pixels(run, site).numpy() / 255 for site in "ABC"}
    average = np.mean([np.abs(np.fft.fft2(one)).mean(0) for one in images.values()], axis=0)

    for (site, _), batches in run.batches.items():
        phases = np.angle(np.fft.fft2(images[site]))
        expected = np.fft.ifft2(average * np.exp(1j * phases)).real
        batches.assert_images(torch.from_numpy(expected))

    def train(site, round_, network):
        network.train()
        for x, y in run.batches[site, round_]:
            parameters = list(network.parameters())
            g = torch.autograd.grad(cross_entropy(network(x), y), parameters)
            buffers = [buffer.clone() for buffer in network.buffers()]
            length = torch.sqrt(sum((one**2).sum() for one in g))
            with torch.no_grad():
                for p, one in zip(parameters, g, strict=True):
                    p += alpha * one / length
            worst = torch.autograd.grad(cross_entropy(network(x), y), parameters)
            with torch.no_grad():
                for p, one, other in zip(parameters, g, worst, strict=True):
                    p -= alpha * one / length + 0.05 * other
                for buffer, value in zip(network.buffers(), buffers, strict=True):
                    buffer.copy_(value)

    assert_models(run, federated_averaging(run, train), atol=2e-6)


def harmo_site(images, name="A", **args):
    """A site of slices, which pass the method's transforms on their way to the network."""

    def batches():
        return (passed(x) for x in images)

    def passed(x):
        sample = {Keys.IMAGE: x, "label": 0}
        for transform in part.transforms(training=False):
            sample = transform(sample)
        yield nn.functional.pad(sample[Keys.IMAGE], (0, 3))[None]  # as the network wants it

    part = FedHarmo(**args).at_site(
        SiteContext(name, nn.Identity(), case_batches=batches, samples_by_case=lambda: [1] * len(images))
    )
    return part


def test_fedharmos_amplitudes_are_final_once_they_were_sent():
    one, other = ({"amplitude": torch.rand(1, 4, 3)} for _ in range(2))
    server = FedHarmo().before_training(ServerContext(nn.Identity(), 1))
    assert server.result() == {}
    server.accept("A", one)
    sent = server.result()
    server.accept("B", other)  # joins later
    assert torch.equal(server.result()["amplitude"], sent["amplitude"])
    restarted = FedHarmo().before_training(ServerContext(nn.Identity(), 1))
    restarted.restore(server.state())
    restarted.accept("C", other)
    assert torch.equal(restarted.result()["amplitude"], sent["amplitude"])
    for server_ in (server, restarted):
        with pytest.raises(ValueError, match=r"\(1, 4, 4\), other sites have \(1, 4, 3\)"):
            server_.check({"amplitude": torch.rand(1, 4, 4)})
    with pytest.raises(ValueError, match="negative"):
        server.check({"amplitude": -one["amplitude"]})


def test_fedharmo_names_the_site_whose_images_have_several_sizes(
    phantom_dir, tiny_config, make_site, tmp_path
):
    with pytest.raises(DataError, match=r"site A.*different size, \(6, 5\) and \(8, 5\).*one size"):
        harmo_site([torch.rand(1, 6, 5), torch.rand(1, 8, 5)]).collect()
    # Of two sites, the second to come; of one site, test images that differ from those it trained on.
    for name, size in (("A", 16), ("B", 32)):
        make_site(name, shape=(size, size, 4))
    with pytest.raises(RunFailed, match=r"must have one size"):
        run_in_process(tiny_config("fedharmo", rounds=1), tmp_path / "data", ["A", "B"], "cpu")
    trainer = SiteTrainer(tiny_config("fedharmo"), phantom_dir, "cpu")
    site = Site("site_A", trainer)
    site.answer(Request(PREPARE, run="0" * 32))
    trainer.parts["fedharmo"].apply({"amplitude": torch.ones(1, 8, 5)})
    reply = site.answer(Request(TRAIN, 1, run="0" * 32))
    assert "site site_A: ValueError" in reply.error
    assert "do not belong to an image of shape (1, 32, 32)" in reply.error


def test_fedharmos_model_is_evaluated_with_the_amplitudes_it_was_trained_with(
    phantom_dir, tiny_config, tmp_path
):
    sites = ["site_A", "site_B", "site_C"]
    server = run_in_process(tiny_config("fedharmo"), phantom_dir, sites, "cpu")
    write_run(tmp_path, server)
    evaluation = evaluate_model(tmp_path / "global_model.pt", phantom_dir, device="cpu")
    test = server.results()["test"]
    expected = {**test["sites"], **test["unseen"]}
    assert {name: scores["dice"] for name, scores in evaluation["sites"].items()} == {
        name: expected[name]["dice"] for name in sites
    }
    saved = torch.load(tmp_path / "global_exchange.pt", weights_only=True)
    assert saved.keys() == {"fedharmo/amplitude"}


def images(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def harmonised(x, others):
    """HarmoFL's amplitude normalisation with whole transforms in float64, a channel at a time."""
    out = np.empty_like(x)
    for c in range(len(x)):
        average = np.mean([np.abs(np.fft.fft2(other[c])) for other in others], axis=0)
        own = np.fft.fft2(x[c])
        out[c] = np.real(np.fft.ifft2(average * np.exp(1j * np.angle(own))))
    return out


@pytest.mark.parametrize("size", [(8, 6), (7, 5), (5, 8), (1, 4), (1, 1)])
def test_it_is_the_equation(size):
    x, others = images(2, *size), images(3, 2, *size, seed=1)
    mean = torch.stack([amplitude_spectrum(other) for other in others]).mean(0)
    assert mean.shape == (2, size[0], size[1] // 2 + 1)
    expected = harmonised(x.numpy(), others.numpy())
    np.testing.assert_allclose(normalise_amplitude(x, mean).numpy(), expected, atol=1e-12)
    result = NormalizeAmplitude(mean.float())({Keys.IMAGE: x.float()})[Keys.IMAGE]
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_volume_is_its_slices():
    volume, mean = images(2, 6, 5, 3), amplitude_spectrum(images(2, 6, 5, seed=1))
    result = normalise_amplitude(volume, mean)
    amplitudes = amplitude_spectrum(volume)
    for i in range(3):
        torch.testing.assert_close(result[..., i], normalise_amplitude(volume[..., i], mean))
        torch.testing.assert_close(amplitudes[..., i], amplitude_spectrum(volume[..., i]))


def test_an_image_with_its_own_amplitudes_is_itself():
    for x in (images(2, 6, 5), images(1, 9, 9)):
        torch.testing.assert_close(normalise_amplitude(x, amplitude_spectrum(x)), x)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_slice_without_content_stays_without(value):
    mean = amplitude_spectrum(images(1, 6, 5))
    result = normalise_amplitude(torch.full((1, 6, 5), value, dtype=torch.float64), mean)
    expected = float(mean[0, 0, 0]) / 30 if value else 0.0
    torch.testing.assert_close(result, torch.full((1, 6, 5), expected, dtype=torch.float64))
