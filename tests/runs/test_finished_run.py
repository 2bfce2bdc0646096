"""Files of a finished run that are not as the run wrote them: refused in one line with the way out."""

import json
import shutil
import zipfile

import pytest
import torch
from finished_runs import simulated

import medfedaug as mfa
from medfedaug import __version__
from medfedaug.analysis import write_predictions_page
from medfedaug.errors import ConfigError


@pytest.fixture(scope="module")
def made(phantom_dir, tmp_path_factory):
    """A run whose model needs statistics of the sites and an exchange of the last round."""
    return simulated(
        phantom_dir, tmp_path_factory.mktemp("made") / "run", "fedrdn,fedfd", "--network", "unet"
    )


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture
def commands(run, phantom_dir, tmp_path):
    """The commands that use a finished run; each returns exit code and all that was printed."""
    image = next((phantom_dir / "site_A/images").glob("*.nii.gz"))

    def call(name, folder):
        out = tmp_path / f"out_{name}"
        site = ("--site", "site_A")
        arguments = {
            "predict": ("--model", folder, "--images", image, "--out", out, "--no-previews", *site),
            "evaluate": ("--model", folder, "--data", phantom_dir, "--out", f"{out}.json"),
            "bundle": (folder, "--out", out, *site),
        }[name]
        code, shown, err = run(name, *arguments)
        return code, " ".join((shown + err).split()), out

    return call


def flip(file, path):
    """Flip a bit in the middle of what is stored under a path in a zip archive."""
    with zipfile.ZipFile(file) as archive:
        names = [info for info in archive.infolist() if path in info.filename]
        info = max(names, key=lambda info: info.file_size)
        content = archive.read(info)
    data = bytearray(file.read_bytes())
    at = bytes(data).index(content) + len(content) // 2
    data[at] ^= 0x08
    file.write_bytes(bytes(data))


def other_weights(file):
    """Whole and sound, and another model."""
    torch.save({k: v * 1.01 for k, v in torch.load(file, weights_only=True).items()}, file)


def other_means(file):
    content = json.loads(file.read_text())
    for site in content["sites"].values():
        site["mean"] = [value * 3 for value in site["mean"]]
    file.write_text(json.dumps(content))


DAMAGE = {
    "a bit of a weight": ("global_model.pt", lambda file: flip(file, "/data/")),
    "another model": ("global_model.pt", other_weights),
    "no exchange": ("global_exchange.pt", lambda file: file.unlink()),
    "another exchange": ("global_exchange.pt", other_weights),
    "other statistics": ("statistics.json", other_means),
}


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        *(("predict", damage) for damage in DAMAGE),
        ("evaluate", "another exchange"),
        ("bundle", "another model"),
    ],
)
def test_a_file_that_is_not_as_the_run_wrote_it_is_refused_with_the_way_out(commands, copy, command, damage):
    name, spoil = DAMAGE[damage]
    spoil(copy / name)
    code, said, out = commands(command, copy)
    assert code == 2
    assert f"{name}: is not" in said
    assert "Put the original back; if the change is meant, correct or remove" in said
    assert "Traceback" not in said
    assert not out.exists()


def test_a_run_without_hashes_is_refused_with_both_versions(commands, copy):
    record = json.loads((copy / "results.json").read_text())
    del record["sha256"]
    record["versions"]["medfedaug"] = "9.8.7"
    (copy / "results.json").write_text(json.dumps(record))
    code, said, _ = commands("predict", copy)
    assert code == 2
    assert "expected an object with sha256" in said
    assert f"medfedaug 9.8.7 made it, and this is {__version__}" in said


def test_a_flipped_bit_is_found_without_its_hash_too(commands, copy):
    record = json.loads((copy / "results.json").read_text())
    del record["sha256"]["global_model.pt"]
    (copy / "results.json").write_text(json.dumps(record))
    flip(copy / "global_model.pt", "/data/")
    code, said, _ = commands("predict", copy)
    assert code == 2
    assert "differs from its checksum" in said


def test_layers_that_a_site_kept_are_not_used_with_a_flipped_bit(run, fedbn_model, phantom_dir, tmp_path):
    made = shutil.copytree(fedbn_model, tmp_path / "run")
    (kept,) = made.glob("state/site_A/*.pt")
    flip(kept, "/data/")
    err = run.refused("evaluate", "--model", made, "--data", phantom_dir, "--out", tmp_path / "s.json")
    assert "differs from its checksum" in " ".join(err.split())


def test_a_notebook_has_results_table_network_and_predictions(made, run, phantom_dir, tmp_path):
    finished = mfa.load_run(made)
    record = json.loads((made / "results.json").read_text())
    assert finished.results == record
    rows = {row.pop("site"): row for row in finished.test_table()}
    assert rows.pop("mean") == {"trained": None, **record["test"]["mean"]}
    for site, row in rows.items():
        group = "unseen" if site in record["unseen"] else "sites"
        scores = record["test"][group][site]
        assert row == {"trained": group == "sites", **{name: scores[name] for name in record["test"]["mean"]}}
    assert set(rows) == {*record["test"]["sites"], *record["test"]["unseen"]}
    network = finished.network()
    assert not network.training
    weights = torch.load(made / "global_model.pt", weights_only=True)
    assert all(torch.equal(network.state_dict()[key], value) for key, value in weights.items())
    image = next((phantom_dir / "site_A/images").glob("*.nii.gz"))
    found = finished.predict(image, tmp_path / "own", site="site_A", previews=False)
    run.ok(
        *("predict", "--model", made, "--images", image, "--out", tmp_path / "command", "--no-previews"),
        *("--site", "site_A"),
    )
    assert not found.failed
    assert (tmp_path / "own" / image.name).read_bytes() == (tmp_path / "command" / image.name).read_bytes()
    page = write_predictions_page(str(tmp_path / "own"))
    assert page.read_bytes() == (tmp_path / "command" / page.name).read_bytes()


def test_a_network_whose_layers_stay_at_the_sites_is_that_of_a_site(fedbn_model):
    finished = mfa.load_run(fedbn_model)
    with pytest.raises(ConfigError, match=r"fedbn: layers of the model stay at the sites; name one .*site_A"):
        finished.network()
    with pytest.raises(ConfigError, match="'nowhere' took no part in the run, whose sites are site_A"):
        finished.network("nowhere")
    states = [finished.network(site).state_dict() for site in ("site_A", "site_B")]
    own = [key for key in states[0] if not torch.equal(states[0][key], states[1][key])]
    assert own
    assert all(".adn.N." in key for key in own)  # the norm layers, and nothing else
