"""Whether what was promised when a model was accepted still holds at a hospital."""
