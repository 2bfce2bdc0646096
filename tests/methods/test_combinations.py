"""Every pair of methods is refused where declarations, or one of the two alone, say so, and nowhere else."""

from __future__ import annotations

import itertools

import pytest
from method_combinations import SETTINGS, Sites, ground, outcome, pairs, specs

from medfedaug.errors import ConfigError
from medfedaug.methods import Method, build_methods, registry
from medfedaug.methods.compatibility import constraints

ALONE = {name: build_methods(specs([name]))[0] for name in registry.built_in_methods()}
DECLARED = {name: constraints(method) for name, method in ALONE.items()}
PHOTOGRAPHS = [name for name, setting in SETTINGS.items() if setting.photographs]
WITH_BATCH_NORM = [name for name in SETTINGS if name.endswith("_batch_norm")]
U_NET = [name for name in SETTINGS if name not in (*PHOTOGRAPHS, *WITH_BATCH_NORM)]
PRIVATE = "site site_A: it trains with differential privacy, and "
SECURE = "secure aggregation: "

# Refusals of a method by itself that do not follow from its words, tasks and dimensions.
REFUSED_ALONE = [
    (
        ["photographs_vit"],
        "network vit: the stages of ViTClassifier are not known",
        "dac_sc fedfa manifold_mixup",
    ),
    (["photographs_vit"], "{}: the stages of ViTClassifier are not known", "fedfa_h"),
    (["photographs_vit"], "network vit: unknown stage 1 of ViTClassifier", "mixstyle moex"),
    ([*U_NET, "photographs", "photographs_vit"], "network ", "bin fedfd fedfd_a"),
    ([*U_NET, "photographs", "photographs_vit"], "{}: ", "fixbn"),
    ([*U_NET, "photographs", "photographs_vit"], "{} keeps running statistics at the site, and ", "silobn"),
    ([*U_NET, *WITH_BATCH_NORM[:2], "photographs_batch_norm", "photographs"], "network ", "fedfd_prompt"),
    (["volumes_batch_norm", "volumes"], "{} averages the amplitudes of whole images", "fedharmo"),
    (
        ["noise"],
        "site site_A: {}: noise cannot be added to this exchange",
        "bin class_mean dac_sc feddg feddg_ga fedharmo fedmix fednova scaffold",
    ),
    (
        ["private_steps"],
        PRIVATE + "nothing bounds what one case changes in the local training of {}",
        "bin condist dac_sc ditto feddg feddg_ga fedfa fedfa_h fedharmo fedmix fednova fedprox "
        "fedrobust fedsam finetune manifold_mixup mixstyle mixup moex moon "
        "randconv scaffold teacher",
    ),
    (["private_steps"], PRIVATE + "{} normalises with statistics of all the site's images", "norm"),
    (
        ["secure_aggregation"],
        SECURE + "{} makes the global model from each site's own",
        "class_mean dp_fedavg feddg_ga fednova median trimmed_mean",
    ),
    (
        ["secure_aggregation"],
        SECURE + "what {} exchanges before training is each site's own",
        "feddg fedharmo fedmix fedrdn",
    ),
    (["secure_aggregation"], SECURE + "{}: its result does not follow", "scaffold"),
    (["secure_aggregation"], SECURE + "these methods send nothing that is added up", "single"),
]
# Settings in which two methods together are another case than each alone, and the outcome.
TOGETHER = [
    (["secure_aggregation"], "single", "bin dac_sc fedfa fedfa_h", "allowed"),  # these send something
    (WITH_BATCH_NORM, "dp_fedavg", "fedbn partialfed silobn", "allowed"),  # the statistics stay at the sites
    *(
        (
            ["noise"],
            name,
            "fedbn norm partialfed single",
            f"site site_A: {name}: noise would not cover its statistics",
        )
        for name in ("fedfa", "fedfa_h")
    ),
]
# One pair for each word on which two methods can be refused.
EXAMPLES = {
    "method": ("fedfd", "fedfd_a"),
    "normalised_input": ("fedrdn", "norm"),
    "global_model": ("fedavgm", "median"),
    "labels": ("mixup", "fedproto"),
    "complete_state_dict": ("fedfd_a", "moon"),
    "separate_sites": ("ditto", "pooled"),
    "averaged_parameters": ("scaffold", "single"),
}


def conflicts(pair: tuple[str, str]) -> set[str]:
    """Words that the one declares to exclude, and the other to require or provide."""
    result = set()
    for one, other in (pair, pair[::-1]) if len(set(pair)) > 1 else ():
        result |= DECLARED[one].excludes & (DECLARED[other].requires | DECLARED[other].provides)
    return {"method" if word.startswith("method:") else word for word in result}


ALLOWED = [pair for pair in pairs() if not conflicts(pair)]
# A few pairs of each setting, other ones in each.
SAMPLE = [
    (pair, setting)
    for number, setting in enumerate(SETTINGS)
    for pair in itertools.islice(ALLOWED, 17 * number, None, 150 if number else 40)
]


def refused_alone(name: str, setting: str) -> set[str]:
    """Beginnings of the lines with which a method alone may be refused in a setting; empty for none."""
    method, declared = ALONE[name], DECLARED[name]
    task = "classification" if setting in PHOTOGRAPHS else "segmentation"
    values = {
        text.format(name)
        for where, text, names in REFUSED_ALONE
        if setting in where and name in names.split()
    }
    if task not in method.tasks:
        values.add(f"{name} is defined for ")
    if setting.startswith("volumes") and 3 not in method.dimensions:
        values.add(f"{name} is not defined for volumes")
    if setting in WITH_BATCH_NORM:
        values |= declared.excludes & {"averaged_buffers"}
    if setting == "max_share":
        values |= declared.excludes & {"given_shares"}
    if setting == "labels_alone":
        values |= (declared.requires | declared.provides) & {"soft_labels"}
    return values


def exchanges(name: str) -> bool:
    """Return whether a method exchanges something by default; fedbn and silobn need other arguments."""
    hooks = ("before_training", "every_round")
    has_one = any(getattr(type(ALONE[name]), hook) is not getattr(Method, hook) for hook in hooks)
    return has_one and name not in ("fedbn", "silobn")


def expected(pair: tuple[str, str], setting: str) -> set[str]:
    """Beginnings of the outcomes that a pair may have in a setting."""
    if len(set(pair)) == 1:
        return refused_alone(pair[0], setting) or {"allowed"}
    for where, one, others, together in TOGETHER:
        if setting in where and one in pair and {*pair} & {*others.split()}:
            alone = {f"as {name} alone" for name in pair if name != one and refused_alone(name, setting)}
            return alone or {together}
    alone = {f"as {name} alone" for name in pair if refused_alone(name, setting)}
    if any("exchange" in DECLARED[one].excludes and exchanges(other) for one, other in (pair, pair[::-1])):
        return alone | {"exchange"}
    return alone or {"allowed"}


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    return Sites(tmp_path_factory.mktemp("combinations"))


def check(sites: Sites, pair: tuple[str, str], setting: str) -> None:
    result = outcome(sites, pair, setting)
    words = expected(pair, setting)
    assert result.startswith(tuple(words)), f"{pair} in {setting}: {result!r}, and not {words}"


@pytest.mark.parametrize("word", EXAMPLES)
def test_two_methods_are_refused_on_each_ground(word):
    assert conflicts(EXAMPLES[word]) >= {word}
    with pytest.raises(ConfigError) as refused:
        build_methods(specs(EXAMPLES[word]))
    assert ground(str(refused.value), EXAMPLES[word]) == word


def test_the_same_pairs_exclude_each_other_in_both_orders():
    for pair in pairs():
        for order in dict.fromkeys((pair, pair[::-1])):
            words = conflicts(pair)
            if not words:
                build_methods(specs(order))
                continue
            with pytest.raises(ConfigError) as refused:
                build_methods(specs(order))
            assert ground(str(refused.value), pair) in words, order


@pytest.mark.parametrize(("pair", "setting"), SAMPLE)
def test_a_sample_of_pairs_in_each_setting(sites, pair, setting):
    pytest.importorskip("opacus")
    check(sites, pair, setting)


@pytest.mark.slow
@pytest.mark.parametrize("first", ALONE)
def test_every_pair_in_every_setting(sites, first):
    pytest.importorskip("opacus")
    for pair in ALLOWED:
        if pair[0] == first:
            for setting in SETTINGS:
                check(sites, pair, setting)


@pytest.mark.slow
@pytest.mark.parametrize("first", ALONE)
def test_the_order_of_two_methods_decides_nothing(sites, first):
    names = ("slices_batch_norm", "slices", "photographs_batch_norm", "secure_aggregation", "max_share")
    for pair in ALLOWED:
        if pair[0] == first:
            allowed = [
                [outcome(sites, order, name) == "allowed" for name in names] for order in (pair, pair[::-1])
            ]
            assert allowed[0] == allowed[1], pair
