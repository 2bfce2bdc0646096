"""`medfedaug prospect`: the command on one machine."""

import json
from dataclasses import replace

import pytest
from browser import CHROMIUM, probe
from calibrations import fingerprint, write_record
from running import TINY_ARGS

from medfedaug.analysis.prospect import make_prospect
from medfedaug.analysis.prospect_page import write_prospect
from medfedaug.data.datasets.phantom import make_phantom

A4 = 688
"""Pixels (1/96 inch) between the margins of a sheet."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prospect") / "data"
    make_phantom(folder, sites=2, patients=3, shape=(20, 20, 3))
    return folder


def test_page_and_json_have_the_fields_that_scripts_rely_on(run, tmp_path, data):
    table = write_record(tmp_path / "own.json", families=3, each=3, seed=0, noise=0.01)
    out, told = tmp_path / "prospect.html", tmp_path / "prospect.json"
    code, printed, _ = run("prospect", "--data", data, "--out", out, "--json", told, "--calibration", table)
    assert code == 0
    found = json.loads(told.read_text())
    assert {*found["sites"]} == {"site_A", "site_B"}
    fields = {"mean", "low80", "high80", "low95", "high95", "known"}
    for expected in (found["expected"], *(site["expected"] for site in found["sites"].values())):
        assert all(fields <= {*one} for one in expected.values())
        assert {"norm", "fedfa", "single"} <= {*expected}
    assert found["sites"]["site_A"]["distance"] > 0
    assert "patients_needed" in found
    assert found["calibration"]["federations"] >= 9
    assert found["calibration"]["norm"] == "batch"
    assert "cannot be distinguished from chance" in printed
    assert "Fingerprints predict no gain" in printed
    assert "Should we train together?" in out.read_text()


def test_the_pilot_is_trained_and_the_norm_is_that_of_its_network(run, tmp_path, data):
    told = tmp_path / "prospect.json"
    options = ("--out", tmp_path / "p.html", "--json", told, "--device", "cpu", "--rounds", 3)
    axes = ("--network", "unet", "--set", f"network_args={json.dumps(TINY_ARGS)}", "--norm", "instance")
    code, printed, err = run("prospect", "--data", data, "--pilot", *options, *axes)
    assert code == 0, err
    found = json.loads(told.read_text())
    assert found["calibration"]["norm"] == "instance"
    assert found["pilot"]["rounds"] in (3, 6, 12)
    for site in found["pilot"]["sites"].values():
        assert site["single_minus_fedavg"] == pytest.approx(site["single"] - site["fedavg"])
    assert not any(one["known"] for one in found["expected"].values())
    assert "In a pilot of" in printed


def test_what_a_user_does_wrong_is_one_line(run, tmp_path, data):
    code, _, alone = run("prospect", "--data", data / "site_A", "--out", tmp_path / "page.html")
    assert code == 2
    assert len(alone.strip().splitlines()) == 1
    (tmp_path / "t.json").write_text("{")
    code, _, wrong = run("prospect", "--data", data, "--calibration", tmp_path / "t.json")
    assert code == 2
    assert "is no record of gains" in wrong
    assert len(wrong.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_is_printed_for_a_board(run, tmp_path, data):
    table = write_record(tmp_path / "own.json", families=3, each=3, seed=0, noise=0.01)
    out, pdf = tmp_path / "prospect.html", tmp_path / "prospect.pdf"
    run("prospect", "--data", data, "--out", out, "--pdf", pdf, "--calibration", table)
    assert pdf.read_bytes().startswith(b"%PDF")
    assert pdf.stat().st_size > 20_000


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_no_table_is_wider_than_a_sheet_of_paper(tmp_path):
    table = write_record(tmp_path / "own.json", families=2, each=2, seed=0, noise=0.01)
    names = [f"University_Hospital_of_Town_{n}" for n in range(12)]
    sites = [replace(fingerprint(name), scanners={"Siemens Healthineers": ["Prisma"]}) for name in names]
    page, paper = tmp_path / "prospect.html", tmp_path / "paper.html"
    write_prospect(make_prospect(sites, record=table), page)
    paper.write_text(page.read_text().replace("@media print", "@media all"))
    found = probe(paper, tmp_path, A4)
    assert (found["tables"], found["beyond"], found["spilled"]) == (0, [], [])
    assert found["scroll"] <= A4
