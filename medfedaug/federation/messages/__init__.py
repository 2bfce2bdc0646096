"""Messages between server and site, and the checks and files that both sides share."""
