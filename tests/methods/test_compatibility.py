"""Methods declare what they require, provide and exclude; one check refuses what cannot be combined."""

import pytest
from outside_package import outside_package as outside_package

from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.methods import Method, build_methods, registry
from medfedaug.methods.base import WORDS
from medfedaug.methods.compatibility import constraints

SITES = ["site_A", "site_B"]
FLIP = '''
from medfedaug.methods import Method, SitePart


class FlipSite(SitePart):
    def mix(self, inputs, targets):
        return inputs.flip(-1), [(weight, labels.flip(-1)) for weight, labels in targets]


class Flip(Method):
    """Mirrors every other batch, which must be of images as they were, of one patient each."""

    name = "flip"
    requires = {"labels"}
    excludes = {"normalised_input", "method:moex"}

    def at_site(self, context):
        return FlipSite()
'''


@pytest.fixture
def flip(outside_package):
    return outside_package("flipping", FLIP, {"medfedaug.methods": {"flip": "Flip"}})


def test_a_method_from_outside_trains_beside_others(flip, tiny_config, phantom_dir):
    plain = run_in_process(tiny_config("fedprox", rounds=1), phantom_dir, SITES, "cpu")
    flipped = run_in_process(tiny_config("fedprox,flip", rounds=1), phantom_dir, SITES, "cpu")
    assert any(not plain.state[key].equal(flipped.state[key]) for key in plain.state)


@pytest.mark.all_layers
def test_a_method_from_outside_is_refused_in_one_line(flip, run, phantom_dir, tmp_path):
    options = ("--methods", "fedrdn,flip", "--engine", "inprocess", "--out", tmp_path / "out")
    err = run.refused("simulate", "--data", phantom_dir, *options)
    assert " ".join(err.split()).endswith(
        "fedrdn and flip cannot be combined: fedrdn provides normalised_input (its transforms normalise the "
        "intensities, instead of plain scaling to [0, 1]), flip excludes it; leave one of the two out"
    )
    with pytest.raises(ConfigError, match=r"moex provides method:moex .*, flip excludes it"):
        build_methods([{"name": "moex"}, {"name": "flip"}])


@pytest.mark.all_layers
def test_methods_declare_words_of_the_list_and_methods_that_exist():
    used = set()
    for method in registry.built_in_methods().values():
        declared = {*method.requires, *method.provides, *method.excludes}
        named = {word.removeprefix("method:") for word in declared if word not in WORDS}
        assert named <= set(registry.built_in_methods()), method.name
        used |= declared
    # The others follow from hooks, from the network, or from the variance of FedFA's layers.
    assert WORDS.keys() - used == {"global_model"}


def test_every_method_declares_the_effects_of_its_hooks():
    class Sharing(Method):
        name = "sharing"

        def local_entries(self, network):
            return frozenset()

    class Aggregating(Method):
        name = "aggregating"

        def aggregator(self, context):
            return None

    assert constraints(Sharing()).requires == {"separate_sites"}
    result = constraints(Aggregating())
    assert result.provides == result.excludes == {"method:aggregating", "global_model"}
    assert not constraints(Method.__new__(type("Plain", (Method,), {"name": "plain"}))).requires
