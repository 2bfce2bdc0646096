"""Kinds of the values that methods exchange."""

# A site that adds noise has public bounds for these.
INTENSITY_MEAN, INTENSITY_STD = "intensity_mean", "intensity_std"
FEATURE_MEAN, FEATURE_STD = "feature_mean", "feature_std"
HISTOGRAM = "histogram"
# The server compares the sites' values of these (`medfedaug.federation.server.outlier_checks`).
VARIANCE, WEIGHTS, STEPS = "variance", "weights", "steps"
