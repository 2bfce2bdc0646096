"""A site's rules: the jobs that it takes part in, and the limits of what its methods send beside the model.

The policy belongs to the site and is never part of a job. Everything that a method's exchange gives passes
through the site's `PrivacyGuard` (`medfedaug.federation.messages.privacy_guard`), and nothing else does:
model weights, losses, scores and numbers of samples are not covered by any ε that is printed here. What of a
site's scores leaves it, `released_scores` decides. ``docs/privacy.md`` has the threat model and the argument,
``docs/threats.md`` says which attack each rule for jobs stops.
"""

import lazy_loader

# Names are imported when they are used; the stub beside this file lists them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
