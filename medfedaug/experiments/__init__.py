"""The papers' experiments: presets, sweeps over them, and their tables beside the published numbers."""
