"""Training samples: drawn from prepared cases, augmented, made ahead of a step."""
