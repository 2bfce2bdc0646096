"""Every method for one round beside others, and methods on every network."""

import pytest
import torch
from small_networks import SEGMENTING, WIDTHS, needs_einops

from medfedaug.config.plan import Plan
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError
from medfedaug.federation.composition import Composition, check_counted, with_trimmed_mean
from medfedaug.federation.in_process import run_in_process, run_pooled
from medfedaug.methods import build_methods, registry
from medfedaug.simulate import configure

SITES = ["site_A", "site_B"]
# Those that need three sites or five, parameters without running statistics, or another network, have runs of
# their own in `tests/methods`.
APART = ("median", "trimmed_mean", "fedfd_prompt")
# Of each way of taking part one runs always: features, a model at the site, a gradient, a weight, a buffer.
ALWAYS = ("bin", "ditto", "fedbn", "feddg_ga", "fedfd", "fedmix", "fedrdn", "pooled", "scaffold")
METHODS = [
    name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow)
    for name, method in registry.built_in_methods().items()
    if name not in APART and "segmentation" in method.tasks
]
FEW_CASES = {"fedmix": {"fedmix": {"group": 2}}}


def check(server):
    results = server.results()
    assert results["rounds"][0]["refused"] == []
    assert len(results["rounds"][0]["sites"]) == 2
    assert all(bool(torch.isfinite(value).all()) for value in server.state.values())


def allowed(*names: str) -> bool:
    try:
        build_methods([{"name": name} for name in names])
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", METHODS)
def test_every_method_beside_fedrdn_and_fedfa(tiny_config, phantom_dir, name):
    others = ("norm", "mixstyle") if name == "pooled" else ("fedrdn", "fedfa")
    methods = (*(other for other in others if other != name and allowed(other, name)), name)
    config = tiny_config(",".join(methods), rounds=1, limit=1, settings=FEW_CASES.get(name))
    check((run_pooled if name == "pooled" else run_in_process)(config, phantom_dir, SITES, "cpu"))


# Features perturbed or drawn, a second pass, a second gradient and a generator meet here.
@pytest.mark.all_layers
@pytest.mark.parametrize(
    ("methods", "network"),
    [
        ("fraug,fedfa_h,fedfa", "lenet5"),
        ("fedproto,fpl,fedsam", "lenet5"),
        ("fedsr,fpl,fedfd_a", "lenet5"),
        ("fedfd_prompt,fedrdn,fedbn", "vit"),
    ],
)
def test_methods_for_classification_beside_others(make_photos, tmp_path, tiny_config, methods, network):
    args = {"img_size": 32, "hidden_size": 12, "mlp_dim": 8, "num_layers": 2} if network == "vit" else {}
    for name in "AB":
        make_photos(name, per_class=5, size=32)
    options = {"network": network, "network_args": args, "rounds": 2}
    config = configure(find_sites(tmp_path / "photos"), methods=tiny_config(methods).methods, **options)
    check(run_in_process(config, tmp_path / "photos", ["A", "B"], "cpu"))


# With a norm that every method can do something with.
BATCH_NORM = ("dynunet", "segresnet", "segresnetds", "unetr")
REFUSED = [
    ("mednext", "fixbn", "MedNeXt has no batch norm"),
    ("vit", "bin", "has no batch norm with running statistics"),
    ("vit", "fedfa", "stages of ViTClassifier are not known"),
    ("vit", "moex", "stage 1 of ViTClassifier is unknown"),
    ("unetr", "mixstyle", "stage 2 of UNETR is unknown"),
    ("unetr", "dac_sc", "at least one"),
]


@pytest.mark.all_layers
@pytest.mark.parametrize(("network", "method", "reason"), REFUSED)
def test_a_network_that_a_method_cannot_use_is_refused(tiny_config, network, method, reason):
    args = SEGMENTING.get(network, {"img_size": 32, "hidden_size": 12, "mlp_dim": 8, "num_layers": 2})
    changes = {} if network in SEGMENTING else {"task": "classification", "classes": ("a", "b")}
    with pytest.raises(ConfigError, match=reason):
        Composition(tiny_config(method, network=network, network_args=args, image_size=32, **changes))


@pytest.mark.parametrize(
    "network",
    [
        "lenet5",
        "vit",
        pytest.param("swin_t", marks=[needs_einops, pytest.mark.slow]),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("alexnet", "densenet100", "resnet18", "resnet50")
        ),
    ],
)
def test_every_network_for_photographs_trains(make_photos, tmp_path, tiny_config, network):
    for name in "AB":
        make_photos(name, per_class=5, size=64)
    sites = find_sites(tmp_path / "photos", limit=2)
    args = {"img_size": 64, "num_layers": 2} if network == "vit" else {}
    methods = tiny_config("fedrdn,fedbn" if network == "vit" else "fedrdn,fedfa+,fedbn").methods
    config = configure(sites, methods=methods, network=network, network_args=args, rounds=1, limit=2)
    check(run_in_process(config, tmp_path / "photos", ["A", "B"], "cpu"))


# As small as each can be: what is 16 times smaller has one voxel, and the volumes have six slices.
PATCHES = {"swinunetr": 32}
USUAL = ("mednext", "unet", "unetr")


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.slow] if name not in USUAL else []),
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


@pytest.mark.all_layers
@pytest.mark.parametrize(
    ("methods", "settings", "validation", "test"),
    [
        ("fedavg", None, "global", "global"),
        ("fedrdn,fedfa", None, "global", "global"),  # statistics of its own images are no model
        ("fedbn", None, "personal (own layers)", "personal (own layers)"),
        ("ditto", None, "personal (own weights)", "personal (own weights)"),
        ("finetune", {"finetune": {"epochs": 2}}, "global", "personal (fine-tuned)"),
        ("finetune", {"finetune": {"epochs": 0}}, "global", "global"),
        ("fedbn,finetune", None, "personal (own layers)", "personal (own layers, fine-tuned)"),
        ("single", None, "local", "local"),
        ("single,fedrdn", None, "local", "local"),
    ],
)
def test_whose_model_a_score_is_of_follows_from_the_composition(
    tiny_config, methods, settings, validation, test
):
    scored = Composition(tiny_config(methods, settings=settings)).scored
    assert scored == {"validation": validation, "test": test, "unseen": "unseen"}


@pytest.mark.all_layers
@pytest.mark.parametrize(
    ("methods", "sites", "changes", "expected"),
    [
        ("fedavg", 4, {}, ["fedavg"]),
        ("fedavg", 5, {}, ["fedavg", "trimmed_mean"]),
        ("fedavg", 5, {"secure_aggregation": True}, ["fedavg"]),
        ("median", 5, {}, ["median"]),
        ("fedavgm", 5, {}, ["fedavgm"]),
    ],
)
def test_five_hospitals_average_by_the_trimmed_mean_unless_a_method_averages(
    tiny_config, methods, sites, changes, expected
):
    run = with_trimmed_mean(tiny_config(methods, **changes), sites)
    assert [method["name"] for method in run.methods] == expected


@pytest.mark.all_layers
@pytest.mark.parametrize("method", ["fedmix", "feddg", "feddg_ga"])
def test_no_job_for_hospitals_has_a_method_that_cannot_name_its_patients(tiny_config, method):
    with pytest.raises(ConfigError, match=f"{method}: hospitals cannot say whose images are in what it"):
        check_counted(tiny_config(method))
