"""The effect that `medfedaug demo` shows, over seeds of patients and training.

python benchmarks/demo_effect.py --out docs/results/demo --seeds 0 1 2 3 4 5 6 7 8 9
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import hardware, parser

MAIN = "fedrdn"


def run(command: str, seed: int) -> dict[str, object]:
    """Run the demo once and return its result, with its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file, started = Path(folder) / "demo.json", time.perf_counter()
        demo = [
            command,
            "demo",
            "--out",
            f"{folder}/demo",
            "--seed",
            str(seed),
            "--json",
            str(file),
        ]
        subprocess.run(demo, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return {**json.loads(file.read_text()), "seconds": round(time.perf_counter() - started)}


def table(runs: dict[str, dict[str, dict]]) -> str:
    """Tabulate each remedy and seed: the odd site, and the mean of the others."""
    lines = ["| remedy | seed | odd site: `fedavg` | with the remedy | others: `fedavg` | with the remedy |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for remedy, seeds in runs.items():
        for seed, result in sorted(seeds.items(), key=lambda item: int(item[0])):
            cells = []
            for of_odd in (True, False):
                for name in ("fedavg", result["remedy"]):
                    scores = [
                        site[name]["dice"] or 0.0
                        for key, site in result["sites"].items()
                        if (key == result["odd"]) == of_odd
                    ]
                    cells.append(f"{sum(scores) / len(scores):.2f}")
            lines.append(f"| {remedy} | {seed} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the missing runs, and write numbers and table after each."""
    arguments = parser(__doc__)
    arguments.add_argument("--out", type=Path, required=True, help="for numbers.json and table.md")
    arguments.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    arguments.add_argument("--command", default=str(Path(sys.executable).with_name("medfedaug")))
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "numbers.json"
    record: dict[str, Any] = (
        json.loads(file.read_text()) if file.exists() else {"hardware": hardware(), "runs": {}}
    )
    done = record["runs"].setdefault(MAIN, {})
    for seed in options.seeds:
        if str(seed) not in done:
            done[str(seed)] = run(options.command, seed)
            file.write_text(json.dumps(record, indent=1) + "\n")
            (options.out / "table.md").write_text(table(record["runs"]))
            odd = done[str(seed)]["sites"][done[str(seed)]["odd"]]
            print(MAIN, seed, {key: round(value["dice"] or 0, 3) for key, value in odd.items()}, flush=True)


if __name__ == "__main__":
    main()
