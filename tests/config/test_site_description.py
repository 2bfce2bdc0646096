"""A site's description of itself, from its file to the model card."""

import json

import pytest
import yaml
from hospitals import Deployment, Hospital
from jsonschema import Draft202012Validator
from running import TINY_NETWORK

from medfedaug.config.run import RunConfig
from medfedaug.config.site_description import SiteDescription
from medfedaug.data.phantom import make_phantom
from medfedaug.errors import ConfigError
from medfedaug.federation.server.history import RunHistory
from medfedaug.federation.server.reply_checks import accepted_description
from medfedaug.hospital.privacy import PrivacyLedger
from medfedaug.hospital.privacy.job_log import JobEntry
from medfedaug.hospital.privacy.job_summary import summary
from medfedaug.hospital.privacy.site_settings import SiteSettings

OWN = {
    "studies": 40,
    "modality": "MR, FLAIR",
    "body_part": "brain",
    "scanners": {"Siemens": ["Prisma", "Skyra <b>"]},
    "years": [2019, 2024],
    "inclusion": "adults with a glioma; none with earlier surgery",
    "annotators": "two neuroradiologists, one after the other",
    "contact": "trials@hospital-a.example.org",
}

IMPOSSIBLE = [
    ({"modalities": "MR"}, "unknown keys"),
    ({"modality": "\x1b[31mMR"}, "control character"),
    ({"inclusion": "x" * 1001}, "more than 1000"),
    ({"modality": 7}, "must be text"),
    ({"years": [2024, 2019]}, "first and the last year"),
    ({"years": [2024]}, "first and the last year"),
    ({"patients": 0}, "at least 1"),
    ({"patients": True}, "whole number"),
    ({"patients": 10**12}, "at most 999999"),
    ({"scanners": {"Siemens": "Prisma"}}, "lists of models"),
    (["MR"], "an object"),
    (None, "an object"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_phantom(folder, sites=3, patients=10, shape=(16, 16, 8), seed=0)
    return folder


@pytest.fixture
def hospitals(data, tmp_path):
    def make(**privacy):
        return [
            Hospital(tmp_path / "kits" / name, data / name, privacy=rules) for name, rules in privacy.items()
        ]

    return make


@pytest.mark.parametrize(("values", "message"), IMPOSSIBLE)
def test_mistakes_are_one_line_and_a_site_that_sends_them_says_nothing(values, message, tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message) as error:
        SiteDescription.of_file(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert accepted_description({"description": values}) == {}


@pytest.mark.parametrize(
    "metrics", [{}, None, 7, {"description": {7: "MR"}}, {"description": {"years": [[]]}}]
)
def test_what_is_no_description_at_all_ends_nothing(metrics):
    assert accepted_description(metrics) == {}


def test_yaml_json_and_the_schema_agree(run, tmp_path):
    out = run.ok("schema", "site-description")
    Draft202012Validator(json.loads(out)).validate(OWN)
    for text in (yaml.safe_dump(OWN, width=20), json.dumps(OWN)):  # paragraphs of YAML too
        (tmp_path / "site").write_text(text)
        assert SiteDescription.of_file(tmp_path / "site").to_dict() == OWN
    (tmp_path / "site").write_text("a: [")
    with pytest.raises(ConfigError, match="not readable as YAML or JSON"):
        SiteDescription.of_file(tmp_path / "site")


def test_site_configure_takes_a_description_and_takes_it_back(run, hospitals, tmp_path):
    (site,) = hospitals(site_A={"min_images": 3})
    (site.kit / "local/resources.json.default").write_text('{"components": []}')
    file, settings = tmp_path / "site.yaml", site.kit / "local/medfedaug.json"
    for values in (OWN, {}):
        file.write_text(yaml.safe_dump(values))
        run.ok("site", "configure", site.kit, "--describe", file)
        assert json.loads(settings.read_text())["privacy"]["description"] == values
    file.write_text("years: 7")
    code, _, err = run("site", "configure", site.kit, "--describe", file)
    assert (code, err.count("\n")) == (2, 1)
    assert str(file) in err


def test_a_job_carries_it_and_the_ledger_names_it(hospitals):
    """A site that says nothing gives its counts, and one with too few patients nothing."""
    rules = {"min_images": 3}
    sites = hospitals(site_A={**rules, "description": OWN}, site_B=rules, site_C={"min_images": 7})
    config = RunConfig.from_dict(
        {"classes": ("background", "lesion"), "rounds": 1, "batch_size": 2, **TINY_NETWORK}
    )
    server = Deployment(sites).run(config)
    assert server.record.descriptions == {
        "site_A": {"patients": 6, **OWN},
        "site_B": {"patients": 6, "studies": 6},
    }
    assert server.record.to_results()["descriptions"] == server.record.descriptions
    again = RunHistory(["dice"], {"scaling": "scale"})
    again.restore(server.record.saved())
    assert again.descriptions == server.record.descriptions
    for site in sites:
        entries = PrivacyLedger(site.kit / "medfedaug/ledger.sqlite").entries()
        expected = "min_images of the site's policy is 7" if site.name == "site_C" else "description"
        assert expected in entries[0].release.shape


def test_the_page_for_an_approval_says_that_it_leaves():
    entry = JobEntry("0" * 64, RunConfig(**TINY_NETWORK).to_dict(), seen=0, verdict="waiting", runs={})
    (line,) = [line for line in summary(entry, SiteSettings()) if "--describe" in line]
    assert "patients and studies" in line
