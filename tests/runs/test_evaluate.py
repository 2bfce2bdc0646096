import pytest

from medfedaug.runs.evaluate import evaluate_model
from medfedaug.simulate import simulate


@pytest.mark.parametrize(
    ("methods", "settings"),
    [("fedfd_a", None), ("fedbn", {"fedbn": {"unseen": "average"}}), ("fedrdn_v", None)],
)
def test_a_finished_run_is_evaluated_with_the_exchange_beside_its_model(
    make_site, tiny_config, tmp_path, methods, settings
):
    for name in "ABC":
        make_site(name, shape=(32, 32, 4))
    config = tiny_config(methods, rounds=2, holdout=("B",), settings=settings)
    options = {"engine": "inprocess", "device": "cpu", "report": False}
    results = simulate(tmp_path / "data", tmp_path / "out", config, **options)
    assert (tmp_path / "out/global_exchange.pt").exists()
    evaluated = evaluate_model(tmp_path / "out/global_model.pt", tmp_path / "data/B", device="cpu")
    assert evaluated["sites"]["B"] == results["test"]["unseen"]["B"]
