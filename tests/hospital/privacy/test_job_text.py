"""What a site tells the server of a job it cannot run: the key, and no text that the job brought."""

import pytest
from hospitals import Hospital

from medfedaug.config.run import RunConfig
from medfedaug.errors import MedFedAugError
from medfedaug.federation.messages.messages import Request
from medfedaug.nvflare_jobs import SiteExecutor

SECRET = "TOPSECRET-4711"
LONG = f"{SECRET} {'and more of the same file, ' * 20}"

BROUGHT = {
    "a class": {"classes": ("background", SECRET)},
    "a long class": {"classes": ("background", LONG)},
    "a class with an escape": {"classes": ("background", f"\x1b[2J{SECRET}\nsecond line")},
    "names of channels": {"channel_names": (SECRET,)},
    "a network": {"network": SECRET, "network_args": {}},
    "a class path": {"network": f"monai.networks.nets.{SECRET.replace('-', '_')}", "network_args": {}},
    "a long name of an argument": {"network_args": {LONG: 1}},
    "an argument": {"network_args": {"act": SECRET}},
    "a nested argument": {"network_args": {"act": ["PRELU", {"init": SECRET}]}},
    "a file": {"network_args": {"act": f"/srv/{SECRET}/weights.pt"}},
    "a loss": {"loss": SECRET},
    "a loss's argument": {"loss_args": {"weight": SECRET}},
    "frozen entries": {"freeze": (SECRET,)},
    "an intensity": {"init": SECRET},
    "a Bundle": {"bundle": {"name": SECRET, "hash": " ".join(["0123abcd"] * 8)}},
}


@pytest.fixture
def hospital(phantom_dir, tmp_path):
    loose = {"privacy": {"min_images": 1}}
    return Hospital(tmp_path / "site_A", phantom_dir / "site_A", **loose)


def executor_of(config: dict) -> tuple[SiteExecutor | None, str]:
    """The executor of a job's configuration, or why it cannot be built.

    A job process that cannot build it ends with a code, and its log stays at the site.
    """
    try:
        return SiteExecutor(config=config), ""
    except MedFedAugError as error:
        return None, str(error)


def answers(hospital: Hospital, config: RunConfig, changes: dict) -> list[str]:
    """What the site tells the server of a job with other settings."""
    executor, said = executor_of({**config.to_dict(), **changes})
    assert "\n" not in said
    if executor is None:
        return []
    hospital.start(config, "job-1")
    hospital.executor = executor
    executor.log_error = executor.log_exception = lambda *_, **how: None
    return [hospital.answer(request).error for request in (Request("prepare"), Request("validate", round=1))]


@pytest.mark.parametrize("case", BROUGHT)
def test_no_text_of_a_job_comes_back(hospital, tiny_config, case):
    for error in answers(hospital, tiny_config(), BROUGHT[case]):
        assert "TOPSECRET" not in error
        assert "of the same file" not in error
        assert error.isprintable()


def test_the_site_keeps_the_whole_message_and_the_server_learns_the_key(hospital, tiny_config, caplog):
    error, _ = answers(hospital, tiny_config(), {"network": SECRET, "network_args": {}})
    assert error.startswith("network …")
    assert f"network {SECRET}" in caplog.text
    error, _ = answers(hospital, tiny_config(), {"network_args": {"widht": 1}})
    assert "widht" in error
    error, _ = answers(hospital, tiny_config(), {"network_args": {LONG: 1}})
    assert "same file" not in error
