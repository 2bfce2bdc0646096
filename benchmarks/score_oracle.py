"""Attacks on mean scores by crafted models, whose score locates the lesion of a single patient.

    python benchmarks/score_oracle.py

The first convolution of each model is as wide as a slice and gates on the slice's mean intensity; with an
open gate, the model predicts a pattern of pixels as lesion. Three attackers have the budget of scores of a
site's default rules:

* a server that knows the mean intensity of one slice of a patient, and requests the score of a model in each
  round of a job: once for each cell of 4 x 4 pixels, or more often for the 16 cells in the middle;
* a server without knowledge, which bisects the range of intensities for each of 8 cells of 8 x 8 pixels;
* a lead with an evaluation job of 65 such models, or with one in each of as many jobs as the rules allow.

The script computes the scores of each model, and checks some of them with the network at a site; budget,
rounding and noise are the site's own. Rounding and noise are drawn anew in each repetition.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import numpy as np
import torch
from measure import begin, parser
from torch import Tensor

from medfedaug.config.run import RunConfig
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.sites import open_site
from medfedaug.federation import FederationServer, SiteTrainer
from medfedaug.federation.messages.messages import Reply, Request
from medfedaug.federation.server.evaluation import EvaluatedRun, Evaluation
from medfedaug.federation.site.evaluation import EvaluationSite
from medfedaug.federation.site.gate import GuardedGate
from medfedaug.federation.site.site import Site
from medfedaug.privacy import (
    LEDGER_FILE,
    JobBook,
    JobRules,
    PrivacyPolicy,
    Pseudonyms,
    noise_multiplier_for,
    released_scores,
)

SIDE, CELL = 32, 4
GRID = SIDE // CELL
STEEP = 1e5
EVERYWHERE = list(itertools.product(range(GRID), range(GRID)))
MIDDLE = list(itertools.product(range(2, 6), range(2, 6)))


def run_config(rounds: int) -> RunConfig:
    """Configure a job that the default rules admit."""
    wide = 2 * SIDE - 1
    network = {"channels": [4, 4], "strides": [SIDE], "kernel_size": wide, "up_kernel_size": wide}
    network |= {"num_res_units": 0, "norm": None, "act": "relu"}
    return RunConfig(
        network="unet", network_args=network, rounds=rounds, batch_size=2, local_steps=5, intensity="scale"
    )


class Hospital:
    """A site with the gate of a real one.

    Args:
        folder: for its data and its ledger.
        patients: their number; a fifth is for validation and a fifth for the test.
        policy: by default the policy of a new kit.
    """

    def __init__(self, folder: Path, patients: int, policy: PrivacyPolicy | None = None) -> None:
        self.folder, self.policy = folder, policy or PrivacyPolicy()
        if not (folder / "data").exists():
            make_phantom(folder / "data", sites=1, patients=patients, seed=7, shape=(SIDE, SIDE, 4))
        self.data = next((folder / "data").glob("site_*"))

    def gate(self, job: str) -> GuardedGate:
        book = JobBook(self.folder / "jobs")
        return GuardedGate("A", JobRules(max_jobs_per_day=1000), Pseudonyms(b"key"), book, job, "", _none)

    def trainer(self, config: RunConfig) -> SiteTrainer:
        ledger = self.folder / LEDGER_FILE
        return SiteTrainer(config, self.data, "cpu", self.folder, self.policy, ledger, threads=1)

    def start(self, config: RunConfig, job: str = "job") -> Site:
        """Start the site in a training job."""
        return Site("A", self.trainer(config), self.gate(job))

    def evaluation(self, runs: dict[str, EvaluatedRun], job: str) -> dict[str, Reply]:
        """Return the site's answers in an evaluation job, by the name of the run."""
        trainers = {name: self.trainer(run.config) for name, run in runs.items()}
        site = EvaluationSite("A", trainers, self.gate(job))
        return {q.scoring["run"]: site.answer(q) for q, _ in Evaluation(runs).scores(["A"])}


def _none() -> Any:
    raise AssertionError("the job has no masks")


@dataclass
class Patient:
    """The truth about a case: the means of its slices, and its lesion."""

    means: list[float]
    lesion: np.ndarray


def truth(data: Path, split: str) -> list[Patient]:
    site, patients = open_site(data), []
    for case in site.cases[split]:
        image, label = site.load_case(case, "scale")
        means = [float(image[0, ..., z].mean()) for z in range(image.shape[-1])]
        patients.append(Patient(means, (label[0] if label.shape[0] == 1 else label[1]).numpy() > 0))
    return patients


@dataclass
class Query:
    """A model that predicts a lesion pattern in slices with a mean intensity within borders."""

    low: float
    high: float
    pattern: np.ndarray

    def scores(self, patients: Sequence[Patient]) -> dict[str, float | None]:
        """Compute the network's Dice of each patient without running it."""
        scores: dict[str, float | None] = {}
        for number, patient in enumerate(patients):
            gate = [self.low <= mean < self.high for mean in patient.means]
            predicted = self.pattern[..., None].astype(bool) & np.array(gate)
            both = predicted.sum() + patient.lesion.sum()
            overlap = (predicted & patient.lesion).sum()
            scores[str(number)] = float(2 * overlap / both) if patient.lesion.any() else None
        return scores


def cells(*chosen: tuple[int, int], size: int = CELL) -> np.ndarray:
    """Return the pixels of some cells."""
    pattern = np.zeros((SIDE, SIDE))
    for y, x in chosen:
        pattern[y * size : (y + 1) * size, x * size : (x + 1) * size] = 1
    return pattern


class Gate:
    """Turns queries into weights."""

    def __init__(self, config: RunConfig) -> None:
        self.server = FederationServer(config)
        self.state = {key: self.server.state[key].clone() for key in self.server.shared}
        wide = [key for key, value in self.state.items() if value.dim() == 4]
        self.down = next(key for key in wide if self.state[key].shape[:2] == (4, 1))
        self.up = next(key for key in wide if self.state[key].shape[0] == 8)

    def weights(self, query: Query) -> dict[str, Tensor]:
        weights = {key: torch.zeros_like(value) for key, value in self.state.items()}
        weights[self.down][:, 0] = STEEP / SIDE**2
        # step(low) - step(high), each of two ReLU; kernels are as wide as the slice on both sides.
        borders = (query.low, query.low + 1 / STEEP, query.high, query.high + 1 / STEEP)
        inside, pattern = slice(SIDE - 1, 2 * SIDE - 1), torch.as_tensor(query.pattern).float()
        for unit, border in enumerate(borders):
            weights[self.down.replace("weight", "bias")][unit] = -STEEP * border
            weights[self.up][unit, 1, inside, inside] = (20.0 if unit in (0, 3) else -20.0) * pattern
        weights[self.up.replace("weight", "bias")][0] = 10.0
        for key, value in weights.items():
            if key.endswith(("N.weight", "running_var")):  # norms that change nothing
                value.fill_(1.0)
        return weights

    def ask(self, query: Query, round_: int, variant: int = 0) -> Request:
        """Make a server's request for the score of a model, in place of a round's model.

        Args:
            query: the model.
            round_: the round.
            variant: another model of the same function, with other bits.
        """
        weights = self.weights(query)
        weights[self.up.replace("weight", "bias")][0] += 1e-3 * variant
        return Request("validate", round_, weights=weights, run=self.server.run)

    def run(self, config: RunConfig, query: Query, owner: str = "") -> EvaluatedRun:
        """Make a run of an evaluation with a crafted model."""
        run = uuid.uuid4().hex
        return EvaluatedRun(config, run, 1, self.weights(query), owner=owner, sites=("A",))


@dataclass
class Target:
    """A slice of a patient, and borders that separate its mean intensity from all other slices."""

    low: float
    high: float
    lesion: np.ndarray

    @classmethod
    def of(cls, patients: Sequence[Patient], own: Patient) -> Target:
        z = int(own.lesion.sum((0, 1)).argmax())
        others = [m for p in patients for i, m in enumerate(p.means) if not (p is own and i == z)]
        gap = min(abs(mean - own.means[z]) for mean in others) / 2
        lesion = own.lesion[..., z].reshape(GRID, CELL, GRID, CELL).sum((1, 3))
        return cls(own.means[z] - gap, own.means[z] + gap, lesion)

    @classmethod
    def largest(cls, patients: Sequence[Patient]) -> Target:
        return cls.of(patients, max(patients, key=lambda patient: patient.lesion.sum()))

    def queries(
        self, chosen: Sequence[tuple[int, int]], count: int
    ) -> Iterator[tuple[tuple[int, int], Query]]:
        """Yield a number of queries, cell by cell and from the beginning again."""
        for cell in itertools.islice(itertools.cycle(chosen), count):
            yield cell, Query(self.low, self.high, cells(cell))

    def correlation(self, answers: Sequence[tuple[tuple[int, int], float]]) -> float:
        """Correlate the mean answer for each requested cell with its pixels of lesion."""
        by_cell: dict[tuple[int, int], list[float]] = {}
        for cell, answer in answers:
            by_cell.setdefault(cell, []).append(answer)
        means = [fmean(values) for values in by_cell.values()]
        pixels = [int(self.lesion[cell]) for cell in by_cell]
        return float(np.corrcoef(means, pixels)[0, 1]) if len({*means}) > 1 and len({*pixels}) > 1 else 0.0


Ask = Callable[[Query], float]


def chance(ask: Ask, target: Target, count: int) -> float:
    """Return the correlation of uninformative answers: the same question for each of 16 cells."""
    nothing = Query(-1.0, 2.0, cells(*EVERYWHERE))
    return target.correlation([(cell, ask(nothing)) for cell, _ in target.queries(MIDDLE, count)])


def blind(ask: Ask, patients: Sequence[Patient], budget: int, repeats: int = 1) -> tuple[int, int]:
    """Bisect over the means of slices, in each of the 8 cells of 8 x 8 pixels in the middle.

    Returns:
        The number of slices that the attacker names, and the number of correct ones.
    """
    named: list[tuple[float, tuple[int, int]]] = []
    left = [budget]

    def explore(low: float, high: float, cell: tuple[int, int]) -> None:
        if left[0] < repeats:
            return
        left[0] -= repeats
        if fmean(ask(Query(low, high, cells(cell, size=8))) for _ in range(repeats)) <= 0:
            return
        if high - low < 4e-4:
            named.append(((low + high) / 2, cell))
            return
        explore(low, (low + high) / 2, cell)
        explore((low + high) / 2, high, cell)

    for cell in itertools.product((1, 2), range(4)):
        explore(0.0, 0.64, cell)

    def right(mean: float, cell: tuple[int, int]) -> bool:
        inside = cells(cell, size=8).astype(bool)
        return any(
            abs(own - mean) < 3e-4 and bool(patient.lesion[..., z][inside].any())
            for patient in patients
            for z, own in enumerate(patient.means)
        )

    return len(named), sum(right(*guess) for guess in named)


Known = dict[tuple[float, float, bytes], dict[str, float | None]]


def answers(policy: PrivacyPolicy | None, patients: Sequence[Patient], seed: int, known_scores: Known) -> Ask:
    """Make a site's answers with a policy, or exact means without one.

    Args:
        policy: of the site.
        patients: of the scored split.
        seed: of rounding and noise.
        known_scores: cache of the exact scores by query.
    """
    generator = random.Random(seed)

    def ask(query: Query) -> float:
        key = (query.low, query.high, query.pattern.tobytes())
        scores = known_scores.get(key)
        if scores is None:
            scores = known_scores[key] = query.scores(patients)
        known = [score for score in scores.values() if score is not None]
        exact = {"dice": fmean(known), "cases": scores}
        if policy is None:
            return round(exact["dice"], 2)
        return float(released_scores(exact, policy, generator=generator)["dice"])

    return ask


def main() -> None:
    arguments = parser(__doc__, repeats=200)
    arguments.add_argument("--patients", type=int, default=50, help="of the site, in all")
    arguments.add_argument("--checked", type=int, default=5, help="models that a site scores as a check")
    options, _ = begin(arguments)
    default = PrivacyPolicy()
    scores = {"validation": default.max_validation_scores, "test": default.max_test_scores}
    with tempfile.TemporaryDirectory() as folder:
        hospital = Hospital(Path(folder), options.patients, replace(default, scores="cases", min_images=1))
        check(hospital, options.checked)
        split = {name: truth(hospital.data, name) for name in scores}
    policies: dict[str, PrivacyPolicy | None] = {"exact to 0.01, no budget": None, "default": default}
    for epsilon in (8.0, 50.0):
        noise = noise_multiplier_for(epsilon, default.delta, scores["validation"])
        name = f"noise, ε = {epsilon:g} for {scores['validation']} scores (z = {noise:.2f})"
        policies[name] = replace(default, score_noise_multiplier=noise, max_epsilon=epsilon)
    computed: dict[str, Known] = {name: {} for name in split}
    print(f"{len(split['validation'])} validation and {len(split['test'])} test patients")
    print("| attack | scores | rules | recovered |\n|---|---|---|---|")
    for name, policy in policies.items():
        of_server, of_lead = (scores["validation"], scores["test"]) if policy else (300, 65)
        for title, part, where, count in (
            ("server, knows a slice's mean; all 64 cells", "validation", EVERYWHERE, of_server),
            ("server, the same; 16 cells in the middle", "validation", MIDDLE, of_server),
            ("lead, knows a slice's mean; one job", "test", EVERYWHERE, 1 if policy else of_lead),
            ("lead, as many jobs as allowed; 16 cells", "test", MIDDLE, of_lead),
        ):
            correlations = []
            for seed in range(options.repeats if policy else 1):
                for own in split[part]:
                    target, ask = (
                        Target.of(split[part], own),
                        answers(policy, split[part], seed, computed[part]),
                    )
                    replies = [(cell, ask(query)) for cell, query in target.queries(where, count)]
                    correlations.append(target.correlation(replies))
            high = quantiles(correlations, n=20)[-1]
            print(f"| {title} | {count} | {name} | r {fmean(correlations):.2f} (95% below {high:.2f}) |")
        for part, count in (("validation", of_server), ("test", of_lead)) if policy else ():
            correlations = [
                chance(answers(policy, split[part], seed, computed[part]), Target.of(split[part], own), count)
                for seed in range(options.repeats)
                for own in split[part]
            ]
            above = sum(r > 0.5 for r in correlations) / len(correlations)
            print(f"| chance alone; 16 cells, {part} | {count} | {name} | r above 0.5 in {above:.1%} |")
        for repeats in (1, 4):
            located = [
                blind(
                    answers(policy, split["validation"], seed, computed["validation"]),
                    *(split["validation"], of_server, repeats),
                )
                for seed in range(options.repeats if policy else 1)
            ]
            believed, right = (fmean(one[index] for one in located) for index in (0, 1))
            print(
                f"| server, knows nothing, asks {repeats} x | {of_server} | {name} | "
                f"{believed:.1f} slices named, {right:.1f} right |"
            )


def check(hospital: Hospital, count: int) -> None:
    """Compare the computed scores with the network's scores at a site."""
    config = run_config(rounds=max(count, 1))
    gate, site, patients = Gate(config), hospital.start(config), truth(hospital.data, "validation")
    queries = Target.largest(patients).queries(EVERYWHERE[GRID * 2 + 2 :], count)
    for number, (_, query) in enumerate(queries, start=1):
        score = site.answer(gate.ask(query, number)).metrics["dice"]
        known = [score for score in query.scores(patients).values() if score is not None]
        assert abs(score - fmean(known)) < 1e-6, (score, fmean(known))


if __name__ == "__main__":
    main()
