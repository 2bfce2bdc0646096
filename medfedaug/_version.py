"""The one place where the version is written."""

__version__ = "0.4.0.dev0"
