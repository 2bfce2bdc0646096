"""Settings of a run: one definition each, with its default, check and help text."""
