"""Promises of a finished model at a site, and checks that they still hold."""
