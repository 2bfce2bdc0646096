"""FedNova in whole federations, against the loop that its paper prints."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from medfedaug.config.run import Execution, derive_seed
from medfedaug.data.sites import find_sites
from medfedaug.federation import FederationServer, Reply, run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.methods import parse_methods
from medfedaug.methods.base import SiteContext
from medfedaug.research.methods.fednova import FedNova
from medfedaug.simulate import configure, simulate

RATE, BATCH = 0.05, 4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_length_is_the_sum_of_the_gradients_weights(momentum):
    part = FedNova().at_site(SiteContext("A", nn.Identity(), momentum=momentum))
    part.start_round()
    velocity, total = 0.0, 0.0  # SGD with a gradient of one throughout: how far it goes
    for _ in range(7):
        part.before_step(None)
        velocity = momentum * velocity + 1
        total += velocity
    assert float(part.collect()["length"]) == pytest.approx(total)


@pytest.mark.parametrize("length", [0.0, -3.0, 1e9])
def test_a_length_that_no_training_has_is_refused(tiny_config, length):
    server = FederationServer(tiny_config("fednova"), execution=Execution(min_sites=1))
    for site in "AB":
        server.accept_preparation(site, Reply("prepare", num_samples=7))
    server.finish_preparation()
    server.start_round()
    weights = {key: server.state[key] for key in server.shared}
    reply = Reply("train", 1, weights, {"fednova/length": torch.tensor([length])}, num_samples=7)
    assert not server.accept("A", reply)
    assert "number of steps" in server.rounds[0]["refused"][0]["reason"]


@pytest.fixture
def uneven(make_photos, tmp_path):
    """Three sites with 6, 12 and 18 training images: 2, 3 and 5 steps an epoch."""
    for name, per_class in {"A": 5, "B": 10, "C": 15}.items():
        make_photos(name, per_class=per_class)
    return tmp_path / "photos"


def configuration(data, momentum):
    return configure(
        find_sites(data),
        methods=tuple(parse_methods("fednova")),
        **{
            "network": "lenet5",
            "network_args": {"norm": "layer"},
            "rounds": 3,
            "local_epochs": 2,
            "batch_size": BATCH,
        },
        **{"optimizer": "sgd", "learning_rate": RATE, "momentum": momentum},
        max_share=1.0,
    )


def by_hand(config, data, taking_part):
    """x ← x − τ_eff Σᵢ pᵢ (x − yᵢ)/aᵢ over the sites of each round; the sums in float64."""
    network = Composition(config).network
    images = {}
    for site in find_sites(data):
        cases = site.cases["training"]
        pixels = torch.stack(
            [site.load_image(case).as_subclass(torch.Tensor).float() / 255 for case in cases]
        )
        images[site.name] = TensorDataset(
            pixels, torch.tensor([config.classes.index(c.label) for c in cases])
        )
    x = {key: value.detach().double() for key, value in network.named_parameters()}
    for round_, sites in enumerate(taking_part, start=1):
        total = sum(len(images[site]) for site in sites)
        effective, direction = 0.0, {key: torch.zeros_like(value) for key, value in x.items()}
        for site in sites:
            network.load_state_dict({key: value.float() for key, value in x.items()}, strict=False)
            optimiser = torch.optim.SGD(network.parameters(), lr=RATE, momentum=config.momentum)
            order = torch.Generator().manual_seed(derive_seed(config.seed, site, round_))
            loader = DataLoader(images[site], BATCH, shuffle=True, generator=order)
            steps = 0
            for _ in range(config.local_epochs):
                for inputs, labels in loader:
                    optimiser.zero_grad()
                    nn.functional.cross_entropy(network(inputs), labels).backward()
                    optimiser.step()
                    steps += 1
            rho = config.momentum
            length = sum((1 - rho ** (steps - k)) / (1 - rho) for k in range(steps))
            share = len(images[site]) / total
            effective += share * length
            for key, y in network.named_parameters():
                direction[key] += share * (x[key] - y.detach().double()) / length
        x = {key: value - effective * direction[key] for key, value in x.items()}
    return x


def test_a_simulation_is_the_papers_loop(uneven, tmp_path):
    """Uneven sites."""
    config = configuration(uneven, 0.9)
    one = Execution(threads=1)
    results = simulate(
        uneven, tmp_path / "out", config, engine="inprocess", device="cpu", report=False, execution=one
    )
    taking_part = [sorted(results["sites"])] * config.rounds
    expected = by_hand(config, uneven, taking_part)
    saved = torch.load(tmp_path / "out/final_model.pt", weights_only=True)
    for key, value in expected.items():
        torch.testing.assert_close(saved[key].double(), value, rtol=0, atol=1e-6)


def test_as_many_steps_everywhere_is_fedavg(phantom_dir, tiny_config):
    sites = ["site_A", "site_B"]
    plain = run_in_process(tiny_config(batch_size=1000), phantom_dir, sites, "cpu")
    nova = run_in_process(tiny_config("fednova", batch_size=1000), phantom_dir, sites, "cpu")
    for key, value in plain.state.items():
        torch.testing.assert_close(nova.state[key], value, rtol=1e-6, atol=1e-7)
    assert nova.rounds[0]["methods"]["fednova"] == {"steps": 1.0}
    uneven = run_in_process(tiny_config("fednova", batch_size=2), phantom_dir, sites, "cpu")
    assert uneven.rounds[0]["methods"]["fednova"]["steps"] > 1
    assert uneven.rounds[0]["bytes"]["fednova"] == {"up": 2 * 4, "down": 0}
