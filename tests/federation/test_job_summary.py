"""The page of a job's configuration, of which the rest is tested where sites decide over it."""

from __future__ import annotations

import time

from medfedaug.config.run import RunConfig
from medfedaug.federation.job_summary import summary
from medfedaug.methods import parse_methods
from medfedaug.privacy.job_log import WAITING, JobEntry, job_hash


def test_one_of_a_kind_is_singular():
    config = RunConfig(task="segmentation", network="basicunet", rounds=1, local_epochs=1, batch_size=1)
    config = RunConfig.from_dict({**config.to_dict(), "methods": parse_methods("fedfa")}).to_dict()
    page = "\n".join(summary(JobEntry(job_hash(config), config, time.time(), WAITING, {})))
    assert "with 1 channel\n" in page
    assert "training: 1 round of 1 epoch, 1 sample a step" in page
    assert "  once: the weights that training changes" in page
    assert "  once: fedfa: " in page
    assert "1 times" not in page
