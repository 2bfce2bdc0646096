"""A site's half of a federation."""
