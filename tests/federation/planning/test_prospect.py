"""A job that exchanges fingerprints: what leaves each site, what it is told, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hospitals import Deployment, Hospital
from results import Page
from running import TINY_NETWORK

from medfedaug.analysis.fingerprint_distance import distances
from medfedaug.config.run import RunConfig
from medfedaug.data.datasets.partial_phantom import annotate_apart
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.quality.image_fingerprint import entry_shapes, fingerprint_of
from medfedaug.data.sites import open_site
from medfedaug.errors import RunFailed
from medfedaug.federation.job_summary import summary
from medfedaug.federation.messages.messages import PREPARE, PROSPECT, TRAIN, Reply, Request
from medfedaug.federation.planning.prospect import Prospecting
from medfedaug.nvflare_jobs.kit.doctor import examine
from medfedaug.privacy import PrivacyLedger
from medfedaug.privacy.job_log import JobBook

FREE = {"approve": False, "min_cases": 1}
NOISE = {"min_images": 3, "noise_multiplier": 1.0, "max_epsilon": 30}
NAMES = set(entry_shapes("segmentation", 2, 1))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prospect") / "data"
    make_phantom(folder, sites=3, patients=6, shape=(20, 20, 3))
    return folder


@pytest.fixture
def config():
    return RunConfig.from_dict({"prospect": True, "classes": ("background", "lesion"), **TINY_NETWORK})


@pytest.fixture
def hospitals(data, tmp_path):
    def make(**privacy):
        return [
            Hospital(tmp_path / "kits" / name, data / name, privacy=rules, jobs=FREE)
            for name, rules in privacy.items()
        ]

    return make


def test_each_site_sends_its_fingerprint_once_and_is_told_those_of_all(data, config, hospitals, tmp_path):
    sites = hospitals(site_A={"min_images": 3}, site_B={"min_images": 3, "scores": "cases"})
    deployment = Deployment(sites)
    server = deployment.run(config)
    assert {*server.prospecting.sites} == {"site_A", "site_B"}
    sent = {name: reply for name, reply in deployment.replies if reply.payload}
    for name, reply in sent.items():
        expected = fingerprint_of(open_site(data / name))
        assert {*reply.payload} == {f"prospect/{entry}" for entry in NAMES}
        for entry, value in expected.entries.items():
            np.testing.assert_allclose(reply.payload[f"prospect/{entry}"], value, rtol=1e-6)
        # Nothing else leaves: no weights, no name of a case or of a file, no text.
        assert not reply.weights
        assert not reply.masks
        assert {*reply.metrics} == {"cases", "looked_at", "patients", "test_patients", "noise"}
        assert all(isinstance(value, (int, float)) for value in reply.metrics.values())
    assert len(deployment.replies) == 4
    assert not any(reply.payload or reply.metrics or reply.weights for _, reply in deployment.replies[2:])
    # One test patient is fewer than A's min_images, and B keeps no count back.
    assert sent["site_A"].metrics["test_patients"] == 0
    assert sent["site_B"].metrics["test_patients"] == 1
    for site in sites:
        entries = [one.release for one in PrivacyLedger(site.kit / "medfedaug/ledger.sqlite").entries()]
        releases = [(one.method, one.kind, one.split, one.count) for one in entries]
        about = ("training", 4)
        # The second answer, to what the server tells, holds nothing, and is entered too.
        assert releases == [("prospect", "statistics", *about), *[("task", "numbers", *about)] * 2]
        pages = site.kit.rglob("prospect.html")
        assert f"Should {site.name} join?" in next(iter(pages)).read_text()


def test_scanners_are_told_where_the_policy_names_them_and_nowhere_else(data, config, hospitals, run):
    own = {"Siemens": ["Prisma", "Skyra <b>"], "Philips": ["Ingenia"]}
    sites = hospitals(site_A={"min_images": 3, "scanners": own}, site_B={"min_images": 3})
    deployment = Deployment(sites)
    server = deployment.run(config)
    assert server.prospecting.sites["site_A"].scanners == own
    assert server.prospecting.sites["site_B"].scanners == {}
    sent = {name: reply.metrics for name, reply in deployment.replies if reply.payload}
    assert sent["site_A"]["scanners"] == own
    assert "scanners" not in sent["site_B"]
    for site in sites:  # both are told them, and each page says what its own site told
        (told,) = site.kit.rglob("fingerprints.json")
        content = json.loads(told.read_text())["sites"]
        assert content["site_A"]["scanners"] == own
        assert "scanners" not in content["site_B"]
        (page,) = site.kit.rglob("prospect.html")
        page = Page(page.read_text())
        assert "Siemens Prisma, Skyra <b>; Philips Ingenia" in page.text
        assert "b" not in page.tags
        assert ("named its scanners" in page.text, "named no scanner" in page.text) == (
            site.name == "site_A",
            site.name == "site_B",
        )
        (record,) = site.kit.rglob("prospect.json")
        assert json.loads(record.read_text())["sites"]["site_A"]["scanners"] == own
        ledger = PrivacyLedger(site.kit / "medfedaug/ledger.sqlite").entries()
        numbers = [one.release.shape for one in ledger if one.release.kind == "numbers"]
        assert any("scanners" in shape for shape in numbers) == (site.name == "site_A")


def test_scanners_of_a_site_that_sends_no_fingerprint_stay(config, hospitals):
    (site,) = hospitals(site_A={"min_images": 50, "scanners": {"Siemens": ["Prisma"]}})
    site.start(config, "job-1")
    reply = site.answer(Request(PROSPECT, run="0" * 32))
    assert "from 50 on" in reply.error
    assert not reply.metrics
    assert "Siemens" not in str(reply)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_classes_that_a_site_lacks_are_told_and_are_no_distance(config, tmp_path, noise):
    """Each site has outlined one of two structures, which all have; A and C the same one."""
    root = tmp_path / "apart"
    make_phantom(root, sites=3, patients=6, shape=(20, 20, 3), classes=3, shift=0)
    lesion, ventricles = "lesion", "ventricles"
    owned = {"site_A": (lesion,), "site_B": (ventricles,), "site_C": (lesion,)}
    assert annotate_apart(root) == owned
    rules = {"min_images": 3} | ({"noise_multiplier": noise, "max_epsilon": 30} if noise else {})
    sites = [Hospital(tmp_path / "kits" / name, root / name, privacy=rules, jobs=FREE) for name in owned]
    deployment = Deployment(sites)
    server = deployment.run(replace(config, classes=("background", lesion, ventricles)))
    assert {name: one.annotated for name, one in server.prospecting.sites.items()} == owned
    apart = distances([*server.prospecting.sites.values()])
    # B has no class in common with the others, and A and C have theirs in most cases.
    assert [apart["site_B"][kind] for kind in ("prevalence", "size", "pieces")] == [0, 0, 0]
    assert apart["site_A"]["prevalence"] < 0.5 or noise
    for site in sites:
        (told,) = site.kit.rglob("fingerprints.json")
        content = json.loads(told.read_text())["sites"]
        assert {name: tuple(one["annotated"]) for name, one in content.items()} == owned
        known = [one.release.shape for one in PrivacyLedger(site.kit / "medfedaug/ledger.sqlite").entries()]
        assert known.count(f"annotated classes: {owned[site.name][0]}") == 1


def test_a_class_that_some_cases_lack_is_no_distance(tmp_path):
    make_phantom(tmp_path, sites=1, patients=6, shape=(20, 20, 3))
    file = tmp_path / "site_A/dataset.json"
    content = json.loads(file.read_text())
    assert fingerprint_of(open_site(file.parent)).annotated is None
    del content["training"][0]["label"]
    for more, shown in ({"labelled": ["lesion"]}, ()), ({"ignore": 255, "labelled": ["lesion"]}, ()):
        file.write_text(json.dumps({**content, **more}))
        assert fingerprint_of(open_site(file.parent)).annotated == shown
    del content["training"][0]
    file.write_text(json.dumps({**content, "labelled": ["lesion"]}))
    assert fingerprint_of(open_site(file.parent)).annotated == ("lesion",)


def test_site_config_names_scanners_and_takes_them_back(run, hospitals):
    (site,) = hospitals(site_A={"min_images": 3})
    (site.kit / "local/resources.json.default").write_text('{"components": []}')

    def config(*options):
        return run("site-config", "--kit", site.kit, *options)

    def named():
        return json.loads((site.kit / "local/medfedaug.json").read_text())["privacy"].get("scanners", {})

    assert config()[0] == 0
    assert named() == {}
    code, _, err = config(
        *("--name-scanner", "Siemens=Prisma", "--name-scanner", "Siemens=Skyra", "--name-scanner", "GE=Signa")
    )
    assert code == 0, err
    assert named() == {"Siemens": ["Prisma", "Skyra"], "GE": ["Signa"]}
    (check,) = [one for one in examine(site.kit, None, connect=False) if one.name == "scanners"]
    assert check.found.endswith(": Siemens Prisma, Skyra; GE Signa")
    for options, expected in (
        (("--name-scanner", "Siemens"), "MANUFACTURER=MODEL"),
        (("--name-scanner", "Siemens=Prisma", "--keep-scanners"), "give one of"),
        (("--name-scanner", f"Siemens={'x' * 65}"), "1 to 64 characters"),
        (("--name-scanner", "Siemens=a\x1bb"), "control character"),
    ):
        code, _, err = config(*options)
        assert (code, err.count("\n")) == (2, 1)
        assert expected in err
    assert config("--keep-scanners")[0] == 0
    assert named() == {}


def test_noise_is_that_of_the_policy_and_the_ledger_has_its_epsilon(data, config, hospitals):
    pytest.importorskip("opacus")
    sites = hospitals(site_A=NOISE, site_B={"min_images": 3})
    deployment = Deployment(sites)
    server = deployment.run(config)
    noisy, plain = (server.prospecting.sites[name] for name in ("site_A", "site_B"))
    own = fingerprint_of(open_site(data / "site_A"))
    blocks = sum(value.numel() for value in own.entries.values())
    assert noisy.noise == pytest.approx(np.sqrt(blocks) / own.cases)
    assert plain.noise == 0
    apart = [float((noisy.entries[name] - own.entries[name]).abs().max()) for name in own.entries]
    assert max(apart) > 0.01
    (page,) = sites[0].kit.rglob("prospect.html")
    assert "with noise of deviation" in page.read_text()
    assert "ε of this site" in page.read_text()


def test_the_deviation_of_the_noise_is_as_stated(data):
    """The guard's own noise, drawn many times, has the deviation that the page gives."""
    pytest.importorskip("opacus")
    import random

    from medfedaug.federation.messages.privacy_guard import PrivacyGuard
    from medfedaug.federation.planning.prospect import ProspectExchange, noise_of
    from medfedaug.privacy import PrivacyPolicy

    site = open_site(data / "site_A")
    policy = PrivacyPolicy(min_images=3, noise_multiplier=0.05, max_epsilon=1e9)
    cases, generator = len(site.cases["training"]), random.Random(0)
    exchange, drawn = ProspectExchange(site), []
    contributions = exchange.contributions(policy.bounds)
    contributions = replace(contributions, values=list(contributions.values))
    exchange.contributions = lambda bounds: contributions
    for _ in range(60):
        guard = PrivacyGuard("A", policy, cases, generator=generator)
        guard.ledger.spend = lambda *values: 1.0
        guard.observe(PROSPECT, exchange)
        drawn.append(guard.collect(PROSPECT, exchange))
    own = fingerprint_of(site).entries
    inside = [name for name in ("mean", "roughness", "edge", "noise") if 0.15 < float(own[name]) < 0.85]
    assert inside
    deviations = [np.std([float(one[name]) for one in drawn]) for name in inside]
    np.testing.assert_allclose(np.mean(deviations), noise_of(policy, drawn[0], cases), rtol=0.25)


def test_a_refusing_site_is_named_and_two_are_needed(config, hospitals):
    server = Deployment(
        hospitals(site_A={"min_images": 3}, site_B={"min_images": 3}, site_C={"min_images": 50})
    ).run(config)
    assert {*server.prospecting.sites} == {"site_A", "site_B"}
    assert "from 50 on" in server.prospecting.missing["site_C"]
    alone = Deployment(hospitals(site_A={"min_images": 3}, site_C={"min_images": 50}))
    with pytest.raises(RunFailed, match=r"two sites or more, got 1: .*from 50 on"):
        alone.run(config)


def test_a_site_that_does_not_answer_in_time_is_named_and_is_told_nothing(config, hospitals):
    class WithoutC(Deployment):
        def ask(self, request, sites, needed, accept):
            super().ask(request, [name for name in sites if name != "site_C"], needed, accept)
            return {"site_C": "no answer within 5 s"} if "site_C" in sites else {}

    sites = hospitals(**{name: {"min_images": 3} for name in ("site_A", "site_B", "site_C")})
    server = WithoutC(sites).run(config)
    assert {*server.prospecting.sites} == {"site_A", "site_B"}
    assert server.prospecting.missing == {"site_C": "no answer within 5 s"}
    assert not list(sites[2].kit.rglob("prospect.html"))


def test_the_server_gets_no_training_of_a_prospect_and_no_fingerprint_of_a_training(config, hospitals):
    (site,) = hospitals(site_A={"min_images": 3})
    site.start(config, "job-1")
    for task in (PREPARE, TRAIN):
        assert "this job exchanges fingerprints alone" in site.answer(Request(task, round=1)).error
    site.start(replace(config, prospect=False), "job-2")
    assert "this job exchanges none" in site.answer(Request(PROSPECT)).error


def test_what_no_site_sends_is_refused_by_name(config):
    asked = Prospecting(config, "run")
    shapes = entry_shapes("segmentation", 2, 1)
    good = {f"prospect/{name}": torch.full(shape, 0.5) for name, shape in shapes.items()}
    counts = {"cases": 5, "looked_at": 5, "patients": 5, "test_patients": 2, "noise": 0.0}

    def reply(payload=good, **changes):
        return Reply(PROSPECT, payload=payload, metrics={**counts, **changes})

    assert asked.accept("A", reply())
    for wrong in (
        reply({**good, "prospect/mean": torch.tensor([float("nan")])}),
        reply({**good, "prospect/mean": torch.tensor([1.5])}),
        reply({**good, "prospect/mean": torch.zeros(10**6)}),
        reply({**good, "prospect/secret": torch.zeros(1)}),
        reply({**good, "fedavg/mean": torch.zeros(1)}),
        reply({"prospect/mean": torch.zeros(1)}),
        reply({}),
        reply(cases=-1),
        reply(cases=2**60),
        reply(cases="<script>"),
        reply(noise=float("nan")),
        reply(noise=-1),
        reply(noise="much"),
        reply(scanners="Siemens"),
        reply(scanners={"Siemens": "Prisma"}),
        reply(scanners={"Siemens": ["a\nb"]}),
        reply(scanners={"Siemens": ["x" * 65]}),
        reply(scanners={"Siemens": [str(n) for n in range(21)]}),
        reply(scanners={"Siemens": []}),
        reply(scanners={"Siemens": [7]}),
        reply(scanners={7: ["Prisma"]}),
        reply(annotated="lesion"),
        reply(annotated=["tumour"]),
        reply(annotated=["background"]),
        reply(annotated=[["lesion"]]),
        Reply(PROSPECT, error="no"),
    ):
        assert not asked.accept("B", wrong)
        assert "\n" not in asked.missing["B"]
    assert {*asked.sites} == {"A"}


def test_what_the_server_tells_is_checked_at_the_site(config, hospitals):
    (site,) = hospitals(site_A={"min_images": 3})
    site.start(config, "job-1")
    assert not site.answer(Request(PROSPECT, run="0" * 32)).error
    reply = site.answer(Request(PROSPECT, run="0" * 32, once={"prospect/mean/site_B": torch.tensor([9.0])}))
    assert "site_B" in reply.error or "prospect" in reply.error
    asked = Prospecting(config, "0" * 32)
    for name in ("site_A", "site_B"):
        payload = {f"prospect/{entry}": torch.full(shape, 0.5) for entry, shape in asked.shapes.items()}
        counts = dict.fromkeys(("cases", "looked_at", "patients", "test_patients"), 5)
        assert asked.accept(name, Reply(PROSPECT, payload=payload, metrics={**counts, "noise": 0.0}))
    for wrong in ({"Siemens": ["a\x1b[2J"]}, {"Siemens": "Prisma"}, "Siemens"):
        reply = site.answer(replace(asked.full_set(), scanners={"site_B": wrong}))
        assert "site_B" in reply.error
        assert "\x1b" not in reply.error
    assert not list(site.kit.rglob("prospect.html"))
    assert not site.answer(asked.full_set()).error
    assert list(site.kit.rglob("prospect.html"))


def test_the_page_of_the_approval_lists_every_entry_and_no_training(config, tmp_path):
    entry = JobBook(tmp_path / "book").note(config, "job-1", None)
    text = "\n".join(summary(entry))
    assert "NOTHING IS TRAINED" in text
    for name in NAMES:
        assert f"    {name} (" in text
    assert "The server sends all sites of the job the fingerprints" in text
    assert "scanners, where this kit's privacy policy names them" in text
    assert "by default none" in text
    assert "weights" not in text
    assert json.dumps(True) in text
