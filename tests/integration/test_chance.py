"""Tests of what no seed fixes are known, so that `tests/support/chance.py` can repeat them."""

from chance import ROOT, SOURCES, drawing_modules


def test_every_module_that_draws_from_the_operating_system_has_its_tests():
    assert drawing_modules() == {*SOURCES}
    for names in SOURCES.values():
        for name in names:
            assert (ROOT / "tests" / name).exists()
