"""Files, validation, plugins and class paths; nothing here imports torch."""
