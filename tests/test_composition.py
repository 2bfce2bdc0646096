"""Every pair of methods for one round, and every method on every network."""

from __future__ import annotations

import itertools

import pytest
import torch

from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.methods import method_names
from medfedaug.models import network_names
from medfedaug.simulate import configure

SITES = ["site_A", "site_B"]
SEGMENTING = ("basicunet", "unet")
CLASSIFYING = ("fraug", "fedfd_prompt")
METHODS = [name for name in method_names() if name not in ("fedrdn_v", "fedfa+", *CLASSIFYING)]
REFUSED = {("norm", "fedrdn"): "both normalise", ("fedfd", "fedfd_a"): "contains fedfd"}


NOT_ON = {
    ("vit", "fedrdn,fedfa+,fedprox"): "stages of ViTClassifier are not known",
    ("vit", "silobn,fedfd_a"): "ViTClassifier has no batch norm",
    ("swin_t", "silobn,fedfd_a"): "SwinClassifier has no batch norm",
}


def check(server):
    results = server.results()
    assert results["rounds"][0]["refused"] == []
    assert len(results["rounds"][0]["sites"]) == 2
    assert all(bool(torch.isfinite(value).all()) for value in server.state.values())


@pytest.mark.parametrize("pair", itertools.combinations(METHODS, 2), ids="+".join)
def test_every_pair_of_methods(tiny_config, phantom_dir, pair):
    config = tiny_config(",".join(pair), rounds=1, limit=1)
    if pair in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[pair]):
            run_in_process(config, phantom_dir, SITES, "cpu")
    else:
        check(run_in_process(config, phantom_dir, SITES, "cpu"))


# A transformer has neither batch norms nor stages.
PAIRS = [("fraug", other) for other in METHODS] + [
    ("fedfd_prompt", other) for other in ("fedavg", "fedprox", "fedbn", "norm", "fedrdn")
]


@pytest.mark.parametrize(("method", "other"), PAIRS, ids="+".join)
def test_every_method_beside_those_for_classification(make_photos, tmp_path, tiny_config, method, other):
    network, args = {
        "fraug": ("lenet5", {}),
        "fedfd_prompt": ("vit", {"img_size": 32, "hidden_size": 12, "mlp_dim": 8, "num_layers": 2}),
    }[method]
    for name in "AB":
        make_photos(name, per_class=5, size=32)
    sites = find_sites(tmp_path / "photos")
    specs = tiny_config(f"{method},{other}").methods
    options = {"network": network, "network_args": args, "rounds": 2, "threads": 1}
    check(run_in_process(configure(sites, methods=specs, **options), tmp_path / "photos", ["A", "B"], "cpu"))


# Together they name every method; what a method does to a network does not depend on its company.
@pytest.mark.parametrize("methods", ["fedrdn,fedfa+,fedprox", "norm,fedbn,fedavg", "silobn,fedfd_a"])
@pytest.mark.parametrize("network", network_names())
def test_every_method_on_every_network(phantom_dir, make_photos, tmp_path, tiny_config, network, methods):
    specs = tiny_config(methods).methods
    if network in SEGMENTING:
        config = tiny_config(methods, rounds=1, limit=1, network=network, network_args={})
        check(run_in_process(config, phantom_dir, SITES, "cpu"))
        return
    for name in "AB":
        make_photos(name, per_class=5, size=64)
    sites = find_sites(tmp_path / "photos", limit=2)
    args = {"img_size": 64, "num_layers": 2} if network == "vit" else {}
    config = configure(sites, methods=specs, network=network, network_args=args, rounds=1, limit=2, threads=1)
    reason = NOT_ON.get((network, methods))
    if reason:
        with pytest.raises(ConfigError, match=reason):
            run_in_process(config, tmp_path / "photos", ["A", "B"], "cpu")
        return
    check(run_in_process(config, tmp_path / "photos", ["A", "B"], "cpu"))
