"""Every pair of methods for one round, and every method on every network."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_networks import SEGMENTING, WIDTHS, needs_einops

from medfedaug.config.plan import Plan
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError
from medfedaug.federation.in_process import run_in_process
from medfedaug.federation.pooled import run_pooled
from medfedaug.methods import build_methods, parse_methods, registry
from medfedaug.models import network_names
from medfedaug.simulate import configure

SITES = ["site_A", "site_B"]
CLASSIFYING = ("fraug", "fedfd_prompt")
METHODS = [name for name in registry.built_in_methods() if name not in CLASSIFYING]
ROBUST = ("median", "trimmed_mean")  # need three sites or five: see test_robust.py
# Those, and what goes with parameters alone: see methods/test_dp_fedavg.py.
APART = (*ROBUST, "dp_fedavg")
TASKS = {name: build_methods([{"name": name}])[0].tasks for name in METHODS if name not in APART}
SEGMENTING_METHODS = [name for name, tasks in TASKS.items() if "segmentation" in tasks]
CLASSIFYING_METHODS = [name for name, tasks in TASKS.items() if "classification" in tasks]
CORE = ("fedavg", "fedprox", "fedbn", "norm", "fedrdn", "fedfa", "fedfa_h")  # all their pairs in fast tests

PROTOTYPES = ("fedproto", "fedsr", "fpl")  # take labels and features of the last layer


def carried(config, *args):
    pooled = any(spec["name"] == "pooled" for spec in config.methods)
    return (run_pooled if pooled else run_in_process)(config, *args)


def small(methods):
    """Arguments that let a method run on a case or two."""
    return {"fedmix": {"group": 2}} if "fedmix" in methods else None


NOT_ON = {
    ("mednext", "silobn,fedfd_a,fixbn"): "MedNeXt has no batch norm",
    **{
        (network, method): "has no batch norm that keeps statistics"
        for network in ("mednext", "swin_t", "vit")
        for method in ("bin",)
    },
    ("unetr", "mixstyle,moex,scaffold,fedsam,fedavgm"): "unknown stage 2 of UNETR",
    ("vit", "fedrdn,fedfa+,fedprox"): "stages of ViTClassifier are not known",
    ("vit", "mixstyle,moex,scaffold,fedsam,fedavgm"): "unknown stage 1 of ViTClassifier",
    ("vit", "manifold_mixup,pooled"): "stages of ViTClassifier are not known",
    ("vit", "dac_sc"): "stages of ViTClassifier are not known",
    ("unetr", "dac_sc"): "dac_sc: UNETR has one stage",
    ("vit", "silobn,fedfd_a,fixbn"): "ViTClassifier has no batch norm",
    ("swin_t", "silobn,fedfd_a,fixbn"): "SwinClassifier has no batch norm",
    **{
        (network, "feddg"): "feddg is defined for segmentation alone"
        for network in network_names()
        if network not in SEGMENTING
    },
}


def check(server):
    results = server.results()
    assert results["rounds"][0]["refused"] == []
    assert len(results["rounds"][0]["sites"]) == 2
    assert all(bool(torch.isfinite(value).all()) for value in server.state.values())


def excluded(*names: str) -> str:
    try:
        build_methods([{"name": name} for name in names])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=() if {*pair} <= set(CORE) else pytest.mark.slow)
        for pair in itertools.combinations(SEGMENTING_METHODS, 2)
        if not excluded(*pair)
    ],
    ids="+".join,
)
def test_every_pair_of_methods(tiny_config, phantom_dir, pair):
    config = tiny_config(",".join(pair), rounds=1, limit=1, settings=small(pair))
    check(carried(config, phantom_dir, SITES, "cpu"))


@pytest.mark.parametrize("name", [name for name in SEGMENTING_METHODS if name not in CORE])
def test_every_other_method_beside_fedrdn_and_fedfa(tiny_config, phantom_dir, name):
    others = ("norm", "mixstyle") if name == "pooled" else ("fedrdn", "fedfa")
    methods = (*(other for other in others if not excluded(other, name)), name)
    config = tiny_config(",".join(methods), rounds=1, limit=1, settings=small(methods))
    check(carried(config, phantom_dir, SITES, "cpu"))


# A transformer has neither batch norms nor stages.
PAIRS = [
    *(("fraug", other) for other in CLASSIFYING_METHODS if not excluded("fraug", other)),
    *(("fedfd_prompt", other) for other in ("fedavg", "fedprox", "fedbn", "norm", "fedrdn", "fedavgm")),
    *(
        (method, other)
        for number, method in enumerate(PROTOTYPES)
        for other in CLASSIFYING_METHODS
        if not excluded(method, other) and other not in PROTOTYPES[: number + 1]
    ),
]
# Fast ones: features perturbed or drawn, a second pass, a second gradient and a generator beside them.
BESIDE = {"fraug": (*CORE, "fedfd_a"), "fedfd_prompt": CORE, "fedproto": ("fedsr", "fpl")}
BESIDE |= dict.fromkeys(("fedsr", "fpl"), ("fedfa", "fedfa_h", "fedfd_a", "fedsam", "fedrobust", "fpl"))


@pytest.mark.parametrize(
    ("method", "other"),
    [pytest.param(*pair, marks=() if pair[1] in BESIDE[pair[0]] else pytest.mark.slow) for pair in PAIRS],
    ids=map("+".join, PAIRS),
)
def test_every_method_beside_those_for_classification(make_photos, tmp_path, tiny_config, method, other):
    small_vit = {"img_size": 32, "hidden_size": 12, "mlp_dim": 8, "num_layers": 2}
    network, args = ("vit", small_vit) if method == "fedfd_prompt" else ("lenet5", {})
    for name in "AB":
        make_photos(name, per_class=5, size=32)
    sites = find_sites(tmp_path / "photos")
    specs = tiny_config(f"{method},{other}", settings=small((method, other))).methods
    options = {"network": network, "network_args": args, "rounds": 2}
    check(carried(configure(sites, methods=specs, **options), tmp_path / "photos", ["A", "B"], "cpu"))


# What a method does to a network does not depend on its company; a method that is not named goes alone.
TOGETHER = {
    # On these networks in fast tests, on the others in slow ones.
    "fedrdn,fedfa+,fedprox": ("basicunet", "unet", "segresnet", "resnet18", "lenet5", "vit"),
    "norm,fedbn,fedavg": ("basicunet", "lenet5"),
    "silobn,fedfd_a,fixbn": ("basicunet", "resnet18", "flexibleunet"),
    "mixstyle,moex,scaffold,fedsam,fedavgm": (),
    "fedmix,fednova,fedrobust": (),
    "mixup": (),
    "fedharmo,randaugment,partialfed": (),
    "manifold_mixup,pooled": (),
    "single": (),
    "feddg_ga": (),
    "bin": ("lenet5",),
    "dac_sc": ("lenet5",),
    "randconv": (),
    "feddg": (),
    "finetune,trimmed_mean": (),
    "ditto,partialfed,moon": ("unet",),
}
NAMED = {part["name"] for methods in TOGETHER for part in parse_methods(methods)}
COMBINATIONS = {**TOGETHER, **{name: () for name in TASKS if name not in {*NAMED, *PROTOTYPES}}}
# With a norm that every method can do something with.
BATCH_NORM = ("basicunetplusplus", "dynunet", "segresnet", "segresnetds", "unetr")


@pytest.mark.parametrize(
    ("network", "methods"),
    [
        pytest.param(
            network,
            methods,
            marks=[
                *([] if network in fast else [pytest.mark.slow]),
                *([needs_einops] if network.startswith("swin") else []),
            ],
        )
        for methods, fast in COMBINATIONS.items()
        for network in network_names()
        if network not in SEGMENTING or methods in (*TOGETHER, *SEGMENTING_METHODS)
    ],
)
def test_every_method_on_every_network(phantom_dir, make_photos, tmp_path, tiny_config, network, methods):
    settings = small(methods)
    specs = tiny_config(methods, settings=settings).methods
    reason = NOT_ON.get((network, methods))
    if network in SEGMENTING:
        args = {**SEGMENTING[network], **({"norm": "batch"} if network in BATCH_NORM else {})}
        size = 32 if network == "unetr" else None
        options = {"network": network, "network_args": args, "image_size": size, "rounds": 1, "limit": 1}
        config, data, sites = tiny_config(methods, settings=settings, **options), phantom_dir, SITES
    else:
        for name in "AB":
            make_photos(name, per_class=5, size=64)
        found = find_sites(tmp_path / "photos", limit=2)
        args = {"img_size": 64, "num_layers": 2} if network == "vit" else {}
        config = configure(found, methods=specs, network=network, network_args=args, rounds=1, limit=2)
        data, sites = tmp_path / "photos", ["A", "B"]
    if reason:
        with pytest.raises(ConfigError, match=reason):
            carried(config, data, sites, "cpu")
        return
    check(carried(config, data, sites, "cpu"))


# As small as each can be: what is 16 times smaller has one voxel, and the volumes have six slices.
PATCHES = {"flexibleunet": 32, "swinunetr": 32}
LARGE = ("flexibleunet", "swinunetr", "vnet")


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.slow] if name in LARGE else []),
                *([needs_einops] if name.startswith("swin") else []),
            ],
        )
        for name in SEGMENTING
    ],
)
def test_every_network_trains_on_volumes(phantom_dir, tiny_config, network):
    patch = [PATCHES.get(network, 16)] * 3
    args = {**SEGMENTING[network], **({"norm": "batch"} if network in BATCH_NORM else {})}
    plan = Plan(spatial_dims=3, patch_size=patch, patches_per_volume=1)
    options = {"rounds": 1, "limit": 2, "batch_size": 2, "plan": plan}
    config = tiny_config("fedrdn,fedfa", network=network, network_args=args, **options)
    server = run_in_process(config, phantom_dir, SITES, "cpu")
    check(server)
    assert max(value.ndim for value in server.state.values()) == 5
    assert set(server.rounds[0]["methods"]["fedfa"]) == {
        f"enc{stage + 1}" for stage in range(len(WIDTHS[network]))
    }
