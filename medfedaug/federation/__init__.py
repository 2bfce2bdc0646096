"""The protocol, the server, the site and the in-process runner; no engine is imported here."""

import lazy_loader

# Names are imported when they are used; the stub beside this file lists them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
