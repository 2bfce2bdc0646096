"""FedHarmo against Jiang et al., AAAI 2022: amplitudes of all sites, and flat minima."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import UNEVEN, assert_models, federated_averaging, pixels
from torch.nn.functional import cross_entropy


def test_images_take_on_the_average_amplitudes_and_minima_are_flat(federate):
    alpha = 0.2
    run = federate(
        "fedharmo",
        plan=UNEVEN,
        settings={"fedharmo": {"perturbation": alpha}},
        network="reference_convolutional",
    )
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


@pytest.mark.parametrize("band", [0.0, 0.3])
def test_low_frequencies_alone(federate, band):
    run = federate("fedharmo", settings={"fedharmo": {"band": band}}, rounds=1)
    images = {site: pixels(run, site).numpy() / 255 for site in "ABC"}
    average = np.mean([np.abs(np.fft.fft2(one)).mean(0) for one in images.values()], axis=0)
    frequencies = np.abs(np.fft.fftfreq(8) * 8)
    low = np.maximum(frequencies[:, None], frequencies[None]) <= int(band * 8)
    for (site, _), batches in run.batches.items():
        spectrum = np.fft.fft2(images[site])
        amplitude = np.where(low, average, np.abs(spectrum))
        expected = np.fft.ifft2(amplitude * np.exp(1j * np.angle(spectrum))).real
        batches.assert_images(torch.from_numpy(expected))
