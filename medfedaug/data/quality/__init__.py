"""Checks of a site's data: duplicates, changed files, intensity scales."""
