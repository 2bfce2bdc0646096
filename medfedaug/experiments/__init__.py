"""The papers' experiments: presets, sweeps over them, and their tables next to the published numbers."""
