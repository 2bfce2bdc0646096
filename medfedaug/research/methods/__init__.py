"""The compared methods, one file each."""
