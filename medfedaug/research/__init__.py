"""What a study adds: published data sets, the papers' experiments, compared methods, sweeps, comparison."""
