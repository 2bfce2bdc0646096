"""A finished run: its folder, predictions, evaluation and export."""
