"""Methods that need a site's account of privacy."""
