"""Bytes of a round between server and sites with a U-Net that is frozen except its last layer.

Rounds of one step on a phantom, in one process; the content of requests and updates counts as under NVFlare.
*All, each round* is the size of all shared entries, the cost if frozen ones travelled with each request.

    python benchmarks/frozen_bytes.py --widest 2048
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from measure import hardware, parser

from medfedaug.config.run import RunConfig
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.federation import run_in_process
from medfedaug.federation.messages.messages import FROZEN, num_bytes


def main() -> None:
    """Print bytes per site of each round."""
    arguments = parser(__doc__, 3)
    arguments.add_argument("--widest", type=int, default=2048, help="channels of the lowest stage")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    channels = [options.widest // 2**stage for stage in reversed(range(6))]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        names = [site.name for site in make_phantom(data, sites=2, patients=3)]
        config = RunConfig(
            network="unet",
            network_args={"channels": channels, "strides": [2] * (len(channels) - 1), "num_res_units": 2},
            rounds=options.repeats,
            local_steps=1,
            batch_size=2,
            freeze=("model.0.*", "model.1.*"),
        )
        server = run_in_process(config, data, names, "cpu")
    rounds, sites = server.results()["rounds"], len(names)
    whole = num_bytes({key: server.state[key] for key in server.shared})
    print(f"{hardware()}; {whole / 4e6:.0f} M numbers, {sites} sites\n")
    print("| round | all, each round | down | of it frozen | up |\n|---|---:|---:|---:|---:|")
    for entry in rounds:
        frozen = entry["bytes"].get(FROZEN, {"down": 0})["down"]
        sizes = (whole, entry["bytes_down"] / sites, frozen / sites, entry["bytes_up"] / sites)
        print(f"| {entry['round']} | " + " | ".join(f"{size / 1e6:.2f} MB" for size in sizes) + " |")


if __name__ == "__main__":
    main()
