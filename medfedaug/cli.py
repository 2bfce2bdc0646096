"""The ``medfedaug`` command: parse, call, print."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from medfedaug._version import __version__
from medfedaug.errors import ConfigError, MedFedAugError, MedFedAugWarning, RunFailed

# Everything heavy is imported inside the commands, so that `medfedaug --help` answers at once.

app = typer.Typer(
    name="medfedaug",
    help="Augmentation against feature shift for medical imaging sites that train together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out_console, err_console = Console(), Console(stderr=True)


class Engine(str, Enum):
    """What carries requests and replies between server and sites."""

    nvflare = "nvflare"
    inprocess = "inprocess"


class Stored(str, Enum):
    """What the images are before their statistics are taken."""

    raw = "raw"
    scale = "scale"


class Split(str, Enum):
    """Which cases are scored."""

    test = "test"
    validation = "validation"


Data = Annotated[Path, typer.Option("--data", help="Folder that holds one folder a site.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto: CUDA where there is one.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many cases of each split a site.")]
Intensity = Annotated[
    str,
    typer.Option(
        help="scale: each volume scaled to [0, 1] before anything else, photographs divided by 255; raw: as "
        "stored; by_method: raw where a method normalises, scale where none does."
    ),
]


def main() -> None:
    """Entry point: an error that a user can do something about is one line and exit code 2."""
    try:
        with _warnings_as_lines():
            app()
    except MedFedAugError as error:
        _say(f"medfedaug: {error}", "red")
        raise SystemExit(2) from error
    except OSError as error:
        if error.filename is None:  # nothing of the user's that could be named
            raise
        _say(f"medfedaug: {error.filename}: {error.strerror}", "red")
        raise SystemExit(2) from error


def _say(text: str, style: str) -> None:
    # A file's name may have bytes that are no text.
    text = text.encode("utf-8", "backslashreplace").decode()
    err_console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Show each of our warnings once, in one line."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if not issubclass(category, MedFedAugWarning):
            before(message, category, *args, **kwargs)
        elif str(message) not in shown:
            shown.add(str(message))
            _say(f"medfedaug: warning: {message}", "yellow")

    with warnings.catch_warnings():
        before, warnings.showwarning = warnings.showwarning, show
        warnings.simplefilter("always", MedFedAugWarning)
        yield


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def phantom(
    out: Annotated[Path, typer.Option(help="A folder that does not exist yet, or is empty.")],
    sites: Annotated[int, typer.Option(min=1, help="Number of sites, each with a scanner of its own.")] = 4,
    patients: Annotated[int, typer.Option(min=3, help="Patients a site.")] = 10,
    seed: Annotated[int, typer.Option(help="The same seed gives the same voxels.")] = 0,
) -> None:
    """Write a multi-site MRI phantom: NIfTI volumes, masks and dataset.json a site."""
    from medfedaug.data.phantom import make_phantom

    try:
        folders = make_phantom(out, sites=sites, patients=patients, seed=seed)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    out_console.print(f"{len(folders)} sites with {patients} patients each in {out}", highlight=False)


@app.command()
def statistics(
    data: Annotated[Path, typer.Option(help="A site's folder, or one that holds several sites' folders.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON file to write, by default statistics.json in the working folder; "
            "other sites that it holds already are kept."
        ),
    ] = None,
    limit: Limit = None,
    intensity: Annotated[
        Stored, typer.Option(help="raw: of images as stored; scale: of each volume scaled to [0, 1].")
    ] = Stored.raw,
    image_size: Annotated[
        int | None, typer.Option(min=16, help="That of the run: statistics are of the images so resized.")
    ] = None,
) -> None:
    """Channel statistics of a site's training images, in one streaming pass."""
    from medfedaug.data.scales import uneven_sites
    from medfedaug.data.sites import find_sites, is_federation, is_site, open_site, site_statistics
    from medfedaug.statistics import other_statistics, save_statistics

    target = out or Path("statistics.json")
    try:
        kept = other_statistics(target, intensity.value)
    except ValueError as error:
        raise ConfigError(f"{error}; it is not replaced: choose another file with --out") from error
    single = data.is_dir() and is_site(data) and not is_federation(data)
    sites = [open_site(data, limit=limit)] if single else find_sites(data, limit=limit)
    found = {}
    table = Table("site", "images", "channel", "mean", "std")
    for site in sites:
        with err_console.status(f"{site.name}: reading {len(site.cases['training'])} images"):
            found[site.name] = site_statistics(site, intensity.value, image_size)
        for channel, (mean, std) in enumerate(
            zip(found[site.name].mean.tolist(), found[site.name].std.tolist(), strict=True)
        ):
            table.add_row(site.name, str(found[site.name].count), str(channel), f"{mean:.6g}", f"{std:.6g}")
    out_console.print(table)
    for scales in uneven_sites(sites).values():
        out_console.print(scales.sentence(intensity.value), highlight=False, soft_wrap=True, markup=False)
    try:
        save_statistics(target, {**kept, **found}, intensity.value)
    except ValueError as error:
        raise ConfigError(f"{target}: {error}; choose another file with --out") from error
    of = "images as stored" if intensity is Stored.raw else "images scaled to [0, 1]"
    also = ", ".join(name for name in kept if name not in found)
    told = f"{target}, which also has {also}" if also else str(target)
    out_console.print(f"saved to {told}: of {of}", highlight=False)


# Options that define a run, the same for a simulation here and for a job that is submitted elsewhere.
Methods = Annotated[str, typer.Option(help="Comma-separated, e.g. fedrdn,fedfa.")]
Rounds = Annotated[int, typer.Option(min=1, help="Communication rounds.")]
LocalEpochs = Annotated[int, typer.Option(min=1, help="Local epochs a round.")]
Seed = Annotated[int, typer.Option(help="Of everything random.")]
Network = Annotated[
    str | None, typer.Option(help="By default basicunet or alexnet, by task; an unknown name lists them all.")
]
NetworkArgs = Annotated[str, typer.Option(help="JSON object for the network's constructor.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="METHOD.ARG=VALUE", help="A method's argument, repeatable."),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="By default 16 or 32, by task.")]
LearningRate = Annotated[
    float | None, typer.Option("--learning-rate", "--lr", help="By default 0.001 or 0.01, by task.")
]
Optimizer = Annotated[str | None, typer.Option(help="adam or sgd; by default by task.")]
Momentum = Annotated[float, typer.Option(min=0, help="Of sgd.")]
ImageSize = Annotated[int | None, typer.Option(min=16, help="Photographs, or slices, are resized to it.")]
WeightDecay = Annotated[float, typer.Option(min=0, help="The optimiser's.")]
Augmentation = Annotated[str, typer.Option(help="Of training images: none, flip or flip_rotate.")]
Precision = Annotated[str, typer.Option(help="float32, or bfloat16 for the network's products.")]
Participation = Annotated[float, typer.Option(help="Share of the sites that each round asks.")]
Weighting = Annotated[str, typer.Option(help="Of sites in the average: samples or uniform.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads a site; 0 shares the cores among the sites.")]
Tracking = Annotated[str | None, typer.Option(help="tensorboard or mlflow: the sites' metrics by round.")]
Holdout = Annotated[
    list[str] | None, typer.Option(help="A site that does not train and is tested as unseen; repeatable.")
]
MinSites = Annotated[int, typer.Option(min=0, help="Good updates that a round needs; 0 for all sites.")]
RoundTimeout = Annotated[
    float, typer.Option(min=0, help="Seconds after which a site is no longer waited for; 0 for ever.")
]
Pictures = Annotated[
    bool, typer.Option("--pictures/--no-pictures", help="Whether report.html shows images of the sites.")
]
Grace = Annotated[
    float | None,
    typer.Option(
        min=0, help="Seconds to wait on once --min-sites gave good updates; by default the timeout."
    ),
]


@app.command()
def simulate(
    context: typer.Context,
    data: Data,
    methods: Methods,
    out: Annotated[
        Path, typer.Option(help="Folder for results.json, global_model.pt, statistics.json, report.html.")
    ],
    rounds: Rounds = 10,
    local_epochs: LocalEpochs = 1,
    seed: Seed = 0,
    task: Annotated[
        str | None, typer.Option(help="segmentation or classification; by default it follows from the data.")
    ] = None,
    network: Network = None,
    network_args: NetworkArgs = "{}",
    set_: Settings = None,
    batch_size: BatchSize = None,
    learning_rate: LearningRate = None,
    optimizer: Optimizer = None,
    momentum: Momentum = 0.0,
    weight_decay: WeightDecay = 0.0,
    image_size: ImageSize = None,
    augmentation: Augmentation = "none",
    precision: Precision = "float32",
    participation: Participation = 1.0,
    weighting: Weighting = "samples",
    intensity: Intensity = "scale",
    limit: Limit = None,
    holdout: Annotated[
        list[str] | None,
        typer.Option(
            help="A site that does not train and is tested as unseen; repeatable. all: each site in turn."
        ),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="nvflare: every site a process; inprocess: one after another.")
    ] = Engine.nvflare,
    device: Device = "auto",
    threads: Threads = 0,
    min_sites: MinSites = 0,
    round_timeout: RoundTimeout = 0,
    grace: Grace = None,
    tracking: Tracking = None,
    pictures: Pictures = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of an earlier run.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that was interrupted; a finished one is shown.")
    ] = False,
) -> None:
    """Train a federation on this machine, and test it at every site."""
    from medfedaug.analysis.inputs import recorded_input
    from medfedaug.data.sites import find_sites
    from medfedaug.holdout import leave_one_site_out
    from medfedaug.simulate import configure
    from medfedaug.simulate import simulate as run

    in_turn = holdout == ["all"]
    options = _run_options(context)
    if in_turn:
        options["holdout"] = ()
    sites = find_sites(data, limit=limit)
    config = configure(sites, **options)
    with _RoundProgress(rounds) as progress:
        results = (leave_one_site_out if in_turn else run)(
            data,
            out,
            config,
            engine=engine.value,
            device=device,
            overwrite=overwrite,
            resume=resume,
            on_event=progress.show,
            tracking=tracking,
            pictures=pictures,
            execution=_execution(context),
            **({} if in_turn else {"sites": sites}),
        )
    if in_turn:
        _print_holdout(results, methods)
        out_console.print(f"{out}/holdout.json", highlight=False)
        return
    _print_scores(results["test"], f"test, model of round {results['selected_round']}")
    out_console.print(f"input: {recorded_input(results)}", highlight=False, markup=False)
    out_console.print(f"{out}/results.json, {out}/report.html", highlight=False)


class _ValuesInARow(TyperCommand):
    """An option that may be repeated also takes its values in a row: ``--methods fedavg fedrdn``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {name for p in self.params if getattr(p, "multiple", False) for name in p.opts}
        repeated: list[str] = []
        option, values = "", 0
        for arg, following in zip(args, [*args[1:], "--"], strict=True):
            if arg in repeatable and following.startswith("--"):
                raise ConfigError(f"{arg} needs a value, or several in a row")
            if arg.startswith("--"):
                option, values = arg if arg in repeatable else "", 0
            else:
                repeated += [option] if option and values else []
                values += 1
            repeated.append(arg)
        return super().parse_args(ctx, repeated)


@app.command(cls=_ValuesInARow)
def benchmark(
    name: Annotated[str | None, typer.Argument(help="A protocol; --list names them all.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with the published files, or one that has it under the data set's name."),
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help="Combinations in a row: fedavg fedrdn,fedfa+ ...")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for METHODS/VARIANT/seed-K, tables and report.html.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Each combination runs with seeds 0, 1, ...")] = 5,
    scale: Annotated[float, typer.Option(help="Share of the rounds: 0.1 is not the paper's.")] = 1.0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE,...",
            help="METHOD.ARG, a field of the run's configuration or an option of the data; "
            "several values are run in turn.",
        ),
    ] = None,
    fraction: Annotated[
        list[str] | None, typer.Option(help="Shares of each site's training cases: 1/6 1/2 1.")
    ] = None,
    local_epochs: Annotated[list[int] | None, typer.Option(help="Local epochs a round: 1 5 20.")] = None,
    statistics_noise: Annotated[
        list[float] | None, typer.Option(help="Deviations of noise on fedfa's statistics: 0 0.1 0.4.")
    ] = None,
    holdout: Annotated[
        list[str] | None, typer.Option(help="Sites to leave out in turn; all of them: all; none: none.")
    ] = None,
    folds: Annotated[int, typer.Option(min=0, help="Folds by patient, so that every one is tested.")] = 0,
    cross_site: Annotated[
        bool, typer.Option("--cross-site", help="Also test each site's local model at every site.")
    ] = False,
    engine: Annotated[
        Engine, typer.Option(help="inprocess: all runs share the decoded images; nvflare: none do.")
    ] = Engine.inprocess,
    device: Device = "auto",
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, a process each.")] = 1,
    memory: Annotated[float, typer.Option(min=0, help="GiB of decoded images that a process keeps.")] = 4.0,
    threads: Threads = 0,
    limit: Limit = None,
    pictures: Pictures = True,
    list_: Annotated[
        bool, typer.Option("--list", help="The protocols, or all about one; with --data whether it is there.")
    ] = False,
) -> None:
    """A paper's comparison on your own copy of its data; continues where it was stopped."""
    from medfedaug.experiments.presets import PRESETS, find_preset

    if list_:
        _print_presets([find_preset(name)] if name else list(PRESETS.values()), data, whole=bool(name))
        return
    if not (name and data and methods and out):
        raise ConfigError("a benchmark needs NAME, --data, --methods and --out; --list names the protocols")
    from medfedaug.experiments.sweep import parse_axis, parse_methods_list, plan, run_all
    from medfedaug.experiments.tables import write_tables

    shorthands = {"fraction": fraction, "local_epochs": local_epochs, "fedfa.noise": statistics_noise}
    settings = [*(set_ or []), *(f"{k}={','.join(map(str, v))}" for k, v in shorthands.items() if v)]
    preset = find_preset(name)
    runs = plan(
        preset,
        data,
        parse_methods_list(methods),
        seeds=seeds,
        axes=[parse_axis(text) for text in settings],
        holdout=holdout or (),
        folds=folds,
        scale=scale,
        limit=limit,
    )
    with _SweepProgress(len(runs)) as progress:
        failed = run_all(
            runs,
            preset,
            data,
            out,
            engine=engine.value,
            device=device,
            jobs=jobs,
            memory=int(memory * 2**30),
            threads=threads,
            on_event=progress.show,
        )
    if len(failed) < len(runs):
        with err_console.status("tables and page"):
            tables, notes = write_tables(
                runs, preset, out, data=data if pictures else None, across=cross_site, device=device
            )
        for table in tables.values():
            out_console.print(table)
        for note in notes:
            out_console.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
        out_console.print(f"{out}/table.md, {out}/report.html", highlight=False)
    if failed:
        folder, reason = next(iter(failed.items()))
        raise RunFailed(f"{len(failed)} of {len(runs)} runs failed, the first of them {folder}: {reason}")


@app.command()
def export(
    context: typer.Context,
    methods: Methods,
    out: Annotated[Path, typer.Option(help="The job folder to write, for `nvflare job submit`.")],
    task: Annotated[str, typer.Option(help="segmentation or classification.")] = "segmentation",
    classes: Annotated[
        str, typer.Option(help="Comma-separated names; of a segmentation the background first.")
    ] = "background,foreground",
    channels: Annotated[int, typer.Option(min=1, help="Channels of an image; photographs have 3.")] = 1,
    rounds: Rounds = 10,
    local_epochs: LocalEpochs = 1,
    seed: Seed = 0,
    network: Network = None,
    network_args: NetworkArgs = "{}",
    set_: Settings = None,
    batch_size: BatchSize = None,
    learning_rate: LearningRate = None,
    optimizer: Optimizer = None,
    momentum: Momentum = 0.0,
    weight_decay: WeightDecay = 0.0,
    image_size: ImageSize = None,
    augmentation: Augmentation = "none",
    precision: Precision = "float32",
    participation: Participation = 1.0,
    weighting: Weighting = "samples",
    intensity: Intensity = "scale",
    threads: Threads = 0,
    min_sites: Annotated[
        int,
        typer.Option(min=2, help="Connected sites that the job waits for, and good updates a round needs."),
    ] = 2,
    round_timeout: RoundTimeout = 7200,
    grace: Grace = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="A job that continues the run of this name from the server's checkpoint."
        ),
    ] = False,
    holdout: Holdout = None,
    tracking: Tracking = None,
) -> None:
    """Write the run as an NVFlare job without code, data or paths."""
    from medfedaug.config import RunConfig, task_defaults
    from medfedaug.nvflare_jobs import MedFedAugRecipe

    if out.exists():
        raise ConfigError(f"{out} is there already; choose another folder")
    options = {
        **_run_options(context),
        "classes": [name.strip() for name in classes.split(",")],
        "in_channels": channels,
    }
    config = RunConfig.from_dict({**task_defaults(task), **options})
    recipe = MedFedAugRecipe(
        config=config, name=out.name, resume=resume, tracking=tracking, execution=_execution(context)
    )
    recipe.export(job_dir=str(out.parent))
    out_console.print(f"{out}: submit it with `nvflare job submit -j {out}`", highlight=False)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Option(help="global_model.pt of a run.")],
    data: Annotated[Path, typer.Option(help="A site's folder, or one that holds several sites' folders.")],
    config: Annotated[
        Path | None, typer.Option(help="The run's results.json; by default beside the model.")
    ] = None,
    split: Annotated[Split, typer.Option()] = Split.test,
    out: Annotated[Path | None, typer.Option(help="JSON file for the scores, case by case.")] = None,
    limit: Limit = None,
    device: Device = "auto",
    state: Annotated[
        Path | None,
        typer.Option(help="Where sites keep their own layers; by default the folder state beside the model."),
    ] = None,
) -> None:
    """Score a trained model on the images of one site or of several."""
    from medfedaug.evaluate import evaluate_model
    from medfedaug.federation.output import write_json
    from medfedaug.run_folder import is_json_with

    if out is not None and out.exists() and not is_json_with(out, "split", "sites", "mean"):
        raise ConfigError(f"{out} holds something else than scores; choose another file")
    with err_console.status("evaluating"):
        scores = evaluate_model(
            model, data, config=config, split=split.value, limit=limit, device=device, state=state
        )
    _print_scores(scores, split.value)
    if out is not None:
        write_json(out, scores)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of finished runs, or one with runs below, as of a benchmark."),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    data: Annotated[
        Path | None,
        typer.Option(
            help="The sites' folders, or a benchmark's files: adds intensities, features, extreme cases."
        ),
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="A folder for the tables as Markdown, CSV and LaTeX.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Compare runs on one self-contained page."""
    from medfedaug.analysis import find_runs, load_run, patient_table, summary_table, write_report

    found = [load_run(run) for run in find_runs(runs)]
    with err_console.status("drawing"):
        write_report(found, out, data=data, device=device)
    scores, patients = summary_table(found), patient_table(found)
    out_console.print(scores)
    if patients.rows:
        out_console.print(patients)
    if tables is not None:
        scores.save(tables / "scores")
        patients.save(tables / "patients")
        out_console.print(f"{tables}/scores.*, {tables}/patients.*", highlight=False)
    out_console.print(f"{out}", highlight=False)


Kit = Annotated[Path, typer.Option(help="An NVFlare kit, the server's or a site's.")]


@app.command("site-config")
def site_config(
    kit: Kit,
    data: Annotated[Path | None, typer.Option(help="Folder with the site's images.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")] = None,
    min_images: Annotated[
        int | None,
        typer.Option(min=1, help="Statistics leave the site only if they summarise so many images; 10."),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Folder for what must survive a restart; by default KIT/medfedaug.")
    ] = None,
    forbid_code: Annotated[bool, typer.Option("--forbid-code", help="Refuse jobs that carry code.")] = False,
    only_medfedaug: Annotated[
        bool, typer.Option("--only-medfedaug", help="Refuse jobs that name classes which ours do not need.")
    ] = False,
    allow_plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-plugin",
            metavar="PACKAGE",
            help="Let jobs use the methods and networks of an installed package, repeatable.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say what is missing and exit with 1; write nothing.")
    ] = False,
) -> None:
    """Prepare a kit of NVFlare: allow-list, launcher, data folder, limits."""
    from medfedaug.nvflare_jobs.kit import open_kit

    opened = open_kit(kit)
    files = opened.plan(
        data=data,
        device=device,
        state=state,
        min_images=min_images,
        forbid=forbid_code,
        only=only_medfedaug,
        plugins=allow_plugin or [],
    )
    if not check:
        opened.write(files)
    changed = [(file.path, change) for file in files for change in file.changes]
    for path, change in changed:
        mark = "missing" if check else "written"
        out_console.print(f"{path.relative_to(kit)}: {mark}: {change}", highlight=False, soft_wrap=True)
    if not changed:
        out_console.print(f"{kit}: nothing to change", highlight=False, soft_wrap=True)
    elif not check:
        note = "Start a running kit again: launcher and policy are read then, the rest with the next job."
        out_console.print(note, highlight=False, soft_wrap=True)
    if check and changed:
        raise typer.Exit(1)


@app.command()
def doctor(
    kit: Annotated[Path | None, typer.Option(help="An NVFlare kit, the server's or a site's.")] = None,
    data: Annotated[Path | None, typer.Option(help="The data, in place of what the kit names.")] = None,
) -> None:
    """Say whether a site is ready: software, device, data, kit, disk. Exit code 1 where it is not."""
    from medfedaug.doctor import examine

    with err_console.status("looking"):
        checks = examine(kit, data)
    table = Table("check", "verdict")
    for title in ("found", "what to do"):
        table.add_column(title, overflow="fold")  # paths and commands are whole, or of no use
    for check in checks:
        verdict = {True: "ok", None: "note", False: "NOT READY"}[check.ok]
        style = {True: "green", None: "yellow", False: "red"}[check.ok]
        table.add_row(check.name, Text(verdict, style=style), Text(check.found), Text(check.advice))
    out_console.print(table)
    wrong = [check.name for check in checks if check.ok is False]
    out_console.print(f"not ready: {', '.join(wrong)}" if wrong else "ready", highlight=False)
    if wrong:
        raise typer.Exit(1)


class _RoundProgress:
    """A bar over the rounds, and a line a round with the sites' losses and validation scores."""

    def __init__(self, rounds: int) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=err_console,
            disable=not err_console.is_terminal,
        )
        self.rounds = rounds
        self.losses: dict[str, float] = {}

    def __enter__(self) -> _RoundProgress:
        self.bar.start()
        self.task = self.bar.add_task("starting", total=self.rounds)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "holdout":
            self._line(f"without {event['site']}")
            self.bar.update(self.task, completed=0)
        elif kind in ("prepared", "unseen"):
            text = f"{event['samples']} training samples" if kind == "prepared" else "unseen, tested only"
            self._line(f"{event['site']}: {text}")
        elif kind == "round_started":
            self.losses = {}
            self.bar.update(self.task, description=f"round {event['round']}")
        elif kind == "trained":
            self.losses[event["site"]] = event["train_loss"]
            self.bar.update(self.task, description=f"round {event['round']}: {event['site']} trained")
        elif kind == "uneven":
            self._line(event["reason"])
        elif kind == "left_out":
            self._line(f"left out: {event['reason']}")
        elif kind == "resumed":
            self._line(f"resumed after round {event['round']}")
            self.bar.update(self.task, completed=event["round"])
        elif kind in ("refused", "missing"):
            self._line(f"round {event['round']}: {kind}: {event['reason']}")
        elif kind == "round_finished":
            losses = "  ".join(f"{site} {loss:.4f}" for site, loss in sorted(self.losses.items()))
            self._line(f"round {event['round']}/{self.rounds}  loss {losses}  ({event['seconds']:.1f} s)")
            self.bar.update(self.task, completed=event["round"])
        elif kind == "validated":
            name, value = next((k, v) for k, v in event.items() if k.startswith("val_"))
            self._line(
                f"round {event['round']}/{self.rounds}  validation {name.removeprefix('val_')} {value:.4f}"
            )
        elif kind == "tested":
            self.bar.update(self.task, description=f"{event['site']} tested")

    def _line(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, soft_wrap=True)


class _SweepProgress(_RoundProgress):
    """A bar over the runs, and a line for each."""

    def show(self, event: dict[str, Any]) -> None:
        if event["event"] == "run":
            self._line(f"{event['number']}/{event['of']} {event['folder']}")
            self.bar.update(self.task, completed=event["number"])
        elif event["event"] == "failed":
            self._line(f"failed: {event['folder']}: {event['reason']}")
            self.bar.advance(self.task)
        elif event["event"] == "round_finished":
            self.bar.update(self.task, description=f"round {event['round']}")


def _print_presets(presets: list[Any], data: Path | None, *, whole: bool) -> None:
    from medfedaug.data.benchmarks import BENCHMARKS
    from medfedaug.experiments.sweep import find_data

    def line(text: str) -> None:
        out_console.print(text, highlight=False, markup=False, soft_wrap=True)

    there: dict[str, str] = {}
    if data is not None:
        with err_console.status("looking"):
            for name in dict.fromkeys(preset.benchmark for preset in presets):
                there[name] = "  data: there" if find_data(data, name) else "  data: NOT there"
    for preset in presets:
        line(f"{preset.name}{there.get(preset.benchmark, '')}")
        told = (preset.benchmark, preset.protocol, preset.config["network"], preset.schedule, preset.source)
        line("    " + " · ".join(told))
    for preset in presets if whole else ():
        line("    " + ", ".join(f"{key} {value}" for key, value in preset.settings.items()))
        for reading in preset.readings:
            line(f"    - {reading}")
        line(f"    data from {BENCHMARKS[preset.benchmark].source}")
        line(f"    expected: {BENCHMARKS[preset.benchmark].layout}")


def _print_scores(scores: dict[str, Any], title: str) -> None:
    metric = next(iter(scores["mean"]))
    table = Table("site", metric, "cases", title=title)
    for group, mark in (("sites", ""), ("unseen", " (unseen)")):
        for site, entry in sorted(scores.get(group, {}).items()):
            table.add_row(site + mark, _number(entry[metric]), str(len(entry.get("cases", {}))))
    table.add_row("mean", _number(scores["mean"][metric]), "")
    out_console.print(table)


def _print_holdout(results: dict[str, Any], methods: str) -> None:
    metric = results["metric"]
    table = Table("left out", f"{metric} there", f"{metric} at the others", title=f"{methods}, unseen sites")
    for site, score in results["unseen"].items():
        table.add_row(site, _number(score), _number(results["seen"][site]))
    table.add_row("mean", _number(results["mean"]), "")
    out_console.print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _run_options(context: typer.Context) -> dict[str, Any]:
    """The fields of `RunConfig` among a command's options; what was not given is left to its default."""
    from medfedaug.config import RunConfig

    given, fields = context.params, {field.name for field in dataclasses.fields(RunConfig)}
    return {
        **{name: value for name, value in given.items() if name in fields and value is not None},
        "methods": _specification(given["methods"], given["set_"]),
        "network_args": _json_object(given["network_args"], "--network-args"),
    }


def _execution(context: typer.Context) -> Any:
    """The fields of `Execution` among a command's options."""
    from medfedaug.config import Execution

    names = [field.name for field in dataclasses.fields(Execution)]
    return Execution(**{name: context.params[name] for name in names})


def _specification(methods: str, settings: list[str] | None) -> tuple[dict[str, Any], ...]:
    from medfedaug.methods import build_methods, parse_methods

    specs = tuple(parse_methods(methods, _settings(settings or [])))
    build_methods(specs)  # whether they go together, before anything is read
    return specs


def _settings(items: list[str]) -> dict[str, dict[str, Any]]:
    """``["fedfa.prob=0.3"]`` as ``{"fedfa": {"prob": 0.3}}``; values are JSON, or text where they are not."""
    settings: dict[str, dict[str, Any]] = {}
    for item in items:
        target, equals, value = item.partition("=")
        method, dot, name = target.partition(".")
        if not (equals and dot and method and name):
            raise ConfigError(f"--set {item!r}: write METHOD.ARG=VALUE, for instance fedfa.prob=0.3")
        try:
            settings.setdefault(method, {})[name] = json.loads(value)
        except ValueError:
            settings.setdefault(method, {})[name] = value
    return settings


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: a JSON object is needed, got {text}")
    return value
