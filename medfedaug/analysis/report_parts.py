"""`ReportParts`: the parts of a report that compare runs or need their images."""

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from medfedaug.runs.run import Run
from medfedaug.utils.layers import added_modules

Groups = Mapping[str, Sequence[Run]]
"""The result of `medfedaug.analysis.grouping.group_runs`."""


class ReportParts:
    """No further parts; `medfedaug.research.comparison.report_parts` has those for studies."""

    def compare(self, groups: Groups, reference: str) -> Sequence[Any]:
        """Compare the scores at the training sites, or at those left out, with a reference.

        Returns:
            `medfedaug.research.comparison.comparison.Comparison`, at most one for each method.
        """
        return ()

    def notes(self, compared: Sequence[Any]) -> tuple[str, ...]:
        """Return notes on comparisons."""
        return ()

    def rule(self, reference: str, cases: str) -> str:
        """Return the rule of the verdicts in a few sentences."""
        return ""

    def add_comparisons(self, body: ET.Element, runs: Sequence[Run], reference: str) -> None:
        """Append comparisons by patient."""

    def add_evaluations(self, body: ET.Element, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Append the comparisons of the sites' own evaluations."""

    def add_images(
        self,
        body: ET.Element,
        groups: Groups,
        example: ET.Element,
        data: Path,
        device: str,
    ) -> None:
        """Append pictures of the sites' images and of the models on them."""


@cache
def report_parts() -> ReportParts:
    """Return the parts of this installation."""
    found = added_modules("comparison.report_parts")
    parts: ReportParts = found[0].PARTS if found else ReportParts()
    return parts
