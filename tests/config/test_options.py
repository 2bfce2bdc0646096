"""One form of a setting: a field that is added from outside is found wherever settings are."""

import json

import pytest
import typer
from typer.testing import CliRunner

from medfedaug.cli.options import Given, read_groups, takes
from medfedaug.config.options import read_text, setting, settings, settings_table
from medfedaug.config.plan import Plan
from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.archive import Access
from medfedaug.hospital.privacy import JobRules, PrivacyPolicy, job_log
from medfedaug.hospital.privacy.site_settings import SETTINGS_FILE, SiteSettings
from medfedaug.runs.prediction.options import PredictionOptions

GROUPS = (RunConfig, Plan, SiteSettings, JobRules, PredictionOptions)
TEXT = "Warmth of the room in degrees."


@pytest.fixture(params=GROUPS, ids=lambda cls: cls.__name__)
def extended(request):
    @settings
    class Extended(request.param):
        """A group with one setting more."""

        warmth: float = setting(20.5, f"{TEXT} Cold rooms are slow.", at_least=0, at_most=40)

    return Extended


def test_a_new_field_is_checked_in_one_line(extended):
    assert extended(warmth=3).warmth == 3
    for value, words in ((-1, "cannot be negative"), (41.0, "must be at most 40"), ("x", "must be a number")):
        with pytest.raises(ConfigError, match=rf"^{extended.TITLE}warmth {words}, got {value!r}$"):
            extended(warmth=value)
    with pytest.raises(ConfigError, match=r"unknown keys warmt \(did you mean warmth\?\)"):
        extended.from_dict({"warmt": 3})


def test_a_new_field_is_in_the_documentation_and_the_table(extended):
    assert f"warmth: {TEXT}" in extended.__doc__
    (row,) = [row for row in settings_table(extended) if row[0] == "warmth"]
    assert row == ("warmth", "20.5", f"{TEXT} Cold rooms are slow.")


def test_a_new_field_is_plain_json_out_and_in(extended):
    content = json.loads(json.dumps(extended(warmth=3.5).to_dict()))
    assert content["warmth"] == 3.5
    assert extended.from_dict(content) == extended(warmth=3.5)


def test_a_new_field_is_an_option_and_a_line_of_a_commands_file(extended, tmp_path):
    received = {}

    @takes(extended)
    def command(*, given: Given, config: typer.FileText | None = None) -> None:
        received.update(given[extended])

    app = typer.Typer()
    app.command()(command)
    runner = CliRunner()
    shown = " ".join(runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).output.split())
    assert TEXT in shown
    assert extended.PANEL in shown
    assert runner.invoke(app, ["--warmth", "12.5"]).exit_code == 0
    assert received["warmth"] == 12.5
    file = tmp_path / "settings.yml"
    file.write_text("warmth: 7.5")
    assert read_groups(file, [extended]) == {extended: {"warmth": 7.5}}


@settings
class Site(SiteSettings):
    """A site with one setting more."""

    warmth: float = setting(20.5, TEXT, at_least=0)


def test_a_new_setting_of_a_site_is_in_its_kits_file_and_its_environment(tmp_path):
    (tmp_path / "local").mkdir()
    (tmp_path / SETTINGS_FILE).write_text('{"warmth": 12.5}')
    assert Site.load(tmp_path, {}).warmth == 12.5
    assert Site.load(tmp_path, {"MEDFEDAUG_WARMTH": "14"}).warmth == 14
    with pytest.raises(ConfigError, match=r"^environment: warmth must be a number, got 'hot'$"):
        Site.load(tmp_path, {"MEDFEDAUG_WARMTH": "hot"})
    assert not Site.load(tmp_path, {"MEDFEDAUG_SIMULATION": "true"}).simulation  # for no kit


@settings
class Run(RunConfig):
    """A run with one setting more."""

    warmth: float = setting(20.5, TEXT, at_least=0)


def test_a_new_setting_of_a_run_is_on_the_page_that_a_site_approves():
    assert job_log.changed_settings(Run(warmth=3.0, rounds=7)) == ["rounds: 7", "warmth: 3.0"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rounds": True}, "rounds must be a whole number, got True"),
        ({"rounds": 10**400}, "rounds must be at most 9.22337e+18, got more than any float"),
        ({"network_args": {"a": [float("nan")]}}, "network_args must be a finite number"),
        ({"network": "a\x1b[2J"}, "network: holds a control character"),
        ({"classes": "a,b"}, "classes must be a list, got 'a,b'"),
        ({"plan": {"spacings": 1}}, "unknown keys spacings"),
        ({"planning": {"memory": "8"}}, "planning: memory must be a number, got '8'"),
        ({"planning": {"given": ["rounds"]}}, "planning: given 'rounds' is not known"),
        ({"optimizer": "adamw"}, "optimizer 'adamw' is not known; did you mean adam"),
        ({"loss": "x" * 1001}, "loss: holds a text of more than 1000 characters"),
    ],
)
def test_hostile_values_are_one_line(values, words):
    with pytest.raises(ConfigError) as raised:
        RunConfig.from_dict(values)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1500


def test_text_is_read_by_the_type_of_its_setting():
    assert read_text(Plan, "spacing", "1, 1.5,3") == (1, 1.5, 3)
    assert read_text(RunConfig, "image_size", "32") == 32
    assert read_text(RunConfig, "network", "32") == "32"
    assert read_text(PrivacyPolicy, "clip", '{"feature_mean": [0, 1]}') == {"feature_mean": [0, 1]}
    with pytest.raises(ConfigError, match="--network-args: not JSON: "):
        read_text(RunConfig, "network_args", "{width}")


def test_a_secret_is_in_no_text():
    assert "s3cret" not in repr(Access(user="me", password="s3cret"))
    for values in ({"password": ["s3cret"]}, {"token": "s3cret\n"}, {"token": "s3cret", "user": "me"}):
        with pytest.raises(ConfigError) as raised:
            Access(**values)
        assert "s3cret" not in str(raised.value)
