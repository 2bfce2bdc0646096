"""Commands that compute nothing import neither PyTorch nor MONAI, with all that they really do."""

import json
import shutil
import subprocess
import sys
from subprocess import PIPE

import pytest
from hospitals import Deployment, Hospital
from results import content
from running import TINY_NETWORK
from typer.main import get_command

from medfedaug.cli import app
from medfedaug.config.run import RunConfig
from medfedaug.federation.job_folder import CARDS, GLOBAL_MODEL

HEAVY = ("torch", "monai", "matplotlib", "scipy", "SimpleITK", "nibabel", "pydicom")
# Run the commands of each line as their script does, in a copy of this process, and write what each said, and
# brought of the libraries.
SCRIPT = f"""
import io, json, os, sys, traceback
from contextlib import redirect_stderr, redirect_stdout
from medfedaug.cli import main

def brought(calls):
    for sys.argv[1:] in calls:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            try:
                code = main() or 0
            except SystemExit as ended:
                code = ended.code or 0
        yield code, [name for name in {HEAVY!r} if name in sys.modules], out.getvalue(), err.getvalue()

for line in sys.stdin:
    if not os.fork():
        try:
            told = [*brought(json.loads(line))]
        except BaseException:
            told = traceback.format_exc()
        print(json.dumps(told), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def light():
    """The output of commands, in one process that imported of the libraries only those that they need."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=PIPE, stdout=PIPE, text=True) as process:

        def call(*calls, code=0, needed=()):
            arguments = [list(map(str, call)) for call in calls]
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            found, said = json.loads(process.stdout.readline()), []
            assert isinstance(found, list), found
            for told, (ended, imported, out, err) in zip(arguments, found, strict=True):
                assert ended == code, f"{told}: {err}"
                assert set(imported) <= set(needed), f"{told} imports {imported}"
                said.append(" ".join((err if code else out).split()))
            return said

        yield call
        process.stdin.close()


@pytest.fixture(scope="module")
def kit(phantom_dir, tmp_path_factory):
    """The kit of a site that has taken part in a job, which has ended."""
    folder = tmp_path_factory.mktemp("kits")
    settings = {"privacy": {"min_images": 1}}
    hospitals = [Hospital(folder / n, phantom_dir / n, **settings) for n in ("site_A", "site_B")]
    methods = ({"name": "fedfa", "args": {}},)
    Deployment(hospitals).run(RunConfig(methods=methods, **TINY_NETWORK, rounds=1, batch_size=4))
    return folder / "site_A"


def test_catalogues(light):
    methods = [("methods",), *(("methods", name) for name in ("fedfa", "FedFA", "fedfa+"))]
    others = [("networks",), ("networks", "basicunet")]
    words = ["fedfa"] * 4 + ["MONAI's BasicUNet"] * 2
    for out, word in zip(light(*methods, *others), words, strict=True):
        assert word in out


def test_commands_of_a_site(light, kit):
    ledger, every, jobs, watch, clean = light(
        ("site", "ledger", kit),
        ("site", "ledger", kit, "--every"),
        ("site", "jobs", kit),
        ("site", "watch", kit, "--once"),
        ("site", "clean", kit, "--older-than", 1),
    )
    assert "job-1: fedfa " in ledger
    assert "SHA-256" in every
    assert "1 ended" in jobs
    assert "fedfa" in jobs
    assert "training loss" in watch
    assert "stays: state of runs (1, " in clean


def test_folders_that_are_not_there(light, tmp_path):
    nowhere = tmp_path / "nowhere"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/results.json").touch()
    of_data = [
        ("simulate", "--methods", "fedavg", "--out", tmp_path / "out"),
        ("compare", "--out", tmp_path / "out"),
        ("plan", "--out", tmp_path / "plan.json"),
        *(("inspect",), ("statistics",), ("evaluate", "--model", tmp_path / "run")),
    ]
    of_data = [*((*call, "--data", nowhere) for call in of_data), ("init", nowhere)]
    for err in light(*of_data, code=2):
        assert err == f"medfedaug: {nowhere}: no such folder."
    of_runs = [
        *(("report", nowhere, "--card"), ("bundle", nowhere, "--out", tmp_path / "out")),
        ("evaluate", "--model", nowhere, "--data", tmp_path),
        ("predict", "--model", nowhere, "--images", tmp_path, "--out", tmp_path / "out"),
    ]
    for err in light(*of_runs, code=2):
        assert err.startswith(f"medfedaug: {nowhere}: no finished run; name a folder with")
    (err,) = light(("init", tmp_path, "--labels", "0=background,0=lesion"), code=2)
    assert err == "medfedaug: --labels names 0 twice"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_names_of_methods_that_are_not_known(light, tmp_path):
    calls = [
        ("simulate", "--data", tmp_path, "--methods", "fedavg,fedrnd", "--out", tmp_path / "out"),
        ("export", "--methods", "fedavg,fedrnd", "--out", tmp_path / "out"),
        ("benchmark", "--data", tmp_path, "--methods", "fedavg,fedrnd", "--out", tmp_path / "out"),
    ]
    for err in light(*calls, code=2):
        assert err.startswith("medfedaug: method 'fedrnd' is not known; did you mean fedrdn?")
    taken = ("export", "--methods", "fedavg", "--out", tmp_path)
    (there,) = light(taken, code=2)
    assert "exists already" in there


def test_the_command_without_arguments_says_where_to_begin(light):
    (out,) = light(())
    assert [word for word in ("demo", "inspect", "compare") if f"medfedaug {word}" in out] == [
        "demo",
        "inspect",
        "compare",
    ]


def test_mistakes_that_need_no_library_to_be_seen(light, tmp_path, phantom_dir):
    out, nowhere = tmp_path / "out", tmp_path / "no.yml"
    (tmp_path / "empty").mkdir()
    site = phantom_dir / "site_A"
    wrong = {
        "is a site itself": ("simulate", "--data", site, "--methods", "fedavg", "--out", out),
        "which is not among the methods fedavg": (
            *("simulate", "--data", phantom_dir, "--methods", "fedavg", "--out", out),
            *("--set", "fedfa.prob=0.3"),
        ),
        "did you mean retina_vessels": ("benchmark", "retina_vesels", "--data", phantom_dir, "--out", out),
        "no finished run": ("predict", "--model", tmp_path / "empty", "--images", site, "--out", out),
        "no such file": ("benchmark", "--data", phantom_dir, "--search", nowhere, "--out", out),
    }
    for text, err in zip(wrong, light(*wrong.values(), code=2), strict=True):
        assert text in err


def test_the_help_of_each_command(light):
    for out in light(*([*name, "--help"] for name in [(), *((name,) for name in get_command(app).commands)])):
        assert "Usage:" in out


def test_the_page_of_a_run_is_drawn_from_its_record_alone(light, write, tmp_path):
    page = tmp_path / "page.html"
    run = write(methods=("fedrdn",), scores={"DU": 0.5, "HT": 0.6})
    light(["report", run, "--out", page], needed=["matplotlib"])
    assert "fedrdn" in page.read_text()


def test_the_leftovers_of_a_run(light, write):
    (out,) = light(("clean", write(methods=("fedavg",), scores={"DU": 0.5, "HT": 0.6})))
    assert "would free: 0 B of 1 run" in out


def cases_of(listing):
    found = json.loads(listing.read_text())
    return sorted(row["image"] for split in ("training", "validation", "test") for row in found[split])


def test_lists_of_photographs_and_of_volumes(light, make_pictures, phantom_dir, tmp_path):
    for name in "AB":
        make_pictures(name)
    for site in ("site_A", "site_B"):
        shutil.copytree(phantom_dir / site, tmp_path / "volumes" / site)
    with_nibabel = ["nibabel", "scipy", "pydicom"]
    for folder, needed in ((tmp_path / "pictures", ()), (tmp_path / "volumes", with_nibabel)):
        listings = [*folder.glob("*/dataset.json")]
        before = [cases_of(listing) for listing in listings]
        (out,) = light(("init", folder, "--yes", "--replace"), needed=needed)
        assert all(str(listing) in out.replace(" ", "") for listing in listings)
        assert [cases_of(listing) for listing in listings] == before


def test_the_card_of_a_run_needs_no_weights(light, write, tmp_path):
    run = write({**content(methods=("fedavg",), scores={"DU": 0.5, "HT": 0.6}), "run": "1", "sha256": {}})
    (run / GLOBAL_MODEL).touch()
    light(("report", run, "--card", "--out", tmp_path), needed=["scipy"])
    assert "SHA-256" in (tmp_path / CARDS[0]).read_text()
