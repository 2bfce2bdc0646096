"""Names of the files of a job, in its folder in a kit's workspace."""

from __future__ import annotations

__all__ = ["ALIVE", "EVENTS", "JOB_FOLDER", "PULSE", "RESULTS", "SESSION"]

JOB_FOLDER = "medfedaug"
"""The folder of our files in the run folder of a job."""
EVENTS = "events.jsonl"
"""File of a job's events, one JSON object per line."""
RESULTS = "results.json"
"""Settings and scores of a finished run."""
ALIVE = "alive"
"""Touched by the job's process every `PULSE` seconds."""
PULSE = 10.0
SESSION = "session.json"
"""At a site, as long as the job has not ended there: what it needs to come back after a reboot."""
