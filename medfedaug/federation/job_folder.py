"""Names of the files of a job and of a finished run, for all that reads or writes them."""

from __future__ import annotations

__all__ = [
    "ALIVE",
    "EVALUATION",
    "EVENTS",
    "FINAL_MODEL",
    "GLOBAL_MODEL",
    "JOB_FOLDER",
    "PULSE",
    "RESULTS",
    "SESSION",
    "STATE",
    "STATISTICS",
]

JOB_FOLDER = "medfedaug"
"""The folder of our files in the run folder of a job."""
EVENTS = "events.jsonl"
"""File of a job's events, one JSON object per line."""
RESULTS = "results.json"
"""Settings and scores of a finished run."""
GLOBAL_MODEL, FINAL_MODEL = "global_model.pt", "final_model.pt"
"""The models of the selected and of the last round."""
STATISTICS = "statistics.json"
"""Channel statistics of the sites."""
STATE = "state"
"""Folder of what server and sites keep after every round."""
EVALUATION = "evaluation.json"
"""Scores of an evaluation."""
ALIVE = "alive"
"""Touched by the job's process every `PULSE` seconds."""
PULSE = 10.0
SESSION = "session.json"
"""At a site, as long as the job has not ended there: what it needs to come back after a reboot."""
