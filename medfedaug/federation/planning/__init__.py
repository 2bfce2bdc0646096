"""A plan from the sites' fingerprints, before training."""
