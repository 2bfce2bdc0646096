"""The methods, one file each, with the site half and the server half side by side."""

from medfedaug.methods.base import Aggregator, Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.fedavg import FedAvg
from medfedaug.methods.fedavgm import FedAvgM
from medfedaug.methods.fedbn import FedBN
from medfedaug.methods.feddyn import FedDyn
from medfedaug.methods.fedfa import FedFA
from medfedaug.methods.fedfa_h import FedFAh
from medfedaug.methods.fedfd import FedFD
from medfedaug.methods.fedfd_a import FedFDA
from medfedaug.methods.fedfd_prompt import FedFDPrompt
from medfedaug.methods.fedharmo import FedHarmo
from medfedaug.methods.fedmix import FedMix
from medfedaug.methods.fednova import FedNova
from medfedaug.methods.fedproto import FedProto
from medfedaug.methods.fedprox import FedProx
from medfedaug.methods.fedrdn import FedRDN
from medfedaug.methods.fedrobust import FedRobust
from medfedaug.methods.fedsam import FedSAM
from medfedaug.methods.fedsr import FedSR
from medfedaug.methods.finetune import FineTune
from medfedaug.methods.fpl import FPL
from medfedaug.methods.fraug import FRAug
from medfedaug.methods.manifold_mixup import ManifoldMixUp
from medfedaug.methods.mixstyle import MixStyle
from medfedaug.methods.mixup import MixUp
from medfedaug.methods.moex import MoEx
from medfedaug.methods.norm import Norm
from medfedaug.methods.partialfed import PartialFed
from medfedaug.methods.partialfed_adaptive import PartialFedAdaptive
from medfedaug.methods.pooled import Pooled
from medfedaug.methods.randaugment import RandAugment
from medfedaug.methods.registry import build_methods, method_names, parse_methods
from medfedaug.methods.scaffold import Scaffold
from medfedaug.methods.silobn import SiloBN
from medfedaug.methods.single import Single

__all__ = [
    "FPL",
    "Aggregator",
    "FRAug",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedDyn",
    "FedFA",
    "FedFAh",
    "FedFD",
    "FedFDA",
    "FedFDPrompt",
    "FedHarmo",
    "FedMix",
    "FedNova",
    "FedProto",
    "FedProx",
    "FedRDN",
    "FedRobust",
    "FedSAM",
    "FedSR",
    "FineTune",
    "ManifoldMixUp",
    "Method",
    "MixStyle",
    "MixUp",
    "MoEx",
    "Norm",
    "PartialFed",
    "PartialFedAdaptive",
    "Pooled",
    "RandAugment",
    "Scaffold",
    "ServerExchange",
    "SiloBN",
    "Single",
    "SiteExchange",
    "SitePart",
    "build_methods",
    "method_names",
    "parse_methods",
]
