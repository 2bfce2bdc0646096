"""`oversized_in` detects structures that a model marks many times as large as they are outlined."""

from collections.abc import Mapping
from typing import Any

from medfedaug.utils.validation import number_or_none

VOLUME_RATIO = "volume_ratio"
"""Entry of a class in a site's test scores: its predicted voxels over the outlined ones, of all cases."""

_MANY = 3.0


def oversized_in(test: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each site at which a model marks structures many times as large as outlined.

    Example:
        >>> oversized_in({"sites": {"A": {"classes": {"lesion": {"volume_ratio": 41.6}}}}})
        ['A: the model marks lesion 42 times as large as outlined.']
    """
    sentences = []
    for site, entry in {**test.get("sites", {}), **test.get("unseen", {})}.items():
        ratios = {name: number_or_none(of.get(VOLUME_RATIO)) for name, of in entry.get("classes", {}).items()}
        large = [f"{name} {ratio:.0f} times" for name, ratio in ratios.items() if ratio and ratio >= _MANY]
        if large:
            sentences.append(f"{site}: the model marks {', '.join(large)} as large as outlined.")
    return sentences
