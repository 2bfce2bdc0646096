"""The command `prospect`: the gain to expect of training together, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from medfedaug.cli.console import Table, err_console, out_console, say
from medfedaug.cli.progress import CaseProgress
from medfedaug.errors import ConfigError

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
    """Predict the gain of training together from the sites' images alone; nothing is trained.

    Example: medfedaug prospect --data hospitals --out prospect.html --json prospect.json
    """
    with err_console.status("starting"):
        from medfedaug.analysis.calibration_table import Calibration
        from medfedaug.analysis.prospect import make_prospect
        from medfedaug.analysis.prospect_page import answer, judged_sentence, write_prospect
        from medfedaug.data.quality.image_fingerprint import fingerprint_of
        from medfedaug.data.sites import arrange_channels, find_sites
        from medfedaug.utils.files import write_json
        from medfedaug.utils.pdf import print_page

        table = Calibration.load(calibration or ())
        sites = [site for site in arrange_channels(find_sites(data)) if site.trains]
    if len(sites) < 2:
        raise ConfigError(f"a prospect needs two sites that train, and {data} has {len(sites)}")
    prints = []
    with CaseProgress() as progress:
        for site in sites:

            def show(number: int, of: int) -> None:
                progress.show({"event": "reading", "number": number, "of": of})

            prints.append(fingerprint_of(site, sample, show))
    with err_console.status("predicting"):
        found = make_prospect(prints, table)
    write_prospect(found, out)
    if json_ is not None:
        write_json(json_, found.to_dict())
    shown = Table("method", "gain over fedavg", "80%", "95%", "shown to hold")
    for methods, gains in sorted(found.gains["mean"].items(), key=lambda one: -one[1][""].mean):
        gain = gains[""]
        ends = [
            "–" if e is None else f"{e[0]:+.3f} to {e[1]:+.3f}" for e in (gain.interval80, gain.interval95)
        ]
        shown.add_row(methods, f"{gain.mean:+.3f}", *ends, "yes" if found.holds(methods) else "no")
    out_console.print(shown)
    for sentence in (*answer(found), judged_sentence(found)):
        say(sentence)
    if found.is_unlike:
        say("unlike anything measured: no federation of the table is near these sites", "yellow", err=True)
    if pdf is not None:
        print_page(out, pdf)
    say(", ".join(map(str, filter(None, (out, json_, pdf)))))
