"""FedFD's prompt variant on MONAI's vision transformer."""

import copy

import pytest
import torch
from monai.networks.nets import ViT
from reference import UNEVEN, assert_models, federated_averaging, mean
from torch.nn.functional import cross_entropy

from medfedaug.data.sites import find_sites
from medfedaug.federation import run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.methods import parse_methods
from medfedaug.methods.base import SiteContext
from medfedaug.models import build_network
from medfedaug.research.methods.fedfd_prompt import FedFDPrompt, find_prompts, insert_prompts, mixing_prompts
from medfedaug.simulate import configure

SMALL = {"img_size": 32, "hidden_size": 12, "mlp_dim": 8, "num_layers": 2, "num_heads": 3}


def small_vit(dims=2):
    torch.manual_seed(0)
    return build_network("vit", spatial_dims=dims, in_channels=1, out_channels=3, **SMALL)


@pytest.mark.parametrize("dims", [2, 3])
def test_prompts_join_the_tokens_and_not_the_state_dict(dims):
    plain = small_vit(dims).double()
    net = insert_prompts(copy.deepcopy(plain), count=4)
    assert list(net.state_dict()) == list(plain.state_dict())
    prompts = find_prompts(net)
    assert any(p is prompts.tokens for p in net.parameters())
    x = torch.randn(2, 1, *[32] * dims, dtype=torch.float64)
    patches = plain.patch_embedding(x)

    def by_hand(tokens):
        sequence = torch.cat([plain.cls_token.expand(2, -1, -1), patches, tokens.expand(2, -1, -1)], dim=1)
        for block in plain.blocks:
            sequence = block(sequence)
        return plain.classification_head(plain.norm(sequence)[:, 0])

    own, other = prompts.tokens.detach(), torch.randn(4, 12, dtype=torch.float64)
    torch.testing.assert_close(net.train()(x), by_hand(own))
    torch.testing.assert_close(net.eval()(x), by_hand(own))
    prompts.global_tokens = other
    torch.testing.assert_close(net.train()(x), by_hand(own))
    torch.testing.assert_close(net.eval()(x), by_hand(other))
    torch.manual_seed(2)
    with mixing_prompts(net.train()):
        result = net(x)
    torch.manual_seed(2)
    u = torch.rand(4, 12, dtype=torch.float64)
    torch.testing.assert_close(result, by_hand(u * own + (1 - u) * other))
    torch.testing.assert_close(net(x), by_hand(own))


def test_prompts_stay_at_their_site_and_come_back_averaged(make_photos, tmp_path):
    for name in "ABC":
        make_photos(name, per_class=5, size=32)
    options = {"network": "vit", "network_args": SMALL, "rounds": 2, "holdout": ("C",)}
    config = configure(
        find_sites(tmp_path / "photos"), methods=tuple(parse_methods("fedfd_prompt")), **options
    )
    server = run_in_process(config, tmp_path / "photos", list("ABC"), "cpu")
    assert not any("prompts" in key for key in server.state)
    assert server.payload["fedfd_prompt/tokens"].shape == (4, 12)
    assert server.results()["test"]["unseen"]["C"]["accuracy"] is not None

    method = FedFDPrompt()
    networks = [method.prepare_network(small_vit()) for _ in range(2)]
    sites = [method.at_site(SiteContext(str(i), network)) for i, network in enumerate(networks)]
    find_prompts(networks[1]).tokens.data.add_(4.0)
    sites[0].restore(sites[1].state())
    assert torch.equal(find_prompts(networks[0]).tokens, find_prompts(networks[1]).tokens)


def test_networks_that_take_no_prompts_are_refused_with_a_reason():
    with pytest.raises(ValueError, match=r"classification=True, not BasicUNet"):
        insert_prompts(build_network("basicunet"))
    with pytest.raises(ValueError, match="classification=True"):
        insert_prompts(ViT(1, 32, 16, hidden_size=12, mlp_dim=8, num_layers=1, num_heads=3, spatial_dims=2))


def test_a_federation_mixes_each_sites_prompts_with_the_average(federate):
    """Eq. 2 and 5 with prompts in the place of statistics, and the draws of the run."""
    l1, l2, rate = 0.3, 0.5, 0.05
    arguments = {"img_size": 8, "patch_size": 4, "hidden_size": 12, "mlp_dim": 8, "num_layers": 1}
    run = federate(
        "fedfd_prompt",
        plan=UNEVEN,
        settings={"fedfd_prompt": {"lambda1": l1, "lambda2": l2, "count": 2}},
        network="vit",
        network_args={**arguments, "num_heads": 3},
        local_epochs=2,
    )
    own, common, sent = {}, {}, {}
    first = find_prompts(Composition(run.config).network).tokens.detach().double()

    def features(network, x, tokens):
        size = (len(x), -1, -1)
        parts = [network.cls_token.expand(size), network.patch_embedding(x), tokens.expand(size)]
        sequence = torch.cat(parts, dim=1)
        for block in network.blocks:
            sequence = block(sequence)
        return network.norm(sequence)[:, 0]

    def train(site, round_, network):
        if round_ > 1:
            sites = sent[round_ - 1]
            common[round_] = mean(list(sites.values()), [run.server.sites[one] for one in sites])["tokens"]
        tokens = own.get(site, first).clone().requires_grad_()
        head, batches = network.classification_head, run.batches[site, round_]
        for (x, y), draws in zip(batches, batches.draws, strict=True):
            f = features(network, x, tokens)
            loss = cross_entropy(head(f), y)
            if round_ > 1:
                u = draws[0].double()
                changed = features(network, x, u * tokens + (1 - u) * common[round_])
                other, distance = cross_entropy(head(changed), y), (f - changed).square().mean()
                loss = (1 - l1) * loss + l1 * other + l2 * distance
            parameters = [*network.parameters(), tokens]
            # MONAI's blocks have a norm for cross-attention, which is not used here.
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        parameter -= rate * gradient
        own[site] = tokens.detach()
        sent.setdefault(round_, {})[site] = {"tokens": own[site]}

    assert_models(run, federated_averaging(run, train), atol=5e-6)
    for round_, sites in sent.items():
        for site, expected in sites.items():
            result = run.replies[round_][site].payload["fedfd_prompt/tokens"]
            torch.testing.assert_close(result.double(), expected["tokens"], rtol=1e-5, atol=5e-6)
