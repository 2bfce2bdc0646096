"""Which jobs a site takes part in: its rules, and its administrator's approval."""

import json
import threading
import time

import pytest
import torch
from hospitals import Deployment, Hospital
from running import TINY_ARGS
from small_networks import needs_einops
from torch.nn.modules.module import register_module_parameter_registration_hook

from medfedaug.config.run import job_hash
from medfedaug.errors import JobRefused, RunFailed
from medfedaug.federation import FederationServer
from medfedaug.federation.messages.messages import Request
from medfedaug.hospital.privacy import JobBook, JobRules, PrivacyLedger
from medfedaug.hospital.privacy import guarded_gate as gate
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.kit.doctor import examine
from medfedaug.nvflare_jobs.simulator import simulator


@pytest.fixture
def hospital(phantom_dir, tmp_path):
    """A site with three training cases, whose rules are otherwise the default."""

    def make(name: str = "site_A", min_images: int = 1, **jobs) -> Hospital:
        settings = {"privacy": {"min_images": min_images}, "jobs": jobs}
        return Hospital(tmp_path / "kits" / name, phantom_dir / name, **settings)

    return make


@pytest.fixture
def deploy(hospital):
    """A federation of such a site and of another one, which is the second, and has rules of its own."""

    def make(site: Hospital) -> Deployment:
        return Deployment([site, hospital("site_B")])

    return make


# Settings of the job, rules of the site, the refusal, its rule, and the value that stays at the site.
REFUSED = {
    "rounds without end": ({"rounds": 10**9}, {}, "rounds are {}", "max_rounds is 1000", "1000000000"),
    "a part of the cases": ({"limit": 2}, {}, "limit is {}", "allow_limit is false", "2"),
    "a large model": ({}, {"max_model_mb": 0.005}, "MB", "max_model_mb is 0.005", ""),
}


@pytest.mark.parametrize(
    "args",
    [
        {"pretrained": "FILE"},
        {"act": ["PRELU", {"init": "FILE"}]},
        {"norm": "FILE"},
        {"act": "file://FILE"},
        {"act": "../../FILE"},
    ],
)
def test_no_job_learns_whether_a_file_exists(hospital, tiny_config, tmp_path, args):
    site, there = hospital(), tmp_path / "weights.pt"
    torch.save({}, there)
    told = []
    for file in (there, tmp_path / "nowhere.pt"):
        named = json.loads(json.dumps(args).replace("FILE", str(file)))
        site.start(tiny_config(network_args={**TINY_ARGS, **named}), "job-1")
        error = site.answer(Request("prepare")).error
        assert error
        told.append(error.replace(str(file), "FILE"))
    assert told[0] == told[1]


@pytest.mark.parametrize("case", REFUSED)
def test_a_job_that_a_site_does_not_allow_is_refused_by_rule_and_its_value_stays_at_the_site(
    hospital, deploy, tiny_config, caplog, case
):
    changes, rules, refusal, rule, value = REFUSED[case]
    words, changes = f"{refusal}, and the site's rule {rule}", dict(changes)
    site = hospital(**rules)
    told = words.format("…")
    with pytest.raises(RunFailed, match=told):
        deploy(site).run(tiny_config(**changes))
    assert told in site.logged[-1]
    assert "site site_A: job refused: " in site.logged[-1]
    if value:
        assert words.format(value) in caplog.text


def test_a_large_exchange_is_refused():
    with pytest.raises(JobRefused, match=r"methods exchange 2 MB in a message, .* max_model_mb is 1"):
        JobRules(max_model_mb=1.0).check_payload("A", 2.0)


def test_a_job_within_the_rules_runs(hospital, deploy, tiny_config):
    server = deploy(hospital()).run(tiny_config(rounds=1, local_steps=5))
    assert server.results()["test"]["sites"]["site_A"]["dice"] is not None


def test_simulations_are_free(tmp_path):
    workspace = tmp_path / "workspace"
    simulator._write_site_settings(workspace)
    assert SiteSettings.load(workspace, {}).simulation


def test_a_new_job_waits_until_it_is_approved_by_its_hash(hospital, deploy, tiny_config, monkeypatch, run):
    monkeypatch.setattr(gate, "_PERIOD", 0.01)
    site, config = hospital(approve=True), tiny_config("fedrdn,fedfa", rounds=2)
    site.start(config, "job-1")
    replies = []
    asking = threading.Thread(target=lambda: replies.append(site.answer(Request("prepare"))))
    asking.start()
    book = JobBook(site.kit / "medfedaug/site_A/jobs")
    while not book.entries():
        time.sleep(0.01)
    code, out, err = run("site", "jobs", site.kit)
    assert code == 0, err
    found = job_hash(config.to_dict())
    assert found in out
    for words in (
        "waiting",
        "methods: fedrdn, fedfa",
        "2 rounds of 1 epoch, 4 samples a step",
        "once: fedrdn: mean (1), std (1), count (1)",
        "2 times: fedfa: enc1/mean (4), enc1/std (4)",
        "2 times: the weights",
        "the scores of the test cases",
    ):
        assert words in out
    assert not replies
    assert run("site", "approve", site.kit, "ffff")[0] == 2
    code, out, _ = run("site", "approve", site.kit, found[:12])
    assert (code, out) == (0, f"{found}: approved\n")
    asking.join(timeout=60)
    assert replies[0].error == ""
    # The same configuration never waits again, and another one does.
    deploy(site).run(config)
    site.start(tiny_config("fedrdn,fedfa", rounds=3), "job-3")
    site.signal.trigger("aborted")
    assert "ended before its configuration" in site.answer(Request("prepare")).error
    assert [entry.verdict for entry in book.entries()] == ["approved", "waiting"]


def test_a_job_that_the_administrator_refuses_is_answered_at_once(hospital, deploy, tiny_config, run):
    site, config = hospital(approve=True), tiny_config(rounds=1)
    JobBook(site.kit / "medfedaug/site_A/jobs").note(config)
    assert run("site", "approve", site.kit, job_hash(config.to_dict()), "--refuse")[0] == 0
    with pytest.raises(RunFailed, match="the site's administrator has refused the configuration"):
        deploy(site).run(config)


@pytest.mark.parametrize("approve", [True, False])
def test_a_job_that_is_refused_while_it_runs_gets_no_more_answers(hospital, tiny_config, run, approve):
    site, config = hospital(approve=approve), tiny_config(rounds=1)
    book = JobBook(site.kit / "medfedaug/site_A/jobs")
    book.judge(book.note(config).hash, "approved")
    site.start(config, "job-1")
    assert not site.answer(Request("prepare")).error
    assert run("site", "approve", site.kit, job_hash(config.to_dict()), "--refuse")[0] == 0
    for job in ("job-1", "job-2"):
        if job == "job-2":
            site.start(config, job)
        assert "administrator has refused the configuration" in site.answer(Request("prepare")).error


def test_an_approval_cannot_be_moved_to_another_configuration(hospital, deploy, tiny_config):
    site, config, other = hospital(approve=True), tiny_config(rounds=1), tiny_config(rounds=3)
    book = JobBook(site.kit / "medfedaug/site_A/jobs")
    book.judge(book.note(config).hash, "approved")
    file = book.folder / f"{job_hash(config.to_dict())}.json"
    file.rename(file.with_name(f"{job_hash(other.to_dict())}.json"))
    with pytest.raises(RunFailed, match="its content does not match its name"):
        deploy(site).run(other)


def test_a_server_cannot_change_a_job_that_was_admitted(hospital, tiny_config):
    site = hospital()
    site.start(tiny_config(), "job-1")
    assert not site.answer(Request("prepare")).error
    planned = {"batch_size": 1, "plan": {}, "network_args": TINY_ARGS}
    assert "a plan for a job that is not planned" in site.answer(Request("prepare", planned=planned)).error


def test_a_site_that_a_job_leaves_out_does_not_train_past_its_rules(hospital, tiny_config):
    """Its training cases are not checked when the job is opened, since nothing is to leave of them."""
    site, config = hospital(min_images=10), tiny_config(holdout=("site_A",))
    site.start(config, "job-1")
    server = FederationServer(config)
    request = Request("train", 1, weights=server.state, run=server.run)
    reply = site.answer(request)
    assert reply.error == "site site_A: it does not train in this job"
    assert not reply.weights
    assert not reply.payload


def test_what_a_server_is_told_before_data_are_open_is_in_the_ledger(hospital, tiny_config):
    site = hospital(min_images=10)
    site.start(tiny_config(), "job-1")
    told = site.answer(Request("prepare")).error
    assert "… cases would train, and min_images of the site's policy is 10" in told
    entries = PrivacyLedger(site.kit / "medfedaug/ledger.sqlite").entries()
    assert [(entry.release.kind, entry.release.shape) for entry in entries] == [("message", told)]


@needs_einops
@pytest.mark.parametrize("most", [0.001, 1000.0])
def test_a_network_that_computes_while_it_is_built_is_measured_too(tiny_config, most):
    args = {"feature_size": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]}
    config = tiny_config(network="swinunetr", network_args=args, image_size=64)
    built = []
    hook = register_module_parameter_registration_hook(lambda module, name, value: built.append(value))
    try:
        if most < 1:
            with pytest.raises(JobRefused, match=r"its model has .* MB, and the site's rule max_model_mb is"):
                JobRules(max_model_mb=most).check("A", config)
        else:
            JobRules(max_model_mb=most).check("A", config)
    finally:
        hook.remove()
    megabytes = sum(value.nbytes for value in built if value.device.type == "cpu") / 1e6
    assert (megabytes < 0.1) is (most < 1)


def test_site_configure_sets_the_rules_and_doctor_shows_them(kits, run):
    kit = kits / "hospital-a"
    code, _, err = run("site", "configure", kit, "--secure-only", "--max-rounds", 50, "--approve")
    assert code == 0, err
    written = {"secure_only": True, "approve": True, "max_rounds": 50}
    assert json.loads((kit / "local/medfedaug.json").read_text())["jobs"] == written
    assert run("site", "configure", kit, "--no-approve")[0] == 0
    assert SiteSettings.load(kit, {}).jobs == JobRules.from_dict({**written, "approve": False})
    check = next(check for check in examine(kit) if check.name == "jobs")
    assert check.ok
    assert check.found == "max_rounds 50; secure_only True"
    code, _, err = run("site", "configure", kits / "fl-server.example.org", "--approve")
    assert code == 2
    assert "of its own" in err
