"""The page of a job's configuration, of which the rest is tested where sites decide over it."""

import time

import pytest

from medfedaug.config.run import RunConfig, job_hash
from medfedaug.hospital.privacy import JobRules, PrivacyPolicy
from medfedaug.hospital.privacy.job_log import WAITING, JobEntry, Origin, summary, withheld_here
from medfedaug.hospital.privacy.policy import OPEN_PROMISE
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.methods import parse_methods


def test_one_of_a_kind_is_singular():
    config = RunConfig(task="segmentation", network="basicunet", rounds=1, local_epochs=1, batch_size=1)
    config = RunConfig.from_dict({**config.to_dict(), "methods": parse_methods("fedfa")}).to_dict()
    page = "\n".join(summary(JobEntry(job_hash(config), config, time.time(), WAITING, {}), SiteSettings()))
    assert "with 1 channel\n" in page
    assert "training: 1 round of 1 epoch, 1 sample a step" in page
    assert "  once: the weights that training changes" in page
    assert "  once: fedfa: " in page
    assert "1 times" not in page


def test_the_page_says_whom_a_site_without_epsilon_trusts():
    config = RunConfig().to_dict()
    entry = JobEntry(job_hash(config), config, time.time(), WAITING, {})
    assert OPEN_PROMISE in "\n".join(summary(entry, SiteSettings()))
    assert OPEN_PROMISE not in "\n".join(summary(entry, SiteSettings(privacy=PrivacyPolicy(epsilon=8))))


@pytest.mark.parametrize(("signed", "proof"), [(True, "by certificate"), (False, "as the server says")])
def test_the_page_says_who_submitted_the_job_and_whose_word_that_is(signed, proof):
    config, origin = RunConfig().to_dict(), Origin("lesions", "lead@a.org", "a", "lead", signed)
    entry = JobEntry(job_hash(config), config, time.time(), WAITING, {}, origins={"job-1": origin})
    assert f"submitted {proof}: lead@a.org (a, lead)" in summary(entry, SiteSettings())


@pytest.mark.parametrize(
    ("settings", "methods", "word"),
    [
        (SiteSettings(privacy=PrivacyPolicy(min_images=12)), "fedavg", "fewer than 12 patients"),
        (SiteSettings(privacy=PrivacyPolicy(epsilon=3)), "fedavg", "ε = 3"),
        (SiteSettings(jobs=JobRules(max_rounds=1)), "fedavg", "max_rounds is 1"),
        (SiteSettings(), "feddg", "everything, since it refuses the job: feddg"),
    ],
)
def test_the_page_says_what_this_kit_withholds(settings, methods, word):
    config = RunConfig(methods=parse_methods(methods), network_args={"features": [4, 8, 8, 8, 8, 4]})
    entry = JobEntry(job_hash(config.to_dict()), config.to_dict(), time.time(), WAITING, {})
    page = "\n".join(summary(entry, settings))
    here = "\n".join(withheld_here(config, settings))
    assert word in here
    assert all(line in page for line in here.splitlines())
    assert word not in "\n".join(withheld_here(RunConfig(), SiteSettings()))
