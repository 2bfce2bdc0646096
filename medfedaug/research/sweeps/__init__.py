"""Sweeps over runs, seeds and folds, on one machine or a cluster, and search of settings."""
