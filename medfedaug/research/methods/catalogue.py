"""The methods that are built in; ``make catalogue`` writes this list from the files beside it."""

from medfedaug.research.methods.bin import BIN as BIN
from medfedaug.research.methods.dac_sc import DACSC as DACSC
from medfedaug.research.methods.fedavgm import FedAvgM as FedAvgM
from medfedaug.research.methods.feddg import FedDG as FedDG
from medfedaug.research.methods.feddg_ga import FedDGGA as FedDGGA
from medfedaug.research.methods.fedfd_prompt import FedFDPrompt as FedFDPrompt
from medfedaug.research.methods.fedharmo import FedHarmo as FedHarmo
from medfedaug.research.methods.fedmix import FedMix as FedMix
from medfedaug.research.methods.fednova import FedNova as FedNova
from medfedaug.research.methods.fedproto import FedProto as FedProto
from medfedaug.research.methods.fedrobust import FedRobust as FedRobust
from medfedaug.research.methods.fedsam import FedSAM as FedSAM
from medfedaug.research.methods.fedsr import FedSR as FedSR
from medfedaug.research.methods.finetune import FineTune as FineTune
from medfedaug.research.methods.fpl import FPL as FPL
from medfedaug.research.methods.manifold_mixup import ManifoldMixUp as ManifoldMixUp
from medfedaug.research.methods.mixstyle import MixStyle as MixStyle
from medfedaug.research.methods.mixup import MixUp as MixUp
from medfedaug.research.methods.moex import MoEx as MoEx
from medfedaug.research.methods.partialfed import PartialFed as PartialFed
from medfedaug.research.methods.randaugment import RandAugment as RandAugment
from medfedaug.research.methods.randconv import RandConv as RandConv
from medfedaug.research.methods.rsc import RSC as RSC
from medfedaug.research.methods.scaffold import Scaffold as Scaffold
from medfedaug.research.methods.selfreg import SelfReg as SelfReg
from medfedaug.research.methods.teacher import Teacher as Teacher
