"""The model card: training data, training, scores and known gaps of a model."""

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from medfedaug.analysis import page
from medfedaug.analysis.text_table import number, plain_markdown
from medfedaug.config.run import DEFAULT_LOSSES, job_hash
from medfedaug.data.dataset_json import LABELLED
from medfedaug.federation.job_folder import CARDS, COUNTS, LEVELS, SPACING
from medfedaug.metrics.registry import find_metric, nothing_learned_in
from medfedaug.metrics.significance import mean_interval
from medfedaug.runs.model_score import BORROWED, OWN, Annotated
from medfedaug.runs.recorded_run import RecordedRun
from medfedaug.runs.run import recorded_input
from medfedaug.utils.files import write_text
from medfedaug.utils.printable import counted

_USE = (
    "For research. It is not a medical device: no authority has cleared it, and no diagnosis and no "
    "treatment may rest on its output. Whoever brings it to another place tests it there first, on cases "
    "of that place.",
    "The sites that trained the weights decide under which terms they may be used; the run records none.",
)
_NOTHING = "–"
_DATA = ("site", "patients", "studies", "training samples", "voxel size, mm", "test cases with scores")
_BOTH, _STATISTICS = "weights (DP-SGD) and statistics", "statistics alone"


@dataclass(frozen=True)
class Table:
    """A table of text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block = str | Table


@dataclass(frozen=True)
class Document:
    """A title, the first paragraph, and sections: each a heading with its blocks.

    Example:
        >>> print(Document("A model", "Of slices.", [("Use", ("Research only.",))]).markdown())
        # A model
        <BLANKLINE>
        Of slices.
        <BLANKLINE>
        ## Use
        <BLANKLINE>
        Research only.
        <BLANKLINE>
    """

    title: str
    lead: str
    sections: Sequence[tuple[str, tuple[Block, ...]]] = ()

    def markdown(self) -> str:
        """Return the document as Markdown."""
        parts = [f"# {_escaped(self.title)}", _escaped(self.lead)]
        for heading, blocks in self.sections:
            parts += [f"## {_escaped(heading)}", *map(_markdown, blocks)]
        return "\n\n".join(parts) + "\n"

    def html(self) -> ET.Element:
        """Return the document as a page, for `medfedaug.analysis.page.write_page`."""
        html, body = page.start_page(self.title)
        page.add(body, "p", self.lead)
        for heading, blocks in self.sections:
            part = page.start_section(body, heading)
            for block in blocks:
                if isinstance(block, Table):
                    page.table(part, block.header, block.rows, words=True)
                else:
                    page.add(part, "p", block)
        return html


def write_model_card(
    run: RecordedRun,
    folder: str | Path,
    *,
    site_names: bool = False,
    promises: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a run's model card, ``model_card.md`` and ``model_card.html``.

    ``promises`` are sentences of a calibration, which name its site, by structure.
    """
    card = model_card(run, site_names=site_names)
    if promises:
        blocks = tuple(f"{name}: {text}." for name, text in promises.items())
        card = replace(card, sections=[*card.sections, ("Promises", blocks)])
    text, html = (Path(folder) / name for name in CARDS)
    page.check_page(html)
    page.write_page(card.html(), html)
    write_text(text, card.markdown())
    return [text, html]


def model_card(run: RecordedRun, *, site_names: bool = False) -> Document:
    """Return the model card of a run, from only its record and its statistics.

    It has no names of cases, folders and files, and names of sites only with ``site_names``.
    """
    return _Card(run, site_names).document()


class _Card:
    def __init__(self, run: RecordedRun, site_names: bool) -> None:
        self.run, self.record, self.config = run, run.record, run.config
        self.site_names = site_names
        self.counts: Mapping[str, Mapping[str, int]] = run.record.get(COUNTS, {})
        self.test: Mapping[str, Any] = run.record.get("test", {})
        self.tested = {**self.test.get("sites", {}), **self.test.get("unseen", {})}
        self.trained = sorted(run.record.get("sites", {}))
        self.unseen = sorted({*run.record.get("unseen", ()), *self.test.get("unseen", {})})
        known = [*self.trained, *(site for site in self.unseen if site not in self.trained)]
        self.names = {site: site if site_names else f"site {index}" for index, site in enumerate(known, 1)}

    def document(self) -> Document:
        config, classes = self.config, ", ".join(self.config.classes)
        title = f"Classification into {classes}"
        if config.task == "segmentation":
            title = f"Segmentation of {', '.join(config.classes[1:])}"
        lead = (
            f"A {config.network} for {config.task} ({classes}), trained by {len(self.trained)} sites that "
            f"shared no images, with {', '.join(method['name'] for method in config.methods)}."
        )
        sections = (
            ("Use", _USE),
            ("Training data", self.data()),
            ("Training", self.training()),
            ("Scores", self.scores()),
            ("Not tested", self.unknown()),
            ("Privacy", self.privacy()),
            ("Identity", self.identity()),
        )
        return Document(title, lead, sections)

    def data(self) -> tuple[Block, ...]:
        samples: Mapping[str, Any] = self.record.get("sites", {})
        spacings, rows = self.spacings(), list[tuple[str, ...]]()
        for site in self.trained:
            counts = (*map(self.counts.get(site, {}).get, ("patients", "studies")), samples.get(site))
            edges = " x ".join(f"{edge:.3g}" for edge in spacings[site][1]) if site in spacings else _NOTHING
            rows.append((self.name(site), *map(_count, counts), edges, self.cases(site)))
        for site in self.unseen:
            rows.append((self.name(site), *["none: it did not train"] * 3, _NOTHING, self.cases(site)))
        sample = "an image"
        if self.config.task == "segmentation":
            sample = f"a {'slice' if self.config.plan.spatial_dims == 2 else 'volume'}, or a patch of one"
        blocks: list[Block] = [
            Table(_DATA, tuple(rows)),
            f"Patients and studies are those of the training. A training sample is {sample}. Voxel "
            "sizes are medians along x, y and z.",
            f"Input: {recorded_input(self.record)}.",
        ]
        if self.config.channel_names:
            blocks.append(f"Channels, in this order: {', '.join(self.config.channel_names)}.")
        for site, names in self.record.get(LABELLED, {}).items():
            blocks.append(f"{self.name(site)} has outlined {', '.join(names) or 'nothing'}.")
        for key, text in (
            ("missing_channels", "does not have"),
            ("constant_channels", "has no variation in"),
        ):
            for site, channels in self.record["input"].get(key, {}).items():
                blocks.append(f"{self.name(site)} {text} {channels}.")
        return tuple(blocks)

    def training(self) -> tuple[Block, ...]:
        config = self.config
        plan, bundle, segments = config.plan.to_dict(), config.bundle, config.task == "segmentation"
        epochs = counted(config.local_epochs, "epoch")
        steps = counted(config.local_steps, "step") if config.local_steps else epochs
        usual = "the Bundle's" if bundle else DEFAULT_LOSSES[config.task]
        rounds = f"{len(self.record['rounds'])}, of {steps} at each site"
        settings = {
            "network": f"{config.network} {_arguments(config.network_args)}",
            "bundle": f"{bundle['name']}, content {bundle['hash']}" if bundle else "",
            "plan": _arguments({k: v for k, v in plan.items() if v is not None}) if segments else "",
            "image size": f"{config.image_size} pixels" if config.image_size else "",
            "rounds": f"{rounds}; the model is from round {self.run.round}",
            "optimiser": f"{config.optimizer}, learning rate {config.learning_rate:g} ({config.schedule})",
            "loss": f"{config.loss or usual} {_arguments(config.loss_args)}",
            "batch size": str(config.batch_size),
            "augmentation": config.augmentation,
            "precision": config.precision,
            "seed": str(config.seed),
            "began with": "given weights, not random ones" if self.record.get("init") else "",
            "purpose": config.purpose,
        }
        rows = [("method", _method(method)) for method in config.methods]
        rows += [(name, value.strip()) for name, value in settings.items() if value]
        return (Table(("setting", "value"), tuple(rows)),)

    def scores(self) -> tuple[Block, ...]:
        if not self.tested:
            return ("The model was not tested.",)
        metrics, classes, kinds = list(self.test["mean"]), self.classes(), Annotated.of(self.record)
        reason = nothing_learned_in(self.test)
        blocks: list[Block] = [f"The model learned nothing: {reason}."] if reason else []
        for name in metrics:
            rows = []
            for site in sorted(self.tested, key=lambda site: (site in self.unseen, site)):
                entry = self.tested[site]
                cells = [
                    _of_class(entry.get("classes", {}), label, name, kinds.kind(site, label))
                    for label in classes
                ]
                score = _with_interval(entry, name, first=name == metrics[0])
                model = self.record.get("scored", {}).get("unseen" if site in self.unseen else "test", "–")
                rows.append((self.name(site), score, *cells, str(model)))
            header = ("site", find_metric(name).title + self.unit(name), *classes, "model")
            blocks += [Table(header, tuple(rows)), self.summary(name)]
        blocks.append(
            "In brackets: the 95% interval of the mean over a site's test cases, by Student's t. It holds "
            "for other cases of the same site, not for other sites. It is missing if a site sent no scores "
            "of cases, or has fewer than two."
        )
        if kinds.sites:
            blocks.append(
                "A class is scored at the sites that outlined it in test cases, and means are over these. "
                "borrowed: the site outlined it in no training case, and the model learned it from others; "
                "without a score its quality there is not known. unknown: no site outlined it for training."
            )
            blocks += self.borrowed(kinds)
        missing = [self.name(site) for site in self.test.get("missing", {})]
        if missing:
            blocks.append(f"Not tested, and not in the mean: {', '.join(missing)}.")
        first = next(iter(self.test.get("mean", {})), "")
        for site, entry in sorted(self.tested.items()):
            if entry.get("note") and entry.get(first) is None:
                blocks.append(f"{self.name(site)}, no score: {entry['note']}.")
        unvalidated = self.record.get("unvalidated")
        for site, reason in sorted(unvalidated.items()) if isinstance(unvalidated, Mapping) else ():
            text = str(reason).removeprefix(f"site {site}: ")
            blocks.append(f"{self.name(site)}, no say in the choice: {text}.")
        return tuple(blocks)

    def borrowed(self, kinds: Annotated) -> Iterator[str]:
        """Yield a line for each borrowed class of a training site that no test case there shows."""
        for site in self.trained:
            scored = self.tested.get(site, {}).get("classes", {})
            for label in kinds.classes:
                if label not in scored and kinds.kind(site, label) == BORROWED:
                    far = kinds.distance(site, label, self.run.statistics)
                    yield f"{self.name(site)}, {label}: not measured at this site{far}."

    def classes(self) -> list[str]:
        names = dict.fromkeys(name for entry in self.tested.values() for name in entry.get("classes", {}))
        return list(names) if len(names) > 1 else []

    def unit(self, name: str) -> str:
        units = sorted({str(entry["unit"]) for entry in self.tested.values() if entry.get("unit")})
        return f" ({', '.join(units)})" if find_metric(name).has_unit and units else ""

    def summary(self, name: str) -> str:
        worst, title = self.test.get("worst", {}).get(name), find_metric(name).title
        text = f"{title}: mean over the sites that trained {number(self.test['mean'][name])}"
        if worst and len(self.test.get("sites", {})) > 1:
            text += f"; worst site: {self.name(worst['site'])}, {number(worst['value'])}"
        return f"{text}."

    def unknown(self) -> tuple[Block, ...]:
        unseen = [self.name(site) for site in self.unseen if site in self.test.get("unseen", {})]
        tested = f"only {', '.join(unseen)} {'was' if len(unseen) == 1 else 'were'} tested" if unseen else ""
        few = [self.name(site) for site in self.names if 0 < self.count(site) < 10]
        return (
            f"Sites that did not train: {tested or 'none was tested'}. Scores at other sites are not known.",
            "Scanners, protocols and patients other than those of the sites above.",
            self.spacing(),
            *([f"Fewer than ten test cases: {', '.join(few)}. Such a mean may be far off."] if few else []),
            "Other seeds: a second training with the same settings may score otherwise.",
        )

    def spacing(self) -> str:
        edges = list(self.spacings().values())
        if self.config.task != "segmentation" or self.record["input"].get("scaling") == "fixed":
            return "Images of another size than the sites' own, and other cameras."
        if not edges:
            return "Voxels of other size than the sites' own: the run did not record their sizes."
        ranges = ", ".join(
            f"{min(low[axis] for low, *_ in edges):.3g} to {max(high[axis] for *_, high in edges):.3g}"
            for axis in range(3)
        )
        return f"Voxels whose edges are not about {ranges} mm along x, y and z: nearly all of training are."

    def spacings(self) -> dict[str, Sequence[Sequence[float]]]:
        """Return low, median and high edges of each site's voxels."""
        spacings = self.record.get(SPACING, {})
        return {site: [levels[level] for level in LEVELS] for site, levels in spacings.items()}

    def privacy(self) -> tuple[Block, ...]:
        spent, deltas = self.last("privacy/epsilon"), self.last("privacy/delta")
        with_weights = {*self.last("privacy/weights")}
        at_server = tuple(
            f"{self.name(site)} added noise to its scores: ε = {epsilon:.3g} for its validation patients."
            for site, epsilon in sorted(self.last("privacy/score_epsilon").items())
        )
        if not spent:
            return (
                "No site added noise to what it sent: nothing bounds what the model, or the statistics that "
                "methods exchanged, reveal of a single patient.",
                *at_server,
            )
        rows = [
            (
                self.name(site),
                f"{epsilon:.3g}",
                f"{deltas.get(site, math.nan):.1e}",
                _BOTH if site in with_weights else _STATISTICS,
            )
            for site, epsilon in sorted(spent.items())
        ]
        blocks: list[Block] = [
            "Sites added noise to what they sent. Each site's spent privacy budget, over all jobs until this "
            "run's end:",
            Table(("site", "ε", "δ", "of"), tuple(rows)),
        ]
        if with_weights:
            blocks.append("Losses are in no ε, nor are scores without noise of their own.")
        if len(with_weights) < len(spent):
            blocks.append(
                "Of statistics alone means that the weights of the model were sent without noise: nothing "
                "bounds what the model reveals of a single patient of such a site."
            )
        without = [self.name(site) for site in self.trained if site not in spent]
        if without:
            blocks.append(
                f"Without noise: {', '.join(without)}. Nothing bounds what the model, or the statistics that "
                "methods exchanged, reveal of a single patient there."
            )
        return (*blocks, *at_server)

    def last(self, name: str) -> dict[str, float]:
        """Return each site's last value of a metric of the rounds that is not 0."""
        rounds = (entry.get("sites", {}) for entry in self.record["rounds"])
        return {
            site: metrics[name] for sites in rounds for site, metrics in sites.items() if metrics.get(name)
        }

    def identity(self) -> tuple[Block, ...]:
        rows = [
            ("file", self.run.model.name),
            ("SHA-256", self.run.sha256),
            ("run", str(self.record["run"])),
            *((name, self.record[name]) for name in ("job", "date") if name in self.record),
            ("round", str(self.run.round)),
            ("configuration, SHA-256", job_hash(self.config.to_dict())),
            *((name, str(version)) for name, version in (self.record.get("versions") or {}).items()),
        ]
        return (Table(("", "value"), tuple(rows)),)

    def name(self, site: str) -> str:
        return self.names.get(site, "another site")

    def count(self, site: str) -> int:
        entry = self.tested.get(site, {})
        if all(entry.get(name) is None for name in self.test.get("mean", {})):
            return 0  # a site without outlines has test cases, and no score
        return int(entry.get("scored_cases", len(entry.get("cases", ()))))

    def cases(self, site: str) -> str:
        return str(self.count(site) or _NOTHING)


def _with_interval(entry: Mapping[str, Any], name: str, first: bool) -> str:
    """Return a site's mean, with its interval if its cases are known."""
    value = entry.get(name)
    cases = entry.get("case_metrics", {}).get(name, entry.get("cases", {}) if first else {})
    known = {case: score for case, score in cases.items() if score is not None}
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


def _method(method: Mapping[str, Any]) -> str:
    arguments = _arguments(method.get("args", {}))
    return f"{method['name']}: {arguments}" if arguments else str(method["name"])


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _markdown(block: Block) -> str:
    if isinstance(block, str):
        return _escaped(block)
    rule = " | ".join(["---"] * len(block.header))
    header, *rows = (" | ".join(map(_escaped, cells)) for cells in (block.header, *block.rows))
    return "\n".join(f"| {line} |" for line in (header, rule, *rows))


def _escaped(text: str) -> str:
    """Escape text of the sites: it makes no border of a table, no markup and no link."""
    return plain_markdown(" ".join(text.split()), "\\|<>*_`[]~#&!")
