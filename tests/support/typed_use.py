"""Calls of a user, which `make types` reads and nothing runs: an ignored error that is none fails there."""

from torch.nn import Conv2d

import medfedaug as mfa
from medfedaug.models import FFALayer, ffa_layers, insert_ffa
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.transforms import FedRDNd

network: Conv2d = insert_ffa(Conv2d(1, 2, 3), stages=["conv"], prob=0.5)
insert_ffa(network, stage=[1])  # type: ignore[call-arg]
layers: dict[str, FFALayer] = ffa_layers(network)
FedRDNd(keys="image", statistic="statistics.json")  # type: ignore[call-arg]
run: FinishedRun = mfa.simulate("data", "run", methods="fedrdn", rounds=20, threads=1, device="cpu")
mfa.simulate("data", rounds="20")  # type: ignore[arg-type]
mfa.simulate("data", method="fedrdn")  # type: ignore[call-arg]
