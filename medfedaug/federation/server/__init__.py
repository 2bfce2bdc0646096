"""The server's half of a federation."""
