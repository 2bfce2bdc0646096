"""The methods by name, and the checks that several go together."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from medfedaug.errors import ConfigError
from medfedaug.methods.arguments import check_arguments
from medfedaug.methods.base import Method
from medfedaug.methods.fedavg import FedAvg
from medfedaug.methods.fedavgm import FedAvgM
from medfedaug.methods.fedbn import FedBN
from medfedaug.methods.feddyn import FedDyn
from medfedaug.methods.fedfa import FedFA
from medfedaug.methods.fedfa_h import FedFAh
from medfedaug.methods.fedfd import FedFD
from medfedaug.methods.fedfd_a import FedFDA
from medfedaug.methods.fedfd_prompt import FedFDPrompt
from medfedaug.methods.fedharmo import FedHarmo
from medfedaug.methods.fedmix import FedMix
from medfedaug.methods.fednova import FedNova
from medfedaug.methods.fedproto import FedProto
from medfedaug.methods.fedprox import FedProx
from medfedaug.methods.fedrdn import FedRDN
from medfedaug.methods.fedrobust import FedRobust
from medfedaug.methods.fedsam import FedSAM
from medfedaug.methods.fedsr import FedSR
from medfedaug.methods.finetune import FineTune
from medfedaug.methods.fpl import FPL
from medfedaug.methods.fraug import FRAug
from medfedaug.methods.manifold_mixup import ManifoldMixUp
from medfedaug.methods.mixstyle import MixStyle
from medfedaug.methods.mixup import MixUp
from medfedaug.methods.moex import MoEx
from medfedaug.methods.norm import Norm
from medfedaug.methods.partialfed import PartialFed
from medfedaug.methods.partialfed_adaptive import PartialFedAdaptive
from medfedaug.methods.pooled import Pooled
from medfedaug.methods.randaugment import RandAugment
from medfedaug.methods.scaffold import Scaffold
from medfedaug.methods.silobn import SiloBN
from medfedaug.methods.single import Single

__all__ = ["build_methods", "method_names", "parse_methods"]

_METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        *(FedAvg, FedProx, FedBN, SiloBN, Norm, FedRDN, FedFA, FedFAh, FedFD, FedFDA, FedFDPrompt, FRAug),
        *(FedAvgM, Scaffold, FedNova, FedDyn, FedSAM, FedMix, MixUp, ManifoldMixUp, MixStyle, MoEx),
        *(FedHarmo, PartialFed, PartialFedAdaptive, RandAugment, FedProto, FPL, FedSR, FedRobust, FineTune),
        *(Single, Pooled),
    )
}

# The extension points that are about what leaves a site, or does not.
_SHARING = ("kept_at_site", "before_training", "every_round", "aggregator")

# Published names of a combination, of a method with an argument, or that other papers give to a method.
_ALIASES: dict[str, list[dict[str, Any]]] = {
    "fedrdn_v": [{"name": "fedrdn", "args": {"average": True}}],
    "fedfa+": [{"name": "fedfa"}, {"name": "fedfa_h"}],
    "harmofl": [{"name": "fedharmo"}],
}


def method_names() -> list[str]:
    """The names that `parse_methods` accepts."""
    return [*_METHODS, *_ALIASES]


def parse_methods(text: str, settings: Mapping[str, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """``"fedrdn,fedfa"`` as the specification that `medfedaug.config.RunConfig` holds.

    Args:
        text: names, separated by commas.
        settings: arguments by method, ``{"fedfa": {"prob": 0.3}}``.

    Raises:
        ConfigError: for a name that is not known, and for settings of a method that is not asked for.

    >>> parse_methods("fedrdn,fedfa+", {"fedfa_h": {"bins": 16}})
    [{'name': 'fedrdn', 'args': {}}, {'name': 'fedfa', 'args': {}}, {'name': 'fedfa_h', 'args': {'bins': 16}}]
    """
    settings = dict(settings or {})
    given = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not given:
        raise ConfigError(f"no method was named; choose from {', '.join(method_names())}")
    for name in given:
        if name not in method_names():
            raise ConfigError(f"unknown method {name!r}; choose from {', '.join(method_names())}")
    specs = [spec for name in given for spec in _ALIASES.get(name, [{"name": name}])]
    names = [spec["name"] for spec in specs]
    stray = sorted(set(settings) - set(names))
    if stray:
        raise ConfigError(
            f"arguments for {', '.join(stray)}, which is not among the methods {', '.join(names)}"
        )
    return [
        {"name": spec["name"], "args": {**spec.get("args", {}), **settings.get(spec["name"], {})}}
        for spec in specs
    ]


def build_methods(specs: Sequence[Mapping[str, Any]]) -> list[Method]:
    """Make the methods of a specification, and check that they go together.

    Raises:
        ConfigError: for unknown names or arguments, a method named twice, and two that exclude each other.
    """
    methods = [_build(spec) for spec in specs]
    names = [method.name for method in methods]
    for name in names:
        # The name is also the prefix of a method's keys on the wire.
        if names.count(name) > 1:
            raise ConfigError(f"{name} is named more than once")
    for method in methods:
        for name in method.contains:
            if name in names:
                raise ConfigError(f"{method.name} contains {name}; leave {name} out")
    normalising = [method.name for method in methods if method.normalises_input]
    if len(normalising) > 1:
        raise ConfigError(f"{' and '.join(normalising)} both normalise the input; choose one")
    aggregating = [method.name for method in methods if _has(method, "aggregator")]
    if len(aggregating) > 1:
        raise ConfigError(f"{' and '.join(aggregating)} both make the global model; choose one")
    mixing = [method.name for method in methods if method.mixes_labels]
    if len(mixing) > 1:
        raise ConfigError(f"{' and '.join(mixing)} both mix the labels of a batch; choose one")
    needing = [method.name for method in methods if method.needs_labels]
    if mixing and needing:
        raise ConfigError(f"{mixing[0]} mixes the labels of a batch, and {needing[0]} needs them unmixed")
    pooling = [method.name for method in methods if method.pools_data]
    sharing = [
        method.name
        for method in methods
        if method.personalises or any(_has(method, hook) for hook in _SHARING)
    ]
    if pooling and sharing:
        raise ConfigError(
            f"{pooling[0]} has all images in one place; {sharing[0]} needs sites that are apart"
        )
    return sorted(methods, key=lambda method: method.runs_network_again)


def _has(method: Method, hook: str) -> bool:
    """Whether a method overrides an extension point."""
    return getattr(type(method), hook) is not getattr(Method, hook)


def _build(spec: Mapping[str, Any]) -> Method:
    name, args = spec.get("name"), dict(spec.get("args") or {})
    if name not in _METHODS:
        raise ConfigError(f"unknown method {name!r}; choose from {', '.join(_METHODS)}")
    factory = _METHODS[name]
    known = [] if factory.__init__ is object.__init__ else list(inspect.signature(factory).parameters)
    unknown = sorted(set(args) - set(known))
    if unknown:
        raise ConfigError(
            f"{name} has no argument {', '.join(unknown)}; it takes {', '.join(known) or 'none'}"
        )
    check_arguments(name, factory, args)
    try:
        return factory(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error
