"""What there is to choose from, as `medfedaug methods`, `networks` and `datasets` show it."""

import inspect
import json
import math
import re
import sys

import pytest
from installed_package import installed as installed
from installed_package import package as package

from medfedaug.cli.catalogue import describe_method, describe_network
from medfedaug.methods import build_methods, method_names
from medfedaug.methods.base import Method
from medfedaug.methods.registry import built_in_methods
from medfedaug.models import build_network, insert_ffa, network_names
from medfedaug.research.datasets.benchmarks import BENCHMARKS
from medfedaug.research.papers.presets import PRESETS


def first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line and not line.startswith(" ")]


def test_every_name_is_in_its_list(run):
    for command, names in (
        ("methods", method_names()),
        ("networks", network_names()),
        ("datasets", BENCHMARKS),
    ):
        code, out, err = run(command)
        assert code == 0, err
        assert set(names) <= set(first_words(out))


def default_of(argument):
    """A constant, or an expression of numbers, which is shown as it is written."""
    try:
        return json.loads(argument.default)
    except json.JSONDecodeError:
        return eval(argument.default, {"math": math})


@pytest.mark.parametrize("name", list(built_in_methods()))
def test_a_method_is_shown_with_its_arguments_and_their_defaults(run, name):
    code, out, err = run("methods", name)
    assert code == 0, err
    cls = built_in_methods()[name]
    shown = {argument.name: argument for argument in describe_method(name).arguments}
    plain = cls.__init__ is object.__init__
    parameters = {} if plain else inspect.signature(cls).parameters
    assert set(shown) == set(parameters)
    for key, parameter in parameters.items():
        assert default_of(shown[key]) == json.loads(json.dumps(parameter.default))
        assert shown[key].text, f"{name}.{key} has no text"
        assert key in out
    hooks = ("before_training", "every_round")
    exchanges = any(getattr(cls, hook) is not getattr(Method, hook) for hook in hooks)
    assert ("Exchange, " in out) == exchanges
    # The defaults that are shown are the method's own: with them it is the method without arguments.
    build_methods([{"name": name, "args": {key: default_of(a) for key, a in shown.items()}}])


def test_what_leaves_a_site_is_said_in_the_list_and_of_each(run):
    _, out, _ = run("methods", "fedfa")
    assert "sent beside the model: every round. Exchange, every round and layer" in " ".join(out.split())
    listed = {line.split()[0]: line for line in run("methods")[1].splitlines() if line.strip()}
    assert "classification" in listed["fedproto"]
    assert "2D" in listed["randaugment"]
    assert "fedrdn with average=true" in " ".join(run("methods", "fedrdn_v")[1].split())


def test_a_network_is_shown_with_the_stages_that_layers_are_inserted_after(run):
    code, out, err = run("networks", "basicunet", "--stages")
    assert code == 0, err
    out = " ".join(out.split())
    count = sum(p.numel() for p in build_network("basicunet").parameters()) / 1e6
    assert f"in 2D: {count:.2f} million parameters (1 channels, 2 classes)" in out
    stages = re.findall(r"(enc\d) \((\d+) channels\)", out)
    layers = [
        m.num_channels for m in insert_ffa(build_network("basicunet")).modules() if hasattr(m, "num_channels")
    ]
    assert [int(channels) for _, channels in stages] == [n for n in layers if n]
    assert "features [16, 32, 64, 128, 256, 16]" in out
    by_path = " ".join(run("networks", "monai.networks.nets.SegResNet", "--stages")[1].split())
    assert "init_filters 8" in by_path
    assert "in 3D: " in by_path


@pytest.mark.parametrize("name", ["basicunet", "dynunet", "lenet5", "resnet18", "segresnet", "swin_t"])
def test_a_networks_defaults_are_those_that_it_is_built_with(name):
    described = describe_network(name)
    given = {
        a.name: json.loads(a.default) for a in described.arguments if a.default and a.default[0] not in '"n{'
    }
    channels, classes = (1, 2) if described.facts["for"] == "segmentation" else (3, 10)
    sizes = {"in_channels": channels, "out_channels": classes}
    plain, same = build_network(name, **sizes), build_network(name, **sizes, **given)
    shapes = {key: value.shape for key, value in plain.state_dict().items()}
    assert {key: value.shape for key, value in same.state_dict().items()} == shapes


def test_a_data_set_is_shown_with_its_address_and_its_protocols(run):
    code, out, err = run("datasets", "lgg_multisite")
    assert code == 0, err
    assert BENCHMARKS["lgg_multisite"].source in out
    assert all(p.name in out for p in PRESETS.values() if p.benchmark == "lgg_multisite")
    assert {"fraction", "unseen", "folds", "fold", "fold_seed"} <= set(first_words(out))


@pytest.mark.parametrize(
    ("command", "name", "meant"),
    [
        ("methods", "fedfaa", "fedfa"),
        ("networks", "bascunet", "basicunet"),
        ("datasets", "lgg", "lgg_multisite"),
    ],
)
def test_an_unknown_name_is_one_line_with_what_was_meant(run, command, name, meant):
    code, _, err = run(command, name)
    assert code == 2
    assert f"did you mean {meant}" in err
    assert err.count("\n") == 1


def test_what_a_package_adds_is_listed_and_described_without_importing_it(run, package):
    _, methods, _ = run("methods")
    _, networks, _ = run("networks")
    assert "Added by the package lesion-methods" in " ".join(methods.split())
    assert "small_unet" in networks
    assert "lesion_methods" not in sys.modules
    code, out, err = run("methods", "cautious")
    assert code == 0, err
    assert out.startswith("cautious: Each weight moves only as far as all sites want")
    assert "added by: the package lesion-methods" in out
    assert "width" in run("networks", "small_unet")[1]
    assert "lesion_methods" not in sys.modules


def test_an_equation_stands_on_its_own_line(run):
    out = run("methods", "ditto")[1].splitlines()
    at = out.index("    min_v hₖ(v; wᵗ) = Fₖ(v) + (λ/2) ‖v − wᵗ‖²,   v ← v − η (∇Fₖ(v) + λ (v − wᵗ))")
    assert not out[at - 1]
    assert not out[at + 1]
