"""A server's or a site's kit: its configuration, its process, and the checks of both."""
