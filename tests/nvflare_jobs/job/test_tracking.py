"""The metrics that sites send to TensorBoard; an integration test compares them with the results."""

import json
import math
from types import SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from medfedaug.errors import ConfigError
from medfedaug.federation.messages.messages import Reply
from medfedaug.nvflare_jobs import MedFedAugRecipe
from medfedaug.nvflare_jobs.job import tracking as module
from medfedaug.nvflare_jobs.job.messages import reply_to_model
from medfedaug.nvflare_jobs.job.tracking import tracked
from medfedaug.simulate import simulate


def test_a_score_that_comes_with_an_update_belongs_to_the_round_before():
    metrics = {"val_dice": 0.5, "train_loss": 1, "fedfa/negative": 0.1, "none": None, "cases": {"a": 1}}
    assert tracked(Reply("train", 3, metrics=metrics)) == [
        ("val_dice", 0.5, 2),
        ("train_loss", 1.0, 3),
        ("fedfa/negative", 0.1, 3),
    ]
    assert tracked(Reply("validate", 3, metrics={"dice": 0.6, "cases": {}})) == [("val_dice", 0.6, 3)]
    assert tracked(Reply("test", 2, metrics={"dice": 0.7})) == [("test_dice", 0.7, 2)]
    assert tracked(Reply("train", 1, metrics={"train_loss": math.nan})) == []
    assert tracked(Reply("prepare", metrics={"cases": 3})) == []


@pytest.mark.parametrize("allowed", [True, False])
def test_a_sites_own_settings_say_whether_its_scores_become_events(allowed, tmp_path, monkeypatch):
    (tmp_path / "local").mkdir()
    (tmp_path / "local/medfedaug.json").write_text(json.dumps({"tracking": allowed}))
    result = FLModelUtils.to_shareable(reply_to_model(Reply("train", 2, metrics={"val_dice": 0.5})))
    context = SimpleNamespace(
        get_workspace=lambda: SimpleNamespace(get_root_dir=lambda: str(tmp_path)), get_prop=lambda key: result
    )
    sent = []
    monkeypatch.setattr(module, "send_analytic_dxo", lambda *given: sent.append(given))
    module.RoundMetrics().handle_event(EventType.AFTER_TASK_EXECUTION, context)
    assert bool(sent) == allowed


def test_a_job_names_the_trackers_receiver_only_where_it_is_asked_for(tmp_path, tiny_config):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    for tracker in (None, "tensorboard"):
        MedFedAugRecipe(config=tiny_config(), name=str(tracker), tracking=tracker).export(str(tmp_path))
        names = {
            entry["path"].rsplit(".", 1)[-1]
            for side in ("server", "client")
            for entry in json.loads(
                (tmp_path / str(tracker) / f"app/config/config_fed_{side}.json").read_text()
            )["components"]
        }
        assert ({"RoundMetrics", "TBAnalyticsReceiver"} <= names) == bool(tracker)
        assert ({"RoundMetrics", "TBAnalyticsReceiver"} & names == set()) == (not tracker)


def test_what_is_missing_is_said(run, tiny_config, monkeypatch, phantom_dir, tmp_path):
    with pytest.raises(ConfigError, match="'neptune' is not known; choose from tensorboard"):
        MedFedAugRecipe(config=tiny_config(), tracking="neptune")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    code, _, err = run(
        "export", "--methods", "fedavg", "--out", tmp_path / "job", "--tracking", "tensorboard"
    )
    assert code == 2
    assert "needs the package tensorboard" in err
    assert "medfedaug[tracking]" in err
    assert not (tmp_path / "job").exists()
    with pytest.raises(ConfigError, match="engine nvflare"):
        simulate(phantom_dir, tmp_path / "out", tiny_config(), engine="inprocess", tracking="tensorboard")
