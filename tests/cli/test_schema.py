"""JSON Schemas of the files that users write: schema and code take and refuse the same."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from hospitals import Hospital
from jsonschema import Draft202012Validator

from medfedaug.cli.schema import File, schema_of
from medfedaug.errors import ConfigError
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.research.sweeps import experiment
from medfedaug.research.sweeps.experiment import make_experiment

DOCS = Path(__file__).resolve().parents[2] / "docs"
WHOLE = {"data": "hospitals", "methods": "fedavg", "out": "runs"}


@cache
def schema(file: File) -> Draft202012Validator:
    content = schema_of(file)
    Draft202012Validator.check_schema(content)
    return Draft202012Validator(content)


def by_code(file: File, content, folder) -> None:
    """Read a file as the commands do; a ConfigError where it cannot be used."""
    if file is File.site_settings:
        (folder / "local").mkdir(exist_ok=True)
        (folder / "local/medfedaug.json").write_text(json.dumps(content))
        SiteSettings.load(folder, {})
    else:
        (folder / "own.yml").write_text(yaml.safe_dump(content))
        make_experiment(folder / "own.yml", {})


def members(file: File):
    """All settings of a file, as path and schema."""
    content = schema_of(file)
    for name, values in content["properties"].items():
        yield (name,), values
        if "$ref" in values:
            for inner, more in content["$defs"][values["$ref"].rpartition("/")[2]]["properties"].items():
                yield (name, inner), more


SETTINGS = [(file, path, values) for file in File for path, values in members(file)]


def with_value(file: File, path, value):
    content = dict(WHOLE) if file is File.experiment else {}
    for name in reversed(path[1:]):
        value = {name: value}
    return {**content, path[0]: value}


def test_each_setting_has_a_description():
    assert [path for _, path, values in SETTINGS if not values.get("description")] == []


@pytest.mark.parametrize(("file", "path", "values"), SETTINGS, ids=lambda value: str(value)[:40])
def test_a_value_of_another_kind_is_refused_by_both(file, path, values, tmp_path):
    wrong = 3 if values.get("type") == "object" or "$ref" in values else {"strange": 3}
    content = with_value(file, path, wrong)
    assert not schema(file).is_valid(content)
    with pytest.raises(ConfigError) as raised:
        by_code(file, content, tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("file", "path"),
    [
        (File.experiment, ("sedes",)),
        (File.site_settings, ("datta",)),
        (File.site_settings, ("privacy", "min_image")),
        (File.site_settings, ("jobs", "aprove")),
        (File.site_settings, ("bundles", "spleen", "hush")),
    ],
)
def test_an_unknown_key_is_refused_by_both(file, path, tmp_path):
    content = with_value(file, path, 3)
    assert not schema(file).is_valid(content)
    with pytest.raises(ConfigError, match=path[-1]):
        by_code(file, content, tmp_path)


def test_examples_of_the_pages_are_valid(tmp_path):
    blocks = re.findall(
        r"```yaml\n(.*?)```", (DOCS / "experiments.md").read_text(encoding="utf-8"), re.DOTALL
    )
    examples = [yaml.safe_load(block) for block in blocks if "methods" in block]
    docstring = (experiment.__doc__ or "").partition("::")[2]
    for content in [*examples, yaml.safe_load(docstring)]:
        schema(File.experiment).validate(content)
        by_code(File.experiment, content, tmp_path)
    assert examples
    page = (DOCS / "privacy/policy.md").read_text(encoding="utf-8")
    settings = [json.loads(block) for block in re.findall(r"```json\n(\{\"privacy.*?)```", page, re.DOTALL)]
    assert settings
    for content in settings:
        schema(File.site_settings).validate(content)
        by_code(File.site_settings, content, tmp_path)


def test_what_the_command_writes_is_valid(run, phantom_dir, tmp_path):
    kit = Hospital(tmp_path / "site_A", phantom_dir / "site_A").kit
    (kit / "local/resources.json.default").write_text('{"components": []}')
    code, _, err = run(
        *("site", "configure", kit, "--data", phantom_dir / "site_A", "--memory", 1),
        *("--epsilon", 8, "--max-rounds", 30, "--allow-methods", "fedavg,fedfa", "--approve"),
        *("--cache", tmp_path, "--allow-plugin", "lesion-methods", "--min-images", 12),
    )
    assert code == 0, err
    written = json.loads((kit / "local/medfedaug.json").read_text())
    assert {"data", "memory", "cache", "privacy", "jobs", "plugins"} <= set(written)
    schema(File.site_settings).validate(written)
