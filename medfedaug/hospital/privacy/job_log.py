"""`JobBook`: the jobs that came to a site, and decisions about them; `summary`: the page of a job.

The page says to the site's administrator what the job computes, and what leaves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from medfedaug.config.comparison import REFERENCE, ComparisonConfig
from medfedaug.config.run import RunConfig, job_hash
from medfedaug.errors import ConfigError, MedFedAugError, config_errors
from medfedaug.hospital.privacy.policy import OPEN_PROMISE
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.utils.files import parse_versioned, private_folder, remove_unfinished, write_versioned
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    from medfedaug.methods.base import ServerExchange

WAITING, APPROVED, REFUSED = "waiting", "approved", "refused"

JOBS_FOLDER = "jobs"
"""Folder of a site's job book, below its state folder."""

_KIND, _VERSION = "job", 1


@dataclass(frozen=True)
class Origin:
    """Origin of a job, as far as the site can know.

    ``signed`` means that the submitter's certificate of the project has signed the job's content; otherwise
    the server names the submitter. ``asked`` is the time of the first request, in seconds since 1970.
    """

    name: str = ""
    submitter: str = ""
    organisation: str = ""
    role: str = ""
    signed: bool = False
    asked: float = 0.0


@dataclass(frozen=True)
class Decision:
    """Decision of the site's administrator, ``"approved"`` or ``"refused"``, with its time."""

    verdict: str
    by: str
    when: float


@dataclass(frozen=True)
class JobEntry:
    """Configuration of jobs at a site, with its ``verdict``: ``"waiting"``, ``"approved"`` or ``"refused"``.

    ``runs``, ``ends`` and ``origins`` have the starts, the reported ends and the origins of its jobs, by the
    jobs' identifiers. ``seen`` is its first arrival, and ``decisions`` begins with the oldest. Times are in
    seconds since 1970.
    """

    hash: str
    config: dict[str, Any]
    seen: float
    verdict: str
    runs: dict[str, float]
    ends: dict[str, float] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()

    @property
    def compares(self) -> bool:
        """Return whether the configuration is of a comparison."""
        return "run" in self.config

    @property
    def run(self) -> dict[str, Any]:
        """The settings of a run; in a comparison those of all trainings, except for methods and seed."""
        return self.config["run"] if self.compares else self.config

    @property
    def methods(self) -> list[str]:
        """The names of the methods; in a comparison those of its trainings."""
        if self.compares:
            return list(self.config["methods"])
        return [method["name"] for method in self.config["methods"]]


class JobBook:
    """Record of the configurations that came to a site, one file each, in a new or existing folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def entries(self) -> list[JobEntry]:
        """List all entries, the oldest first."""
        entries = [self._read(path) for path in sorted(self.folder.glob("*.json"))]
        return sorted(entries, key=lambda entry: entry.seen)

    def waiting_jobs(self) -> set[str]:
        """Return the identifiers of the jobs that wait for approval."""
        entries = self.entries()
        waiting = {job for entry in entries if entry.verdict == WAITING for job in entry.origins}
        return waiting - {job for entry in entries for job in entry.runs}

    def note(
        self, config: RunConfig | ComparisonConfig, job: str = "", origin: Origin | None = None
    ) -> JobEntry:
        """Return the entry of a configuration, and make it if it is new; note the origin of its job."""
        values = config.to_dict()
        digest = job_hash(values)
        with self._locked():
            path = self._path(digest)
            if not path.exists():
                self._write(JobEntry(digest, values, time.time(), WAITING, {}))
            entry = self._read(path)
            if origin is not None and job not in entry.origins:
                origins = {**entry.origins, job: replace(origin, asked=time.time())}
                entry = replace(entry, origins=origins)
                self._write(entry)
            return entry

    def begin(self, config: RunConfig | ComparisonConfig, job: str) -> None:
        """Enter the start of a job with a configuration; a job that was started again counts once."""
        entry = self.note(config)
        with self._locked():
            entry = self._read(self._path(entry.hash))
            ends = {name: when for name, when in entry.ends.items() if name != job}  # it came back
            self._write(replace(entry, runs={job: time.time(), **entry.runs}, ends=ends))

    def end(self, job: str) -> None:
        """Enter the end of a job at this site."""
        with self._locked():
            for entry in self.entries():
                if job in entry.runs:
                    self._write(replace(entry, ends={**entry.ends, job: time.time()}))

    def find(self, beginning: str) -> JobEntry:
        """Return the entry whose hash has this beginning."""
        entries = self.entries()
        matches = [entry for entry in entries if beginning and entry.hash.startswith(beginning)]
        if len(matches) != 1:
            known = ", ".join(entry.hash[:12] for entry in entries) or "none"
            text = f"{len(matches)} jobs have a hash that begins with {beginning!r}; known: {known}"
            raise ConfigError(text)
        return matches[0]

    def judge(self, beginning: str, verdict: str, by: str = "") -> JobEntry:
        """Enter a decision, ``"approved"`` or ``"refused"``, about the configuration that `find` returns."""
        with self._locked():
            entry = self.find(beginning)
            decisions = (*entry.decisions, Decision(verdict, by, time.time()))
            entry = replace(entry, verdict=verdict, decisions=decisions)
            self._write(entry)
        return entry

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"

    def _read(self, path: Path) -> JobEntry:
        with config_errors(f"{path}: not an entry of the book of jobs", remedy="; remove it"):
            values = parse_versioned(path.read_text(encoding="utf-8"), _KIND, _VERSION)
            entry = JobEntry(
                path.stem,
                config=values["config"],
                seen=values["seen"],
                verdict=values["verdict"],
                runs=values["runs"],
                ends=values["ends"],
                origins={job: Origin(**entry) for job, entry in values["origins"].items()},
                decisions=tuple(Decision(**entry) for entry in values["decisions"]),
            )
            # The approval is for the hash in the file's name.
            if job_hash(entry.config) != entry.hash:
                raise ValueError("its content does not match its name")
        return entry

    def _write(self, entry: JobEntry) -> None:
        content = {name: value for name, value in asdict(entry).items() if name != "hash"}
        write_versioned(self._path(entry.hash), _KIND, _VERSION, content, private=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        private_folder(self.folder)
        with FileLock(self.folder / ".lock"):
            remove_unfinished(self.folder)
            yield


def _submitters(entry: JobEntry) -> list[str]:
    """Return who submitted the jobs, and whether a certificate or only the server says so."""
    lines = []
    for origin in entry.origins.values():
        who = ", ".join(filter(None, (origin.organisation, origin.role)))
        proof = "by certificate" if origin.signed else "as the server says"
        lines.append(f"submitted {proof}: {origin.submitter or 'unknown'}" + (f" ({who})" if who else ""))
    return list(dict.fromkeys(lines))


def summary(entry: JobEntry, settings: SiteSettings) -> list[str]:
    """Return the page of a job at a site, in lines of text.

    The server's half of each method, built here, defines the values that may leave.
    """
    # Imported here, since a list of jobs needs no PyTorch.
    from medfedaug.federation.messages.messages import num_bytes, packed
    from medfedaug.federation.server.server import FederationServer

    policy = settings.privacy
    lines = [
        f"job {entry.hash}",
        *_submitters(entry),
        f"purpose: {entry.run.get('purpose') or 'none given'}",
        "",
        "What runs",
    ]
    try:
        compared = ComparisonConfig.from_dict(entry.config) if entry.compares else None
        configs = [*compared.configs().values()] if compared else [RunConfig.from_dict(entry.config)]
        # The seeds of a method have the same server, but for the initial weights.
        servers = [FederationServer(config) for config in configs[:: compared.seeds if compared else 1]]
    except MedFedAugError as error:
        return [*lines, f"  nothing: it cannot run here ({error})"]
    config, server = configs[0], servers[0]
    lines += [f"  {line}" for line in _runs(config, compared)]
    weights = {key: server.state[key] for key in server.reply_checks.model.shapes}
    sent = num_bytes(packed(weights, config.wire)) / 1e6
    if policy.epsilon is None:
        lines += ["", "Trust", f"  {OPEN_PROMISE}."]
    lines += ["", f"What leaves this site, each number of {policy.min_images} patients or more"]
    if config.planning:
        lines += [
            "  once: the fingerprint of the training volumes; the plan that is made of it is a job of its own"
        ]
    times = "once" if config.rounds == 1 else f"{config.rounds} times"
    if compared:
        lines += [f"  in each of {len(configs)} trainings:"]
    once, every_round = (
        dict.fromkeys(line for of in servers for line in _exchanged(getattr(of.aggregation, name)))
        for name in ("once", "every_round")
    )
    entries = counted(len(server.reply_checks.model.shapes), "entry", "entries")
    return [
        *lines,
        "  once: numbers of cases, patients and studies, and how images are scaled",
        "  once: voxel sizes of the training volumes, as 10 %, 50 % and 90 % quantiles of two digits",
        "  once: names of the classes with enough annotated training patients, where labelled names some",
        *(f"  once: {line}" for line in once),
        *(
            ["  the server learns only sums of weights and statistics over sites"]
            if server.aggregation.words is not None
            else []
        ),
        f"  {times}: the weights that training changes, {sent:.4g} MB, of {entries}",
        f"  {times}: number of samples, validation score, whole seconds",
        *(f"  {times}: {line}" for line in every_round),
        *(_of_comparison(compared) if compared else ["  once, at the end: the scores of the test cases"]),
        "",
        "What this kit withholds, by its policy and rules",
        *dict.fromkeys(f"  {line}" for of in servers for line in withheld_here(of.config, settings)),
        "",
        "Settings that are not the default",
        *(f"  {line}" for line in changed_settings(config)),
    ]


def _of_comparison(compared: ComparisonConfig) -> Iterator[str]:
    stages = " and ".join(map(str, compared.stages()))
    yield (
        f"  after the rounds {stages} at most: the validation score of the best model, and its mean "
        f"difference from that of {REFERENCE}, with standard error, interval and p"
    )
    yield "  no score of a test case"


def withheld_here(config: RunConfig, settings: SiteSettings) -> Iterator[str]:
    """Yield what a site with these settings withholds from a job, a line each."""
    from medfedaug.federation.composition import check_counted

    policy = settings.privacy
    try:
        settings.jobs.check("this kit", config)
        check_counted(config)
        policy.check_loop("this kit", config.loop)
    except MedFedAugError as error:
        yield f"everything, since it refuses the job: {error}"
        return
    yield f"each number, scores included, of fewer than {policy.min_images} patients (min_images)"
    yield "the training's losses, scores of single cases and classes, distances, names of cases and files"
    if policy.epsilon is not None:
        yield (
            f"whatever would exceed ε = {policy.epsilon:g} of a patient over all jobs, and whatever noise "
            "cannot hide: times, voxel sizes, differences of scores, messages about images"
        )
        yield "everything, where a method changes the training or sends statistics, and noise cannot hide it"


def changed_settings(config: RunConfig) -> list[str]:
    """Return a line for each setting of a job that is not the default."""
    usual = type(config)().to_dict()
    return [f"{name}: {json.dumps(v)}" for name, v in config.to_dict().items() if v != usual[name]]


def _runs(config: RunConfig, compared: ComparisonConfig | None = None) -> list[str]:
    local, unit = (config.local_steps, "step") if config.local_steps else (config.local_epochs, "epoch")
    methods = [
        method["name"] + (f" {json.dumps(method['args'])}" if method.get("args") else "")
        for method in config.methods
    ]
    # Quoted, so that foreign names cannot pass for words of this page.
    classes = ", ".join(json.dumps(name, ensure_ascii=False) for name in config.classes)
    return [
        f"{config.task} of {classes}, with {counted(config.in_channels, 'channel')}",
        f"network: {config.network}" + (" (a Bundle, which is code of this site)" if config.bundle else ""),
        *([f"training loop: {config.loop}, CODE THAT SEES THE IMAGES"] if config.loop else []),
        f"methods: {', '.join(methods)}"
        if compared is None
        else f"a comparison of {', '.join(compared.order)}: {counted(compared.seeds, 'training')} of each",
        f"training: {counted(config.rounds, 'round')} of {counted(local, unit)}, "
        f"{counted(config.batch_size, 'sample')} a step",
        f"cases: {'all' if config.limit is None else f'at most {config.limit} of each split'}",
    ]


def _exchanged(exchanges: Mapping[str, ServerExchange]) -> list[str]:
    lines = []
    for name, exchange in exchanges.items():
        shapes = [
            f"{key} ({' x '.join('any' if n is None else str(n) for n in shape) or '1'})"
            for key, shape in exchange.shapes.items()
        ]
        more = f" and {len(shapes) - 6} more" if len(shapes) > 6 else ""
        lines.append(f"{name}: {', '.join(shapes[:6])}{more}")
    return lines
