"""The command `prospect`: differences between sites, and the result of a pilot, before they train."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from medfedaug.cli.console import err_console, say
from medfedaug.cli.loading import importing
from medfedaug.cli.options import Data, Device, JsonFile, Limit, Trained
from medfedaug.cli.progress import CaseProgress, RoundProgress


class _Norm(str, Enum):
    batch = "batch"
    instance = "instance"


def prospect(
    data: Data,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("prospect.html"),
    pilot: Annotated[
        bool, typer.Option("--pilot", help="Also train FedAvg and each site alone, small and short.")
    ] = False,
    network: Annotated[
        str | None, typer.Option(help="Network of the pilot; by default a small one of the task.")
    ] = None,
    norm: Annotated[
        _Norm | None, typer.Option(help="Norm of pilot and recorded federations; by default --network's.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Communication rounds of the pilot.")] = 10,
    set_: Trained = None,
    device: Device = "auto",
    limit: Limit = None,
    json_: JsonFile = None,
    pdf: Annotated[
        Path | None,
        typer.Option("--pdf", metavar="FILE", help="Also print the page, by an installed Chromium."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record of gains in place of the package's.")
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, help="Training cases of each site to read, evenly from its list.")
    ] = 200,
) -> None:
    """Compare the sites' images, and with --pilot measure the gain of a short training together.

    Fingerprints measure the differences between the sites, and predict no gain. Only a pilot predicts a gain,
    for methods whose predictions held and beat the yardstick (0, plus and minus the recorded gains) in
    recorded federations whose whole family was left out.
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
        with RoundProgress(rounds) as progress:
            measured = prospective.pilot_of(config, data, sites, device, progress.show)
    with CaseProgress() as progress:
        result = prospective.prospect_of(
            sites, sample, progress.read, norm=kind, pilot=measured, record=calibration
        )
    write_prospect(result, out)
    if json_ is not None:
        write_json(json_, result.to_dict())
    for sentence in sentences(result):
        say(sentence)
    if pdf is not None:
        print_page(out, pdf)
    say(", ".join(map(str, filter(None, (out, json_, pdf)))))
