"""Whose model a score is of, and what of a site's scores leaves it."""

import json

import pytest
from running import TINY_OPTIONS

from medfedaug.federation.composition import Composition


@pytest.mark.all_layers
@pytest.mark.parametrize(
    ("methods", "settings", "validation", "test"),
    [
        ("fedavg", None, "global", "global"),
        ("fedrdn,fedfa", None, "global", "global"),  # statistics of its own images are no model
        ("fedbn", None, "personal (own layers)", "personal (own layers)"),
        ("ditto", None, "personal (own weights)", "personal (own weights)"),
        ("finetune", {"finetune": {"epochs": 2}}, "global", "personal (fine-tuned)"),
        ("finetune", {"finetune": {"epochs": 0}}, "global", "global"),
        ("fedbn,finetune", None, "personal (own layers)", "personal (own layers, fine-tuned)"),
        ("single", None, "local", "local"),
        ("single,fedrdn", None, "local", "local"),
    ],
)
def test_whose_model_a_score_is_of_follows_from_the_composition(
    tiny_config, methods, settings, validation, test
):
    scored = Composition(tiny_config(methods, settings=settings)).scored
    assert scored == {"validation": validation, "test": test, "unseen": "unseen"}


@pytest.mark.all_layers
@pytest.mark.parametrize(
    ("methods", "model"), [("fedavg", "global"), ("partialfed", "personal (own layers)")]
)
def test_results_and_terminal_say_whose_model_was_scored(run, phantom_dir, tmp_path, methods, model):
    out = tmp_path / "out"
    code, printed, err = run(
        *("simulate", "--data", phantom_dir, "--methods", methods, "--out", out, "--rounds", 1),
        *("--engine", "inprocess", *TINY_OPTIONS, "--threads", 1),
        *("--batch-size", 4, "--no-report"),
    )
    assert code == 0, err
    scored = json.loads((out / "results.json").read_text())["scored"]
    assert scored == {"validation": model, "test": model, "unseen": "unseen"}
    lines = {line.split()[1]: line for line in printed.splitlines() if "site_" in line}
    assert model.split()[0] in lines["site_A"]  # a narrow terminal breaks the line
    assert "unseen" in lines["site_C"].replace("(unseen)", "")
    again = tmp_path / "again.json"
    code, printed, err = run("evaluate", "--model", out, "--data", phantom_dir, "--out", again)
    assert code == 0, err
    found = json.loads(again.read_text())["scored"]
    assert found == {"site_A": model, "site_B": model, "site_C": "unseen"}
    code, printed, err = run("evaluate", "--model", out, "--data", phantom_dir / "site_A")
    assert "global (no site" in printed or model.split()[0] in printed
