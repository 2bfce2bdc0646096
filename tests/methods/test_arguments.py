"""Arguments of a method are checked by its annotations, wherever it is made."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest

from medfedaug.errors import ConfigError
from medfedaug.methods import FedFAh, FedProx
from medfedaug.methods.arguments import NotNegative, Share
from medfedaug.methods.base import Method


class Custom(Method):
    """A method of another package, with annotations of many kinds."""

    name = "custom"

    def __init__(
        self,
        share: Share = 0.5,
        limit: NotNegative | None = None,
        places: Sequence[int | str] = (),
        kind: Literal["sum", "mean"] = "sum",
        like: np.ndarray | None = None,
        **more: float,
    ) -> None:
        self.given = share, limit, places, kind, like, more


class Unreadable(Method):
    """A method whose annotations mean nothing at run time."""

    name = "unreadable"

    def __init__(self, share: "Nowhere" = 0.5) -> None:  # noqa: F821
        self.share = share


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 1.5}, "share must be at most 1, got 1.5"),
        ({"share": True}, "share must be a number, got True"),
        ({"share": float("nan")}, "share must be a number, got nan"),
        ({"limit": -1}, "limit cannot be negative, got -1"),
        ({"kind": "none"}, "kind must be 'sum' or 'mean', got 'none'"),
        ({"places": "enc1"}, "places .*, got 'enc1'"),
    ],
)
def test_errors_name_the_argument_and_the_values_it_takes(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"^custom: {message}$"):
        Custom(**arguments)


def test_other_arguments_pass_as_they_are():
    like = np.ones(2)
    result = Custom(1, 2, [1, "last"], "mean", like, factor=3).given
    assert result[:4] == (1, 2, [1, "last"], "mean")
    assert result[4] is like
    assert result[5] == {"factor": 3}
    assert FedFAh(bins=np.int64(4)).bins == 4
    assert FedProx(np.float32(0.5)).mu == 0.5
    assert Unreadable("anything").share == "anything"
