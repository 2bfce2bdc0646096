"""Methods by name: what can be asked for, and what is said of what cannot."""

import pytest

from medfedaug.errors import ConfigError
from medfedaug.methods import build_methods, method_names, parse_methods


def test_parse_methods_keeps_order_and_arguments():
    assert parse_methods(" FedRDN, fedfa ", {"fedfa": {"prob": 0.2}}) == [
        {"name": "fedrdn", "args": {}},
        {"name": "fedfa", "args": {"prob": 0.2}},
    ]
    assert parse_methods("fedrdn_v,fedfa+", {"fedfa_h": {"bins": 4}}) == [
        {"name": "fedrdn", "args": {"average": True}},
        {"name": "fedfa", "args": {}},
        {"name": "fedfa_h", "args": {"bins": 4}},
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: parse_methods("fedavg,fedwrong"), ["'fedwrong'", *method_names()]),
        (lambda: parse_methods(" , "), ["no method"]),
        (lambda: parse_methods("fedavg", {"fedfa": {"prob": 1}}), ["fedfa", "not among"]),
        (lambda: build_methods([{"name": "fedfa", "args": {"probability": 1}}]), ["probability", "prob"]),
        (lambda: build_methods([{"name": "fedavg", "args": {"x": 1}}]), ["known: none"]),
        (lambda: build_methods([{"name": "fedfa"}, {"name": "fedfa"}]), ["more than once"]),
    ],
)
def test_what_cannot_be_built_says_why(call, words):
    with pytest.raises(ConfigError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
