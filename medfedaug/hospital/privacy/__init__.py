"""A site's rules for jobs, and the limits of what its methods send in addition to the model.

The policy belongs to the site and is never part of a job. A method's exchange, and nothing else, passes
through the site's `PrivacyGuard` (`medfedaug.hospital.privacy.guard`): its ε does not cover model
weights, losses, scores and numbers of samples. `released_scores` decides which scores leave a site.
``docs/privacy.md`` has the threat model and the argument, ``docs/threats.md`` the attack that each rule for
jobs stops.
"""

import lazy_loader

# Names are imported when they are used; the stub `__init__.pyi` lists them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
