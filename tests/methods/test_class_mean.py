"""The last layer is averaged class by class, over the sites that have annotated the class."""

import torch

from medfedaug.methods.base import RoundMean, ServerContext, SiteUpdate
from medfedaug.methods.class_mean import ClassMean


def test_the_last_layer_is_averaged_over_the_sites_that_have_the_class():
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Conv2d(2, 3, 1))
    task = type("Task", (), {"num_classes": 3})()
    server = ClassMean().aggregator(ServerContext(network, 1, task=task))
    state = {key: value.clone() for key, value in network.state_dict().items()}
    models = {site: {key: torch.randn_like(value) for key, value in state.items()} for site in "AB"}
    annotated = {"A": torch.tensor([1.0, 1, 0]), "B": torch.tensor([1.0, 0, 0])}
    for site, weight in (("A", 1.0), ("B", 3.0)):
        server.accept(SiteUpdate(site, 1, models[site], {"annotated": annotated[site]}, weight))
    mean = {key: (models["A"][key] + 3 * models["B"][key]) / 4 for key in state}
    result = server.result(RoundMean(1, state, mean, {"A": 1.0, "B": 3.0}))
    for key in ("1.weight", "1.bias"):
        assert torch.allclose(result[key][0], mean[key][0])
        assert torch.allclose(result[key][1], models["A"][key][1])
        assert torch.equal(result[key][2], state[key][2])
    assert torch.equal(result["0.weight"], mean["0.weight"])
    assert server.summary() == {"sites": [2, 1, 0]}
