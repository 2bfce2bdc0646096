"""Secure aggregation: the server learns the sum over several sites, and nothing of a single site.

``docs/threats.md`` describes its protection and its limits.
"""
