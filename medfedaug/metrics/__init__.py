"""Metrics: their registry, their computation and tests of significance."""
