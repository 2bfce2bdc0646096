"""The page of a comparison: which method helped whom by how much in short trainings, and the next step."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from medfedaug.analysis import page
from medfedaug.analysis.plots import WIDTH, add_legend, colours_by_name, plain_label, tidy
from medfedaug.analysis.text_table import TextTable, number
from medfedaug.config.comparison import ALONE, REFERENCE
from medfedaug.metrics.registry import find_metric
from medfedaug.utils.printable import counted

_MOST_SITES = 12
_ENDS = ("mean", "low", "high")


def gain_table(record: Mapping[str, Any]) -> TextTable:
    """Return the gains over FedAvg, one row per method, from the content of ``compare.json``."""
    sites = [*record["sites"]] if len(record["sites"]) <= _MOST_SITES else []
    title = find_metric(record["metric"]).title
    header = ["method", title, f"gain over {REFERENCE} [90%]", "shown", "rounds", *sites]
    body, records = [], []
    for name in record["methods"]:
        gain = record["gains"].get(name)
        trainings = [training for training in record["trainings"] if training["method"] == name]
        scores = [training["score"] for training in trainings if training["score"] is not None]
        rounds = max((training["rounds"] for training in trainings), default=0)
        shown = "reference" if name == REFERENCE else shown_by(gain)
        line = [name, number(fmean(scores) if scores else None), _text(gain), shown, str(rounds)]
        body.append([*line, *(_text(record["sites"][site]["gains"].get(name)) for site in sites)])
        gains = {"": gain, **{f"{s} ": entry["gains"].get(name) for s, entry in record["sites"].items()}}
        ends = {f"{of}{key}": (one or {}).get(key) for of, one in gains.items() for key in _ENDS}
        records.append({"method": name, **ends})
    return TextTable(header, body, records, tuple(_explained(record)), optional=frozenset(sites))


def shown_by(gain: Mapping[str, Any] | None) -> str:
    """Return what an interval shows: better, worse, or nothing.

    >>> shown_by({"mean": 0.1, "low": 0.02, "high": 0.2}), shown_by({"mean": 0.1, "low": None, "high": None})
    ('better', 'not distinguishable')
    """
    if gain is None:
        return "no score"
    if gain["low"] is not None and gain["low"] > 0:
        return "better"
    if gain["high"] is not None and gain["high"] < 0:
        return "worse"
    return "not distinguishable"


def _text(gain: Mapping[str, Any] | None) -> str:
    if gain is None:
        return "–"
    if gain["low"] is None:
        return f"{gain['mean']:+.3f}"
    return f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"


def conclusions(record: Mapping[str, Any], data: str = "", settings: Sequence[str] = ()) -> list[str]:
    """Return what a ``compare.json`` shows, in sentences, and the command of the next step.

    The command names the folder of all sites, if any, and the settings of the comparison, ``NAME=VALUE``.
    """
    kept = [setting for setting in settings if not setting.startswith("rounds=")]
    return list(_conclusions(record, data, kept))


def _conclusions(record: Mapping[str, Any], data: str, settings: Sequence[str]) -> Iterator[str]:
    budget, gains, title = record["budget"], record["gains"], find_metric(record["metric"]).in_text
    rounds = counted(max(budget["stages"], default=0), "round")
    if record["nothing_learned"]:
        yield (
            f"No comparison: no method learned anything in {rounds} ({record['nothing_learned']}). Train "
            "longer: a larger --budget, or more local epochs (--set local_epochs=4)."
        )
        return
    if not gains:
        yield "No comparison: no site has a score of two methods on validation patients."
        return
    methods = {name: shown_by(gain) for name, gain in gains.items() if name != ALONE}
    by_gain = sorted(methods, key=lambda name: -gains[name]["mean"])
    answers = []
    for word, verb in (("better", "Better"), ("worse", "Worse")):
        if named := [f"{name} {_text(gains[name])}" for name in by_gain if methods[name] == word]:
            answers.append(f"{verb} than {REFERENCE}: {', '.join(named)}.")
    if ALONE in gains:
        words = {"worse": "Training together helped", "better": "Separate training was better"}
        alone = words.get(shown_by(gains[ALONE]), "Separate and joint training cannot be distinguished")
        text = f"{alone}: each site by itself has {_text(gains[ALONE])} {title} against {REFERENCE}."
        # The first sentence is the headline: what was shown.
        answers.insert(0 if shown_by(gains[ALONE]) in words else len(answers), text)
    yield from answers
    if named := [name for name in by_gain if methods[name] == "not distinguishable"]:
        yield f"Not distinguishable from {REFERENCE}: {', '.join(named)}."
    for site, entry in record["sites"].items():
        helped = {name: gain for name, gain in entry["gains"].items() if shown_by(gain) == "better"}
        if helped:
            best = max(helped, key=lambda name: helped[name]["mean"])
            yield f"At {site}, most: {best} {_text(helped[best])}."
        if entry["nothing_learned"]:
            yield f"{REFERENCE} learned nothing at {site}: {title} 0.000."
    for name, entry in record["failed"].items():
        yield f"{name} failed after {counted(entry['rounds'], 'round')}: {entry['reason']}."
    if record["rising"]:
        yield f"{REFERENCE} still improved after {rounds}: a longer training may rank methods differently."
    yield _next_step(record, data, settings)


def _next_step(record: Mapping[str, Any], data: str, settings: Sequence[str]) -> str:
    rest = [name for name in record["recommended"] if name != REFERENCE]
    measured = (
        f"Measured in {counted(max(record['budget']['stages']), 'round')} with "
        f"{counted(record['budget']['seeds'], 'seed')} on validation patients; longer trainings were not."
    )
    if not record["recommended"]:
        found = record["gains"].get(first := largest_gain(record["gains"]))
        largest = f"{first} has the largest, {_text(found)}" if found else "no method has one"
        return (
            f"{measured} No gain was distinguishable from 0; {largest}. Repeat with a larger --budget, or "
            "with more patients."
        )
    rounds = 5 * max(record["budget"]["stages"])
    if not data:
        if rest == [ALONE]:
            return measured
        joint = next((name for name in rest if name != ALONE), REFERENCE)
        return f"{measured} Next: medfedaug export --methods {joint} --rounds {rounds} ..."
    methods = " ".join([REFERENCE, *rest[:2]])
    chosen = " ".join([f"rounds={rounds}", *map(quote, settings)])
    options = f"--methods {methods} --seeds 5 --set {chosen} --out benchmark"
    return f"{measured} Next: medfedaug benchmark --data {quote(data)} {options}"


def largest_gain(gains: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the method with the largest gain over FedAvg; FedAvg if none is positive."""
    means = {REFERENCE: 0.0, **{name: gain["mean"] for name, gain in gains.items()}}
    return max(means, key=lambda name: means[name])


def write_gain_page(record: Mapping[str, Any], path: Path, sentences: list[str]) -> None:
    """Write a comparison as one HTML file."""
    html, body = page.start_page("Train together, and with which method? Short trainings")
    for sentence in sentences:
        text, then, command = sentence.partition(" Next: ")
        page.add(body, "p", text + then, **{"class": "answer"} if sentence is sentences[0] else {})
        if then:
            page.add(body, "pre", command)
        if sentence is sentences[0] and record["gains"]:
            caption = "Black: the gain with its 90% interval. In colour: the gain at each site."
            page.figure(body, gain_picture(record), f"Gains over {REFERENCE} by method", caption)
    section = page.start_section(body, f"Gains over {REFERENCE}")
    page.text_table(section, gain_table(record))
    section = page.start_section(body, "Trainings", folded=True)
    rows = [
        (
            training["method"],
            str(training["seed"]),
            str(training["rounds"]),
            f"{training['seconds']:.0f}",
            number(training["score"]),
            " ".join(f"{score:.2f}" for score in training["validation"]),
        )
        for training in record["trainings"]
    ]
    head = ("method", "seed", "rounds", "seconds", "score", "validation score by round")
    page.table(section, head, rows)
    page.end_page(body)
    page.write_page(html, path)


def gain_picture(record: Mapping[str, Any]) -> Figure:
    """Draw each method's gain with its interval, and its gain at each site."""
    sites = [*record["sites"]] if len(record["sites"]) <= _MOST_SITES else []
    colours = colours_by_name(sites)
    drawing = Figure(figsize=(WIDTH, 1.1 + 0.4 * len(record["gains"])), layout="constrained")
    panel = drawing.add_subplot()
    panel.axvline(0, color="0.6", linewidth=1)
    for place, (name, gain) in enumerate(record["gains"].items()):
        for site in sites:
            if (there := record["sites"][site]["gains"].get(name)) is not None:
                panel.plot(there["mean"], place + 0.25, "o", color=colours[site], markersize=4)
        if gain["low"] is not None:
            panel.plot((gain["low"], gain["high"]), (place, place), color="black", linewidth=1.6)
        panel.plot(gain["mean"], place, "o", color="black", markersize=6)
    tidy(panel)
    panel.set_yticks(range(len(record["gains"])), [plain_label(name) for name in record["gains"]])
    panel.set_ylim(len(record["gains"]) - 0.4, -0.4)
    panel.set_xlabel(f"{find_metric(record['metric']).title} over {REFERENCE}, validation", fontsize=10)
    add_legend(drawing, colours)
    return drawing


def _explained(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the notes of the table: the interval and the budget."""
    budget = record["budget"]
    yield (
        "Gain: the mean difference on the validation patients of each site, positive where the method is "
        "better; sites count alike, test cases are not read. The interval covers other seeds and other "
        "patients of these sites, each method by itself (medfedaug.metrics.significance)."
    )
    yield f"Scored: each training's best model of {counted(max(budget['stages'], default=0), 'round')}."
    limit = f" of {budget['seconds']:.0f}" if budget["seconds"] else ""
    patients = ", ".join(f"{site} {entry['patients']}" for site, entry in record["sites"].items())
    yield f"{budget['spent']:.0f}{limit} seconds. Validation patients: {patients or 'none'}."
