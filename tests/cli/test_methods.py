"""What there is to choose from, as `medfedaug methods`, `networks` and `datasets` show it."""

import inspect
import sys

import pytest
from installed_package import installed as installed
from installed_package import package as package

from medfedaug.methods import method_names
from medfedaug.methods.registry import built_in_methods
from medfedaug.models import network_names
from medfedaug.research.datasets.benchmarks import BENCHMARKS
from medfedaug.research.papers.presets import PRESETS


def first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line and not line.startswith(" ")]


@pytest.mark.parametrize(
    ("command", "names"),
    [("methods", method_names()), ("networks", network_names()), ("datasets", BENCHMARKS)],
)
def test_every_name_is_in_its_list(run, command, names):
    assert set(names) <= set(first_words(run.ok(command)))


@pytest.mark.parametrize("name", list(built_in_methods()))
def test_a_method_is_shown_with_the_text_of_each_argument(run, name):
    shown = " ".join(run.ok("methods", name).split())
    cls = built_in_methods()[name]
    plain = cls.__init__ is object.__init__
    for key in {} if plain else inspect.signature(cls).parameters:
        assert f"{key}: " in shown.partition("Args:")[2], key


def test_a_combination_is_its_methods(run):
    assert "fedrdn with average=true" in " ".join(run.ok("methods", "fedrdn_v").split())


@pytest.mark.parametrize("name", [*network_names(), "monai.networks.nets.SegResNet"])
def test_a_network_is_shown_with_its_arguments(run, name):
    assert "(" in run.ok("networks", name).split("\n\n")[1].splitlines()[0]


def test_a_data_set_is_shown_with_its_address_and_its_protocols(run):
    out = run.ok("datasets", "lgg_multisite")
    assert BENCHMARKS["lgg_multisite"].source in out
    assert all(p.name in out for p in PRESETS.values() if p.benchmark == "lgg_multisite")
    assert all(f"\n{option}=" in out for option in BENCHMARKS["lgg_multisite"].options)


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
    assert "Added by the package lesion-methods" in " ".join(run.ok("methods").split())
    assert "small_unet" in run.ok("networks")
    assert "Each weight moves only as far as all sites want" in run.ok("methods", "cautious")
    assert "width: int=8" in run.ok("networks", "small_unet")
    assert "lesion_methods" not in sys.modules
