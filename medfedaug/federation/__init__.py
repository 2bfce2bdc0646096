"""The site's trainer, the server's aggregation and the in-process runner; no engine is imported here."""

from medfedaug.averaging import WeightedMean
from medfedaug.federation.inprocess import run_in_process
from medfedaug.federation.messages import Reply, Request
from medfedaug.federation.server import FederationServer
from medfedaug.federation.site import Site, SiteTrainer

__all__ = ["FederationServer", "Reply", "Request", "Site", "SiteTrainer", "WeightedMean", "run_in_process"]
