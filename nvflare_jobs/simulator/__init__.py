"""NVFlare's simulator, started for the command `simulate`."""
