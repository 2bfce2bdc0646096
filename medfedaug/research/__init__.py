"""The layer of a study: published data sets, the papers' experiments, compared methods, sweeps, tables."""
