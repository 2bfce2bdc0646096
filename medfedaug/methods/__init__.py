"""One file a method, its site half and its server half side by side."""

from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.fedavg import FedAvg
from medfedaug.methods.fedbn import FedBN
from medfedaug.methods.fedfa import FedFA
from medfedaug.methods.fedfa_h import FedFAh
from medfedaug.methods.fedfd import FedFD
from medfedaug.methods.fedfd_a import FedFDA
from medfedaug.methods.fedfd_prompt import FedFDPrompt
from medfedaug.methods.fedprox import FedProx
from medfedaug.methods.fedrdn import FedRDN
from medfedaug.methods.fraug import FRAug
from medfedaug.methods.norm import Norm
from medfedaug.methods.registry import build_methods, method_names, parse_methods
from medfedaug.methods.silobn import SiloBN

__all__ = [
    "FRAug",
    "FedAvg",
    "FedBN",
    "FedFA",
    "FedFAh",
    "FedFD",
    "FedFDA",
    "FedFDPrompt",
    "FedProx",
    "FedRDN",
    "Method",
    "Norm",
    "ServerExchange",
    "SiloBN",
    "SiteExchange",
    "SitePart",
    "build_methods",
    "method_names",
    "parse_methods",
]
