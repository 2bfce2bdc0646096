"""The project file for provisioning, and a rehearsal of a deployment on one machine."""
