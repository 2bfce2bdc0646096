"""Learning curves, bytes and gamma."""

import io

import pytest
from results import content

from medfedaug.analysis import gamma_by_layer, learning_curves
from medfedaug.analysis.plots import site_scores
from medfedaug.metrics.significance import mean_interval
from medfedaug.runs.load_results import load_run


def test_learning_curves_show_every_site_and_the_mean(seeds):
    figure = learning_curves(seeds)
    assert [panel.get_title() for panel in figure.axes] == ["DU", "HT", "mean of sites"]
    mean = figure.axes[-1].lines[0]
    assert list(mean.get_xdata()) == [1, 2, 3]
    assert list(mean.get_ydata()) == pytest.approx([0.15, 0.25, 0.35])
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [list(dot.get_xdata()) for dot in dots] == [[2], [2]]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["fedavg (3 seeds)", "fedrdn (3 seeds)", "selected round"]


def test_learning_curves_leave_out_missing_scores(write):
    data = content()
    data["rounds"][1]["sites"]["DU"]["val_dice"] = None
    del data["rounds"][2]["sites"]["DU"]
    run = load_run(write(data))
    assert run.validation("DU") == [0.1, None, None]
    figure = learning_curves([run])
    assert list(figure.axes[0].lines[0].get_xdata()) == [1]
    figure.savefig(io.BytesIO(), format="svg")


def test_gamma_by_layer(write):
    figure = gamma_by_layer(load_run(write(methods=("fedfa",))))
    assert [panel.get_title() for panel in figure.axes] == ["enc1"]
    low, high = figure.axes[0].lines[:2]
    assert list(low.get_ydata()) == [0.3] * 3
    assert list(high.get_ydata()) == [0.51, 0.52, 0.53]


def test_scores_by_site_have_an_interval_over_patients_averaged_over_seeds(write):
    runs = []
    for seed, more in enumerate((0.0, 0.1)):
        data = content(seed=seed)
        cases = {f"p{k}": 0.2 * k + more for k in range(4)}
        data["test"]["sites"] = {"DU": {"dice": 0.3 + more, "cases": cases}, "HT": {"dice": 0.5, "cases": {}}}
        runs.append(load_run(write(data)))
    (panel,) = site_scores({"fedavg": runs}).axes
    dot, line, other = panel.lines
    assert (list(dot.get_xdata()), list(other.get_xdata())) == ([pytest.approx(0.35)], [0.5])
    assert list(line.get_xdata()) == pytest.approx(mean_interval([0.05, 0.25, 0.45, 0.65], 1.0))
    assert panel.get_xlim()[1] <= 1
