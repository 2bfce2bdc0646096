"""Kinds of the values that methods exchange; a site's policy bounds each of them."""

from __future__ import annotations

# Kinds of exchanged values. A site that adds noise has public bounds for the first four.
INTENSITY_MEAN, INTENSITY_STD = "intensity_mean", "intensity_std"
FEATURE_MEAN, FEATURE_STD = "feature_mean", "feature_std"
HISTOGRAM = "histogram"
# Further ones, of which the server compares the sites' (`medfedaug.federation.server.outlier_checks`).
VARIANCE, WEIGHTS, STEPS = "variance", "weights", "steps"
