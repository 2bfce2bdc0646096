"""A comparison at hospitals: one approval for all trainings, means only, and NVFlare's processes."""

import json
import threading

import pytest
from running import TINY_NETWORK

from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.run import Execution
from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.federation.in_process import SitesInProcess, compare_in_process
from medfedaug.federation.job_folder import COMPARED
from medfedaug.federation.messages.messages import SCORE, Request
from medfedaug.federation.protocol import compare
from medfedaug.federation.server.comparison import Comparison
from medfedaug.federation.site.comparison import ComparisonSite
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.hospital.privacy import (
    LEDGER_FILE,
    JobBook,
    JobRules,
    PrivacyLedger,
    PrivacyPolicy,
    Pseudonyms,
)
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.hospital.privacy.guarded_gate import GuardedGate
from medfedaug.hospital.privacy.job_log import APPROVED, WAITING, summary
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.hospital.secure.identity import Identity
from medfedaug.methods import parse_methods
from medfedaug.nvflare_jobs.job.comparison import ComparisonRecipe
from medfedaug.nvflare_jobs.simulator.simulator import run_job
from medfedaug.simulate import configure


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sites with four patients for training, three for validation, and one for the test."""
    root = tmp_path_factory.mktemp("compared") / "data"
    for folder in make_phantom(root, sites=2, patients=8, shape=(24, 24, 2), seed=0):
        listing = folder / "dataset.json"
        content = json.loads(listing.read_text())
        cases = [case for split in ("training", "validation", "test") for case in content[split]]
        content |= {"training": cases[:4], "validation": cases[4:7], "test": cases[7:]}
        listing.write_text(json.dumps(content))
    return root


@pytest.fixture(scope="module")
def config(data):
    small = {**TINY_NETWORK, "local_steps": 2, "batch_size": 4, "augmentation": "none"}
    run = configure(find_sites(data), methods=parse_methods("fedavg"), rounds=2, purpose="to try", **small)
    methods = {name: parse_methods(name) for name in ("fedavg", "single", "ditto")}
    return ComparisonConfig(run=run, methods=methods)


def ledger_of(data, name):
    """The ledger of a site, to which its images belong in all tests."""
    return data.parent / f"{name}_{LEDGER_FILE}"


def guarded(name, data, config, folder, rules=None):
    """A site behind its guard, and its book of jobs."""
    policy = PrivacyPolicy(min_images=3)
    book = JobBook(folder / "jobs")
    rules = rules or JobRules()
    gate = GuardedGate(name, rules, Pseudonyms(b"key"), book, "job", "approve", Identity)
    gate.comparison = config

    def trainer(run):
        privacy = SitePrivacy(policy, ledger_of(data, name))
        return SiteTrainer(run, data, "cpu", folder, privacy, threads=1)

    return ComparisonSite(name, config, trainer, folder, gate), book


def test_hospitals_send_means_and_their_differences_and_nothing_of_a_case(data, config, tmp_path):
    sites = {name: guarded(name, data, config, tmp_path / name)[0] for name in ("site_A", "site_B")}
    comparison = Comparison(config, tmp_path, Execution(threads=1))
    compare(comparison, SitesInProcess(sites))
    record = comparison.results()
    assert {name: entry["patients"] for name, entry in record["sites"].items()} == dict.fromkeys(sites, 3)
    assert set(record["gains"]) == {"single", "ditto"}
    plain = compare_in_process(
        config, find_sites(data), tmp_path / "plain", "cpu", execution=Execution(threads=1)
    )
    for name, gain in plain["gains"].items():
        assert record["gains"][name] == pytest.approx(gain)
    ledger = PrivacyLedger(ledger_of(data, "site_A")).entries()
    assert {entry.release.split for entry in ledger} <= {"", "training", "validation"}
    assert sum(entry.release.kind == "differences" for entry in ledger) == 2 * 2 * 2  # methods, seeds, stages


def test_one_approval_is_for_all_trainings(data, config, tmp_path):
    site, book = guarded("site_A", data, config, tmp_path / "a", JobRules(approve=True))
    comparison = Comparison(config, tmp_path)
    turn = next(comparison.turns())
    request = turn.server.prepare()
    request.training = "fedavg/0"
    replies = []
    thread = threading.Thread(target=lambda: replies.append(site.answer(request)))
    thread.start()
    while not (entries := book.entries()):
        thread.join(0.05)
    (entry,) = entries
    assert (entry.verdict, entry.compares, entry.methods) == (WAITING, True, ["fedavg", "single", "ditto"])
    book.judge(entry.hash, APPROVED)
    thread.join()
    assert not replies[0].error
    request.training, request.run = "ditto/1", "1" * 32
    assert not site.answer(request).error
    assert len(book.entries()) == 1


def test_no_request_gets_scores_of_test_cases(data, config, tmp_path):
    """The three validation cases are enough patients, and the one test case is not."""
    site, _ = guarded("site_A", data, config, tmp_path / "a")
    server = next(Comparison(config, tmp_path).turns()).server
    request = Request(SCORE, weights=dict(server.state), run=server.run, training="fedavg/0")
    reply = site.answer(request)
    assert reply.error == ""
    assert reply.metrics["scored_cases"] == 3


def test_a_refused_comparison_trains_nothing(data, config, tmp_path):
    site, book = guarded("site_A", data, config, tmp_path / "a", JobRules(max_rounds=1))
    comparison = Comparison(config, tmp_path)
    request = next(comparison.turns()).server.prepare()
    request.training = "ditto/0"
    assert "the site's rule max_rounds is 1" in site.answer(request).error
    assert not book.entries()


def test_the_page_for_approval_names_all_methods_and_what_leaves(config, tmp_path):
    book = JobBook(tmp_path)
    page = "\n".join(summary(book.note(config), SiteSettings()))
    assert "purpose: to try" in page
    assert "a comparison of fedavg, single, ditto: 2 trainings of each" in page
    assert "in each of 6 trainings:" in page
    assert "after the rounds 1 and 2 at most: the validation score" in page
    assert "scores of the test cases" not in page


@pytest.mark.slow  # NVFlare's processes
def test_the_job_in_nvflares_simulator_gives_what_is_had_in_process(data, config, tmp_path):
    execution = Execution(threads=1)
    plain = compare_in_process(config, find_sites(data), tmp_path / "plain", "cpu", execution=execution)
    recipe = ComparisonRecipe(config=config, min_clients=2, execution=execution)
    out = run_job(
        recipe, data, ["site_A", "site_B"], tmp_path / "work", COMPARED, device="cpu", execution=execution
    )
    record = json.loads((out / COMPARED).read_text())
    assert (out / "compare.html").exists()
    for name in ("recommended", "failed", "methods"):
        assert record[name] == plain[name]
    assert record["budget"]["stages"] == plain["budget"]["stages"]
    for training, other in zip(record["trainings"], plain["trainings"], strict=True):
        # Two processes may differ in the last bits, and so in single pixels.
        assert training["sites"] == pytest.approx(other["sites"], abs=1e-3)
        same = ("method", "seed", "rounds")
        assert [training[key] for key in same] == [other[key] for key in same]
    for name, gain in plain["gains"].items():
        assert record["gains"][name] == pytest.approx(gain, abs=1e-3)
