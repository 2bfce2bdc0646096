"""Augmentation against feature shift for medical imaging sites that train together without sharing images.

The names that most scripts need are here, and nothing is imported before one of them is used::

    import medfedaug as mfa

    run = mfa.simulate("data", "runs/fedrdn", methods="fedrdn", rounds=20)

The sub-packages, by what a user looks for:

* `medfedaug.transforms`: MONAI transforms (FedRDN).
* `medfedaug.models`: layers and their insertion into MONAI networks (FFA).
* `medfedaug.functional`: the papers' equations as pure functions on tensors.
* `medfedaug.statistics`: channel statistics of a site, in one streaming pass.
* `medfedaug.methods`: one file per method, site half and server half side by side.
* `medfedaug.federation`: the site's trainer, the server's aggregation, the in-process runner.
* `medfedaug.nvflare_jobs`: the same federation as an NVFlare job.
"""

import lazy_loader

# Names are imported when they are used; the stub beside this file lists them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
