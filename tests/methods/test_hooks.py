"""Every hook that a method may have is called by a federation, whoever adds one."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from medfedaug.data.phantom import make_phantom
from medfedaug.federation import run_in_process
from medfedaug.hospital.privacy import PrivacyPolicy
from medfedaug.methods import base, registry
from medfedaug.methods.base import (
    INTENSITY_MEAN,
    Aggregator,
    Contributions,
    Method,
    ServerExchange,
    SiteExchange,
    SitePart,
)

SITES = ["site_A", "site_B", "site_C"]  # the third has no training cases
KEPT = "model.1.submodule.0.adn.N.bias"


def hooks(cls) -> set[str]:
    """The public methods that a class of `base` declares."""
    return {name for name, value in vars(cls).items() if inspect.isfunction(value) and name[0] != "_"}


def interfaces() -> list[type]:
    """The classes of `base` that a method is made of; what methods are handed (`SiteContext`) is data."""
    values = [value for value in vars(base).values() if inspect.isclass(value)]
    own = [cls for cls in values if cls.__module__ == base.__name__ and not dataclasses.is_dataclass(cls)]
    return [cls for cls in own if hooks(cls)]


class Calls:
    """Record the called hooks, as ``SitePart.loss``."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def spy(self, interface: type, name: str, /, **answers) -> type:
        """A class whose hooks write themselves down, then do what ``answers`` or the interface says."""

        def spied(hook):
            does = answers.get(hook) or getattr(interface, hook)

            def method(part, *args, **kwargs):
                self.seen.add(f"{interface.__name__}.{hook}")
                return does(part, *args, **kwargs)

            return method

        known = {key: value for key, value in answers.items() if key not in hooks(interface)}
        return type(name, (interface,), {**{hook: spied(hook) for hook in hooks(interface)}, **known})


VALUE = {"value": torch.ones(2)}


def spying_method(calls: Calls, *, summed: bool = False) -> type[Method]:
    """A method that has everything a method can have, or what it can have under secure aggregation."""
    site_exchange = calls.spy(
        SiteExchange,
        "Exchange",
        collect=lambda _: dict(VALUE),
        apply=lambda *_: None,
        contributions=lambda part, _: Contributions(
            {"value": INTENSITY_MEAN}, (dict(VALUE) for _ in part.context.case_moments())
        ),
    )
    server_exchange = calls.spy(
        ServerExchange,
        "Server",
        shapes={"value": (2,)},
        accept=lambda *_: None,
        result=lambda _: dict(VALUE),
        state=lambda _: dict(VALUE),
        terms=lambda _, payload: dict(payload),
        accept_mean=lambda *_: None,
    )
    aggregator = calls.spy(
        Aggregator, "Spy", result=lambda _, round_: dict(round_.mean), state=lambda _: dict(VALUE)
    )
    part = calls.spy(SitePart, "Part", state=lambda _: dict(VALUE))

    def at_site(_, context):
        result = part()
        result.before_training, result.every_round = None if summed else site_exchange(), site_exchange()
        for exchange in filter(None, (result.before_training, result.every_round)):
            exchange.context = context
        return result

    return calls.spy(
        Method,
        "Spying",
        name="summed" if summed else "spy",
        local_entries=lambda _, network: frozenset({KEPT}),
        at_site=at_site,
        before_training=lambda *_: None if summed else server_exchange(),
        every_round=lambda *_: server_exchange(),
        aggregator=lambda *_: None if summed else aggregator(),
    )


def test_the_spies_know_every_interface():
    assert set(interfaces()) == {Method, SitePart, SiteExchange, ServerExchange, Aggregator}


def test_a_federation_calls_every_hook(phantom_dir, tiny_config, tmp_path, monkeypatch):
    pytest.importorskip("opacus")  # the guard's noise calls two of them
    calls = Calls()
    monkeypatch.setitem(registry._BUILT_IN, "spy", spying_method(calls))
    state = tmp_path / "state"
    run_in_process(tiny_config("spy", rounds=1), phantom_dir, SITES, "cpu", state_dir=state)
    # Continued, server and sites find what they kept.
    run_in_process(tiny_config("spy", rounds=2), phantom_dir, SITES, "cpu", state_dir=state, resume=True)
    bounds = {INTENSITY_MEAN: (0.0, 2.0)}
    policy = PrivacyPolicy(min_images=1, noise_multiplier=50.0, epsilon=1000.0, clip=bounds)
    run_in_process(tiny_config("spy", rounds=1), phantom_dir, SITES, "cpu", policy=policy)
    monkeypatch.setitem(registry._BUILT_IN, "summed", spying_method(calls, summed=True))
    three = tmp_path / "three"  # that train: no fewer add up what they send
    names = [site.name for site in make_phantom(three, sites=3, patients=3, shape=(32, 32, 6))]
    run_in_process(tiny_config("summed", rounds=1, secure_aggregation=True), three, names, "cpu")
    declared = {f"{cls.__name__}.{hook}" for cls in interfaces() for hook in hooks(cls)}
    # Several processes of a site have tests of their own (tests/nvflare_jobs/job/test_ranks.py).
    assert declared - calls.seen == {"SitePart.continue_round"}


def test_a_hook_that_nobody_calls_is_found(monkeypatch):
    monkeypatch.setattr(SitePart, "never_called", lambda part: None, raising=False)
    assert "never_called" in hooks(SitePart)
