"""Networks whose modules have two names, as MONAI's DynUNet: each tensor is sent, kept and frozen once."""

import pytest
import torch
from small_networks import SEGMENTING, marked

from medfedaug.federation import SiteTrainer, run_in_process
from medfedaug.federation.composition import Composition

SITES = ["site_A", "site_B"]
FILTERS = {"filters": (4, 4, 8, 8, 8)}
KEEPING = {
    **dict.fromkeys(("fedbn", "silobn", "single")),
    **{f"partialfed {name}": {"partialfed": {"strategy": name}} for name in ("head", "norm+head")},
}


def composition(tiny_config, methods, network="dynunet", **changes):
    args = changes.pop("network_args", SEGMENTING[network])
    return Composition(tiny_config(methods, network=network, network_args=args, **changes))


def tensors(network, keys):
    state = network.state_dict(keep_vars=True)
    return [id(state[key]) for key in keys]


@pytest.mark.all_layers
@pytest.mark.parametrize("network", marked(SEGMENTING))
def test_no_tensor_is_sent_twice_or_both_sent_and_kept(tiny_config, network):
    made = composition(
        tiny_config, "partialfed", network, image_size=32, settings={"partialfed": {"strategy": "head"}}
    )
    sent, kept = tensors(made.network, made.sent), tensors(made.network, made.kept_keys)
    assert len(set(sent)) == len(sent)
    assert kept
    assert not set(sent) & set(kept)
    floating = {id(v) for v in made.network.state_dict(keep_vars=True).values() if v.is_floating_point()}
    assert floating <= {*sent, *kept}


@pytest.mark.all_layers
@pytest.mark.parametrize("name", KEEPING)
def test_what_a_method_keeps_leaves_a_site_under_no_name(tiny_config, name):
    args = {**FILTERS, "norm": "batch"}
    made = composition(tiny_config, name.split()[0], settings=KEEPING[name], network_args=args)
    assert not set(tensors(made.network, made.sent)) & set(tensors(made.network, made.kept_keys))


def test_what_a_site_keeps_stays_when_it_receives_a_model(phantom_dir, tiny_config):
    config = tiny_config("fedbn", network="dynunet", network_args=FILTERS, rounds=1)
    server = run_in_process(config, phantom_dir, SITES, device="cpu")
    site = SiteTrainer(config, phantom_dir / "site_A", device="cpu")
    site.open("site_A")
    with torch.no_grad():
        for norm in (module for module in site.network.modules() if "InstanceNorm" in type(module).__name__):
            norm.weight.fill_(7.0)
    site.receive({key: server.state[key] for key in site.shared})
    kept = [site.network.state_dict()[key] for key in site.kept_keys if key.endswith("weight")]
    assert len(kept) > 5
    assert all(float(value.min()) == float(value.max()) == 7.0 for value in kept)


@pytest.mark.all_layers
@pytest.mark.parametrize("masked", [False, True])
def test_the_global_model_has_what_was_trained_under_all_names(phantom_dir, tiny_config, tmp_path, masked):
    sites = [*SITES, "third"] if masked else SITES  # masks need three
    for name, source in zip(sites, (*SITES, SITES[0]), strict=False):
        (tmp_path / name).symlink_to(phantom_dir / source)
    config = tiny_config(
        "fedavg", network="dynunet", network_args=FILTERS, rounds=1, secure_aggregation=masked
    )
    server = run_in_process(config, tmp_path, sites, device="cpu")
    network = Composition(config).network
    before = {key: value.clone() for key, value in network.state_dict().items()}
    network.load_state_dict(server.state)
    after = network.state_dict()
    assert len(after) > len(server.shared)
    assert not [key for key, value in before.items() if torch.equal(value, after[key])]
    assert all(torch.equal(server.state[key], value) for key, value in after.items())


def test_a_second_name_freezes_what_it_names(tiny_config):
    made = composition(tiny_config, "fedavg", network_args=FILTERS, freeze=["skip_layers.downsample.*"])
    fixed = [name for name, parameter in made.network.named_parameters() if not parameter.requires_grad]
    assert fixed
    assert all(name.startswith("input_block.") for name in fixed)
    assert made.frozen >= set(fixed)
    assert not made.frozen & set(made.sent)
