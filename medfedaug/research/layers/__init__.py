"""Layers of the compared methods."""
