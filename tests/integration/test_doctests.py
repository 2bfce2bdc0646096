"""Every example in a docstring runs."""

import doctest
import importlib

import pytest
from our_modules import modules


@pytest.mark.parametrize("name", [name for name, path in modules().items() if ">>>" in path.read_text()])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
