"""The released code of FedFA against ours: the same photographs, network, initial weights, steps and rounds.

    git clone https://github.com/tfzhou/FedFA CODE
    python benchmarks/released_fedfa.py --code CODE --data DIR --out docs/results/peers/fedfa --seeds 0 1

Office-Caltech 10. The script calls the network with its FFA layers, a client's training and testing, the
aggregation and the accuracy of CODE unchanged, without its data sets (which need torchvision) and its logging
(wandb). Both train on the same images without augmentation, and both end with the model of the last round,
scored by the same function. Seconds are processor time of one thread for local training, aggregation, and
validation of the global model; the median round. Runs in the output's JSON are not repeated.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from measure import hardware, parser
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from medfedaug.config.run import RunConfig
from medfedaug.data.federation import federation_settings
from medfedaug.data.preparation.decoded_cache import keep_decoded
from medfedaug.federation import FederationServer, SiteTrainer, run_in_process
from medfedaug.methods import parse_methods
from medfedaug.research.datasets.benchmarks import find_root, open_benchmark, write_federation
from medfedaug.research.papers.axes import parse_axis
from medfedaug.research.papers.presets import PRESETS
from medfedaug.research.sweeps.run_list import plan
from medfedaug.utils.files import write_json

METHODS = {"fedavg": ("AlexNet", "FedAvg"), "fedfa": ("AlexNetFedFa", "FedFA")}
"""Network and kind of aggregation of the released code, by method."""


@dataclass
class Released:
    """Modules of the released code."""

    networks: ModuleType
    client: ModuleType
    comm: ModuleType


@contextmanager
def released(code: Path) -> Iterator[Released]:
    """Import the released modules, with stand-ins for their other imports."""
    absent = ("torchvision", "torchvision.transforms", "wandb", "cv2", "skimage", "h5py")
    missing = {name: MagicMock() for name in absent if name not in sys.modules}
    # Its package of clients imports unreleased ones, and its builders import all data sets.
    package = ModuleType("pyfed.client")
    package.__path__ = [str(code / "pyfed/client")]
    missing |= {"pyfed.client": package}
    missing |= {name: MagicMock() for name in ("pyfed.dataset.utils", "pyfed.manager.helper.build_dataset")}
    with patch.dict(sys.modules, missing), patch.object(sys, "path", [str(code), *sys.path]):
        from pyfed.client import base
        from pyfed.manager import comm
        from pyfed.network import alexnet

        yield Released(alexnet, base, comm)


def tensors(config: RunConfig, data: Path, site: str) -> dict[str, TensorDataset]:
    """Return a site's images and classes by split, as in our loop."""
    trainer = SiteTrainer(config, data, "cpu")
    trainer.open(site)
    datasets = {}
    for split, of in (("train", "training"), ("validation", "validation"), ("test", "test")):
        cases = trainer.samples.of_cases(trainer.folder.cases[of])
        batches = [(images.contiguous(), labels) for images, labels in trainer.samples.batches(cases)]
        datasets[split] = TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
    return datasets


def same_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give an AlexNet the weights of another, whose entries have other names in the same order."""
    own = {name: value for name, value in network.state_dict().items() if "ffa_layer" not in name}
    assert [tuple(v.shape) for v in own.values()] == [tuple(v.shape) for v in weights.values()]
    network.load_state_dict(dict(zip(own, weights.values(), strict=True)), strict=False)


def theirs(
    code: Released, method: str, config: RunConfig, sites: Mapping[str, Mapping[str, TensorDataset]]
) -> tuple[nn.Module, list[float]]:
    """Return the model after the last round, and the seconds of each round."""
    name, kind = METHODS[method]
    random.seed(config.seed), np.random.seed(config.seed), torch.manual_seed(config.seed)
    server = getattr(code.networks, name)(num_classes=len(config.classes))
    same_weights(server, FederationServer(replace(config, methods=tuple(parse_methods("fedavg")))).state)
    settings = SimpleNamespace(
        TRAIN_GPU=0,
        TRAIN_OPTIMIZER=config.optimizer,
        TRAIN_LR=config.learning_rate,
        TRAIN_MOMENTUM=0,
        TRAIN_WEIGHT_DECAY=0,
        TRAIN_LOSS="ce",
        METRIC="top1",
    )

    def loaders(_config: Any, site: str) -> tuple[DataLoader, ...]:
        train, *others = (sites[site][split] for split in ("train", "validation", "test"))
        size = config.batch_size
        shuffled = DataLoader(train, batch_size=size, shuffle=True, drop_last=True)  # as in their builder
        return shuffled, *(DataLoader(other, batch_size=size) for other in others)

    with patch.object(code.client, "build_dataset", loaders):
        clients = [code.client.BaseClient(settings, site, server) for site in sites]
    aggregate = code.comm.Comm(server, kind)
    seconds = []
    for _ in range(config.rounds):  # the order of `Manager.train`
        started = time.process_time()
        for client in clients:
            client.train(server_model=server)
        models = [client.client_to_server()["model"] for client in clients]
        server = aggregate(models, [1 / len(clients)] * len(clients), server)
        for client in clients:
            client.val(server)
        for client in clients:
            client.server_to_client(server)
        seconds.append(time.process_time() - started)
    return server, seconds


def ours(config: RunConfig, data: Path, sites: list[str]) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights after the last round, and the seconds of each round."""
    seconds: list[float] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "round_started":
            seconds.append(time.process_time())

    server = run_in_process(config, data, sites, "cpu", listen)
    return server.state, [later - earlier for earlier, later in pairwise(seconds)]


def accuracy(network: nn.Module, images: TensorDataset) -> float:
    """Return the share of correctly classified images."""
    network.eval()
    with torch.no_grad():
        right = [network(x).argmax(1).eq(y) for x, y in DataLoader(images, batch_size=64)]
    return float(torch.cat(right).double().mean())


def table(runs: list[dict[str, Any]]) -> str:
    """Tabulate the runs."""
    sites = list(runs[0]["sites"])
    lines = [
        f"| | seed | {' | '.join(sites)} | mean | a round, s |",
        "|---|---:" + "|---:" * (len(sites) + 2) + "|",
    ]
    for run in sorted(runs, key=lambda run: (run["method"], run["code"], run["seed"])):
        cells = [f"{run['method']}, {run['code']}", str(run["seed"])]
        cells += [f"{run['sites'][site]:.3f}" for site in sites]
        cells += [f"{fmean(run['sites'].values()):.3f}", f"{run['seconds']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Make the missing runs, and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--code", type=Path, required=True, help="folder of the released code")
    arguments.add_argument("--data", type=Path, required=True, help="as for medfedaug benchmark")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    arguments.add_argument("--image-size", type=int, default=96)
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--batch-size", type=int, default=32)
    arguments.add_argument("--limit", type=int, default=None, help="cases a split, for a quick test")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "numbers.json"
    record: dict[str, Any] = {"hardware": hardware(), "runs": []}
    if file.exists():
        record = json.loads(file.read_text())

    preset = PRESETS["office_caltech_10"]
    settings = {"image_size": options.image_size, "batch_size": options.batch_size, "augmentation": "none"}
    axes = [parse_axis(f"{name}={value}") for name, value in settings.items()]
    run = plan(preset, options.data, ["fedavg"], seeds=1, axes=axes, holdout=["none"], limit=options.limit)[0]
    root = find_root(options.data, preset.benchmark)
    folders = open_benchmark(preset.benchmark, root, limit=options.limit, **run.data)
    names = [folder.name for folder in folders]
    common = replace(run.config, **federation_settings(folders), rounds=options.rounds)
    with tempfile.TemporaryDirectory() as folder, keep_decoded(4 * 2**30), released(options.code) as code:
        data = Path(folder) / "data"
        write_federation(data, preset.benchmark, root, **run.data)
        sites = {name: tensors(common, data, name) for name in names}
        for seed in options.seeds:
            for method in options.methods:
                config = replace(common, methods=tuple(parse_methods(method)), seed=seed)
                for whose in ("medfedaug", "released"):
                    wanted = {"method": method, "code": whose, "seed": seed, "rounds": options.rounds}
                    wanted["image_size"] = options.image_size
                    if any(wanted.items() <= entry.items() for entry in record["runs"]):
                        continue
                    if whose == "released":
                        network, seconds = theirs(code, method, config, sites)
                    else:
                        weights, seconds = ours(config, data, names)
                        network = code.networks.AlexNet(num_classes=len(config.classes))
                        same_weights(network, weights)
                    scores = {name: accuracy(network, sites[name]["test"]) for name in names}
                    entry = {**wanted, "sites": scores, "seconds": median(seconds[1:] or seconds)}
                    record["runs"].append(entry)
                    write_json(file, record)
                    print(
                        f"{wanted}: {fmean(scores.values()):.3f}, {entry['seconds']:.1f} s a round",
                        flush=True,
                    )
    print(table(record["runs"]))


if __name__ == "__main__":
    main()
