"""The protocol, the server, the site and the in-process runner; no engine is imported here."""

from medfedaug.federation.in_process import run_in_process
from medfedaug.federation.messages import Reply, Request
from medfedaug.federation.protocol import Carrier, run
from medfedaug.federation.server.server import FederationServer
from medfedaug.federation.site.data_folder import resolve_data_folder
from medfedaug.federation.site.site import Site
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.functional.weighted_mean import WeightedMean

__all__ = [
    "Carrier",
    "FederationServer",
    "Reply",
    "Request",
    "Site",
    "SiteTrainer",
    "WeightedMean",
    "resolve_data_folder",
    "run",
    "run_in_process",
]
