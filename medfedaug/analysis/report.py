"""`write_report`: finished runs on one HTML page that needs no other files and no network."""

import json
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from medfedaug.analysis import page
from medfedaug.analysis.grouping import experiment, group_runs
from medfedaug.analysis.metric_table import metric_table
from medfedaug.analysis.plan_page import add_plan
from medfedaug.analysis.plots import byte_unit, gamma_by_layer, learning_curves, site_scores
from medfedaug.analysis.score_table import MOST_SITES, STUDIES, Row, Table, summary_table
from medfedaug.analysis.text_table import number
from medfedaug.metrics.registry import METRICS, REMEDIES, find_metric
from medfedaug.runs.load_results import find_runs, load_run
from medfedaug.runs.run import BASELINE, MODEL, NOT_RECORDED, Run
from medfedaug.utils.plugins import added_modules
from medfedaug.utils.printable import counted
from medfedaug.utils.validation import is_number

_MOST_TROUBLES = 100
WORDS: dict[str, str] = yaml.safe_load((resources.files(__package__) / "words.yml").read_text("utf-8"))
"""Words of a page with a special sense, besides the titles of metrics."""


def write_report(
    run_dirs: Sequence[str | Path | Run],
    out_html: str | Path,
    *,
    data: str | Path | None = None,
    device: str = "auto",
    notes: Sequence[str | Sequence[Sequence[str]]] = (),
    evaluations: Sequence[Mapping[str, Any]] = (),
    reference: str = BASELINE,
) -> Path:
    """Write one page about one or more runs: scores, comparisons, curves, bytes, γ, failures, configuration.

    Args:
        run_dirs: the runs' folders, folders that contain them at any depth, or loaded runs.
        data: the folder with the sites' folders, or with a benchmark's files. The page then also shows the
            test case on which methods differ most, and for the first run of each method the worst and the
            best case of each site.
        device: the device of the models, with ``data``.
        notes: paragraphs that a reader must know first, and tables as lines of cells, the headings first.
        evaluations: contents of ``evaluation.json``, which come first; with them no run is needed.
        reference: the methods that all others are compared with, joined by commas.

    Raises:
        DataError: when a ``results.json`` is missing or malformed, or data cannot be used.
        ConfigError: when runs cannot be compared, or ``out_html`` exists and is not a page of this kind.
        StorageError: when the page cannot be written.
    """
    out = Path(out_html)
    page.check_page(out)
    loaded = [run for run in run_dirs if isinstance(run, Run)]
    folders = find_runs(run for run in run_dirs if not isinstance(run, Run))
    runs = [*loaded, *map(load_run, folders)]
    if evaluations and not runs:
        html, body = page.start_page("Evaluation of a federation")
        for study in added_modules(STUDIES):
            study.add_evaluations(body, evaluations)
        page.end_page(body)
    else:
        html = _page(runs, data, device, notes, evaluations, reference)
    page.write_page(html, out)
    return out


def _page(
    runs: Sequence[Run],
    data: str | Path | None,
    device: str,
    notes: Sequence[str | Sequence[Sequence[str]]],
    evaluations: Sequence[Mapping[str, Any]],
    reference: str,
) -> ET.Element:
    groups, studies = group_runs(runs), added_modules(STUDIES)
    members = [*chain.from_iterable(groups.values())]
    several = f"{len(groups)} methods" if len(groups) > 4 else ", ".join(groups)
    html, body = page.start_page(f"Federated training: {several}")
    scores = summary_table(runs, reference)
    page.add(body, "p", answer(scores), **{"class": "answer"})
    if len({site for run in runs for site in run.sites}) <= MOST_SITES and any(run.sites for run in runs):
        caption = "A line is the 95% interval of the mean over a site's test patients, from three on."
        page.figure(body, site_scores(groups), "Test score by site and method", caption)
    example = page.add(body, "section")
    for note in (_lead(runs), *notes, *_events(runs)):
        if isinstance(note, str):
            page.add(body, "p", note)
        else:
            page.table(body, note[0], note[1:])
    words = page.add(body, "section")
    for study in studies:
        study.add_evaluations(body, evaluations)
    page.text_table(page.start_section(body, f"{members[0].title} on the test cases"), scores)
    silent = scores.nothing_learned or (scores.untrained and not any(row.verdict for row in scores.rows))
    for study in studies if len(groups) > 1 and not silent else ():
        study.add_comparisons(body, members, reference)
    section = page.start_section(body, "All metrics, worst site and spread over sites", folded=True)
    page.text_table(section, metric_table(members))
    for append in (_curves, _traffic, _gamma):
        append(body, groups)
    for study in added_modules("comparison.report_images") if data is not None else ():
        study.image_sections(body, groups, example, data, device)
    if any("planned" in run.context for run in runs):
        _plan(page.add(body, "section"), groups)
    for append in (_troubles, _runs, _configuration):
        append(body, groups)
    page.end_page(body)
    page.definitions(words, "What the words mean", words_in(" ".join(body.itertext())))
    return html


def _lead(runs: Sequence[Run]) -> str:
    data = sorted({run.data for run in runs if run.data})
    sites = sorted({site for run in runs for site in run.sites})
    unseen = sorted({site for run in runs for site in run.unseen} - {*sites})
    parts = [counted(len(runs), "run")]
    parts += [f"data: {', '.join(data)}"] if data else []
    parts += [f"training sites: {_names(sites)}"]
    parts += [f"unseen: {_names(unseen)}"] if unseen else []
    held_out = sorted({site for run in runs for site in run.held_out})
    parts += [f"left out of training: {_names(held_out)}"] if held_out else []
    return " · ".join(parts)


def _events(runs: Sequence[Run]) -> Iterator[str]:
    """Yield sentences on structures marked many times as large as outlined, an early end, late updates."""
    for run in runs:
        yield from (f"{run.label} ({run.name}), {text}" for text in run.context.get("oversized", ()))
        if early := run.context.get("stalled"):
            ended = f"ended after {early['round']} of {run.config['rounds']} rounds"
            yield f"{run.label} ({run.name}) {ended}: {early['reason']}."
        late: dict[str, list[int]] = defaultdict(list)
        for site, reply in (pair for entry in run.rounds for pair in entry["sites"].items()):
            if is_number(reply.get("staleness")):
                late[site].append(reply["staleness"])
        sites = (f"{site} {fmean(late[site]):.1f}, at most {max(late[site])}" for site in sorted(late))
        if late:
            yield (
                f"{run.label} ({run.name}) made each model of the first {run.config.get('buffer')} updates. "
                f"Updates were late by this many rounds on average: {'; '.join(sites)}."
            )


def _names(sites: Sequence[str]) -> str:
    return ", ".join(sites) if len(sites) <= MOST_SITES else str(len(sites))


def _curves(body: ET.Element, groups: dict[str, list[Run]]) -> None:
    runs = [*chain.from_iterable(groups.values())]
    if not any(value is not None for run in runs for value in run.validation()):
        return
    section = page.start_section(
        body, f"{find_metric(runs[0].chosen_by).title} on the validation cases, by round"
    )
    caption = "A dot marks the round whose model was tested."
    scored = {label: members[0].scored.get("validation", NOT_RECORDED) for label, members in groups.items()}
    caption += f" Model: {', '.join(f'{label} {model}' for label, model in scored.items())}."
    if any(len(members) > 1 for members in groups.values()):
        caption += " Several runs of a method: their mean, in a band from the lowest to the highest."
    page.figure(section, learning_curves(runs), "Validation score by round", caption)


def _traffic(body: ET.Element, groups: dict[str, list[Run]]) -> None:
    lines = []
    for label, (run, *_) in groups.items():
        turns = max(1, sum(map(_num_sites, run.rounds)))
        once = run.context.get("bytes_up_before_training", {})
        parts: dict[str, list[int]] = {part: [size, 0] for part, size in once.items()}
        for entry in run.rounds:
            for part, sizes in entry.get("bytes", {}).items():
                total = parts.setdefault(part, [0, 0])
                total[0] += sizes.get("up", 0)
                total[1] += sizes.get("down", 0)
        for part, (up, down) in parts.items():
            lines.append([label, part, *map(_size, (up / turns, down / turns, up + down))])
    if not lines:
        return
    section = page.start_section(body, "Bytes", folded=True)
    header = ["method", "part", "up, per site and round", "down, per site and round", "all sites, whole run"]
    page.table(section, header, lines)
    page.remark(
        section,
        "Content only, without the framing of messages. Means over the rounds; what was sent once before "
        "training is included.",
    )


def _num_sites(entry: Mapping[str, Any]) -> int:
    """Return the number of sites that received a round's model."""
    trained = {site for site, scores in entry["sites"].items() if "samples" in scores}
    return len(trained | {str(t.get("site")) for key in ("refused", "missing") for t in entry.get(key, ())})


def _gamma(body: ET.Element, groups: dict[str, list[Run]]) -> None:
    runs = {label: members[0] for label, members in groups.items() if members[0].gamma()}
    if not runs:
        return
    section = page.start_section(body, "γ by layer", folded=True)
    page.remark(
        section,
        "γ scales the noise on a channel's statistics by how much the sites disagree on that channel. The "
        "band runs from the lowest to the highest channel; without height it would mean a single γ.",
    )
    for label, run in runs.items():
        page.add(section, "h3", f"{label}, {run.name}")
        page.figure(section, gamma_by_layer(run), f"γ by layer, {label}")


def _plan(section: ET.Element, groups: dict[str, list[Run]]) -> None:
    runs = [(label, run) for label, members in groups.items() for run in members if "planned" in run.context]
    label, run = runs[0]
    planned = run.context["planned"]
    add_plan(section, planned.get("reasons", ()), planned.get("fingerprints", {}))
    if any(other.planned != run.planned for _, other in runs):
        page.add(
            section,
            "p",
            f"This is the plan of {label}, {run.name}. Runs whose sites sent other fingerprints have other "
            "plans: they are under Configuration, and the reasons for them in results.json.",
        )


def _troubles(body: ET.Element, groups: dict[str, list[Run]]) -> None:
    # One line for the same event in several rounds.
    rounds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for label, members in groups.items():
        for run in members:
            for event, named in (("left out", run.left_out), ("suspected", run.suspected)):
                rounds |= {(label, run.name, site, event, reason): [] for site, reason in named.items()}
            for entry in run.rounds:
                for kind in ("refused", "missing"):
                    for trouble in entry.get(kind, []):
                        site, reason = (str(trouble.get(key, "")) for key in ("site", "reason"))
                        event = kind if kind != "missing" else f"no answer to {trouble.get('task', 'train')}"
                        rounds[label, run.name, site, event, reason].append(entry["round"])
            for event, reasons in (("not tested", run.untested), ("no score", run.unscored)):
                rounds |= {(label, run.name, site, event, reason): [] for site, reason in reasons.items()}
    if not rounds:
        return
    section = page.start_section(body, "Sites that failed or are suspected, and refused updates")
    lines = [[*key[:4], _ranges(when), key[4]] for key, when in rounds.items()]
    page.table(
        section, ["method", "run", "site", "what", "rounds", "reason"], lines[:_MOST_TROUBLES], words=True
    )
    if len(lines) > _MOST_TROUBLES:
        page.add(section, "p", f"And {len(lines) - _MOST_TROUBLES} more: see results.json.")


def _ranges(numbers: Iterable[int]) -> str:
    """``[1, 2, 3, 7]`` as ``"1–3, 7"``."""
    ordered = sorted(set(numbers))
    starts = [n for i, n in enumerate(ordered) if not i or ordered[i - 1] != n - 1]
    ends = [a for a, b in pairwise(ordered) if b != a + 1] + ordered[-1:]
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))


def _runs(body: ET.Element, groups: dict[str, list[Run]]) -> None:
    section = page.start_section(body, "Runs", folded=True)
    lines = []
    in_turn = any(run.in_turn for members in groups.values() for run in members)
    for label, members in groups.items():
        for run in members:
            seconds = run.context.get("seconds")
            left_out = run.unseen.get(run.held_out[0]) if run.in_turn else None
            lines.append(
                [
                    label,
                    run.scored.get("test", NOT_RECORDED),
                    run.name.replace(" ", "\u00a0"),
                    str(len(run.rounds)),
                    str(run.selected_round),
                    number(run.mean, 4),
                    *([number(left_out, 4)] if in_turn else []),
                    f"{seconds / 60:.1f} min" if isinstance(seconds, int | float) else "–",
                    str(run.context.get("engine", "–")),
                ]
            )
    mean = f"mean test {next(iter(groups.values()))[0].title}"
    means = [f"{mean} where trained", "where left out (unseen)"] if in_turn else [mean]
    page.table(section, ["method", MODEL, "run", "rounds", "selected round", *means, "time", "engine"], lines)


def _configuration(body: ET.Element, groups: dict[str, list[Run]]) -> None:
    section = page.start_section(body, "Configuration", folded=True)
    # Seeds and folds are listed for each run above; threads are from the first run.
    first = {
        label: {"methods": run.config["methods"], "input": str(run.input), **_settled([run, *others])}
        for label, (run, *others) in groups.items()
    }
    lines = []
    for key in dict.fromkeys(key for config in first.values() for key in config):
        values = {label: _plain(config.get(key)) for label, config in first.items()}
        if len(set(values.values())) == 1:
            lines.append([key, next(iter(values.values()))])
        else:
            lines += [[f"{key} ({label})", value] for label, value in values.items()]
    page.table(section, ["setting", "value"], lines, words=True)


def _settled(members: Sequence[Run]) -> dict[str, Any]:
    """Return the settings of runs of one experiment, with the fingerprints' decisions for each run."""
    settings = experiment(members[0])
    for key in dict.fromkeys(key for run in members for key in run.planned):
        runs: dict[str, list[str]] = {}
        for run in members:
            runs.setdefault(_plain(run.config[key]), []).append(run.name)
        listed = [f"{value} ({'; '.join(names)})" for value, names in runs.items()]
        settings[key] = ", ".join(listed if len(runs) > 1 else runs)
    return settings


def _plain(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(v, dict) and "name" in v for v in value) and value:
        return ", ".join(v["name"] + (f" {json.dumps(v['args'])}" if v.get("args") else "") for v in value)
    if value is None or value in ([], {}, ""):
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _size(number: float) -> str:
    size, unit = byte_unit(number)
    # No line break before the unit.
    return f"{number / size:.4g}\u00a0{unit}" if size > 1 else f"{number:.0f}\u00a0{unit}"


def answer(scores: Table) -> str:
    """Return the result of the runs in one to three sentences, with the verdict.

    Example:
        >>> from medfedaug.analysis.score_table import Score
        >>> rows = (Row("fedavg", (0,), {"A": Score((0.6,))}, Score((0.6,))),)
        >>> answer(Table([], [], [], rows=rows, metric="dice"))
        'fedavg has a mean Dice of 0.600 on the test cases.'
    """
    if scores.nothing_learned:
        return f"Nothing was learned: {scores.nothing_learned}. {REMEDIES}"
    metric = find_metric(scores.metric)
    known = [(row, row.mean.mean) for row in scores.rows if row.mean.mean is not None]
    if not known:
        return "No method has a score."
    sign = 1 if metric.higher_is_better else -1
    compared = [(row, row.difference) for row, _ in known if row.difference is not None]
    if scores.untrained and not compared:
        return scores.untrained
    if not compared:
        best, mean = max(known, key=lambda pair: sign * pair[1])
        text = f"{best.label} has a mean {metric.in_text} of {mean:.3f} on the test cases"
        return text + (f", the best of {len(known)} methods." if len(known) > 1 else f"{_range(best)}.")
    best, gain = max(compared, key=lambda pair: sign * pair[1])
    mean = next(mean for row, mean in known if row is best)
    text = f"{best.label} has a mean {metric.in_text} of {mean:.3f} on the test cases"
    text += f", {abs(gain):.3f} {'above' if gain > 0 else 'below'} {scores.reference}"
    baselines = {row.label: mean for row, mean in known if row.baseline}
    text += f" ({next(iter(baselines.values())):.3f})" if len(baselines) == 1 else ""
    text += ", the best of the methods that are compared with it" if len(compared) > 1 else ""
    others = [f"{row.label} {gain:+.3f}" for row, gain in compared if row is not best]
    rest = f" The others: {', '.join(others)}." if 0 < len(others) <= 4 else ""
    return f"{text}. {_certainty(best, scores.reference)}{rest}"


def _range(row: Row) -> str:
    values = {site: score.mean for site, score in row.sites.items() if score.mean is not None}
    if len({*values.values()}) < 2:
        return ""
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return f": from {values[low]:.3f} at {low} to {values[high]:.3f} at {high}"


def _certainty(row: Row, reference: str) -> str:
    verdict = row.verdict
    if verdict is None:
        return ""
    if verdict.word == "open":
        lacking = ", ".join(verdict.lacking)
        return f"Whether that is more than chance is open: a verdict takes more ({lacking})."
    if verdict.word == "no difference shown":
        return "By the rule of this page no difference is shown."
    than = "" if verdict.carried else f" than {reference}"
    return f"That is more than chance by the rule of this page: {verdict}{than}."


def words_in(text: str) -> dict[str, str]:
    """Return the titles of metrics and the `WORDS` that occur in a text, each with its meaning."""
    metrics = {metric.title: metric.meaning for metric in METRICS.values() if metric.meaning}
    return {word: meaning for word, meaning in {**metrics, **WORDS}.items() if _occurs(word, text)}


def _occurs(word: str, text: str) -> bool:
    # A letter is a word of its own only as it is written.
    flags = re.IGNORECASE if len(word) > 2 else 0
    return re.search(rf"(?<!\w){re.escape(word)}s?(?!\w)", text, flags) is not None
