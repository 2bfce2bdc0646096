"""Methods exclude each other as they declare, in both orders; a site or server refuses a method by itself."""

import itertools
import re

import pytest

from medfedaug.config.run import RunConfig
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation import FederationServer, SiteTrainer
from medfedaug.hospital.privacy import PrivacyPolicy
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.methods import build_methods, registry
from medfedaug.methods.compatibility import constraints

# For a site of few cases.
SMALL = {"fedmix": {"group": 2}}


def specs(*names: str) -> list[dict]:
    return [{"name": name, "args": SMALL.get(name, {})} for name in dict.fromkeys(names)]


ALONE = {name: build_methods(specs(name))[0] for name in registry.built_in_methods()}
DECLARED = {name: constraints(method) for name, method in ALONE.items()}
REFUSAL = re.compile(
    r"(?P<first>.+) and (?P<second>.+) cannot be combined: (?P<one>.+) (requires|provides) (?P<word>\S+) "
    r"\(.+\), (?P<other>.+) excludes it; .+"
)


def conflicts(pair: tuple[str, str]) -> set[str]:
    """Words that the one declares to exclude, and the other to require or provide."""
    result = set()
    for one, other in (pair, pair[::-1]):
        result |= DECLARED[one].excludes & (DECLARED[other].requires | DECLARED[other].provides)
    return {"method" if word.startswith("method:") else word for word in result}


def ground(pair: tuple[str, str]) -> str:
    """The word on which a pair is refused, empty where it is not; the line names both methods."""
    try:
        build_methods(specs(*pair))
    except ConfigError as error:
        match = REFUSAL.fullmatch(str(error))
        assert match
        assert {match["first"], match["second"]} == {match["one"], match["other"]} == set(pair)
        return "method" if match["word"].startswith("method:") else match["word"]
    return ""


def test_the_same_pairs_exclude_each_other_in_both_orders():
    grounds = set()
    for pair in itertools.combinations(ALONE, 2):
        words = conflicts(pair)
        for order in (pair, pair[::-1]):
            word = ground(order)
            assert word in words if words else not word, order
            grounds.add(word)
    assert grounds - {""} == {
        "method",
        "normalised_input",
        "global_model",
        "labels",
        "complete_state_dict",
        "separate_sites",
        "averaged_parameters",
    }


POLICY = {
    "noise_multiplier": 50.0,
    "epsilon": 1000.0,
    "clip": dict.fromkeys(("intensity_mean", "intensity_std", "feature_mean", "feature_std"), (0.01, 2.0)),
}
PRIVATE = "site site_A: it trains with differential privacy, and "
SECURE = "secure aggregation: "
# Lines with which a method is refused by itself, and the methods.
REFUSED = {
    "noise": {
        "site site_A: {}: noise cannot be added to this exchange": "bin class_mean dac_sc feddg "
        "feddg_ga fedharmo fedmix fednova scaffold"
    },
    "private steps": {
        PRIVATE + "nothing bounds what one case changes in the local training of {}": "bin condist dac_sc "
        "ditto feddg feddg_ga fedfa fedfa_h fedharmo fedmix fednova fedprox fedrobust fedsam "
        "finetune manifold_mixup mixstyle mixup moex randconv scaffold "
        "teacher",
        "site site_A: {}: noise cannot be added to this exchange": "class_mean",
        PRIVATE + "{} normalises with statistics of all the site's images": "norm",
    },
    "secure aggregation": {
        SECURE + "{} makes the global model from each site's own": "class_mean "
        "feddg_ga fednova median trimmed_mean",
        SECURE + "what {} exchanges before training is each site's own": "feddg fedharmo fedmix fedrdn",
        SECURE + "{}: its result does not follow": "scaffold",
        SECURE + "these methods send nothing that is added up": "single",
    },
}
# Of those for segmentation on a network without batch norm.
SUITABLE = [
    name
    for name, method in ALONE.items()
    if "segmentation" in method.tasks
    and name not in ("bin", "fedfd", "fedfd_a", "fedfd_prompt", "fixbn", "silobn", "pooled")
]


@pytest.mark.parametrize("setting", REFUSED)
def test_a_method_by_itself_is_refused_where_its_values_cannot_be_covered(setting, phantom_dir):
    pytest.importorskip("opacus")
    policy = {"private steps": {**POLICY, "sgd_noise_multiplier": 1.0}, "noise": POLICY}.get(setting, {})
    config = RunConfig(
        network="unet",
        network_args={"channels": [2, 4, 4], "strides": [2, 2], "norm": "instance"},
        batch_size=2,
        secure_aggregation=setting == "secure aggregation",
    )
    site = find_sites(phantom_dir)[0]

    def refusal(name: str) -> str:
        try:
            run = RunConfig.from_dict({**config.to_dict(), "methods": specs(name)})
            FederationServer(run)
            trainer = SiteTrainer(
                run, site, "cpu", privacy=SitePrivacy(PrivacyPolicy(min_images=1, **policy))
            )
            trainer.open(site.name)
            for method, part in trainer.parts.items():
                for exchange in (part.before_training, part.every_round):
                    if exchange is not None:
                        trainer.guard.check(method, exchange)
        except MedFedAugError as error:
            return re.sub(r" \([^)]*\)", "", str(error))  # without its asides
        return ""

    expected = {name: line.format(name) for line, names in REFUSED[setting].items() for name in names.split()}
    for name in SUITABLE:
        line = refusal(name)
        assert line.startswith(expected[name]) if name in expected else not line, f"{name}: {line!r}"
