"""The example of an nnU-Net trainer in rounds, with nnU-Net's own network, loss, optimiser and steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from medfedaug.data.phantom import make_phantom
from medfedaug.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rounds(tmp_path_factory) -> Path:
    """The package of the example, as pip installs it."""
    pytest.importorskip("nnunetv2", reason="pip install nnunetv2")
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(EXAMPLES / "nnunet")], check=True)
    return site


@pytest.mark.parametrize("methods", ["fedprox", "fedrdn,fedbn"])
def test_nnunets_own_trainer_goes_in_rounds_through_nvflare(rounds, run, tmp_path, monkeypatch, methods):
    monkeypatch.syspath_prepend(str(rounds))
    monkeypatch.setenv("PYTHONPATH", str(rounds))
    data, out = tmp_path / "data", tmp_path / "run"
    make_phantom(data, sites=2, patients=4, shape=(32, 32, 8), seed=0)
    network = {"spacing": [7, 7, 12], "patch_size": [32, 32, 8], "features": 4}
    code, _, err = run(
        *("simulate", "--data", data, "--methods", methods, "--rounds", 2, "--local-steps", 3),
        *("--spatial-dims", 3, "--spacing", "7,7,12", "--patch-size", "32,32,8", "--batch-size", 2),
        *("--normalisation", "none" if "fedrdn" in methods else "z_score"),
        *("--network", "nnunet", "--network-args", json.dumps(network), "--loop", "nnunet"),
        *("--device", "cpu", "--no-report", "--out", out),
    )
    assert code == 0, err
    results = json.loads((out / "results.json").read_text())
    for entry in results["rounds"]:
        assert {site: 0 <= scores["val_dice"] <= 1 for site, scores in entry["sites"].items()} == {
            "site_A": True,
            "site_B": True,
        }

    import nnunet_rounds

    state = torch.load(out / "global_model.pt", weights_only=True)
    plain = nnunet_rounds.network(3, 1, 2, **network)
    plain.load_state_dict(state, strict=True)
    norms = {key: value for key, value in state.items() if ".norm." in key}
    untouched = [
        torch.equal(value, torch.full_like(value, key.endswith("weight"))) for key, value in norms.items()
    ]
    assert all(untouched) == ("fedbn" in methods)
    if "fedrdn" in methods:
        pairs = json.loads((out / "statistics.json").read_text())
        assert pairs["sites"]["site_A"] != pairs["sites"]["site_B"]
        return
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    nnunet_rounds.model_folder(out, tmp_path / "model")
    predictor = nnUNetPredictor(device=torch.device("cpu"))
    predictor.initialize_from_trained_model_folder(str(tmp_path / "model"), use_folds=("all",))
    for key, value in predictor.network.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key])


def test_a_patch_that_nnunets_network_cannot_halve_is_refused_with_one_that_it_can(rounds, monkeypatch):
    monkeypatch.syspath_prepend(str(rounds))
    import nnunet_rounds

    with pytest.raises(ConfigError, match="take 40,40,8"):
        nnunet_rounds.network(3, 1, 2, spacing=[1, 1, 3], patch_size=[37, 40, 8])
