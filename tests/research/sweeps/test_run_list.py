"""Which runs a sweep is made of, and what they are called."""

from dataclasses import replace

import pytest
from benchmark_files import OFFICE
from sweeps import OFFICE_PRESET, planned

from medfedaug.errors import ConfigError, DataError
from medfedaug.research.papers.axes import parse_axis, shown
from medfedaug.research.papers.presets import PRESETS
from medfedaug.research.sweeps.run_list import plan


def test_values_of_an_axis_are_json_fractions_or_text():
    assert parse_axis("fedfa.prob=0.1,0.5").values == (0.1, 0.5)
    assert parse_axis("fedfa.stages=[1],[1,2]").values == ([1], [1, 2])
    assert parse_axis('network_args={"norm":"group"},{}').values == ({"norm": "group"}, {})
    assert parse_axis("fedfa.variance=client,random").values == ("client", "random")
    assert parse_axis("fraction=1/6,1").values == (1 / 6, 1)
    for text in ("fedfa.prob", "=1", "fedfa.prob=", "fedfa.prob=1,,2"):
        with pytest.raises(ConfigError, match="write NAME=VALUE"):
            parse_axis(text)


def test_a_plan_goes_seed_by_seed_and_names_only_what_differs(office):
    runs = plan(
        OFFICE_PRESET,
        office,
        ["fedavg", "fedrdn,fedfa"],
        seeds=2,
        axes=[parse_axis("fedfa.prob=0.1,0.5"), parse_axis("fraction=1/6,1"), parse_axis("local_epochs=1")],
    )
    first = [
        "fedavg/fraction=0.1667/seed-0",
        "fedavg/base/seed-0",
        "fedrdn,fedfa/fedfa.prob=0.1,fraction=0.1667/seed-0",
        "fedrdn,fedfa/fedfa.prob=0.1/seed-0",
        "fedrdn,fedfa/fedfa.prob=0.5,fraction=0.1667/seed-0",
        "fedrdn,fedfa/fedfa.prob=0.5/seed-0",
    ]
    assert [str(run.folder) for run in runs] == first + [text.replace("seed-0", "seed-1") for text in first]
    assert [spec["args"] for spec in runs[2].config.methods] == [{}, {"prob": 0.1}]
    assert runs[2].data == {"fraction": 1 / 6}
    assert str(runs[2].data_folder("office_caltech_10")) == "data/office_caltech_10_fraction-0.1667"
    assert str(runs[3].data_folder("office_caltech_10")) == "data/office_caltech_10"
    for run in runs:
        assert {**run.config.to_dict(), **OFFICE_PRESET.config} == run.config.to_dict()


def test_values_that_differ_have_folders_of_their_own_and_what_is_named_twice_is_run_once(office):
    rates = ["learning_rate=0.00123456,0.00123457,1e-3,0.001"]
    runs = planned(office, "fedavg", rates, seeds=1, holdout=["dslr", "dslr"])
    names = [run.folder.parts[1].rpartition("learning_rate=")[2].partition(",")[0] for run in runs]
    assert names == ["0.00123456", "0.00123457", "0.001"]
    assert [run.config.learning_rate for run in runs] == [0.00123456, 0.00123457, 0.001]
    shares = {p / q for q in range(2, 61) for p in range(1, q)}
    assert len({shown(share) for share in shares}) == len(shares)


def test_scale_holdout_and_network_are_told_in_the_folder(office):
    runs = planned(office, "fedavg", seeds=1, scale=0.1, holdout=["all"], limit=3)
    assert [run.held_out for run in runs] == list(OFFICE)
    config = runs[1].config
    assert (config.rounds, config.holdout, config.limit) == (40, ("caltech",), 3)
    assert runs[1].folder.parts[1].endswith("image_size=32,network=lenet5,scale=0.1,limit=3,without=caltech")
    prostate = PRESETS["prostate_mri"]
    own = prostate.config["network_args"]
    norm = parse_axis('network_args={"norm":"group"}')
    with pytest.raises(DataError, match="is missing, and prostate_mri needs it"):
        plan(prostate, office, ["fedavg"], axes=[norm])
    run = plan(replace(prostate, benchmark="office_caltech_10", data={}), office, ["fedavg"], axes=[norm])[0]
    assert run.config.network_args == {**own, "norm": "group"}
    assert run.folder.parts[1] == "network_args=norm-group"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": ["fedfa.prob=0.1"]}, "--set fedfa.prob: fedfa is not among the methods"),
        (
            {"axes": ["speed=3"]},
            "--set: neither METHOD.ARG nor a setting: speed; known: network, network_args",
        ),
        ({"methods": "fedrdn,norm"}, "cannot be combined: norm provides normalised_input"),
        ({"holdout": ["Basel"]}, "--holdout: training site 'Basel' is not known; choose from amazon"),
        ({"folds": 5}, "office_caltech_10 has no option folds"),
        ({"axes": ["learning_rate=fast"]}, "learning_rate must be a number, got 'fast'"),
        ({"axes": ["fraction=2"]}, "fraction must be at most 1, got 2"),
        ({"axes": ["fraction=half"]}, "fraction must be a number, got 'half'"),
        ({"methods": "fedfa", "axes": ["fedfa.stages=[1],[9]"]}, "stage 9 of StagedClassifier is unknown"),
        ({"methods": "fedavg fedfd_prompt"}, "prompts go into MONAI's ViT"),
    ],
)
def test_plans_that_cannot_be(office, options, message):
    with pytest.raises(ConfigError, match=message):
        planned(office, **options)
