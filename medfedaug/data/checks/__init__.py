"""Checks of a site's list of cases, and across sites."""
