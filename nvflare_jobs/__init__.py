"""The federation as an NVFlare job: recipe, controller, executor and the simulator."""

import lazy_loader

# Names are imported when they are used: a site's parent process runs for months and needs only the launcher,
# not PyTorch. The stub beside this file lists them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
