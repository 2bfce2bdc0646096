"""The limits of what a site's methods send beside the model: a minimum number of cases, noise, and a budget.

The policy belongs to the site and is never part of a job. Everything that a method's exchange gives passes
through the site's `PrivacyGuard`, and nothing else does: model weights, losses and numbers of samples are not
covered by any ε that is printed here. `released_scores` decides what of a site's scores leaves it, and the
`PrivacyLedger` of how many models.
``docs/privacy.md`` has the threat model and the argument.
"""

from medfedaug.accounting import epsilon_spent, noise_multiplier_for
from medfedaug.privacy.ledger import LEDGER_FILE, PrivacyLedger, Release
from medfedaug.privacy.policy import PrivacyPolicy
from medfedaug.privacy.pseudonyms import Pseudonyms, public_text
from medfedaug.privacy.scores import class_labels, released_difference, released_loss, released_scores

__all__ = [
    "LEDGER_FILE",
    "PrivacyLedger",
    "PrivacyPolicy",
    "Pseudonyms",
    "Release",
    "class_labels",
    "epsilon_spent",
    "noise_multiplier_for",
    "public_text",
    "released_difference",
    "released_loss",
    "released_scores",
]
