"""The command `prospect`: what differs between sites, and what a pilot measures, before they train."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from medfedaug.cli.console import err_console, say
from medfedaug.cli.loading import importing
from medfedaug.cli.options import Data, Device, Limit
from medfedaug.cli.progress import CaseProgress, RoundProgress


class _Norm(str, Enum):
    batch = "batch"
    instance = "instance"


def prospect(
    data: Data,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("prospect.html"),
    pilot: Annotated[
        bool,
        typer.Option(
            "--pilot",
            help="Also train FedAvg and each site alone, small and short: for --rounds, or two or four times "
            "as many while the validation score of FedAvg rises.",
        ),
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(help="Network of the pilot, as in `simulate`; by default a small one of the task."),
    ] = None,
    norm: Annotated[
        _Norm | None,
        typer.Option(
            help="Normalisation of the networks, of the pilot and of the recorded federations; by default "
            "that of --network."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Communication rounds of the pilot.")] = 10,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the pilot (image_size, batch_size, seed, ...), as in `benchmark`.",
        ),
    ] = None,
    device: Device = "auto",
    limit: Limit = None,
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
        Path | None,
        typer.Option(
            metavar="FILE", help="Record of gains in place of the package's (benchmarks/judge_prospect.py)."
        ),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, help="Training cases of each site to look at, evenly from its list.")
    ] = 200,
) -> None:
    """Compare the sites' images, and with --pilot measure what a short training together brings.

    Fingerprints say how far the sites are apart and in what, and predict no gain. A gain is predicted from a
    pilot alone, for the methods of which such predictions held and beat the yardstick (always 0, plus and
    minus what was measured elsewhere) in recorded federations whose whole family was left out.
    """
    with err_console.status("starting"), importing():
        from medfedaug.analysis.gain_record import find_record
        from medfedaug.analysis.prospect_page import sentences, write_prospect
        from medfedaug.experiments import prospective
        from medfedaug.federation.composition import Composition
        from medfedaug.models.networks import norm_of
        from medfedaug.utils.files import write_json
        from medfedaug.utils.pdf import print_page

        sites = prospective.training_sites(data, limit)
        settings = [f"rounds={rounds}", *(set_ or [])]
        config = prospective.pilot_config(sites, network, norm and norm.value, settings)
        kind = norm_of(Composition(config).network)
        find_record("dice", kind, calibration)  # a file that cannot be read ends the command at once
    measured = None
    if pilot:
        with RoundProgress(rounds) as shown:
            measured = prospective.pilot_of(config, data, sites, device, shown.show)
    with CaseProgress() as progress:
        found = prospective.prospect_of(
            sites, sample, progress.read, norm=kind, pilot=measured, record=calibration
        )
    write_prospect(found, out)
    if json_ is not None:
        write_json(json_, found.to_dict())
    for sentence in sentences(found):
        say(sentence)
    if pdf is not None:
        print_page(out, pdf)
    say(", ".join(map(str, filter(None, (out, json_, pdf)))))
