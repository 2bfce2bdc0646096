"""Names that methods of other packages used before: each still works, and its warning says the new one."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from outside_package import outside_package as outside_package
from torch import nn

from medfedaug.errors import ConfigError, MedFedAugDeprecation
from medfedaug.federation import FederationServer, run_in_process
from medfedaug.methods import FedBN, FedFA, Method, SitePart, build_methods
from medfedaug.methods.base import WORDS, Aggregator, ServerContext, SiteContext, SiteExchange
from medfedaug.methods.old_names import OLD_FLAGS

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
# The method of an earlier version: every hook and flag by its old name.
KEEPER = """
from medfedaug.methods import Method, SiteExchange, SitePart
from medfedaug.methods.median import MedianServer


class KeeperSite(SitePart):
    def __init__(self, context):
        self.context = context
        self.first = {key: context.network.state_dict()[key].clone() for key in context.kept}

    def stand_ins(self):
        return self.first


class Keeper(Method):
    name = "keeper"
    contains = ("fedper",)
    mixes_labels = True
    needs_global_start = True

    def kept_at_site(self, network):
        return frozenset(key for key in network.state_dict() if key.startswith("model.2.conv"))

    def at_site(self, context):
        return KeeperSite(context)
"""


@pytest.fixture
def keeper(outside_package):
    outside_package("keeping", KEEPER, {"medfedaug.methods": {"keeper": "Keeper"}})


def test_a_method_with_old_names_keeps_and_scores_what_it_did(keeper, tiny_config, phantom_dir):
    with pytest.warns(MedFedAugDeprecation) as warned:
        server = run_in_process(
            tiny_config("keeper", rounds=1), phantom_dir, ["site_A", "site_B", "site_C"], "cpu"
        )
    kept = {"model.2.conv.weight", "model.2.conv.bias"}
    assert kept <= server.state.keys()
    assert kept.isdisjoint(server.shared)
    # An unseen site is scored with what the method falls back to.
    assert server.results()["test"]["unseen"]["site_C"]["dice"] is not None
    said = {str(one.message).partition(";")[0] for one in warned}
    assert said >= {
        "keeping.Keeper: kept_at_site is now local_entries",
        "keeping.KeeperSite: stand_ins is now default_local_entries",
        'keeping.Keeper: contains is now provides = {"method:NAME"}',
        'keeping.Keeper: mixes_labels is now requires = {"labels"}, excludes = {"labels"}',
        "medfedaug.methods.contexts.SiteContext: kept is now local_entries",
    }


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("mixup", "mixup requires labels .*, keeper excludes it"),
        ("fedsr", "fedsr requires labels .*, keeper excludes it"),
        ("partialfed_adaptive", "keeper requires global_start .*, partialfed_adaptive excludes it"),
        ("fedper", "keeper provides method:fedper .*, fedper excludes it"),
        ("pooled", "keeper requires separate_sites .*, pooled excludes it"),
    ],
)
def test_old_flags_refuse_what_they_did(keeper, other, reason):
    with pytest.warns(MedFedAugDeprecation), pytest.raises(ConfigError, match=reason):
        build_methods([{"name": "keeper"}, {"name": other}])


@pytest.mark.parametrize("flag", OLD_FLAGS)
def test_each_old_flag_is_its_words(flag):
    value = ("fedsam",) if flag == "contains" else True
    expected = {
        name: {word.format("fedsam") for word in OLD_FLAGS[flag].get(name, ())}
        for name in ("requires", "provides", "excludes")
    }
    assert {word for words in expected.values() for word in words} - {"method:fedsam"} <= WORDS.keys()
    with pytest.warns(MedFedAugDeprecation, match=f"Old: {flag} is now"):
        cls = type("Old", (Method,), {"name": "old", flag: value})
    with pytest.warns(MedFedAugDeprecation, match=f"Late: {flag} is now"):
        late = type(
            "Late", (Method,), {"name": "late", "__init__": lambda self: setattr(self, flag, value)}
        )()
    for found in (cls, cls(), late):
        assert {name: getattr(found, name) for name in expected} == expected
        with pytest.warns(MedFedAugDeprecation, match=flag):
            assert getattr(found, flag) == value
    assert Method.requires == Method.provides == Method.excludes == frozenset()


def test_a_false_flag_takes_back_what_the_base_class_declares():
    with pytest.warns(MedFedAugDeprecation, match="needs_norms"):
        found = type("Other", (FedBN,), {"name": "other", "needs_norms": False, "needs_labels": True})
    assert found.requires == {"labels"}
    assert FedBN.requires == {"norm_layers"}
    layers = FedFA()
    with pytest.warns(MedFedAugDeprecation, match="needs_batch"):
        layers.needs_batch = False
    assert layers.requires == frozenset()
    assert FedFA().requires == {"several_images"}


def test_an_old_hook_reaches_that_of_its_base_class():
    class Norms(FedBN):
        name = "norms"

        def kept_at_site(self, network):
            return super().kept_at_site(network) | {"0.weight"}

    class More(Norms):
        name = "more"

        def kept_at_site(self, network):
            return super().kept_at_site(network) | {"0.bias"}

    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.InstanceNorm2d(1, affine=True))
    with pytest.warns(MedFedAugDeprecation):
        found = [More().local_entries(network), More().kept_at_site(network)]
    assert found == [{"0.weight", "0.bias", "1.weight", "1.bias"}] * 2


def test_old_names_of_exchanges_aggregators_and_contexts():
    class Exchange(SiteExchange):
        summarises = 4

        def collect(self):
            return {}

        def apply(self, payload):
            pass

    class Counted(Exchange):
        def summarised(self):
            return 1 + super().summarised()

    class Patient(Aggregator):
        least_updates = 3

        def result(self, round_):
            return dict(round_.mean)

    def warned(holder, name):
        with pytest.warns(MedFedAugDeprecation, match=f"{type(holder).__name__}: {name} is now"):
            return getattr(holder, name)

    exchange, network = Exchange(), nn.Linear(1, 1)
    assert (exchange.cases_per_value, exchange.fewest_cases()) == (4, 4)
    with pytest.warns(MedFedAugDeprecation, match="summarises is now cases_per_value"):
        exchange.summarises = 7
    assert exchange.fewest_cases() == warned(exchange, "summarises") == warned(exchange, "summarised")() == 7
    with pytest.warns(MedFedAugDeprecation, match="summarised is now fewest_cases"):
        assert Counted().fewest_cases() == 5
    assert Patient().min_updates == warned(Patient(), "least_updates") == 3
    site = SiteContext("A", network, local_entries=frozenset({"bias"}), missing_channels=(1,))
    assert (warned(site, "kept"), warned(site, "missing")) == ({"bias"}, (1,))
    assert warned(ServerContext(network, 1, local_entries=frozenset({"bias"})), "kept") == {"bias"}


def test_a_server_waits_for_as_many_updates_as_an_old_aggregator_asks(outside_package, tiny_config):
    source = """
from medfedaug.methods import Aggregator, Method


class PatientServer(Aggregator):
    least_updates = 4

    def result(self, round_):
        return dict(round_.mean)


class Patient(Method):
    name = "patient"

    def aggregator(self, context):
        return PatientServer()
"""
    outside_package("waiting", source, {"medfedaug.methods": {"patient": "Patient"}})
    with pytest.warns(MedFedAugDeprecation, match="least_updates is now min_updates"):
        assert FederationServer(tiny_config("patient")).participation.least == 4


def test_new_names_and_both_names_at_once_do_not_warn():
    def entries(self, network):
        return frozenset({"new"})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = {"name": "both", "local_entries": entries, "kept_at_site": lambda self, network: frozenset()}
        assert type("Both", (Method,), both)().local_entries(nn.Identity()) == {"new"}
        assert (
            type("New", (SitePart,), {"default_local_entries": lambda self: {}})().default_local_entries()
            == {}
        )


def test_the_page_has_every_old_name_with_its_new_one():
    page = PAGE.read_text(encoding="utf-8")
    for interface in (Method, SitePart, SiteExchange, Aggregator, SiteContext, ServerContext):
        for old, new in interface._renamed.items():
            assert f"\n| `{interface.__name__}.{old}` | `{new}` |\n" in page
    for flag, words in OLD_FLAGS.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `Method.{flag}` |")]
        for attribute, found in words.items():
            listed = ", ".join(f'"{word}"' for word in found).replace("{}", "NAME")
            assert f"`{attribute} = {{{listed}}}`" in line
