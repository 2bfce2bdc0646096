"""A site's rules: the jobs that it takes part in, and the limits of what its methods send beside the model.

The policy belongs to the site and is never part of a job. Everything that a method's exchange gives passes
through the site's `PrivacyGuard` (`medfedaug.federation.site.privacy_guard`), and nothing else does: model
weights, losses, scores and numbers of samples are not covered by any ε that is printed here. What of a site's
scores leaves it, `released_scores` decides. ``docs/privacy.md`` has the threat model and the argument,
``docs/threats.md`` says which attack each rule for jobs stops.
"""

from medfedaug.privacy.accountant import epsilon_spent, noise_multiplier_for
from medfedaug.privacy.job_log import JOBS_FOLDER, JobBook, JobEntry, Origin, job_hash
from medfedaug.privacy.job_policy import JobRules
from medfedaug.privacy.ledger import LEDGER_FILE, PrivacyLedger, Release
from medfedaug.privacy.policy import PrivacyPolicy
from medfedaug.privacy.pseudonyms import Pseudonyms, public_text
from medfedaug.privacy.score_release import class_labels, released_difference, released_loss, released_scores

__all__ = [
    "JOBS_FOLDER",
    "LEDGER_FILE",
    "JobBook",
    "JobEntry",
    "JobRules",
    "Origin",
    "PrivacyLedger",
    "PrivacyPolicy",
    "Pseudonyms",
    "Release",
    "class_labels",
    "epsilon_spent",
    "job_hash",
    "noise_multiplier_for",
    "public_text",
    "released_difference",
    "released_loss",
    "released_scores",
]
