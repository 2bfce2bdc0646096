"""Summary of a page: its result in a sentence or two, and the meaning of its words."""

import re
from importlib import resources

import yaml

from medfedaug.analysis.score_table import Row, Table
from medfedaug.metrics.nothing_learned import REMEDIES
from medfedaug.metrics.registry import METRICS, find_metric

WORDS: dict[str, str] = yaml.safe_load((resources.files(__package__) / "words.yml").read_text("utf-8"))
"""Words of a page with a special sense, besides the titles of metrics."""


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
