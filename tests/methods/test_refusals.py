"""Arguments, networks, tasks and company that methods refuse, each in one line with the reason."""

import pytest
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.federation.composition import Composition
from medfedaug.methods import build_methods
from medfedaug.methods.base import ServerContext, SiteContext
from medfedaug.methods.registry import built_in_methods
from medfedaug.tasks import ClassificationTask

# One for each kind of limit, and those that a constructor checks itself.
ARGUMENTS = [
    ("condist", {"first_weight": -0.1}, "first_weight cannot be negative"),
    ("condist", {"temperature": 0}, "temperature must be positive"),
    ("feddg", {"band": 0.5}, "band must be below 0.5, got 0.5"),
    ("fedfa_h", {"bins": 1}, "bins"),
    ("fedfd", {"distance": "max"}, "'max'"),
    ("fedrobust", {"penalty": 20}, "learning_rate x penalty is 2;"),
    ("fixbn", {"exploration": 2}, "exploration must be at most 1, got 2"),
    ("fraug", {"prototype_rate": 0}, "prototype_rate"),
    ("partialfed", {"strategy": "adaptive"}, "strategy must be 'norm+head', "),
    ("randconv", {"kernels": [2]}, "kernels are odd numbers from 1, got [2]"),
    ("rsc", {"features": 1.0}, "features must be below 1"),
    ("teacher", {"threshold": 1.1}, "threshold must be at most 1"),
]

# By word: the methods that require or provide it, and one that excludes it.
EXCLUDED = [
    ("averaged_parameters", "ditto feddg_ga fedprox", "single"),
    ("complete_state_dict", "ditto", "fedfd_a"),
    ("complete_state_dict", "ditto", "fedfd_prompt"),
    ("labels", "fedproto fedsr fpl", "mixup"),
    ("labels", "mixup", "fedmix"),
    ("normalised_input", "fedrdn", "norm"),
    ("separate_sites", "fedrdn fedfa fedbn fedavgm single", "pooled"),
]


@pytest.mark.all_layers
@pytest.mark.parametrize(("name", "args", "reason"), ARGUMENTS)
def test_arguments_out_of_range_are_named(name, args, reason):
    with pytest.raises(ConfigError) as refused:
        build_methods([{"name": name, "args": args}])
    assert str(refused.value).startswith(f"{name}: ")
    assert reason in str(refused.value)


@pytest.mark.all_layers
@pytest.mark.parametrize(("word", "names", "excluding"), EXCLUDED)
def test_methods_that_do_not_go_together_are_named_with_the_word(word, names, excluding):
    for name in names.split():
        with pytest.raises(ConfigError) as refused:
            build_methods([{"name": name}, {"name": excluding}])
        message = str(refused.value)
        assert f" {word} (" in message
        assert {name, excluding} <= set(message.replace(":", "").replace(",", "").split())


CLASSIFYING = [name for name, method in built_in_methods().items() if method.tasks == ("classification",)]


@pytest.mark.parametrize("name", CLASSIFYING)
def test_methods_for_classification_refuse_segmentation_and_other_last_layers(tiny_config, name):
    with pytest.raises(ConfigError, match=f"{name} is defined only for classification"):
        Composition(tiny_config(name))
    with pytest.raises(ConfigError, match=f"{name}: the network's last layer is not fully connected"):
        use(name, nn.Sequential(nn.Conv2d(3, 2, 1)))


def use(name, network):
    (method,) = build_methods([{"name": name}])
    task = ClassificationTask(["a", "b"], scale=True)
    method.prepare_network(network)
    method.every_round(ServerContext(network, 3, task=task))
    method.at_site(SiteContext("A", network, task=task))
