"""Images as a network takes them: normalised, on the plan's grid, and kept."""
