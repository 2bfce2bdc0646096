"""DP-SGD against a hostile model and a hostile job: nothing of one case is seen but its clipped gradient."""

import random
from types import SimpleNamespace

import bundles
import nibabel
import numpy as np
import pytest
import reconstruction
import reference
import torch
from hospitals import Hospital
from PIL import Image
from private import PrivateSite, dropping, private, smooth
from private_steps import epsilon
from running import TINY_ARGS
from torch import nn

from medfedaug.config.plan import Plan
from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites, open_site
from medfedaug.federation import Request
from medfedaug.hospital.privacy import PrivacyLedger
from medfedaug.methods import parse_methods, registry
from medfedaug.methods.base import Method, SitePart
from medfedaug.models import networks
from medfedaug.simulate import configure

INSTANCE = {**TINY_ARGS, "norm": "instance"}
OF_NOISE = {"privacy/epsilon", "privacy/delta", "privacy/weights"}
"""What leaves with an update before there is a validation score."""


class Mixing(nn.Module):
    """Lets the images of a batch meet without any layer that says so."""

    def __init__(self, in_channels: int = 3, out_channels: int = 2, **_) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels * 64, out_channels)

    def forward(self, x):
        x = x.flatten(1)
        return self.linear(x + x.mean(0))


class Remembering(nn.Module):
    """Keeps the last image in a buffer, which is sent with the model."""

    def __init__(self, in_channels: int = 3, out_channels: int = 2, **_) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels * 64, out_channels)
        self.register_buffer("seen", torch.zeros(in_channels * 64))

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.seen.copy_(x.detach()[-1])
        return self.linear(x)


def deep(in_channels: int = 3, out_channels: int = 2, **_) -> nn.Module:
    """Fully connected layers in a row, in which numbers grow from layer to layer."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 64, out_channels))
    return nn.Sequential(first, *(nn.Linear(out_channels, out_channels) for _ in range(5)))


class InPlace(nn.Module):
    """A network that no image passes alone."""

    def __init__(self, in_channels: int = 3, out_channels: int = 2, **_) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(in_channels * 64, 2), nn.GroupNorm(2, 2), nn.Linear(2, out_channels)
        )

    def forward(self, x):
        return self.layers(x)


NETWORKS = {
    **reference.NETWORKS,
    "reference_deep": deep,
    "reference_dropping": dropping,
    "reference_mixing": Mixing,
    "reference_remembering": Remembering,
    "reference_in_place": InPlace,
}


@pytest.fixture
def photographs(make_photos, tmp_path, monkeypatch):
    """`photographs(network="reference_linear", policy=private())`: site A of three, of twelve cases."""
    for name, network in NETWORKS.items():
        monkeypatch.setitem(networks._NETWORKS, name, network)
    root = tmp_path / "photos"

    def make(methods="fedavg", policy=None, per_class=10, size=8, more=None, **changes) -> PrivateSite:
        for name in "ABC":
            if not (root / name).exists():
                make_photos(name, per_class, size=size)
        values = {"network": "reference_linear", "rounds": 9, "batch_size": 64, "learning_rate": 1.0}
        chosen = {"optimizer": "sgd", "local_steps": 1, **values, **changes}
        config = configure(find_sites(root), methods=tuple(parse_methods(methods)), **chosen)
        return PrivateSite(config, root, policy, **(more or {}))

    make.root = root
    return make


def overflowing(site: PrivateSite, target: int) -> dict[str, torch.Tensor]:
    """A model of which float32 overflows for one image and no other, with no weight that is refused."""
    dataset = site.trainer.own_dataset(0)
    images = torch.stack([torch.as_tensor(dataset[i]["image"]).double().flatten() for i in range(site.cases)])
    direction = images[target] - 0.5
    direction = direction - direction.mean()
    scores = images @ direction
    assert int(scores.abs().argmax()) == target
    weights = {key: torch.zeros_like(value) for key, value in site.start.items()}
    first, *others = [key for key in weights if key.endswith("weight")]
    weights[first][0] = direction.float()
    for key in others:
        weights[key][0, 0] = (3.4028e38 / (0.97 * float(scores[target]))) ** (1 / len(others))
    assert max(float(value.max()) for value in weights.values()) < 1e10
    return weights


def test_a_model_that_overflows_for_one_image_does_not_tell_whether_it_is_there(photographs, caplog):
    policy = private(sgd_noise_multiplier=1.0, epsilon=8.0)
    site = photographs(policy=policy, network="reference_deep")
    target = site.trainer.folder.cases["training"][4]
    evil = overflowing(site, 4)
    there = [photographs(policy=policy, network="reference_deep").ask(evil) for _ in range(3)]
    assert "1 of 12 cases that were drawn in round 1 added nothing" in caplog.text  # at the site alone
    noise = np.random.default_rng(9).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).save(target.image)
    gone = [photographs(policy=policy, network="reference_deep").ask(evil) for _ in range(3)]
    for reply in (*there, *gone):
        assert not reply.error
        assert set(reply.metrics) == OF_NOISE
        assert all(bool(value.isfinite().all()) for value in reply.weights.values())


def test_nor_does_it_through_a_kit_and_its_executor(photographs, tmp_path):
    privacy = {"epsilon": 8.0, "min_images": 3}
    site = photographs(network="reference_deep")
    target = site.trainer.folder.cases["training"][4]
    evil, answers = overflowing(site, 4), []
    for kit in ("there", "gone"):
        hospital = Hospital(tmp_path / kit / "A", photographs.root / "A", privacy=privacy)
        hospital.start(site.config, "job")
        assert not hospital.answer(Request("prepare", run="a" * 32)).error
        reply = hospital.answer(Request("train", 1, weights=evil, run="a" * 32))
        assert not reply.error
        assert all(bool(value.isfinite().all()) for value in reply.weights.values())
        answers.append((sorted(reply.metrics), reply.num_samples, sorted(reply.weights)))
        noise = np.random.default_rng(9).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).save(target.image)
    assert answers[0] == answers[1]
    assert answers[0][:2] == (sorted(OF_NOISE), 12)


def test_what_is_not_finite_of_one_case_adds_nothing_and_spoils_no_other(photographs):
    site = photographs(network="reference_deep")
    evil = overflowing(site, 4)
    step = site.step(evil)
    assert float(step.norm()) > 0.5  # the others are there
    alone = photographs(network="reference_deep").silence(set(range(12)) - {4})
    assert float(alone.step(evil).norm()) < 1e-4
    without = photographs(network="reference_deep").silence({4})
    torch.testing.assert_close(step, without.step(evil), rtol=0, atol=1e-4)


def test_an_image_on_which_the_network_fails_ends_no_round(photographs, caplog):
    """One of another size, which in a batch would be an error that the server hears of."""
    site = photographs()
    case = site.trainer.folder.cases["training"][7]
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(case.image)
    odd = photographs()
    step = odd.step()
    assert "1 of 12 cases that were drawn in round 1 added nothing" in caplog.text
    torch.testing.assert_close(step, photographs().silence({7}).step(), rtol=0, atol=1e-4)


def test_the_images_of_a_step_do_not_meet_whatever_the_network_does(photographs):
    site = photographs(network="reference_mixing")
    alone = sum(
        photographs(network="reference_mixing").silence(set(range(12)) - {i}).step() for i in range(12)
    )
    torch.testing.assert_close(site.step(), alone, rtol=0, atol=1e-3)


def test_a_buffer_that_holds_an_image_is_not_sent(photographs):
    reply = photographs(network="reference_remembering").ask()
    assert not reply.error
    (seen,) = [value for key, value in reply.weights.items() if key.endswith("seen")]
    assert float(seen.abs().max()) == 0.0


class Counting(Method):
    """Has a metric of its own, and no hook of local training."""

    name = "counting"

    def at_site(self, context):
        part = SitePart()
        part.metrics = lambda: {"cases": float(context.num_samples())}
        return part


def test_neither_loss_nor_time_nor_a_metric_of_a_method_leaves(photographs, monkeypatch):
    monkeypatch.setitem(registry._BUILT_IN, "counting", Counting)
    reply = photographs("counting").ask()
    assert not reply.error
    assert set(reply.metrics) == OF_NOISE


def test_neither_steps_nor_weight_follow_from_the_number_of_slices(tmp_path, tiny_config):
    """A case more or less that says nothing changes neither what is spent nor what the server counts."""
    root = make_phantom(tmp_path / "data", sites=1, patients=5, shape=(32, 32, 12))[0]
    config = tiny_config(batch_size=2, network_args=INSTANCE, rounds=1, learning_rate=0.1)
    counts = []
    for emptied in (False, True):
        if emptied:
            case = open_site(root).cases["training"][0]
            stored = nibabel.load(case.label)
            nibabel.save(nibabel.Nifti1Image(np.zeros(stored.shape, np.uint8), stored.affine), case.label)
        site = PrivateSite(config, root, private(), "site_A")
        reply = site.ask()
        assert not reply.error
        slices = len(site.trainer.samples.training())
        counts.append((slices, site.prepared.num_samples, reply.num_samples, site.privacy.ledger.releases()))
    assert counts[0][0] > counts[1][0] > 6
    assert counts[0][1:] == counts[1][1:] == (3, 3, [(1e-7, 2, pytest.approx(2 / 3))])


# ---------------------------------------------------------------- the draws of a case


def replayed(site: PrivateSite) -> torch.Tensor:
    """A step whose draws are those of a generator that begins anew."""
    site.trainer.training.random = random.Random(5)
    return site.step()


@pytest.mark.parametrize(
    "changes",
    [{"network": "reference_dropping"}, {"network": "reference_dropping", "augmentation": "full"}],
    ids=str,
)
def test_one_case_moves_the_sum_by_c_with_all_else_as_it_was(photographs, changes):
    """The last one, so that replayed draws are the same for all before it."""
    moved = float((replayed(photographs(**changes)) - replayed(photographs(**changes).silence({11}))).norm())
    assert moved == pytest.approx(1.0, abs=1e-4)


def test_two_cases_of_a_patient_move_it_by_no_more_than_two(photographs):
    policy = private(cases_per_patient=2)
    both = replayed(photographs(policy=policy)) - replayed(photographs(policy=policy).silence({10, 11}))
    assert 1.0 < float(both.norm()) <= 2.0 + 1e-4


VOLUMES = {
    "slices": Plan(),
    "patches of slices": Plan(patch_size=(16, 16)),
    "patches": Plan(patch_size=(16, 16, 8), spatial_dims=3),
}


def volumes(root, sites, plan, tiny_config, **changes) -> PrivateSite:
    values = {"batch_size": 64, "local_steps": 1, "rounds": 9, "learning_rate": 1.0, "optimizer": "sgd"}
    config = tiny_config(network="reference_smooth", network_args={}, plan=plan, **{**values, **changes})
    return PrivateSite(config, root / sites, private(sgd_clip=0.02), sites)


@pytest.mark.parametrize("plan", VOLUMES.values(), ids=VOLUMES)
def test_slices_and_patches_of_a_case_move_the_sum_by_c(tmp_path, tiny_config, plan, monkeypatch):
    monkeypatch.setitem(networks._NETWORKS, "reference_smooth", smooth)
    make_phantom(tmp_path / "data", sites=1, patients=7, shape=(32, 32, 12))
    changes = {"augmentation": "full"}
    sites = [volumes(tmp_path / "data", "site_A", plan, tiny_config, **changes) for _ in range(2)]
    sites[1].silence({sites[1].cases - 1})
    moved = float((replayed(sites[0]) - replayed(sites[1])).norm())
    assert moved == pytest.approx(1.0, abs=2e-3)


def test_several_samples_that_a_bundle_cuts_of_a_case_count_as_one_case(tmp_path):
    make_phantom(tmp_path / "data", sites=2, patients=5, shape=(20, 20, 8))
    bundle = bundles.volumes()
    _set_norm(bundle, "instance")
    path = bundles.write(tmp_path / "bundle/spleen", bundle)
    changes = {"rounds": 9, "local_steps": 1, "learning_rate": 1.0, "batch_size": 64}
    config = configure(find_sites(tmp_path / "data"), bundle=path, **changes)
    steps = []
    for silent in ((), (2,)):
        site = PrivateSite(config, tmp_path / "data/site_A", private(sgd_clip=0.02), "site_A")
        site.trainer.training.definition = SimpleNamespace(
            optimiser=lambda parameters, rate: torch.optim.SGD(parameters, lr=1.0)
        )
        steps.append(replayed(site.silence(silent)))
    assert float((steps[0] - steps[1]).norm()) == pytest.approx(1.0, abs=2e-3)


def _set_norm(value, norm):
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == "norm":
            value[key] = norm
        _set_norm(inner, norm)


def test_no_draw_follows_from_the_seed_of_the_run_and_none_outside_is_changed(photographs):
    outside = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    steps = [photographs(network="reference_dropping").step() for _ in range(2)]
    assert float((steps[0] - steps[1]).norm()) > 0.5
    assert torch.equal(torch.random.get_rng_state(), outside[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == outside[1:]


# ---------------------------------------------------------------- what is spent


def test_a_network_that_cannot_be_trained_so_spends_nothing(photographs, tmp_path):
    ledger = tmp_path / "ledger.sqlite"
    bounds = {"intensity_mean": [0, 1], "intensity_std": [0.01, 1]}
    policy = private(sgd_noise_multiplier=1.0, noise_multiplier=1.0, clip=bounds)
    site = photographs("fedrdn", policy, network="reference_in_place", more={"ledger": ledger})
    assert site.prepared.error == (
        "site A: it trains with differential privacy (sgd_noise_multiplier of its privacy policy), and "
        "reference_in_place cannot be trained on one case at a time (Expected more than 1 value per channel "
        "when training, got input size [1, 2]); no budget was spent on it"
    )
    assert PrivacyLedger(ledger).releases() == []


def test_a_model_that_is_not_finite_spends_nothing(photographs):
    site = photographs()
    spoilt = {key: torch.full_like(value, torch.nan) for key, value in site.start.items()}
    assert "refused what the server sent" in site.ask(spoilt).error
    assert site.privacy.ledger.releases() == []


def test_a_round_that_was_stopped_has_been_spent(photographs, tmp_path):
    policy = private(sgd_noise_multiplier=2.0, epsilon=50.0)
    more = {"ledger": tmp_path / "ledger.sqlite", "state_dir": tmp_path / "state"}
    asked = iter([False, False, True])
    site = photographs(policy=policy, local_steps=4, more=more)
    assert "the training was stopped" in site.ask(should_stop=lambda: next(asked)).error
    again = photographs(policy=policy, local_steps=4, more=more)
    reply = again.ask()
    assert not reply.error
    assert reply.metrics["privacy/epsilon"] == pytest.approx(epsilon((2.0, 1.0, 8)))


@pytest.mark.slow  # 24 photographs through 514 channels
def test_a_photograph_comes_back_from_one_update(tmp_path):
    """The number of docs/threats.md."""
    assert reconstruction.correlations(tmp_path)[0] > 0.9


def test_with_epsilon_nothing_of_such_a_network_leaves(tmp_path):
    with pytest.raises(RuntimeError, match="it trains with differential privacy"):
        reconstruction.correlations(tmp_path, privacy={"epsilon": 8})
