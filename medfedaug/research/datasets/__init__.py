"""Published data sets and the phantom, as sites."""
