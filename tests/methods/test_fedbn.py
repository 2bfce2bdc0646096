"""FedBN and SiloBN: what stays at the sites, and what an unseen one is scored with."""

import numpy as np
import pytest
import torch
from PIL import Image
from reference import assert_models, assert_same, copied, descend, federated_averaging, mean
from torch import nn

from medfedaug.data.sites import open_site
from medfedaug.errors import ConfigError
from medfedaug.methods import FedBN

UNEVEN = [("A", "B"), ("A",), ("A", "B")]
SIZES = {"A": 5, "B": 10, "C": 10}
STATISTICS = ("running_mean", "running_var")


def kept(method):
    """Select the entries of `reference_convolutional` that stay; norms are the second layers of stages."""

    def keeps(key):
        in_norm = key.startswith("encoder.") and key.split(".")[2] == "1"
        return in_norm and (method == "fedbn" or key.endswith(STATISTICS))

    return keeps


def by_hand(run, method):
    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    return federated_averaging(run, train, kept(method))


def federation(federate, method, unseen="none", with_method="", **changes):
    return federate(
        f"{method}{with_method}",
        local_epochs=2,
        settings={method: {"unseen": unseen}},
        **{"plan": UNEVEN, "sizes": SIZES, "holdout": ("C",), **changes},
    )


def trainers_state(run, site):
    state = run.sites[site].trainer.network.state_dict()
    return {key: value for key, value in state.items() if value.is_floating_point()}


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_sites_keep_their_local_entries_and_average_the_rest(federate, method):
    run = federation(federate, method)
    rounds = by_hand(run, method)
    assert_models(run, rounds)
    selected = run.server.selected_round
    last = max(r for r in range(1, selected + 1) if "B" in run.took_part(r))
    expected = {**rounds[last - 1].local["B"], **rounds[selected - 1].model}
    assert_same(trainers_state(run, "B"), expected)  # the state that B was tested with


@pytest.mark.parametrize("unseen", ["none", "average"])
def test_a_late_site_starts_from_its_local_entries_also_after_a_score_with_defaults(federate, unseen):
    plan, sizes = [("A", "B"), *[("A", "B", "D")] * 3], {**SIZES, "D": 5}
    run = federation(federate, "fedbn", unseen, plan=plan, sizes=sizes, rounds=4)
    first = next(replies["D"] for replies in run.replies if "D" in replies)
    assert (first.metrics["val_accuracy"] is None) == (unseen == "none")
    assert_models(run, by_hand(run, "fedbn"))


def test_without_a_word_nothing_more_leaves_and_an_unseen_site_has_no_score(federate):
    run = federation(federate, "fedbn", plan=UNEVEN[:1], rounds=1)
    assert set(run.server.rounds[0]["bytes"]) == {"model"}
    assert run.tested["C"].metrics["accuracy"] is None
    assert "keeps" in run.tested["C"].metrics["note"]


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_an_unseen_site_is_scored_with_the_average_of_the_local_entries(federate, method):
    run = federation(federate, method, "average")
    rounds, selected = by_hand(run, method), run.server.selected_round
    local = rounds[selected - 1].local
    average = mean(list(local.values()), [run.server.sites[site] for site in local])
    assert_same(trainers_state(run, "C"), average)
    check_scores(run, copied(run.network(), average))
    # Beside the model travels what FedAvg would send with it.
    sent = {key.split("/", 1)[1] for key in run.replies[1]["A"].payload}
    assert sent == {key for key in average if kept(method)(key)}


def test_the_average_has_the_weights_that_another_method_gives_the_models(federate):
    sizes = {"A": 5, "B": 10, "D": 15, "C": 5}
    run = federation(
        federate, "fedbn", "average", ",median", sizes=sizes, plan=[("A", "B", "D")] * 2, rounds=2
    )
    local = run.replies[run.server.selected_round]
    entries = {key: value for key, value in trainers_state(run, "C").items() if kept("fedbn")(key)}
    sent = [
        {key.split("/", 1)[1]: v.double() for key, v in reply.payload.items()} for reply in local.values()
    ]
    assert len(sent) == 3
    assert_same(entries, mean(sent, [1.0, 1.0, 1.0]))


def pixels_of(case):
    pixels = np.asarray(Image.open(case.image)).transpose(2, 0, 1)
    return torch.from_numpy(pixels.copy()).double() / 255


def check_scores(run, network):
    site = open_site(run.root / "C")
    classes = run.config.classes
    for case in site.cases["test"]:
        with torch.no_grad():
            result = network.eval()(pixels_of(case)[None]).argmax()
        assert run.tested["C"].metrics["cases"][case.name] == float(classes[int(result)] == case.label)


def test_fedbn_keeps_norm_layers_by_type_not_by_name():
    class Oddly(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn_conv = nn.Conv2d(1, 2, 1)  # a word in a key proves nothing
            self.downsample = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2))
            self.last = nn.InstanceNorm3d(2, affine=True)
            self.plain = nn.InstanceNorm2d(2)

    kept = FedBN().local_entries(Oddly())
    batch = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    expected = {f"downsample.1.{key}" for key in batch}
    expected |= {"downsample.2.weight", "downsample.2.bias", "last.weight", "last.bias"}
    assert kept == expected
    with pytest.raises(ConfigError, match=r"no norm layer.*norm='batch'"):
        FedBN().local_entries(nn.Conv2d(1, 1, 1))
