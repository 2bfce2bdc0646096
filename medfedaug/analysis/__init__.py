"""Reads, compares, plots and reports finished runs."""

import lazy_loader

# Names are imported on first use; the stub of this file lists them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
