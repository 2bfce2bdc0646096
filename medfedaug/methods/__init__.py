"""The methods, one file each, with the site half and the server half side by side."""

from medfedaug.methods.base import Aggregator as Aggregator
from medfedaug.methods.base import Method as Method
from medfedaug.methods.base import ServerExchange as ServerExchange
from medfedaug.methods.base import SiteExchange as SiteExchange
from medfedaug.methods.base import SitePart as SitePart
from medfedaug.methods.catalogue import *  # noqa: F403
from medfedaug.methods.registry import build_methods as build_methods
from medfedaug.methods.registry import method_names as method_names
from medfedaug.methods.registry import parse_methods as parse_methods
