"""Imports without garbage collection, which is on again whatever happens."""

import gc
from contextlib import suppress

from medfedaug.cli.loading import importing


def test_collection_is_off_while_importing_and_on_again_after_a_failed_import():
    assert gc.isenabled()
    with suppress(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    with importing():
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
