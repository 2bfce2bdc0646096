"""The project file for provisioning, and the enrolment of participants that keep their keys."""
