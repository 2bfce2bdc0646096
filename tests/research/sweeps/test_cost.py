"""`medfedaug benchmark --cost`."""

import csv

import pytest
from benchmark_files import OFFICE, write_fedbn

from medfedaug.models import build_network
from medfedaug.research.sweeps.cost import Cost, CostTable


def test_a_table_of_costs():
    cost = Cost("fedavg", 11_310_000, 0.00143, 0.00134, 44_800_000, 18_432, 0, None, 64)
    table = CostTable((cost,), ("notes.",))
    assert table.body == [["fedavg", "11.31 M", "1.4", "1.3", "44.8 MB", "18.43 kB", "0 bytes", "–"]]
    assert table.records()[0]["up"] == 44_800_000
    assert table.markdown().endswith("notes.\n")
    panels = table.draw().axes
    assert [panel.get_title() for panel in panels] == ["step, ms", "inference, ms", "up and down, MB"]
    assert [panel.patches[0].get_width() for panel in panels] == pytest.approx([1.43, 1.34, 44.818432])


@pytest.mark.slow
def test_costs_are_measured_in_the_protocol(run, tmp_path):
    write_fedbn(tmp_path / "office_caltech_10", "office_caltech_10", OFFICE, train=10, test=3)
    out = tmp_path / "out"
    small = ("--set", "network=lenet5", "image_size=32", "batch_size=4", "--threads", 1, "--device", "cpu")
    methods = ("--methods", "fedavg", "fedrdn,fedfa")
    printed = run.ok(
        "benchmark", "office_caltech_10", "--cost", *methods, "--data", tmp_path, "--out", out, *small
    )
    assert "inference" in printed
    assert sorted(path.name for path in out.iterdir()) == ["cost.csv", "cost.md", "cost.svg", "cost.tex"]
    plain, both = csv.DictReader((out / "cost.csv").read_text().splitlines())
    network = build_network("lenet5", in_channels=3, out_channels=2)
    weights = sum(parameter.numel() for parameter in network.parameters())
    assert int(plain["parameters"]) == int(both["parameters"]) == weights
    entries = [value for value in network.state_dict().values() if value.is_floating_point()]
    assert int(plain["up"]) == sum(4 * value.numel() for value in entries)
    channels = 6 + 16  # of LeNet-5's stages: two statistics each, in both directions
    assert [int(both[way]) - int(plain[way]) for way in ("up", "down")] == [
        2 * 4 * channels,
        2 * 4 * channels,
    ]
    assert int(plain["once"]) == 0 < int(both["once"]) < 100
    assert all(float(row[name]) > 0 for row in (plain, both) for name in ("step", "inference", "memory"))
    assert {row["images"] for row in (plain, both)} == {"4"}
