"""The command `prospect`: the gain to expect of training together, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from medfedaug.cli.console import Table, err_console, out_console, say
from medfedaug.cli.progress import CaseProgress

__all__ = ["prospect"]


def prospect(
    data: Annotated[Path, typer.Option(help="Folder that holds one folder per site.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("prospect.html"),
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write all numbers to this file.")
    ] = None,
    pdf: Annotated[
        Path | None,
        typer.Option(
            "--pdf", metavar="FILE", help="Also print the page to this file, by an installed Chromium."
        ),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Table with more federations that were trained; may be repeated."),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, help="Training cases of each site to look at, evenly from its list.")
    ] = 200,
) -> None:
    """Predict the gain of training together from the sites' images alone; nothing is trained."""
    with err_console.status("starting"):
        from medfedaug.analysis.calibration_table import Calibration
        from medfedaug.analysis.prospect_page import sentences, write_prospect
        from medfedaug.experiments.predicted import prospect_of
        from medfedaug.utils.files import write_json
        from medfedaug.utils.pdf import print_page

        table = Calibration.load(calibration or ())
    with CaseProgress() as progress:

        def show(number: int, of: int) -> None:
            progress.show({"event": "reading", "number": number, "of": of})

        found = prospect_of(data, table, sample=sample, on_case=show)
    write_prospect(found, out)
    if json_ is not None:
        write_json(json_, found.to_dict())
    shown = Table("method", "gain over fedavg", "80%", "95%", "shown to hold", "skill")
    gains = {methods: one[""] for methods, one in found.gains["mean"].items() if found.is_shown(methods)}
    for methods, gain in sorted(gains.items(), key=lambda one: -one[1].mean):
        skill, intervals = found.has_skill(methods), (gain.interval80, gain.interval95)
        ends = ["–" if one is None else f"{one[0]:+.3f} to {one[1]:+.3f}" for one in intervals]
        mean = f"{gain.mean:+.3f}" if skill else "–"
        shown.add_row(
            methods, mean, *ends, *("yes" if one else "no" for one in (found.holds(methods), skill))
        )
    if gains:
        out_console.print(shown)
    for sentence in sentences(found):
        say(sentence)
    if pdf is not None:
        print_page(out, pdf)
    say(", ".join(map(str, filter(None, (out, json_, pdf)))))
