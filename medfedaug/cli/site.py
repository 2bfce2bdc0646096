"""The group `site`: the commands for a kit, but for `watch`."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.text import Text
from typer import Argument, Option

from medfedaug.cli.console import Table, confirm, err_console, exit_if, out_console, print_page, say
from medfedaug.cli.options import Given, takes
from medfedaug.hospital.privacy import JobRules, PrivacyPolicy
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.kit.kit import open_kit

Kit = Annotated[Path, Argument(metavar="KIT", help="An NVFlare kit, the server's or a site's.")]
SiteKit = Annotated[Path, Argument(metavar="KIT", help="A site's NVFlare kit.")]
_rule = partial(Option, rich_help_panel=JobRules.PANEL)
Timeout = Annotated[float, Option(min=1, metavar="SECONDS", help="Longest time to wait.")]


@takes(SiteSettings, PrivacyPolicy, JobRules)
def configure(
    kit: Kit,
    *,
    given: Given,
    config: Annotated[
        Path | None, Option(metavar="FILE", help="JSON like local/medfedaug.json; options take precedence.")
    ] = None,
    allow_bundle: Annotated[
        list[Path] | None,
        _rule("--allow-bundle", metavar="DIR", help="Let jobs use a Bundle as it is now; repeatable."),
    ] = None,
    forbid_code: Annotated[
        bool,
        _rule("--forbid-code/--allow-code", help="Refuse jobs with code, or allow it without --epsilon."),
    ] = True,
    check: Annotated[bool, Option("--check", help="Only check; exit code 1 if a part is missing.")] = False,
) -> None:
    """Prepare an NVFlare kit: allow-list, validator, launcher, data folder, limits."""
    from medfedaug.config.bundle_reference import AllowedBundle

    opened = open_kit(kit)
    bundles = [AllowedBundle.of(folder) for folder in allow_bundle or []]
    allowed = {**given[SiteSettings].get("bundles", {}), **{bundle.name: bundle for bundle in bundles}}
    rules = {"privacy": given[PrivacyPolicy], "jobs": given[JobRules]}
    changes = {**given[SiteSettings], **rules, "bundles": allowed}
    files = opened.plan(changes, forbid=forbid_code)
    if not check:
        if "data" in given[SiteSettings]:
            opened.bind_account(files)
        opened.write(files)
    changed = [(file.path, change) for file in files for change in file.changes]
    for path, change in changed:
        say(f"{path.relative_to(kit)}: {'missing' if check else 'written'}: {change}")
    if not changed:
        say(f"{kit}: nothing to change")
    elif not check:
        say("Restart a running kit: it reads launcher, validator and policy at the start, the rest per job.")
    exit_if(check and changed)


def start(kit: Kit, timeout: Timeout = 60.0) -> None:
    """Start a kit, and wait until it runs; at a site, until the server has answered."""
    from medfedaug.nvflare_jobs.kit import kit_start

    _carry_out(kit_start.start, kit, timeout)


def stop(kit: Kit, timeout: Timeout = 60.0) -> None:
    """Stop a kit without a question, and wait until its processes have ended.

    Running jobs wait for the site.
    """
    from medfedaug.nvflare_jobs.kit import kit_start

    _carry_out(kit_start.stop, kit, timeout)


def restart(
    kit: Kit,
    timeout: Timeout = 60.0,
    yes: Annotated[bool, Option("--yes", help="Restart without asking, also while jobs run.")] = False,
) -> None:
    """Restart a kit, and wait until it runs. While jobs run, name them and ask.

    A site rejoins its running jobs. A kit in a service or a container stays there. A kit that does not run is
    started.
    """
    from medfedaug.nvflare_jobs.kit import kit_process, kit_start
    from medfedaug.nvflare_jobs.kit.job_states import running_jobs

    opened = open_kit(kit)
    runs = kit_process.find_process(opened.path) is not None
    if runs and not yes and (jobs := running_jobs(opened)):
        effect = "ends here; the lead submits it again with --resume" if opened.server else "is rejoined"
        for job, name in jobs.items():
            say(f"job {job}{f' ({name})' if name else ''} runs, and {effect}")
        confirm("Restart?", "nothing is restarted: give --yes to restart while jobs run")
    _carry_out(kit_start.restart, kit, timeout)


def _carry_out(action: Callable[[Path, float], str], kit: Path, timeout: float) -> None:
    with err_console.status("waiting"):
        outcome = action(open_kit(kit).path, timeout)
    say(f"{kit}: {outcome}")


def doctor(
    kit: Kit,
    offline: Annotated[bool, Option("--offline", help="Do not connect to the server.")] = False,
    health: Annotated[bool, Option("--health", help="Check only that the process works.")] = False,
) -> None:
    """Check whether a site is ready: software, kit, its process, certificates, server, device, data, disk.

    The exit code is 1 if it is not ready.
    """
    if health:
        _check_health(kit)
        return
    from medfedaug.nvflare_jobs.kit.doctor import examine

    with err_console.status("looking"):
        checks = examine(kit, connect=not offline)
    table = Table("check", "verdict")
    for title in ("found", "what to do"):
        table.add_column(title, overflow="fold")  # cut paths and commands are of no use
    verdicts = {True: ("ok", "green"), None: ("note", "yellow"), False: ("NOT READY", "red")}
    for check in checks:
        table.add_row(check.name, Text(*verdicts[check.ok]), Text(check.found), Text(check.advice))
    out_console.print(table)
    wrong = [check.name for check in checks if check.ok is False]
    say(f"not ready: {', '.join(wrong)}" if wrong else "ready")
    exit_if(wrong)


def _check_health(kit: Path) -> None:
    """Check the state that the kit's process writes to a file: a site works while the server answers it."""
    from medfedaug.nvflare_jobs.kit.kit_process import find_trouble

    opened = open_kit(kit)
    trouble = find_trouble(opened.path, server=opened.server)
    say(f"{kit}: {trouble or 'works'}")
    exit_if(trouble)


def jobs(
    kit: SiteKit,
    job: Annotated[str | None, Argument(metavar="HASH", help="Only the job with this hash.")] = None,
) -> None:
    """List the jobs that a site has seen, with the code and releases of jobs that wait for approval.

    With a hash, describe that job.
    """
    from collections import Counter
    from datetime import datetime

    from medfedaug.config import bundle_reference
    from medfedaug.hospital.privacy.job_log import WAITING, summary
    from medfedaug.hospital.privacy.policy import OPEN_PROMISE
    from medfedaug.nvflare_jobs.kit.job_states import running_jobs
    from medfedaug.utils import plugins

    opened = open_kit(kit)
    book, settings = opened.job_book(), SiteSettings.load(kit)
    plugins.restrict(settings.plugins)  # the description of a job has the site's plugins
    bundle_reference.restrict(settings.bundles)
    entries, running = [book.find(job)] if job else book.entries(), running_jobs(opened)
    if not entries:
        say("no job has come to this site")
        return
    table = Table("hash", "seen", "approval", "jobs", "methods", "rounds", "purpose")
    # Whole on a narrow terminal: the hash is copied to approve the job.
    table.columns[0].min_width, table.columns[1].min_width = 12, 10
    for entry in entries:
        methods = ", ".join(entry.methods)
        methods = f"compare {methods}" if entry.compares else methods
        seen = datetime.fromtimestamp(entry.seen).isoformat(" ", "minutes")
        states = Counter(
            "ended" if name in entry.ends else "running" if name in running else "no process"
            for name in entry.runs
        )
        runs = ", ".join(f"{count} {state}" for state, count in states.items()) or "none has begun"
        rounds, purpose = str(entry.run["rounds"]), str(entry.run.get("purpose", ""))
        table.add_row(entry.hash[:12], seen, entry.verdict, runs, methods, rounds, purpose)
    out_console.print(table)
    if settings.privacy.epsilon is None:
        say(f"Without --epsilon, {OPEN_PROMISE}.")
    for entry in entries:
        # The page builds the job's network: not for every past job of a site without approvals.
        if job or (entry.verdict == WAITING and (settings.jobs.approve or not entry.runs)):
            print_page(["", *summary(entry, settings)])


def approve(
    kit: SiteKit,
    job: Annotated[str, Argument(metavar="HASH", help="The first digits of the job's hash.")],
    refuse: Annotated[bool, Option("--refuse", help="Refuse it, also if it was approved.")] = False,
    by: Annotated[str | None, Option(help="Person who decides, for the record.")] = None,
) -> None:
    """Approve the configuration of a job that waits. The same configuration then never waits again."""
    from medfedaug.hospital.privacy.job_log import APPROVED, REFUSED
    from medfedaug.utils.validation import check_plain

    check_plain("--by", by)
    verdict = REFUSED if refuse else APPROVED
    entry = open_kit(kit).job_book().judge(job, verdict, by or _user())
    say(f"{entry.hash}: {entry.verdict}")


def _user() -> str:
    """Return the system's user; with sudo, also its caller."""
    user = f"user {os.getuid()}"
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    real = os.environ.get("SUDO_USER")
    return f"{user} for {real}" if real and real != user else user


def ledger(
    kit: SiteKit,
    every: Annotated[bool, Option("--every", help="Print a line for each release, with its hash.")] = False,
    names: Annotated[bool, Option("--names", help="List the cases' pseudonyms.")] = False,
) -> None:
    """List all releases of a site: job, method, kind, size, number of cases, and repetitions."""
    if names:
        _print_names(kit)
        return
    from datetime import datetime

    from medfedaug.hospital.privacy.ledger import by_kind

    account = open_kit(kit).ledger()
    entries = account.entries()
    if not entries:
        say("nothing has left this site")
        return
    several = len({entry.release.site for entry in entries}) > 1
    for first, last, count in [(entry, entry, 1) for entry in entries] if every else by_kind(entries):
        r = last.release
        when = [datetime.fromtimestamp(entry.time).isoformat(" ", "seconds") for entry in (first, last)]
        parts = [
            f"{' to '.join(dict.fromkeys(when))}, {r.job}: {r.method} {r.kind}: {r.shape}",
            f"site {r.site}" if several and r.site else "",
            f"{r.count} {r.split} cases ({last.cases[:8]})" if r.split else "",
            f"noise {r.noise:g}" if r.noise else "",
            f"{count} times" if count > 1 else "",
            f"SHA-256 {r.digest}" if every else "",
        ]
        say("; ".join(filter(None, parts)))
    if spent := sum(budget.releases for budget in account.releases()):
        say(f"{spent} releases with noise count against the budget of ε")


def _print_names(kit: Path) -> None:
    from medfedaug.data.sites import open_site
    from medfedaug.federation.site.data_folder import resolve_data_folder

    opened = open_kit(kit)
    pseudonyms = opened.pseudonyms()
    site = open_site(resolve_data_folder(opened.name, SiteSettings.load(kit).data), name=opened.name)
    table = Table("pseudonym", "case", "split")
    for split, cases in site.cases.items():
        for case in cases:
            table.add_row(pseudonyms.of(case.name), Text(case.name), split)
    out_console.print(table)


def clean(
    kit: Kit,
    older_than: Annotated[
        float, Option("--older-than", metavar="DAYS", min=1, help="Remove nothing that is younger.")
    ],
    results: Annotated[
        bool, Option("--results", help="Also remove finished jobs' results, perhaps the only copy.")
    ] = False,
    yes: Annotated[bool, Option("--yes", help="Remove; without this option only list.")] = False,
) -> None:
    """List remains of old jobs in a kit that may go, and those that stay with the reason; --yes removes.

    A run without its state can be neither resumed nor evaluated at this kit any more. Ledger, keys,
    approvals, settings, certificates and everything that a running job may need stay.
    """
    from datetime import datetime

    from medfedaug.nvflare_jobs.kit.cleaning import remove, survey
    from medfedaug.utils.event_text import size_text

    with err_console.status("looking"):
        entries = survey(open_kit(kit), older_than, results=results)
    going = [entry for entry in entries if not entry.needed]
    for entry in going:
        when = datetime.fromtimestamp(entry.used).isoformat(" ", "minutes")
        if yes:
            remove(entry)
        action = "removed" if yes else "would go"
        say(f"{action}: {entry.path} ({entry.kind}, {size_text(entry.size)}, last used {when})")
    stays: dict[tuple[str, str], list[int]] = {}
    for entry in entries:
        if entry.needed:
            stays.setdefault((entry.kind, entry.needed), []).append(entry.size)
    for (kind, reason), sizes in stays.items():
        say(f"stays: {kind} ({len(sizes)}, {size_text(sum(sizes))}): {reason}")
    total = f"{len(going)} of {len(entries)} entries, {size_text(sum(entry.size for entry in going))}"
    say(f"removed: {total}" if yes else f"would go: {total}" + ("; --yes removes them" if going else ""))
