"""The job: its recipe, and its components at the server and at the sites."""
