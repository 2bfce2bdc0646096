"""A federation small enough to be written out by hand, and what the hand-written ones have in common.

`Federation` drives a real server and real sites, which read photographs from real folders; who takes part in
a round is the test's choice. A method's equations are not here: each test writes them down, in float64, from
the paper.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.sites import open_site
from medfedaug.federation import Carrier, FederationServer, Reply, Request, Site, SiteTrainer, run
from medfedaug.federation.messages.messages import TEST, TRAIN
from medfedaug.federation.protocol import Accept
from medfedaug.methods.base import Method, SiteContext, SitePart
from medfedaug.models import build_network
from medfedaug.models.classifiers import StagedClassifier

State = dict[str, Tensor]

UNEVEN = [("A", "B", "C"), ("A", "C"), ("A", "B", "C")]
"""Who trains in which round: B misses the second."""

FINE_TUNING = 0
"""Stands for a round in `Federation.batches`, where the one that it would count as has batches already."""


def linear(in_channels: int = 3, out_channels: int = 2, **_: Any) -> nn.Module:
    """One fully connected layer, for images of 8 x 8 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 64, out_channels))


def convolutional(in_channels: int = 3, out_channels: int = 2, **_: Any) -> nn.Module:
    """Two stages with batch norm, smooth throughout, and a fully connected layer."""
    widths = [in_channels, 4, 5]
    stages = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.Tanh(), nn.AvgPool2d(2))
        for a, b in pairwise(widths)
    ]
    return StagedClassifier(
        stages, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, out_channels))
    )


def segmenting(in_channels: int = 3, out_channels: int = 2, **_: Any) -> nn.Module:
    """Two convolutions with a batch norm between them, smooth throughout, and one that makes the logits."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 5, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(5, out_channels, 1),
    )


SEGMENTING_OPTIONS: dict[str, Any] = {"network": "reference_segmenting", "network_args": {}, "batch_size": 2}
SEGMENTING_OPTIONS |= {"loss": "cross_entropy", "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}


class Batches(list[tuple[Tensor, Tensor]]):
    """What a site trained on in a round: images, float64, and labels, one pair a step.

    Attributes:
        draws: what was drawn from torch's own generator from the moment that the loader gave the batch of a
            step, in the order of drawing; after those of the step itself others may follow.
        first_draws: the same from the start of the round to the first batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[list[Tensor]] = []
        self.first_draws: list[Tensor] = []

    def assert_images(self, *choices: Tensor) -> list[int]:
        """Each image is one of the site's as some choice has it, and each epoch has every image once.

        Args:
            *choices: all the site's images, (N, C, H, W), as they may look.

        Returns:
            Which choice each image that was trained on is.
        """
        seen = torch.cat([images for images, _ in self])
        number = len(choices[0])
        distance = torch.stack([(seen[:, None] - one[None]).abs().amax((2, 3, 4)) for one in choices])
        nearest, where = distance.permute(1, 0, 2).flatten(1).min(dim=1)
        assert float(nearest.max()) < 1e-5
        for epoch in (where % number).split(number):
            assert sorted(epoch.tolist()) == list(range(number))
        return (where // number).tolist()


class Draws(ExitStack):
    """Writes down what is drawn from torch's own generator; what has a generator of its own is left out.

    It stands in for each function that draws: a mode of torch would be asked at every operation.
    """

    _DRAWING: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (torch, ("rand", "randn", "rand_like", "randn_like", "randperm", "randint", "_sample_dirichlet")),
        (Tensor, ("uniform_", "normal_")),
    )
    current: list[Tensor] = []  # noqa: RUF012, of the step that is under way

    def __enter__(self) -> Draws:
        import_module("torch._dynamo")  # which knows PyTorch's functions as they are when it is imported
        for owner, names in self._DRAWING:
            for name in names:
                self.enter_context(patch.object(owner, name, self._noting(getattr(owner, name))))
        return super().__enter__()

    @staticmethod
    def _noting(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(*args: Any, **kwargs: Any) -> Tensor:
            value = draw(*args, **kwargs)
            if kwargs.get("generator") is None:
                Draws.current.append(value.detach().clone())
            return value

        return drawn


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "reference_linear": linear,
    "reference_convolutional": convolutional,
    "reference_segmenting": segmenting,
}


class Recorder(Method):
    """Writes down the batches of every site and round as they come from the loader; changes nothing."""

    name = "recorder"
    batches: dict[tuple[str, int], Batches]

    def at_site(self, context: SiteContext) -> SitePart:
        return _RecorderSite(context, self.batches)


class _RecorderSite(SitePart):
    def __init__(self, context: SiteContext, batches: dict[tuple[str, int], Batches]) -> None:
        self.context, self.batches = context, batches
        self.current = Batches()

    def start_round(self) -> None:
        self.current = Batches()
        Draws.current = self.current.first_draws
        # What comes after a later round is fine-tuning before the test.
        key = (self.context.name, self.context.round())
        self.batches[(key[0], FINE_TUNING) if key in self.batches else key] = self.current

    def mix(self, inputs: Tensor, targets: Any) -> tuple[Tensor, Any]:
        self.current.append((inputs.detach().double().contiguous(), targets[0][1].clone()))
        Draws.current = []
        self.current.draws.append(Draws.current)
        return inputs, targets


class _Planned(Carrier):
    """The sites of a `Federation`, of which those are connected that the plan names for the next round."""

    def __init__(self, federation: Federation, plan: Sequence[Sequence[str]] | None) -> None:
        self.federation, self.plan = federation, plan

    def connected(self) -> list[str]:
        """Those of the plan; held-out sites before the first round, and all after the last."""
        done = self.federation.server.round
        if self.plan is None or done >= len(self.plan):
            return sorted(self.federation.sites)
        held_out = () if done else self.federation.config.holdout
        return sorted({*self.plan[done], *held_out})

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Every site answers at once, and what it says must be used."""
        federation = self.federation
        if request.task == TRAIN:
            federation.requests.append(request)
            federation.replies.append({})
        for name in sites:
            if federation.states and request.task == TRAIN:
                federation.sites[name] = federation.start(name)
            reply = federation.sites[name].answer(request)
            if request.task == TRAIN:
                federation.replies[-1][name] = reply
            elif request.task == TEST:
                federation.tested[name] = reply
            assert accept(name, reply), reply.error
        return {}

    def round_done(self, server: FederationServer) -> None:
        """Keep the model."""
        self.federation.models.append(self.federation.shared())


class Federation:
    """A server and its sites.

    Args:
        config: the run, with `Recorder` first among its methods.
        root: holds the sites' folders.
        sites: their names.
        plan: who trains in each round; by default whom the server chooses. A site is prepared before the
            first round that it trains in, as one that joins late is.
        states: a folder for what sites keep; they are then started anew before every round.

    Attributes:
        initial: the whole state dict that the run began with.
        models: the shared entries of the global model, by round; of 0, as it began.
        replies: what came back, by round and site.
        batches: what a site trained on, by site and round.
    """

    def __init__(
        self,
        config: RunConfig,
        root: Path,
        sites: Sequence[str],
        plan: Sequence[Sequence[str]] | None = None,
        states: Path | None = None,
    ) -> None:
        self.config, self.root, self.states = config, root, states
        self.batches: dict[tuple[str, int], Batches] = {}
        Recorder.batches = self.batches
        self.server = FederationServer(config, execution=Execution(min_sites=1))
        self.initial = {key: value.clone() for key, value in self.server.state.items()}
        self.sites = {name: self.start(name) for name in sites}
        self.models = [self.shared()]
        self.replies: list[dict[str, Reply]] = [{}]
        self.requests: list[Any] = [None]
        self.tested: dict[str, Reply] = {}
        run(self.server, _Planned(self, plan))

    def start(self, name: str) -> Site:
        """A site that has just been started."""
        folder = self.states / name if self.states else None
        return Site(name, SiteTrainer(self.config, self.root, "cpu", folder))

    def shared(self) -> State:
        """The global model's shared entries."""
        return {key: self.server.state[key].clone() for key in self.server.shared}

    def network(self) -> nn.Module:
        """The network as it began, float64 and without a method's layers."""
        config = self.config
        sizes = {"in_channels": config.in_channels, "out_channels": len(config.classes)}
        network = build_network(config.network, **sizes, **config.network_args).double()
        network.load_state_dict(self.initial)
        return network

    def took_part(self, round_: int) -> list[str]:
        """Who trained in a round."""
        return sorted(self.replies[round_])


def pixels(run: Federation, site: str, split: str = "training") -> Tensor:
    """The photographs of a site as its files have them, 0 to 255, (N, 3, H, W)."""
    files = [np.asarray(Image.open(case.image)) for case in open_site(run.root / site).cases[split]]
    return torch.from_numpy(np.stack(files).transpose(0, 3, 1, 2).copy()).double()


def statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """FedRDN Eq. 5 and 6: means over the images of their own mean and deviation, (3, 1, 1) each."""
    mean = images.mean((2, 3), keepdim=True)
    std = (images - mean).square().mean((2, 3), keepdim=True).sqrt()
    return mean.mean(0), std.mean(0)


def assert_tested(
    run: Federation, site: str, state: Mapping[str, Tensor], prepare: Callable[[Tensor], Tensor]
) -> None:
    """The site's test scores are those of a model, whose images are prepared so."""
    network = copied(run.network(), state).eval()
    with torch.no_grad():
        assert_scores(run, site, network(prepare(pixels(run, site, "test"))))


def assert_scores(run: Federation, site: str, logits: Tensor) -> None:
    """The site's test scores are those of these logits of its test images."""
    for guess, case in zip(logits.argmax(1).tolist(), open_site(run.root / site).cases["test"], strict=True):
        assert run.tested[site].metrics["cases"][case.name] == float(run.config.classes[guess] == case.label)


def labels_of(run: Federation, site: str) -> Tensor:
    """The labels of a site's training images, in their order."""
    cases = open_site(run.root / site).cases["training"]
    return torch.tensor([run.config.classes.index(case.label) for case in cases])


def images_of(batches: Batches, count: int) -> tuple[Tensor, Tensor]:
    """All images and labels of a site, from the first epoch of a round."""
    images, labels = torch.cat([x for x, _ in batches])[:count], torch.cat([y for _, y in batches])[:count]
    assert len(images) == count
    return images, labels


def descend(
    network: nn.Module,
    batches: Batches,
    rate: float,
    term: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    correct: Callable[[State], State] | None = None,
    momentum: float = 0.0,
) -> nn.Module:
    """Gradient descent on the cross-entropy, written out; the network is changed in place.

    Args:
        network: float64.
        batches: one a step.
        rate: the learning rate.
        term: what is added to the loss, of the network, the images and the labels; asked for after the pass.
        correct: the gradients that are stepped along, of those of the loss.
        momentum: v ← momentum·v + g, w ← w − rate·v.
    """
    network.train()
    velocity: State = {}
    for x, y in batches:
        loss = cross_entropy(network(x), y)
        if term is not None:
            loss = loss + term(network, x, y)
        parameters = dict(network.named_parameters())
        slopes = torch.autograd.grad(loss, list(parameters.values()))
        gradients = dict(zip(parameters, slopes, strict=True))
        if correct is not None:
            gradients = correct(gradients)
        with torch.no_grad():
            for key, parameter in parameters.items():
                velocity[key] = momentum * velocity.get(key, 0.0) + gradients[key]
                parameter.sub_(rate * velocity[key])
    return network


def step_down(network: nn.Module, loss: Tensor, rate: float) -> None:
    """One step of plain gradient descent."""
    parameters = list(network.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(rate * gradient)


def copied(network: nn.Module, state: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A copy of the network, with other entries where they are given."""
    result = copy.deepcopy(network)
    if state is not None:
        result.load_state_dict(dict(state), strict=False)
    return result


def entries(network: nn.Module, keys: Iterable[str] | None = None) -> State:
    """Copies of the floating-point entries of a network."""
    state = network.state_dict()
    chosen = [key for key in state if state[key].is_floating_point()] if keys is None else list(keys)
    return {key: state[key].detach().clone() for key in chosen}


def mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> State:
    """Σ p_k w_k with p_k the weights' shares."""
    total = float(sum(weights))
    return {
        key: sum((w / total) * s[key] for w, s in zip(weights, states, strict=True))  # type: ignore[misc]
        for key in states[0]
    }


def assert_same(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float = 1e-6) -> None:
    """Both have the same keys, and the same numbers to so much."""
    assert set(state) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(
            state[key].double(),
            value.double(),
            rtol=1e-5,
            atol=atol,
            msg=lambda text, key=key: f"{key}: {text}",
        )


@dataclass
class Round:
    """What a round of a hand-written federation left.

    Args:
        model: the entries of the global model that are averaged.
        local: by site, all entries of its model after training; of those that took part.
    """

    model: State
    local: dict[str, State]


def federated_averaging(
    run: Federation,
    train: Callable[[str, int, nn.Module], Any],
    keeps: Callable[[str], bool] = lambda key: False,
) -> list[Round]:
    """FedAvg written out: w ← Σ (nₖ/n) wₖ over the sites of each round, from the global model in each.

    Args:
        run: whose sites and rounds are repeated.
        train: changes the network of a site in a round; float64.
        keeps: whether an entry stays at its site, which goes on with it when it trains the next time.
    """
    start = run.network()
    kept: dict[str, State] = {}
    model, rounds = {key: value for key, value in entries(start).items() if not keeps(key)}, []
    for round_ in range(1, run.config.rounds + 1):
        local = {}
        for site in run.took_part(round_):
            network = copied(start, {**kept.get(site, {}), **model})
            train(site, round_, network)
            local[site] = entries(network)
            kept[site] = {key: value for key, value in local[site].items() if keeps(key)}
        uniform = run.config.weighting == "uniform"
        weights = [1 if uniform else run.server.sites[site] for site in local]
        model = mean([{key: state[key] for key in model} for state in local.values()], weights)
        rounds.append(Round(model, local))
    return rounds


def assert_models(run: Federation, rounds: Sequence[Round], atol: float = 1e-6) -> None:
    """Every round's global model is the hand-written one."""
    assert len(rounds) == len(run.models) - 1
    for model, expected in zip(run.models[1:], rounds, strict=True):
        assert_same(model, expected.model, atol)


def assert_tested_with_its_own(run: Federation, rounds: Sequence[Round], site: str) -> None:
    """In the test a site has the selected model, with what it kept after the last round that it was in."""
    selected = run.server.selected_round
    last = max(r for r in range(1, selected + 1) if site in run.took_part(r))
    state = run.sites[site].trainer.network.state_dict()
    floats = {key: value for key, value in state.items() if value.is_floating_point()}
    assert_same(floats, {**rounds[last - 1].local[site], **rounds[selected - 1].model})


def assert_steps(
    run: Federation, loss: Callable[[nn.Module, Tensor, Tensor, list[Tensor]], Tensor], atol: float = 2e-6
) -> None:
    """The run is FedAvg with descent along a loss of network, images, labels and the step's draws."""

    def train(site: str, round_: int, network: nn.Module) -> None:
        network.train()
        batches = run.batches[site, round_]
        for (x, y), draws in zip(batches, batches.draws, strict=True):
            step_down(network, loss(network, x, y, list(draws)), run.config.learning_rate)

    assert_models(run, federated_averaging(run, train), atol)


def share_of(draw: Tensor) -> Tensor:
    """A draw from Beta(α, α), which torch makes as one from a Dirichlet of two."""
    return draw[..., 0].double()


def same(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts agree to the last bit."""
    return state.keys() == expected.keys() and all(torch.equal(state[k], expected[k]) for k in state)


class Points:
    """A task of points (B, 1, H, W) with labels (B,), for loss and targets alone."""

    dense, num_classes, spatial_dims = False, 3, 2

    def probabilities(self, targets):
        return nn.functional.one_hot(targets, 3).float()

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)
