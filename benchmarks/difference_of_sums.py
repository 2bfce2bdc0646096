r"""Error of a server that subtracts the sums of two rounds to learn the update of one site.

Four phantom sites train a small network from one model. The server subtracts the sum over three of them from
the sum over all four, and takes the rest for the fourth site's update. The script prints the error as a part
of the update's norm: 0 is the update itself, and 1 is the error of a zero update.

    python benchmarks/difference_of_sums.py --rounds 20
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from measure import begin, parser
from torch import Tensor, nn

from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.federation import FederationServer
from medfedaug.federation.messages.messages import TRAIN, Request
from medfedaug.federation.site.site import Site
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods import parse_methods
from medfedaug.models import networks
from medfedaug.simulate import configure

Model = dict[str, Tensor]


class Small(nn.Sequential):
    """Three convolutions, whose channels can have another order."""

    def __init__(self, in_channels: int, out_channels: int, **_: object) -> None:
        super().__init__(
            nn.Conv2d(in_channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, out_channels, 1),
        )


def reordered(model: Mapping[str, Tensor], order: Tensor) -> Model:
    """Return the same function with another order of the first layer's channels."""
    result = dict(model)
    result["0.weight"], result["0.bias"] = model["0.weight"][order], model["0.bias"][order]
    result["2.weight"] = model["2.weight"][:, order]
    return result


def norm(model: Mapping[str, Tensor]) -> float:
    """Return the norm of all numbers."""
    return float(sum(value.double().square().sum() for value in model.values())) ** 0.5


def minus(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Model:
    """Return the difference of two models."""
    return {key: one[key].double() - other[key].double() for key in one}


class Federation:
    """Sites that train without masks, whose sums a server could subtract."""

    def __init__(self, folder: Path, batch: int, rate: float) -> None:
        config = configure(
            find_sites(folder),
            methods=tuple(parse_methods("fedavg")),
            network="small",
            rounds=10_000,
            batch_size=batch,
            learning_rate=rate,
        )
        self.server = FederationServer(config)
        names = [site.name for site in find_sites(folder)]
        self.sites = {n: Site(n, SiteTrainer(config, folder, "cpu", threads=1)) for n in names}
        self.samples = {}
        for name, site in self.sites.items():
            self.samples[name] = site.answer(self.server.prepare()).num_samples

    def updates(self, model: Model, round_: int) -> dict[str, Model]:
        """Return the update of each site."""
        updates = {}
        for name, site in self.sites.items():
            weights = {key: value.clone() for key, value in model.items()}
            reply = site.answer(Request(TRAIN, round_, weights=weights, run="0" * 32))
            assert not reply.error, reply.error
            updates[name] = minus(reply.weights, model)
        return updates

    def mean(self, updates: Mapping[str, Model]) -> Model:
        """Return the mean of some sites' updates."""
        total = sum(self.samples[name] for name in updates)
        return {
            key: sum(self.samples[name] / total * one[key] for name, one in updates.items())
            for key in next(iter(updates.values()))
        }

    def error(self, first: Mapping[str, Model], second: Mapping[str, Model]) -> float:
        """Return the error of the difference of two sums against the last site's first update."""
        gone = sorted(first)[-1]
        left = {
            key: sum(self.samples[n] * (first[n][key] - (second[n][key] if n != gone else 0)) for n in first)
            / self.samples[gone]
            for key in first[gone]
        }
        return norm(minus(left, first[gone])) / norm(first[gone])


def main() -> None:
    arguments = parser(__doc__, repeats=1)
    arguments.add_argument("--rounds", type=int, default=20)
    options, _ = begin(arguments)
    networks._NETWORKS["small"] = Small
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        make_phantom(data, sites=4, patients=10, shape=(32, 32, 4))
        for batch, what in ((10_000, "all slices a step"), (8, "batches of 8")):
            measure(Federation(data, batch, 1e-3), what, options.rounds)


def measure(federation: Federation, what: str, rounds: int) -> None:
    """Print the errors early and late in a training."""
    model: Model = {k: v.clone() for k, v in federation.server.state.items()}
    generator = torch.Generator().manual_seed(0)
    for round_ in range(1, rounds + 1):
        now = federation.updates(model, round_)
        step = federation.mean(now)
        after = {key: (value + step[key]).float() for key, value in model.items()}
        if round_ in (1, rounds // 2, rounds):
            own = norm(now[sorted(now)[-1]])
            print(f"{what}, round {round_}: the model moves by {norm(step) / own:.2f} of the site's update")
            later = federation.updates(model, round_ + 1)
            print(f"  same model in the next round: {federation.error(now, later):.2g}")
            order = torch.randperm(16, generator=generator)
            apart = norm(minus(reordered(model, order), model)) / own
            other = federation.updates(reordered(model, order), round_ + 1)
            back = {name: reordered(one, order.argsort()) for name, one in other.items()}
            print(
                f"  channels in another order ({apart:.0f} updates apart): {federation.error(now, back):.2g}"
            )
            for part in (0.01, 0.1, 1.0):
                noise = {k: torch.randn(v.shape, generator=generator) for k, v in model.items()}
                scale = part * own / norm(noise)
                moved = federation.updates({k: v + scale * noise[k] for k, v in model.items()}, round_ + 1)
                print(f"  model moved at random by {part:g} updates: {federation.error(now, moved):.2g}")
            later = federation.updates(after, round_ + 1)
            print(f"  model after an honest round: {federation.error(now, later):.2g}")
        model = after


if __name__ == "__main__":
    main()
