"""The papers' experiments and their published numbers."""
