"""The command `plan`: a plan of volumes from the sites' fingerprints, before any run."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from medfedaug.cli.console import Table, err_console, out_console, say
from medfedaug.cli.options import Data, Given, PlanMemory, takes
from medfedaug.config.plan import Plan, planning_settings
from medfedaug.config.run import RunConfig

_OTHERS = tuple(
    name for name in RunConfig.__dataclass_fields__ if name not in ("network", "network_args", "batch_size")
)


@takes(RunConfig, Plan, without=_OTHERS)
def plan(
    data: Data,
    out: Annotated[Path, typer.Option(help="The plan, a JSON file; a page of this name has the reasons.")],
    *,
    given: Given,
    plan_memory: PlanMemory = None,
) -> None:
    """Make a plan of volumes from the sites' data: spacing, and sizes of patches and batches.

    It is the plan that `simulate --plan auto` makes of the same data: only the summaries that a site would
    send enter it.
    """
    from medfedaug.analysis.plan_page import write_plan_page
    from medfedaug.config.plan import save_plan
    from medfedaug.data.sites import arrange, find_sites
    from medfedaug.federation.planning.fingerprint import fingerprint
    from medfedaug.federation.planning.planner import make_plan
    from medfedaug.simulate import configure

    sites = arrange(find_sites(data))
    planning = planning_settings((*given[Plan], *given[RunConfig]), plan_memory)
    config = configure(sites, **given[RunConfig], plan=Plan(**given[Plan]), planning=planning)
    prints = {}
    for site in (site for site in sites if site.trains):
        with err_console.status(f"{site.name}: reading {len(site.cases['training'])} volumes"):
            prints[site.name] = fingerprint(site, config.classes)
    planned = make_plan(prints, config)
    content = planned.to_dict()
    changes: dict[str, Any] = {name: value for name, value in content["changes"].items() if name != "plan"}
    save_plan(out, planned.changes["plan"], {"suggested": changes, "reasons": content["reasons"]})
    page = out.with_suffix(".html")
    write_plan_page(page, planned, prints)
    table = Table("decided", "why")
    for decision, reason in planned.reasons:
        table.add_row(decision, reason)
    out_console.print(table)
    options = " ".join(
        f"--{name.replace('_', '-')} {value if not isinstance(value, dict) else quote(json.dumps(value))}"
        for name, value in changes.items()
    )
    say(f"{out}, {page}")
    use = f"medfedaug simulate --data {quote(str(data))} --plan {quote(str(out))} {options} ..."
    say(f"use it with: {use}")
