"""Which jobs a site takes part in: its own rules, and its administrator's approval.

The rules belong to the site and are never part of a job. ``docs/threats.md`` says which attack each of them
stops.
"""

from medfedaug.admission.book import JOBS_FOLDER, JobBook, JobEntry, Origin, job_hash
from medfedaug.admission.rules import JobRules

__all__ = ["JOBS_FOLDER", "JobBook", "JobEntry", "JobRules", "Origin", "job_hash"]
