"""Every method with a Bundle: it runs, or says in one line why it does not go with it."""

import bundles
import pytest

from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.errors import MedFedAugError
from medfedaug.federation import run_in_process
from medfedaug.federation.in_process import run_pooled
from medfedaug.methods import method_names, parse_methods
from medfedaug.simulate import configure

CLASSIFYING = ("fedproto", "fedsr", "fpl", "fraug", "rsc", "selfreg")
REFUSED = {
    **dict.fromkeys(CLASSIFYING, "is defined only for classification"),
    **dict.fromkeys(("feddg", "randaugment"), "in 2D"),
    "fedharmo": "patches",
    "fedmix": "fedmix provides soft_labels",
    "fedfd_prompt": "prompts go into MONAI's ViT",
}


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    root = tmp_path_factory.mktemp("methods")
    make_phantom(root / "data", sites=3, patients=4, shape=(20, 20, 8), seed=0)
    return root / "data", bundles.write(root / "spleen", bundles.volumes())


@pytest.mark.slow
@pytest.mark.parametrize("method", method_names())
def test_a_method_runs_with_a_bundle_or_says_why_not(method, volumes):
    data, bundle = volumes
    sites, events = find_sites(data), []
    carry = run_pooled if method == "pooled" else run_in_process

    def run():
        config = configure(sites, bundle=bundle, methods=tuple(parse_methods(method)), rounds=2)
        return carry(config, data, sites, "cpu", on_event=events.append).results()

    if method in REFUSED:
        with pytest.raises(MedFedAugError, match=REFUSED[method]) as caught:
            run()
        assert "\n" not in str(caught.value)
        return
    results = run()
    assert set(results["test"]["sites"]) == {site.name for site in sites}
    assert all(0 <= site["mean_dice"] <= 1 for site in results["test"]["sites"].values())
    assert not [event for event in events if event["event"] in ("refused", "missing", "left_out")]
