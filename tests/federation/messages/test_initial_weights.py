"""Runs that start from given weights: what fits, what is said of the rest, and how they reach the sites."""

import json
import os

import pytest
import torch
import torchvision_resnet
from running import TINY_OPTIONS
from safetensors.torch import save_file

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, MedFedAugWarning
from medfedaug.federation import FederationServer
from medfedaug.federation.composition import Composition
from medfedaug.federation.in_process import run_in_process
from medfedaug.federation.messages.initial_weights import INITIAL_FILE, InitialWeights
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.models import build_network
from medfedaug.models.entries import fit_weights, read_weights

SITES = ["site_A", "site_B"]
STANDS_STILL = {"optimizer": "sgd", "learning_rate": 1e-30}  # below the last bit of any weight


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvisions_resnets_give_the_same_outputs_here(name):
    given = torchvision_resnet.weights(name)
    net = build_network(name, in_channels=3, out_channels=1000)
    fit = fit_weights(given, net.state_dict())
    assert (fit.skipped, fit.missing) == ({}, [])
    assert len(fit.entries) == fit.total == sum(value.is_floating_point() for value in given.values())
    net.load_state_dict(fit.entries, strict=False)
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = torchvision_resnet.forward(given, x)
        torch.testing.assert_close(net.eval()(x), expected, rtol=1e-3, atol=1e-3)
    assert expected.std() > 0.01
    assert sum(v.numel() for n, v in given.items() if "running" not in n and v.ndim) in (
        11_689_512,
        25_557_032,
    )


def test_another_number_of_classes_or_channels_is_named_and_skipped():
    given = torchvision_resnet.weights("resnet18")
    fit = fit_weights(given, build_network("resnet18", in_channels=1, out_channels=7).state_dict())
    assert fit.skipped == {
        "conv1.weight": "shape [64, 3, 7, 7], needed [64, 1, 7, 7]",
        "fc.weight": "shape [1000, 512], needed [7, 512]",
        "fc.bias": "shape [1000], needed [7]",
    }
    assert set(fit.missing) == set(fit.skipped)
    assert len(fit.entries) == fit.total - 3


FLEXIBLE = "monai.networks.nets.FlexibleUNet"


def test_names_with_a_prefix():
    given = {f"module.{name}": value for name, value in torchvision_resnet.weights("resnet18").items()}
    fit = fit_weights(given, build_network("resnet18", in_channels=3, out_channels=2).state_dict())
    assert torch.equal(fit.entries["layer4.1.bn2.running_var"], given["module.layer4.1.bn2.running_var"])
    assert set(fit.skipped) == {"module.fc.weight", "module.fc.bias"}


class Code:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_files_that_cannot_be_used_are_named_in_one_line(tmp_path):
    state = build_network("lenet5", in_channels=1, out_channels=2).state_dict()
    file = tmp_path / "weights.pt"
    bad = {
        "no such file": None,
        "not a state dict": b"no weights",
        "no tensors by name": {"epoch": 3},
        "none of its 1 entries fits the network: the file has for instance other": {"other": torch.ones(2)},
        "NaN or infinite values in encoder.0.0.weight": {
            "encoder.0.0.weight": state["encoder.0.0.weight"] * float("nan")
        },
        "not a state dict:": {"weight": Code(str(tmp_path / "mark"))},
    }
    for words, content in bad.items():
        file.unlink(missing_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif content is not None:
            torch.save(content, file)
        with pytest.raises(ConfigError) as caught:
            InitialWeights.read(file, state)
        assert words in str(caught.value)
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "mark").exists()
    # Within a training script's checkpoint, in half precision, as safetensors.
    half = {name: value.half() for name, value in state.items() if value.is_floating_point()}
    torch.save({"epoch": 3, "state_dict": half}, file)
    save_file(half, tmp_path / "weights.safetensors")
    for path in (file, tmp_path / "weights.safetensors"):
        assert set(read_weights(path)) == set(half)
        entries = InitialWeights.read(path, state).entries
        assert {value.dtype for value in entries.values()} == {torch.float32}
    torch.save({"encoder.0.0.weight": state["encoder.0.0.weight"]}, file)
    with pytest.warns(
        MedFedAugWarning, match=r"weights.pt: only 1 of \d+ entries of the network are started"
    ):
        InitialWeights.read(file, state)


@pytest.fixture
def given(tmp_path, tiny_config):
    """A file with weights for the tiny network, of which one entry has another shape, and what fits."""
    torch.manual_seed(7)
    state = {
        name: torch.rand_like(value) + 0.1 if value.is_floating_point() else value
        for name, value in Composition(tiny_config()).network.state_dict().items()
    }
    torch.save({**state, "model.2.conv.weight": torch.ones(9, 2, 3, 3)}, tmp_path / "given.pt")
    return tmp_path / "given.pt", {
        name: value
        for name, value in state.items()
        if value.is_floating_point() and "model.2.conv.w" not in name
    }


def initial(path, config):
    weights = InitialWeights.read(path, Composition(config).network.state_dict())
    return weights, RunConfig.from_dict({**config.to_dict(), "init": weights.digest})


def test_the_command_starts_from_a_file_and_says_what_it_used(run, phantom_dir, tmp_path, given):
    path, entries = given
    args = [*TINY_OPTIONS, "--rounds", 1, "--limit", 1]
    code, out, err = run(
        *("simulate", "--data", phantom_dir, "--methods", "fedavg", "--out", tmp_path / "out", *args),
        *("--engine", "inprocess", "--device", "cpu", "--no-report", "--init", path),
        *("--optimizer", "sgd", "--lr", 1e-30),
    )
    assert code == 0, err
    line = "not used: model.2.conv.weight (shape [9, 2, 3, 3], needed [8, 2, 3, 3])"
    assert line in " ".join((out + err).split())
    record = json.loads((tmp_path / "out/results.json").read_text())
    assert record["init"]["file"] == "given.pt"
    assert (record["init"]["loaded"], record["init"]["of"]) == (len(entries), len(entries) + 1)
    assert record["init"]["missing"] == ["model.2.conv.weight"]
    assert record["config"]["init"]
    weights = torch.load(tmp_path / "out/global_model.pt", weights_only=True)
    assert all(torch.equal(weights[n], value) for n, value in entries.items() if "running" not in n)
    code, out, err = run("evaluate", "--model", tmp_path / "out/global_model.pt", "--data", phantom_dir)
    assert code == 0, err


def test_what_stays_at_the_sites_starts_from_the_file_too(phantom_dir, tiny_config, tmp_path, given):
    path, entries = given
    methods = "fedbn"
    weights, config = initial(path, tiny_config(methods, rounds=2, limit=1, **STANDS_STILL))
    server = run_in_process(config, phantom_dir, SITES, "cpu", state_dir=tmp_path / "state", initial=weights)
    kept = Composition(config).kept_keys & entries.keys()
    assert len(kept) == 16
    for site in SITES:
        (file,) = (tmp_path / "state" / site).glob("*.pt")
        rounds = torch.load(file, weights_only=True)["rounds"]
        for name in kept:
            value = rounds[2]["network"][name]
            # Running statistics are the site's own from the first step on, also in the second round.
            assert torch.equal(value, entries[name]) != ("running" in name), name
            assert torch.equal(value, rounds[1]["network"][name]) != ("running" in name), name
    assert server.rounds[0]["bytes"]["initial"]["down"] == 2 * 4 * sum(entries[n].numel() for n in kept)
    assert "initial" not in server.rounds[1]["bytes"]


def test_what_a_site_has_trained_is_not_replaced_when_it_receives_the_weights_again(
    phantom_dir, tiny_config, given
):
    """As happens to every site when another one joins."""
    weights, config = initial(given[0], tiny_config("fedbn", limit=1))
    server, trainer = FederationServer(config, initial=weights), SiteTrainer(config, phantom_dir, "cpu")
    trainer.open("site_A")
    model = {key: server.state[key] for key in server.shared}
    once = weights.kept(trainer.kept_keys)

    def norms():
        return {key: trainer.network.state_dict()[key].clone() for key in trainer.kept_keys & given[1].keys()}

    trainer.start_round(1, model, once=once)
    trainer.train(1)
    trained = norms()
    assert not any(torch.equal(value, given[1][key]) for key, value in trained.items())
    trainer.start_round(2, model, once=once)
    assert all(torch.equal(value, trained[key]) for key, value in norms().items())


def test_a_run_goes_on_without_the_file_and_does_not_begin_without_it(
    phantom_dir, tiny_config, tmp_path, given
):
    weights, config = initial(given[0], tiny_config("fedbn", rounds=3, limit=1))
    with pytest.raises(ConfigError, match="the run starts from given weights, and none were given"):
        run_in_process(config, phantom_dir, SITES, "cpu")
    whole = run_in_process(config, phantom_dir, SITES, "cpu", initial=weights)

    def stop(event):
        if event["event"] == "round_started" and event["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(config, phantom_dir, SITES, "cpu", stop, tmp_path / "state", initial=weights)
    again = run_in_process(config, phantom_dir, SITES, "cpu", None, tmp_path / "state", resume=True)
    assert all(torch.equal(again.state[key], value) for key, value in whole.state.items())
    assert again.results()["init"] == whole.results()["init"]
    other = InitialWeights({**weights.entries, "model.2.conv.bias": torch.zeros(2)})
    with pytest.raises(ConfigError, match="not those that the run was configured with"):
        FederationServer(config, initial=other)


def export(run, out, path):
    code, printed, err = run(*("export", "--methods", "fedbn", "--out", out, "--init", path), *TINY_OPTIONS)
    assert code == 0, err
    return printed


def test_a_job_carries_the_weights_as_numbers_and_the_server_checks_them(run, tmp_path, given, recwarn):
    path, entries = given
    assert "not used: model.2.conv.weight" in export(run, tmp_path / "job", path)
    assert not [str(w.message) for w in recwarn if "secret" in str(w.message).lower()]
    folder = tmp_path / "job/app"
    assert {file.name for file in folder.rglob("*") if file.is_file()} == {
        "config_fed_server.json",
        "config_fed_client.json",
        INITIAL_FILE,
    }
    settings = json.loads((folder / "config/config_fed_server.json").read_text())
    config = RunConfig.from_dict(settings["workflows"][0]["args"]["config"])
    file = folder / "config" / INITIAL_FILE
    server = FederationServer(config, initial=InitialWeights.load(file))
    assert all(torch.equal(server.state[name], value) for name, value in entries.items())
    assert str(path.parent) not in file.read_bytes().decode(errors="replace")
    file.write_bytes(b"\x80\x05not safetensors at all")
    with pytest.raises(ConfigError, match="the job's initial weights cannot be read"):
        InitialWeights.load(file)
