"""Training samples: drawn from prepared cases, augmented, prefetched."""
