"""The same federation in medfedaug, with NVFlare's own recipe, in Flower, and in a plain loop of one process.

    python benchmarks/peers.py --sites 4 --rounds 3 --flower /tmp/flower

Phantom sites of ten patients, BasicUNet with instance norm, rounds of one epoch, one thread a site. The
folder of ``--flower`` gets an environment for Flower, which takes PyTorch and MONAI from this one. All kinds
take turns; the table has medians. Processor time is of all processes, memory the largest sum of their
proportional set sizes.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from measure import hardware, parser
from peer_site import FEATURES, NETWORK

HERE = Path(__file__).resolve().parent
FLOWER = "flwr[simulation]==1.42.0"
KINDS = (
    "medfedaug",
    "medfedaug, fresh processes",
    "medfedaug, in process",
    "NVFlare's recipe",
    "Flower",
    "plain loop",
)

NVFLARE_CLIENT = """
import os
from pathlib import Path
import nvflare.client as flare
from peer_site import MonaiSite

flare.init()
site = MonaiSite(Path(os.environ["PEER_DATA"]) / flare.get_site_name())
while flare.is_running():
    model = flare.receive()
    params = site.train(model.params)
    if site.round == int(os.environ["PEER_ROUNDS"]):
        site.finish(params)
    flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": site.samples}))
"""

NVFLARE_JOB = """
import os, sys
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe.sim_env import SimEnv
from peer_site import NETWORK
names = os.environ["PEER_SITES"].split(",")
recipe = FedAvgRecipe(
    name="peer", min_clients=len(names), num_rounds=int(os.environ["PEER_ROUNDS"]), train_script="client.py",
    server_expected_format=ExchangeFormat.PYTORCH,
    model={"class_path": "monai.networks.nets.BasicUNet",
           "args": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, **NETWORK}},
)
recipe.execute(SimEnv(clients=names, num_threads=len(names), workspace_root=sys.argv[1]))
"""

FLOWER_APP = """
import os
from pathlib import Path
from flwr.app import ArrayRecord, MetricRecord, RecordDict, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

data, rounds = Path(os.environ["PEER_DATA"]), int(os.environ["PEER_ROUNDS"])
names = os.environ["PEER_SITES"].split(",")
client, server = ClientApp(), ServerApp()
sites = {}

def site_of(context):
    from peer_site import MonaiSite  # in the process of the site
    name = names[context.node_config["partition-id"]]
    if name not in sites:
        sites[name] = MonaiSite(data / name)
    return sites[name]

@client.train()
def train(message, context):
    site = site_of(context)
    site.round = int(message.content["config"]["server-round"]) - 1
    trained = site.train(message.content["arrays"].to_torch_state_dict())
    metrics = MetricRecord({"num-examples": site.samples})
    return Message(content=RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)

@client.evaluate()
def evaluate(message, context):
    site = site_of(context)
    if int(message.content["config"]["server-round"]) == rounds:
        site.finish(message.content["arrays"].to_torch_state_dict())
    metrics = MetricRecord({"num-examples": site.samples})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)

@server.main()
def main(grid, context):
    from peer_site import network
    needed = dict(min_train_nodes=len(names), min_evaluate_nodes=len(names), min_available_nodes=len(names))
    FedAvg(**needed).start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)

if __name__ == "__main__":
    # A core for each site, as the other kinds have a process for each.
    backend = {"init_args": {"num_cpus": len(names)}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=len(names), backend_config=backend)
"""

PLAIN = """
import os
from pathlib import Path
from peer_site import MonaiSite, average, network
data = Path(os.environ["PEER_DATA"])
sites = {name: MonaiSite(data / name) for name in os.environ["PEER_SITES"].split(",")}
state = network().state_dict()
for _ in range(int(os.environ["PEER_ROUNDS"])):
    state = average({name: (site.train(state), site.samples) for name, site in sites.items()})
for site in sites.values():
    site.finish(state)
"""


class Watched:
    """A command with its processes: elapsed and processor time, memory, and its lines with times."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.seconds: dict[tuple[int, float], float] = {}
        self.memory, self.lines = 0.0, []
        self.began, started = time.time(), time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        watch = threading.Thread(target=self._watch, args=(process,), daemon=True)
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.time() - self.began, line.rstrip()))
        code = process.wait()
        self.elapsed = time.monotonic() - started
        watch.join()
        if code:
            text = "\n".join(line for _, line in self.lines[-30:])
            raise SystemExit(f"{command[:3]} ended with {code}:\n{text}")

    @property
    def cpu(self) -> float:
        return sum(self.seconds.values())

    def _watch(self, process: subprocess.Popen[str]) -> None:
        turn = 0
        while process.poll() is None:
            memory = 0.0
            try:
                root = psutil.Process(process.pid)
                members = [root, *root.children(recursive=True)]
            except psutil.Error:
                return
            for member in members:
                try:
                    times = member.cpu_times()
                    self.seconds[member.pid, member.create_time()] = times.user + times.system
                    memory += 0 if turn % 5 else member.memory_full_info().pss
                except psutil.Error:
                    continue
            self.memory, turn = max(self.memory, memory / 2**30), turn + 1
            time.sleep(0.1)


def environment(folder: Path, data: Path, rounds: int, **more: str) -> dict[str, str]:
    """Return the variables for all kinds, with a new file of marks."""
    marks = folder / "marks"
    marks.unlink(missing_ok=True)
    own = {
        "PEER_DATA": str(data),
        "PEER_SITES": ",".join(sorted(path.name for path in data.iterdir() if path.is_dir())),
        "PEER_ROUNDS": str(rounds),
        "PEER_MARKS": str(marks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE),
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **own, **more}


def ours(folder: Path, data: Path, rounds: int, engine: str, **more: str) -> dict[str, float]:
    """Measure a run of the command."""
    out = folder / "out"
    command = [
        *(sys.executable, "-m", "medfedaug", "simulate", "--data", str(data), "--out", str(out)),
        *("--methods", "fedavg", "--rounds", str(rounds), "--device", "cpu", "--threads", "1", "--overwrite"),
        *("--augmentation", "none", "--no-pictures", "--engine", engine),
        *("--network-args", json.dumps(NETWORK)),
    ]
    done = Watched(command, folder, environment(folder, data, rounds, **more))
    results = json.loads((out / "results.json").read_text())
    ready = [at for at, line in done.lines if "training samples" in line]
    ended = [at for at, line in done.lines if line.strip() == "finished"]
    moved = sum(entry["bytes_up"] + entry["bytes_down"] for entry in results["rounds"]) / rounds / 2**20
    return {
        "elapsed": done.elapsed,
        "first step": max(ready),
        "round": statistics.median(entry["seconds"] for entry in results["rounds"]),
        **({"stop": done.elapsed - max(ended)} if ended else {}),
        "CPU": done.cpu,
        "GiB": done.memory,
        "MiB a round": moved,
    }


def theirs(
    folder: Path, data: Path, rounds: int, script: str, python: str, *arguments: str
) -> dict[str, float]:
    """Measure a run of a script whose sites write marks."""
    (folder / "run.py").write_text(script)
    (folder / "client.py").write_text(NVFLARE_CLIENT)
    done = Watched([python, "run.py", *arguments], folder, environment(folder, data, rounds))
    marks = [json.loads(line) for line in (folder / "marks").read_text().splitlines()]
    begins = [
        min(one["time"] for one in marks if one["what"] == "begin" and one["round"] == number)
        for number in range(rounds)
    ]
    ends = [one["time"] for one in marks if one["what"] == "end" and one["round"] == rounds]
    tested = max(one["time"] for one in marks if one["what"] == "tested")
    edges = [*begins, max(ends)]
    return {
        "elapsed": done.elapsed,
        "first step": begins[0] - done.began,
        "round": statistics.median(b - a for a, b in itertools.pairwise(edges)),
        "stop": done.elapsed - (tested - done.began),
        "CPU": done.cpu,
        "GiB": done.memory,
    }


def flower(folder: Path) -> str:
    """Return the Python of an environment with Flower, which takes all other packages from this one."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", FLOWER], check=True)
    (target,) = (folder / "lib").glob("python*/site-packages")
    packages = [path for path in sys.path if Path(path).name == "site-packages"]
    (target / "beside.pth").write_text("\n".join(packages) + "\n")
    return str(python)


def measure(kind: str, folder: Path, data: Path, rounds: int, python: str | None) -> dict[str, float]:
    """Measure one run of a kind."""
    if kind == "medfedaug, in process":
        return ours(folder, data, rounds, "inprocess")
    if kind.startswith("medfedaug"):
        return ours(folder, data, rounds, "nvflare", MEDFEDAUG_FAST_START="0" if "fresh" in kind else "1")
    if kind == "NVFlare's recipe":
        return theirs(folder, data, rounds, NVFLARE_JOB, sys.executable, str(folder / "workspace"))
    if kind == "Flower":
        assert python is not None
        return theirs(folder, data, rounds, FLOWER_APP, python)
    return theirs(folder, data, rounds, PLAIN, sys.executable)


def main() -> None:
    """Run all kinds in turn, and print the table."""
    from medfedaug.data.phantom import make_phantom

    arguments = parser(__doc__)
    arguments.add_argument("--sites", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--repeats", type=int, default=1)
    arguments.add_argument("--patients", type=int, default=10, help="at each site (default 10)")
    arguments.add_argument("--features", type=int, nargs=6, default=FEATURES, help="of the network's levels")
    arguments.add_argument("--flower", type=Path, help="folder of Flower's environment")
    arguments.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = arguments.parse_args()
    os.environ["PEER_FEATURES"] = json.dumps(options.features)
    NETWORK["features"] = options.features
    python = flower(options.flower.resolve()) if options.flower else None
    kinds = [kind for kind in options.kinds if kind != "Flower" or python]
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data"
        make_phantom(data, sites=options.sites, patients=options.patients)
        for _ in range(options.repeats):
            for kind in kinds:
                with tempfile.TemporaryDirectory() as folder:
                    results[kind].append(measure(kind, Path(folder), data, options.rounds, python))
                print(kind, {key: round(value, 2) for key, value in results[kind][-1].items()}, flush=True)
    print(f"\n{options.sites} sites, {options.rounds} rounds, {options.repeats} time(s); {hardware()}\n")
    columns = ["elapsed", "first step", "round", "stop", "CPU", "GiB", "MiB a round"]
    print("| | " + " | ".join(columns) + " |\n|---" + "|---:" * len(columns) + "|")
    for kind, runs in results.items():
        cells = [statistics.median(run[key] for run in runs) if key in runs[0] else None for key in columns]
        print(f"| {kind} | " + " | ".join("" if cell is None else f"{cell:.1f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
