"""The methods that are built in; ``make catalogue`` writes this list from the files beside it."""

from medfedaug.methods.class_mean import ClassMean as ClassMean
from medfedaug.methods.condist import ConDist as ConDist
from medfedaug.methods.ditto import Ditto as Ditto
from medfedaug.methods.fedavg import FedAvg as FedAvg
from medfedaug.methods.fedbn import FedBN as FedBN
from medfedaug.methods.fedfa import FedFA as FedFA
from medfedaug.methods.fedfa_h import FedFAh as FedFAh
from medfedaug.methods.fedfd import FedFD as FedFD
from medfedaug.methods.fedfd_a import FedFDA as FedFDA
from medfedaug.methods.fedprox import FedProx as FedProx
from medfedaug.methods.fedrdn import FedRDN as FedRDN
from medfedaug.methods.fixbn import FixBN as FixBN
from medfedaug.methods.fraug import FRAug as FRAug
from medfedaug.methods.median import Median as Median
from medfedaug.methods.norm import Norm as Norm
from medfedaug.methods.pooled import Pooled as Pooled
from medfedaug.methods.silobn import SiloBN as SiloBN
from medfedaug.methods.single import Single as Single
from medfedaug.methods.trimmed_mean import TrimmedMean as TrimmedMean
