"""The model card: what a model was trained on, how it scored, and what nobody knows of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from medfedaug.analysis.document import Block, Code, Document, Section, Table
from medfedaug.analysis.page import check_page, write_page
from medfedaug.analysis.text_table import number
from medfedaug.config.command_line import command_of
from medfedaug.config.run import DEFAULT_LOSSES
from medfedaug.config.scanners import scanners_text
from medfedaug.data.dataset_json import LABELLED
from medfedaug.federation.job_folder import CARDS, LEVELS, SPACING
from medfedaug.metrics.nothing_learned import nothing_learned_in
from medfedaug.metrics.registry import find_metric
from medfedaug.metrics.significance import mean_interval
from medfedaug.runs.annotated import OWN, Annotated
from medfedaug.runs.input_scaling import recorded_input
from medfedaug.runs.recorded_run import RecordedRun
from medfedaug.utils.files import write_text

_USE = (
    "For research. It is not a medical device: no authority has cleared it, and no diagnosis and no "
    "treatment may rest on what it says. Whoever brings it to another place tests it there first, on cases "
    "of that place.",
    "Under which terms the weights may be used is for the sites that trained them to say; the run records "
    "none.",
)
_NOTHING = "–"
_DATA = ("site", "patients", "studies", "training samples", "edges of a voxel, mm", "test cases with scores")
_SAID = {
    ("modality", "body part", "scanners", "years"): ("modality", "body_part", "scanners", "years"),
    ("patients who are included", "who drew the outlines"): ("inclusion", "annotators"),
}
_BOTH, _STATISTICS = "weights (DP-SGD) and statistics", "statistics alone"
_UNKNOWN = "Scanners, protocols and patients other than those of the sites above."


def write_model_card(run: RecordedRun, folder: str | Path, *, site_names: bool = False) -> list[Path]:
    """Write a run's model card, ``model_card.md`` and ``model_card.html``."""
    card = model_card(run, site_names=site_names)
    text, page = (Path(folder) / name for name in CARDS)
    check_page(page)
    write_page(card.html(), page)
    write_text(text, card.markdown())
    return [text, page]


def model_card(run: RecordedRun, *, site_names: bool = False) -> Document:
    """The model card of a run: nothing in it comes from elsewhere than its record and its statistics.

    Names of cases, of folders and of files are left out, and names of sites unless they are asked for.
    """
    return _Card(run, site_names).document()


class _Card:
    def __init__(self, run: RecordedRun, site_names: bool) -> None:
        self.run, self.record, self.config = run, run.record, run.config
        self.site_names = site_names
        self.descriptions: Mapping[str, Mapping[str, Any]] = run.record.get("descriptions", {})
        self.test: Mapping[str, Any] = run.record.get("test", {})
        self.trained = sorted(run.record.get("sites", {}))
        self.unseen = sorted({*run.record.get("unseen", ()), *self.test.get("unseen", {})})
        known = [*self.trained, *(site for site in self.unseen if site not in self.trained)]
        self.names = {site: site if site_names else f"site {index}" for index, site in enumerate(known, 1)}

    def document(self) -> Document:
        config, classes = self.config, ", ".join(self.config.classes)
        what = {"segmentation": "Segmentation of", "classification": "Classification into"}[config.task]
        named = ", ".join(config.classes[1:] if config.task == "segmentation" else config.classes)
        lead = (
            f"A {config.network} for {config.task} ({classes}), trained by {len(self.trained)} sites that "
            f"shared no images, with {', '.join(method['name'] for method in config.methods)}."
        )
        sections = (
            Section("Use", _USE),
            Section("What it was trained on", self.data()),
            Section("How it was trained", self.training()),
            Section("How it scored", self.scores()),
            Section("What it was not tested on", self.unknown()),
            Section("Privacy", self.privacy()),
            Section("Which model this is", self.identity()),
            Section("How to make it again", self.again()),
        )
        return Document(f"{what} {named}", lead, sections)

    def loss(self) -> str:
        """The loss by name, the default's too, with its arguments."""
        if self.config.bundle and not self.config.loss:
            return "the Bundle's"
        name = self.config.loss or DEFAULT_LOSSES[self.config.task]
        return f"{name} {_arguments(self.config.loss_args)}" if self.config.loss_args else name

    def data(self) -> tuple[Block, ...]:
        samples: Mapping[str, Any] = self.record.get("sites", {})
        rows: list[tuple[str, ...]] = [
            (*self.counted(site), _count(samples.get(site)), self.edges(site), self.cases(site))
            for site in self.trained
        ]
        rows += [
            (self.name(site), *["none: it did not train"] * 3, _NOTHING, self.cases(site))
            for site in self.unseen
        ]
        sample = {2: "a slice, or a patch of one", 3: "a volume, or a patch of one"}
        one = sample[self.config.plan.spatial_dims] if self.config.task == "segmentation" else "an image"
        found: list[Block] = [
            Table(_DATA, tuple(rows)),
            "Patients and studies are those that the site trains with, as it counts them or says. A training "
            f"sample is {one}. Edges of a voxel are medians along x, y and z.",
            *self.described(),
            f"Input: {self.input()}.",
        ]
        if self.config.channel_names:
            found.append(f"Channels, in this order: {', '.join(self.config.channel_names)}.")
        for site, names in self.record.get(LABELLED, {}).items():
            told = f"{self.name(site)} has outlined {', '.join(names) or 'nothing'}."
            if not names and site not in self.unseen:
                told += f" In the average it counts {self.config.unlabelled_weight:g} of its samples."
            found.append(told)
        for key, text in (
            ("missing_channels", "does not have"),
            ("constant_channels", "has no variation in"),
        ):
            for site, channels in self.record["input"].get(key, {}).items():
                found.append(f"{self.name(site)} {text} {channels}.")
        if self.record["input"].get("normalised_by") and self.run.statistics:
            pairs = self.run.statistics
            rows = [
                (self.name(site), _numbers(pair.mean.tolist()), _numbers(pair.std.tolist()))
                for site, pair in sorted(pairs.items())
                if site in self.names
            ]
            found += [
                "Means over a site's images of their mean and standard deviation, by channel:",
                Table(("site", "mean", "standard deviation"), tuple(rows)),
            ]
        return tuple(found)

    def counted(self, site: str) -> tuple[str, str, str]:
        """Name, patients and studies of a site."""
        told = self.descriptions.get(site, {})
        return self.name(site), _count(told.get("patients")), _count(told.get("studies"))

    def edges(self, site: str) -> str:
        rows = self.spacings().get(site)
        return " x ".join(f"{edge:.3g}" for edge in rows[1]) if rows else _NOTHING

    def described(self) -> Iterator[Block]:
        """Return the sites' statements on patients and images; a cell says where a site says nothing."""
        if not any(told.keys() - {"patients", "studies"} for told in self.descriptions.values()):
            yield (
                "No site describes its images and patients: modality, body part, scanners, years, inclusion "
                "and who drew the outlines are not known (medfedaug site-config --describe)."
            )
            return
        yield "As each site says:"
        for header, keys in _SAID.items():
            rows = [(self.name(site), *(self.said(site, key) for key in keys)) for site in self.names]
            yield Table(("site", *header), tuple(rows))
        contacts = {site: told["contact"] for site, told in self.descriptions.items() if "contact" in told}
        if self.site_names:
            yield from (f"Contact at {self.name(site)}: {contact}" for site, contact in contacts.items())
        elif contacts:
            yield "Contacts are on the card with the names of the sites (--site-names)."

    def said(self, site: str, key: str) -> str:
        value = self.descriptions.get(site, {}).get(key)
        if not value:
            return "not said"
        if key == "scanners":
            return scanners_text(value)
        return " to ".join(str(year) for year in dict.fromkeys(value)) if key == "years" else str(value)

    def input(self) -> str:
        seen = recorded_input({**self.record, "input": {**self.record["input"], "uneven": None}})
        uneven = [self.name(site) for site in self.record["input"].get("uneven", {})]
        odd = f"; the volumes of {', '.join(uneven)} lie on very different scales" if uneven else ""
        return f"{seen}{odd}"

    def training(self) -> tuple[Block, ...]:
        config = self.config
        rows = [("method", _method(method)) for method in config.methods]
        rows += [("network", f"{config.network} {_arguments(config.network_args)}")]
        if config.bundle:
            rows += [("bundle", f"{config.bundle['name']}, content {config.bundle['hash']}")]
        if config.task == "segmentation":
            rows += [("plan", _arguments({k: v for k, v in config.plan.to_dict().items() if v is not None}))]
        if config.image_size:
            rows += [("image size", f"{config.image_size} pixels")]
        many, one = (config.local_steps, "step") if config.local_steps else (config.local_epochs, "epoch")
        steps = f"{many} {one}{'s' if many > 1 else ''}"
        count = len(self.record["rounds"])
        rows += [
            ("rounds", f"{count}, of {steps} at each site; the model is that of round {self.run.round}"),
            ("optimiser", f"{config.optimizer}, learning rate {config.learning_rate:g} ({config.schedule})"),
            ("loss", self.loss()),
            ("batch size", str(config.batch_size)),
            ("augmentation", config.augmentation),
            ("precision", config.precision),
            ("seed", str(config.seed)),
        ]
        if self.record.get("init"):
            rows.append(("began with", "given weights, not random ones"))
        if self.config.purpose:
            rows.append(("purpose", self.config.purpose))
        return (Table(("setting", "value"), tuple((a, b.strip()) for a, b in rows)),)

    def scores(self) -> tuple[Block, ...]:
        tested = {**self.test.get("sites", {}), **self.test.get("unseen", {})}
        if not tested:
            return ("The model was not tested.",)
        metrics, classes, kinds = list(self.test["mean"]), self.classes(tested), Annotated.of(self.record)
        reason = nothing_learned_in(self.test)
        found: list[Block] = [f"The model learned nothing: {reason}."] if reason else []
        for name in metrics:
            rows = []
            for site in sorted(tested, key=lambda site: (site in self.unseen, site)):
                by_class = tested[site].get("classes", {})
                cells = [_of_class(by_class, one, name, kinds.kind(site, one)) for one in classes]
                score = _with_interval(tested[site], name, first=name == metrics[0])
                rows.append((self.name(site), score, *cells, self.whose(site)))
            header = ("site", find_metric(name).title + self.unit(name, tested), *classes, "model")
            found += [Table(header, tuple(rows)), self.summary(name)]
        found.append(
            "In brackets: the 95% interval of the mean over a site's test cases, by Student's t; it says how "
            "far the mean of other cases of the same site may be away, and nothing of other sites. It is "
            "missing where a site sent no scores of cases, or has fewer than two."
        )
        if kinds.sites:
            found.append(
                "A class is scored at the sites that outlined it in test cases, and means are over these. "
                "borrowed: the site outlined it in no training case, and the model learned it from others; "
                "without a score, how well it is found there is not known. unknown: no site outlined it "
                "for training."
            )
        missing = [self.name(site) for site in self.test.get("missing", {})]
        if missing:
            found.append(f"Not tested, and not in the mean: {', '.join(missing)}.")
        for what, reasons in (
            ("no score", self.without_score()),
            ("no say in the choice", self.unvalidated()),
        ):
            found += [f"{self.name(site)}, {what}: {reason}." for site, reason in reasons.items()]
        return tuple(found)

    def without_score(self) -> dict[str, str]:
        first = next(iter(self.test.get("mean", {})), "")
        entries = {**self.test.get("sites", {}), **self.test.get("unseen", {})}
        return {
            s: str(e["note"]) for s, e in sorted(entries.items()) if e.get("note") and e.get(first) is None
        }

    def unvalidated(self) -> dict[str, str]:
        found = self.record.get("unvalidated")
        reasons = found if isinstance(found, Mapping) else {}
        return {site: str(why).removeprefix(f"site {site}: ") for site, why in sorted(reasons.items())}

    def classes(self, tested: Mapping[str, Any]) -> list[str]:
        seen = dict.fromkeys(name for entry in tested.values() for name in entry.get("classes", {}))
        return list(seen) if len(seen) > 1 else []

    def whose(self, site: str) -> str:
        scored = self.record.get("scored", {})
        return str(scored.get("unseen" if site in self.unseen else "test", "–"))

    def unit(self, name: str, tested: Mapping[str, Any]) -> str:
        units = sorted({str(entry["unit"]) for entry in tested.values() if entry.get("unit")})
        return f" ({', '.join(units)})" if find_metric(name).has_unit and units else ""

    def summary(self, name: str) -> str:
        worst = self.test.get("worst", {}).get(name)
        text = (
            f"{find_metric(name).title}: mean over the sites that trained {number(self.test['mean'][name])}"
        )
        if worst and len(self.test.get("sites", {})) > 1:
            text += f"; worst site: {self.name(worst['site'])}, {number(worst['value'])}"
        return f"{text}."

    def unknown(self) -> tuple[Block, ...]:
        found: list[Block] = []
        unseen = [self.name(site) for site in self.unseen if site in self.test.get("unseen", {})]
        if unseen:
            found.append(
                f"Sites that did not train: only {', '.join(unseen)} {'was' if len(unseen) == 1 else 'were'} "
                "tested. How it does at others is not known."
            )
        else:
            found.append("Sites that did not train: none was tested. How it does elsewhere is not known.")
        found += [_UNKNOWN, self.spacing()]
        few = [self.name(site) for site in self.names if 0 < self.count(site) < 10]
        if few:
            found.append(f"Fewer than ten test cases: {', '.join(few)}. Such a mean may be far off.")
        found.append("Other seeds: a second training with the same settings may score otherwise.")
        return tuple(found)

    def spacing(self) -> str:
        edges = list(self.spacings().values())
        if self.config.task != "segmentation" or self.record["input"].get("scaling") == "fixed":
            return "Images of another size than the sites' own, and other cameras."
        if not edges:
            return "Voxels of other size than the sites' own: the run did not record their sizes."
        low = [min(found[0][axis] for found in edges) for axis in range(3)]
        high = [max(found[-1][axis] for found in edges) for axis in range(3)]
        ranges = ", ".join(f"{a:.3g} to {b:.3g}" for a, b in zip(low, high, strict=True))
        return f"Voxels whose edges are not about {ranges} mm along x, y and z: nearly all of training are."

    def spacings(self) -> dict[str, Sequence[Sequence[float]]]:
        """Low, median and high edges of each site's voxels, as every run records them, or a plan."""
        prints = self.record.get("planned", {}).get("fingerprints", {})
        found = {site: entry["spacing"] for site, entry in prints.items() if any(entry["spacing"][1])}
        for site, levels in self.record.get(SPACING, {}).items():
            found[site] = [levels[level] for level in LEVELS]
        return found

    def privacy(self) -> tuple[Block, ...]:
        spent: dict[str, tuple[float, float]] = {}
        with_weights: set[str] = set()
        for entry in self.record["rounds"]:
            for site, metrics in entry.get("sites", {}).items():
                if isinstance(metrics.get("privacy/epsilon"), int | float):
                    spent[site] = metrics["privacy/epsilon"], metrics.get("privacy/delta", math.nan)
                    with_weights |= {site} if metrics.get("privacy/weights") else set()
        at_server = (*self.score_noise(), *self.server_noise())
        if not spent:
            return (
                "No site added noise to what it sent: there is no bound on what the model, or the statistics "
                "that methods exchanged, say of a single patient.",
                *at_server,
            )
        rows = [
            (self.name(site), f"{e:.3g}", f"{d:.1e}", _BOTH if site in with_weights else _STATISTICS)
            for site, (e, d) in sorted(spent.items())
        ]
        found: list[Block] = [
            "Sites added noise to what they sent. What each has spent of its privacy "
            "budget, over all jobs until this run's end:",
            Table(("site", "ε", "δ", "of"), tuple(rows)),
        ]
        if with_weights:
            found.append("Losses are in no ε, nor are scores without noise of their own.")
        if len(with_weights) < len(spent):
            found.append(
                "Of statistics alone means that the weights of the model were sent without noise: there is "
                "no bound on what the model says of a single patient of such a site."
            )
        without = [self.name(site) for site in self.trained if site not in spent]
        if without:
            found.append(
                f"Without noise: {', '.join(without)}. There is no bound on what the model, or the "
                "statistics that methods exchanged, say of a single patient there."
            )
        return (*found, *at_server)

    def score_noise(self) -> Iterator[str]:
        """Return the privacy budget that sites have spent on the scores of their validation patients."""
        spent: dict[str, float] = {}
        for entry in self.record["rounds"]:
            for site, metrics in entry.get("sites", {}).items():
                if isinstance(metrics.get("privacy/score_epsilon"), int | float):
                    spent[site] = metrics["privacy/score_epsilon"]
        for site, epsilon in sorted(spent.items()):
            name = self.name(site)
            yield f"{name} added noise to its scores: ε = {epsilon:.3g} for its validation patients."

    def server_noise(self) -> Iterator[str]:
        """Return the last round's noise that methods added at the server."""
        for name, told in self.record["rounds"][-1].get("methods", {}).items():
            if "privacy/epsilon" in told:
                epsilon, delta = told["privacy/epsilon"], told["privacy/delta"]
                yield (
                    f"The server added noise to the mean of the sites' updates ({name}), after it saw them. "
                    f"All models of the run together have ε = {epsilon:.3g} at δ = {delta:.1e}, for a site "
                    "that took part or stayed silent. Scores are not covered, nor is the choice of the round."
                )

    def identity(self) -> tuple[Block, ...]:
        rows = [
            ("file", self.run.model.name),
            ("SHA-256", self.run.sha256),
            ("run", str(self.record["run"])),
            ("round", str(self.run.round)),
        ]
        versions = self.record.get("versions") or {}
        rows += [(name, str(number)) for name, number in versions.items()]
        return (Table(("", "value"), tuple(rows)),)

    def again(self) -> tuple[Block, ...]:
        engine = self.record.get("engine")
        settings = {**self.record["config"]}
        settings["holdout"] = [self.name(site) for site in settings.get("holdout", ())]
        planned = self.record.get("planned")
        if planned:
            settings.update(planned["asked"], holdout=settings["holdout"])
        made = command_of(settings, simulated=engine is not None)
        bits = (
            "With the same data, versions and number of threads this gives the same model bit for bit, "
            "unless sites added noise."
        )
        return (Code(made), bits)

    def name(self, site: str) -> str:
        return self.names.get(site, "another site")

    def count(self, site: str) -> int:
        entry = {**self.test.get("sites", {}), **self.test.get("unseen", {})}.get(site, {})
        return int(entry.get("scored_cases", len(entry.get("cases", ()))))

    def cases(self, site: str) -> str:
        return str(self.count(site)) if self.count(site) else "–"


def _with_interval(entry: Mapping[str, Any], name: str, first: bool) -> str:
    """A site's mean, and where its cases are known the interval of it."""
    value = entry.get(name)
    found = entry.get("case_metrics", {}).get(name, entry.get("cases", {}) if first else {})
    cases = found if isinstance(found, Mapping) else {}
    known = {case: score for case, score in cases.items() if isinstance(score, int | float)}
    patients, scores = entry.get("patients", {}), list(known.values())
    of_cases = bool(scores) and value is not None and math.isclose(fmean(scores), value, abs_tol=1e-6)
    owners = [patients.get(case, case) for case in known]
    largest = find_metric(name).largest
    return _between(value, mean_interval(scores, largest, patients=owners) if of_cases else None)


def _of_class(by_class: Mapping[str, Any], label: str, name: str, kind: str) -> str:
    if label not in by_class and kind != OWN:
        return kind
    entry = by_class.get(label, {})
    low, high = entry.get(f"{name}_low"), entry.get(f"{name}_high")
    score = _between(entry.get(name), None if low is None or high is None else (low, high))
    return score if kind == OWN else f"{score} ({kind})"


def _between(value: float | None, interval: Sequence[float] | None) -> str:
    return f"{number(value)} [{' to '.join(map(number, interval))}]" if interval else number(value)


def _count(value: Any) -> str:
    return str(value) if isinstance(value, int) else "–"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _method(method: Mapping[str, Any]) -> str:
    arguments = _arguments(method.get("args", {}))
    return f"{method['name']}: {arguments}" if arguments else str(method["name"])


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
