"""The job folders that are shipped; ``make lint`` compares them with what is written today."""

import json
from importlib import resources
from pathlib import Path

import pytest

from medfedaug.config.run import RunConfig
from medfedaug.federation import FederationServer

SHIPPED = sorted((Path(str(resources.files("medfedaug.nvflare_jobs"))) / "jobs").iterdir())


@pytest.mark.parametrize("job", SHIPPED, ids=lambda job: job.name)
def test_the_server_of_a_shipped_job_can_be_built(job):
    content = json.loads((job / "app/config/config_fed_server.json").read_text())
    (workflow,) = content["workflows"]
    assert FederationServer(RunConfig.from_dict(workflow["args"]["config"])).shared
