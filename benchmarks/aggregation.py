"""Cost of a round at the server with 10, 100 and 3,400 sites: time per site, and memory.

    python benchmarks/aggregation.py

Every site's update passes the checks of the server, the weighted mean of the models and the server parts of
FedFA and FedFAʰ, as in a federation without a network connection. A separate process measures each number of
sites, and compares its memory with that before the first update. One thread counts processor time.
"""

import multiprocessing
import resource
import sys
import time
from pathlib import Path

import torch
from measure import begin, parser

from medfedaug.config.run import RunConfig
from medfedaug.federation import FederationServer, Reply
from medfedaug.federation.messages.messages import PREPARE, TRAIN, namespaced
from medfedaug.methods import parse_methods

NETWORKS = {
    "tiny": (8, 8, 8, 8, 8, 8),
    "default": (16, 32, 64, 128, 256, 16),
    "paper": (32, 64, 128, 256, 512, 32),
}


def _memory(field: str) -> float:
    """Return ``VmRSS`` (now) or ``VmHWM`` (maximum) in MB; without ``/proc`` the maximum for both."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith(field)]
        return int(line.split()[1]) / 1024
    unit = 2**20 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def one_round(sites: int, network: str, threads: int) -> dict[str, float]:
    """Return milliseconds per site and for the end of the round, and megabytes above the start."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    config = RunConfig(
        methods=tuple(parse_methods("fedfa,fedfa_h")),
        network_args={"features": list(NETWORKS[network])},
    )
    server = FederationServer(config)
    for index in range(sites):
        server.accept_preparation(f"site_{index}", Reply(PREPARE, num_samples=100))
    server.finish_preparation()
    server.start_round()
    generator = torch.Generator().manual_seed(0)

    # The current update, as an engine passes it.
    weights = {key: server.state[key].clone() for key in server.shared}
    payload = {}
    for name, exchange in server.aggregation.every_round.items():
        shapes = exchange.shapes.items()
        payload.update(namespaced({key: torch.rand(size, generator=generator) for key, size in shapes}, name))
    histogram = payload["fedfa_h/histogram"]
    histogram /= histogram.sum(dim=1, keepdim=True)

    before, seconds = _memory("VmRSS"), 0.0
    for index in range(sites):
        # Each site's own tensors, as from a connection.
        own = {key: value.clone() for key, value in weights.items()}
        reply = Reply(TRAIN, 1, weights=own, payload=payload, num_samples=100)
        started = clock()
        if not server.accept(f"site_{index}", reply):
            raise SystemExit(f"refused: {server.rounds[-1]['refused']}")
        seconds += clock() - started
    started = clock()
    server.finish_round()
    end = clock() - started
    return {
        "ms a site": 1e3 * seconds / sites,
        "ms at the end": 1e3 * end,
        "MB": _memory("VmHWM") - before,
        "MB of an update": sum(v.numel() * v.element_size() for v in weights.values()) / 2**20,
    }


def main() -> None:
    """Measure every number of sites in a separate process."""
    arguments = parser(__doc__, repeats=1)
    arguments.add_argument("--sites", type=int, nargs="+", default=[10, 100, 3400])
    arguments.add_argument("--network", choices=list(NETWORKS), default="default", help="BasicUNet's widths")
    options, _ = begin(arguments)
    print(f"{options.network} U-Net, fedfa,fedfa_h")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        first: dict[str, float] = {}
        for sites in options.sites:
            for _ in range(options.repeats):
                cost = pool.apply(one_round, (sites, options.network, options.threads))
                first = first or cost
                size = cost["MB of an update"]
                print(
                    f"  {sites:5d} sites: {cost['ms a site']:.1f} ms a site, {cost['ms at the end']:.0f} "
                    f"ms at the end, {cost['MB']:.0f} MB above the start = {cost['MB'] / size:.1f} updates "
                    f"of {size:.1f} MB; against the first line: time a site "
                    f"{cost['ms a site'] / first['ms a site']:.2f}, memory {cost['MB'] / first['MB']:.2f}"
                )


if __name__ == "__main__":
    main()
