"""The command line as a user meets it: what it prints, what it writes, how it fails."""

import io
import json
import subprocess
import sys

import pytest
import torch
from cli_arguments import simulate_args
from finished_runs import rehashed
from running import assert_complete

import medfedaug
from medfedaug.cli.console import out_console, print_scores
from medfedaug.config.run import RunConfig
from medfedaug.methods import method_names
from medfedaug.models import ffa_layers
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.statistics import load_statistics


def test_the_version_is_printed_by_the_command_and_by_the_module(run):
    assert run("--version")[1].strip() == medfedaug.__version__
    module = subprocess.run([sys.executable, "-m", "medfedaug", "--version"], capture_output=True, text=True)
    assert module.stdout == run("--version")[1]


def test_a_traceback_is_in_lines_that_no_text_of_others_can_forge():
    script = (
        "import sys, medfedaug.cli\n"
        "def fail(): raise RuntimeError('first\\nmedfedaug: all is well\\x1b[2J')\n"
        "sys.modules['medfedaug.cli.app']._command = lambda: fail\n"
        "medfedaug.cli.main()"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stderr
    assert "RuntimeError: first" in shown
    assert "\n    medfedaug: all is well" in shown
    assert "\x1b" not in shown


def test_an_interrupt_while_the_command_is_imported_prints_no_traceback():
    script = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'medfedaug.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from medfedaug.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (130, "")


def test_simulate_writes_the_promised_files_and_evaluate_reads_them(run, phantom_dir, tmp_path):
    """With NVFlare: `tests/integration/test_nvflare.py`."""
    out = tmp_path / "out"
    # Each layer takes part in each step: one that never did so has statistics of no site.
    code, printed, err = run(*simulate_args(phantom_dir, out), "--set", "fedfa.prob=1")
    assert code == 0, err
    assert "site_C (unseen)" in printed
    assert "round 1/1  loss" in err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert_complete(out, phantom_dir, tmp_path / "scores.json")

    code, _, err = run(*simulate_args(phantom_dir, out))
    assert code == 2
    assert "earlier run" in err

    # What plain training takes of it: γ of each stage, as the site's own layers have it.
    finished = FinishedRun.open(out)
    own = ffa_layers(finished.trainer("site_A", phantom_dir / "site_A", "cpu").network)
    assert list(finished.gamma) == list(own)
    for stage, gammas in finished.gamma.items():
        assert torch.equal(torch.stack(gammas), torch.stack([own[stage].gamma_mean, own[stage].gamma_std]))
        assert float(gammas[0].std()) > 0


def test_statistics_prints_and_saves(run, phantom_dir, tmp_path):
    target = tmp_path / "s.json"
    code, out, err = run("statistics", "--data", phantom_dir / "site_A", "--out", target)
    assert code == 0, err
    saved = load_statistics(target)["site_A"]
    assert f"{float(saved.mean[0]):.6g}" in out
    assert f"{float(saved.std[0]):.6g}" in out
    assert "--intensity scale" in out, "a pipeline that scales must not have statistics of stored images"
    scaled = run(
        "statistics", "--data", phantom_dir / "site_A", "--out", tmp_path / "0", "--intensity", "scale"
    )
    assert "--intensity scale" not in scaled[1]


def test_export_writes_the_job_that_the_simulator_runs(run, tmp_path):
    job = tmp_path / "job"
    options = ["--methods", "fedrdn,fedfa", "--rounds", 3, "--min-sites", 4, "--classes", "background,lesion"]
    options += ["--holdout", "hospital-d"]
    code, out, err = run("export", *options, "--out", job)
    assert code == 0, err
    assert "nvflare job submit" in out
    files = {path.relative_to(job).as_posix() for path in job.rglob("*") if path.is_file()}
    assert files == {"meta.json", "app/config/config_fed_server.json", "app/config/config_fed_client.json"}
    assert json.loads((job / "meta.json").read_text())["min_clients"] == 4
    client = json.loads((job / "app/config/config_fed_client.json").read_text())
    (executor,) = client["executors"]
    assert executor["executor"]["path"] == "medfedaug.nvflare_jobs.job.executor.SiteExecutor"
    config = RunConfig.from_dict(executor["executor"]["args"]["config"])
    assert (config.rounds, config.classes) == (3, ("background", "lesion"))
    server = json.loads((job / "app/config/config_fed_server.json").read_text())
    assert server["workflows"][0]["args"]["execution"]["min_sites"] == 4
    assert config.holdout == ("hospital-d",)
    assert [method["name"] for method in config.methods] == ["fedrdn", "fedfa"]
    code, _, err = run("export", *options, "--out", job)
    assert code == 2
    assert "exists already" in err
    code, _, err = run("export", "--methods", "fedavg", "--task", "magic", "--out", tmp_path / "other")
    assert code == 2
    assert "segmentation, classification" in err


def test_sites_that_do_not_make_a_federation(run, make_site, tmp_path):
    out, data = tmp_path / "out", tmp_path / "data"
    data.mkdir()
    for expected in ("no site found", "two sites with training cases, found 1 (A)"):
        code, _, err = run(*simulate_args(data, out))
        assert code == 2
        assert expected in err
        assert err.count("\n") == 1
        make_site("A")
    make_site("B", channels=2)
    code, _, err = run(*simulate_args(data, out))
    assert code == 2
    assert "site B" in err
    assert "2 channels" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--methods", "fedavg,fedwrong"], ["fedwrong", *method_names()]),
        (["--network", "nonet"], ["nonet", "basicunet"]),
        (["--set", "fedfa.prob"], ["METHOD.ARG=VALUE"]),
        (["--set", "fedfa.probability=1"], ["probability", "momentum"]),
        (["--set", "fedbn.x=1"], ["fedbn", "not among"]),
        (["--methods", "fedrdn", "--set", "fedrdn.average=no"], ["fedrdn: average", "true or false", "'no'"]),
        (["--set", "fedfa.prob=often"], ["fedfa: prob", "a number", "'often'"]),
        (["--set", f"fedfa.prob={10**400}"], ["fedfa: prob", "a number", "more than any float"]),
        (["--network-args", '{"spatial_dims": 3}'], ["spatial_dims", "plan"]),
        (["--network-args", '{"in_channels": 3}'], ["in_channels", "follow"]),
        (["--network-args", "{"], ["--network-args", "JSON"]),
        (["--optimizer", "magic"], ["magic", "adam", "sgd"]),
        (["--holdout", "nowhere"], ["nowhere", "site_A"]),
    ],
)
def test_wrong_options_say_what_would_be_right(run, phantom_dir, tmp_path, extra, words):
    code, _, err = run(*simulate_args(phantom_dir, tmp_path / "out"), *extra)
    assert code == 2
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_evaluate_puts_the_sites_own_layers_in(run, phantom_dir, tmp_path):
    out, again = tmp_path / "out", tmp_path / "again.json"
    code, _, err = run(*simulate_args(phantom_dir, out, "fedbn"))
    assert code == 0, err
    arguments = ("evaluate", "--model", out / "global_model.pt", "--data", phantom_dir, "--out", again)
    code, _, err = run(*arguments)
    assert code == 0, err
    tested = json.loads((out / "results.json").read_text())["test"]
    evaluated = json.loads(again.read_text())["sites"]
    for site, entry in tested["sites"].items():
        assert evaluated[site]["cases"] == pytest.approx(entry["cases"], nan_ok=True)
    assert "this site has none" in evaluated["site_C"]["note"]
    code, _, err = run(*arguments, "--state", tmp_path / "elsewhere")
    assert code == 2
    assert "left layers or weights at the sites" in err


def test_report_prints_the_scores_and_writes_page_and_tables(run, phantom_dir, tmp_path):
    assert run(*simulate_args(phantom_dir, tmp_path / "run", methods="fedavg"))[0] == 0
    page, tables = tmp_path / "new/report.html", tmp_path / "tables"
    options = ("--out", page, "--tables", tables, "--data", phantom_dir, "--device", "cpu")
    code, out, _ = run("report", tmp_path / "run", *options)
    assert code == 0
    assert "fedavg" in out
    assert "Worst and best case of each site" in page.read_text()
    names = {f"{name}.{kind}" for name in ("scores", "patients", "metrics") for kind in ("md", "csv")}
    assert {path.name for path in tables.iterdir()} == names
    code, _, err = run("report", tmp_path / "run", "--out", page, "--data", tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err
    assert err.count("\n") == 1


def test_names_and_paths_are_printed_as_they_are(run, tmp_path):
    """In brackets they are no markup, and a long path or command is on one line, so that it can be copied."""
    scores = {"[old] DU": {"dice": 0.5, "cases": {}}, "DU": {"dice": 0.5, "cases": {}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out_console, "file", said := io.StringIO(), raising=False)
        print_scores({"mean": {"dice": 0.5}, "sites": scores}, "test", {"test": "global"})
    assert "[old] DU" in said.getvalue()
    out = tmp_path / f"{'long ' * 20}[new]" / "job"
    code, printed, err = run("export", "--methods", "fedavg", "--out", out, "--min-sites", 2)
    assert (code, err) == (0, "")
    assert printed.splitlines()[-1] == f"{out}: submit it with `nvflare job submit -j '{out}'`"


def test_evaluate_says_what_is_wrong(run, phantom_dir, tmp_path):
    model = tmp_path / "global_model.pt"
    code, _, err = run("evaluate", "--model", model, "--data", phantom_dir)
    assert code == 2
    assert "results.json" in err
    (tmp_path / "results.json").write_text(
        json.dumps(
            {
                **{"config": RunConfig().to_dict(), "input": {"spacing": {}, "intensity": {}}},
                **{"run": "0" * 32, "rounds": [], "selected_round": 0, "test": {"sites": {}, "mean": {}}},
            }
        )
    )
    model.write_bytes(b"no model")
    rehashed(tmp_path)
    code, _, err = run("evaluate", "--model", model, "--data", phantom_dir)
    assert code == 2
    assert "not a model" in err
