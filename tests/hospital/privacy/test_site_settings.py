"""What a site sets for itself: file, environment, and how mistakes are told."""

import json
from pathlib import Path

import pytest

from medfedaug.config.machine import Machine
from medfedaug.errors import ConfigError
from medfedaug.hospital.privacy import PrivacyPolicy
from medfedaug.hospital.privacy.site_settings import SETTINGS_FILE, SiteSettings


@pytest.fixture
def kit(tmp_path):
    (tmp_path / "local").mkdir()
    return tmp_path


def write(kit: Path, content) -> None:
    (kit / SETTINGS_FILE).write_text(json.dumps(content))


def test_the_environment_comes_before_the_file(kit, monkeypatch):
    write(
        kit,
        {
            "data": "/srv/data",
            "device": "cpu",
            "state": "kept",
            "privacy": {"min_images": 25, "cases_per_patient": 2},
        },
    )
    settings = SiteSettings.load(kit, {})
    assert settings == SiteSettings(
        Path("/srv/data"), "cpu", kit / "kept", privacy=PrivacyPolicy(min_images=25, cases_per_patient=2)
    )
    assert settings.privacy.min_images == 25
    monkeypatch.chdir(kit)
    changed = SiteSettings.load(
        kit / "local" / "..",
        {"MEDFEDAUG_DATA": "there", "MEDFEDAUG_DEVICE": "cuda:1", "MEDFEDAUG_STATE": "/var/state"},
    )
    assert changed == SiteSettings(
        Path.cwd() / "there", "cuda:1", Path("/var/state"), privacy=settings.privacy
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"min_images": 5}, ["unknown keys min_images; known: data, device", "privacy"]),
        ({"data": 3}, ["data must name a folder", "3"]),
        ({"device": ""}, ["device must be text"]),
        ({"privacy": [10]}, ["privacy: expected an object"]),
        ({"privacy": {"min_images": 0}}, ["min_images", "0"]),
        ({"privacy": {"min_images": True}}, ["min_images", "True"]),
        ([], ["expected an object", "list"]),
        ({"jobs": {"batch": 3}}, ["jobs: unknown keys batch"]),
        ({"jobs": {"max_rounds": 0}}, ["jobs: max_rounds must be positive"]),
        ({"jobs": {"max_rounds": True}}, ["jobs: max_rounds must be a whole number"]),
        ({"jobs": {"loops": "loop.py"}}, ["jobs: loops must be a list"]),
        ({"jobs": []}, ["jobs: expected an object"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file(kit, content, words):
    write(kit, content)
    with pytest.raises(ConfigError) as raised:
        SiteSettings.load(kit, {})
    for word in (str(kit / SETTINGS_FILE), *words):
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[" * 100_000, "nested too deeply"),
        ('{"privacy": {"min_images": 20, "min_images": 2}}', "'min_images' occurs twice"),
    ],
    ids=["broken", "deep", "twice"],
)
def test_a_file_that_is_no_json_or_says_something_twice_is_named(kit, text, reason):
    (kit / SETTINGS_FILE).write_text(text)
    with pytest.raises(ConfigError, match=rf"medfedaug\.json: not readable as JSON: {reason}"):
        SiteSettings.load(kit, {})


def test_what_a_simulations_sites_compute_with_reaches_their_processes(tmp_path):
    machine = Machine(0.5, tmp_path, compile="on", deterministic=True)
    found = SiteSettings.load(None, machine.variables()).to_dict()
    assert machine.to_dict().items() <= found.items()
    with pytest.raises(ConfigError, match="compile 'sometimes' is not known; choose from auto, on, off"):
        SiteSettings.load(None, {"MEDFEDAUG_COMPILE": "sometimes"})


@pytest.mark.parametrize("file", ["fed_client.json", "fed_server.json"])
def test_a_simulation_in_a_kit_is_an_error(kit, file):
    write(kit, {"simulation": True})
    assert SiteSettings.load(kit, {}).simulation
    (kit / "startup").mkdir(exist_ok=True)
    (kit / "startup" / file).write_text("{}")
    with pytest.raises(ConfigError, match="simulation is true, and in a kit it suspends all rules"):
        SiteSettings.load(kit, {})


def test_epsilon_alone_gives_everything_noise(kit):
    write(kit, {"privacy": {"epsilon": 8}})
    policy = SiteSettings.load(kit, {}).privacy
    assert (policy.noise_multiplier, policy.sgd_noise_multiplier, policy.score_noise_multiplier) == (8, 1, 8)


def test_epsilon_covers_everything_or_is_an_error(kit):
    write(kit, {"privacy": {"epsilon": 8, "noise_multiplier": 2}})
    with pytest.raises(ConfigError, match=r"everything that leaves has noise, and sgd_noise_multiplier is 0"):
        SiteSettings.load(kit, {})
