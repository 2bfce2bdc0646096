"""FedRDNd and insert_ffa in pipelines of others: engines, caches, compilation, processes, export."""

import copy
import multiprocessing
from pathlib import Path

import pytest
import torch
from monai.data import CacheDataset, DataLoader, Dataset, PersistentDataset, ThreadDataLoader
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.losses import DiceLoss
from monai.networks.nets import BasicUNet, DynUNet, SegResNet
from monai.transforms import Compose, RandFlipd, ScaleIntensityd
from torch.nn.parallel import DistributedDataParallel

from medfedaug.models import FFALayer, ffa_layers, insert_ffa, remove_ffa
from medfedaug.transforms import FedRDNd

PAIRS = {"A": [[0.0], [1.0]], "B": [[10.0], [2.0]], "C": [[-5.0], [0.5]]}


def unet(**ffa) -> BasicUNet:
    torch.manual_seed(3)
    return insert_ffa(BasicUNet(2, 1, 2, features=(4, 4, 8, 8, 8, 4)), **ffa)


def cases(number: int, size: int = 32) -> list[dict[str, torch.Tensor]]:
    """Images with a bright square, which is the label."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(number):
        label = torch.zeros(1, size, size)
        label[:, index % 4 : index % 4 + 6, 4:10] = 1
        image = label + 0.1 * torch.randn(1, size, size, generator=generator)
        samples.append({"image": image, "label": label})
    return samples


def criterion() -> DiceLoss:
    return DiceLoss(to_onehot_y=True, softmax=True)


def trainer(network, loader, **more) -> SupervisedTrainer:
    return SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=2,
        train_data_loader=loader,
        network=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        loss_function=criterion(),
        decollate=False,
        **more,
    )


# ------------------------------------------------------------------ MONAI's caches and loaders


def drawn(dataset, loader) -> list[set[str]]:
    """Which site's pair each image of a constant 0 was normalised with, in each of six epochs."""
    values = {mean[0] / -std[0]: site for site, (mean, std) in PAIRS.items()}
    sites: list[set[str]] = [set() for _ in range(len(dataset))]
    batches = loader(dataset, batch_size=len(dataset))  # one, since MONAI seeds the draws of each anew
    for _ in range(6):
        (batch,) = batches
        for index, image in enumerate(batch["image"]):
            sites[index].add(values[float(image.flatten()[0])])
    return sites


@pytest.mark.parametrize("kind", [Dataset, CacheDataset, PersistentDataset])
@pytest.mark.parametrize("loader", [DataLoader, ThreadDataLoader])
def test_no_cache_keeps_what_fedrdn_drew(kind, loader, tmp_path):
    zeros = [{"image": torch.zeros(1, 4, 4), "label": torch.zeros(1, 4, 4)} for _ in range(8)]
    transform = Compose([ScaleIntensityd("image", minv=None, maxv=None, factor=0.0), FedRDNd("image", PAIRS)])
    torch.manual_seed(0)  # of which MONAI's loader makes the seeds of the draws
    more = {"cache_dir": tmp_path} if kind is PersistentDataset else {}
    by_case = drawn(kind(zeros, transform, **more), loader)
    assert all(len(sites) > 1 for sites in by_case)
    assert set().union(*by_case) == set(PAIRS)


@pytest.mark.slow  # new processes import everything; forked ones can wait for ever on threads they lack
def test_a_loaders_processes_draw_for_themselves():
    zeros = [{"image": torch.zeros(1, 4, 4)} for _ in range(16)]
    dataset = Dataset(zeros, FedRDNd("image", PAIRS))
    torch.manual_seed(0)
    batches = list(DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context="spawn"))
    first, second = ([float(image.flatten()[0]) for image in batch["image"]] for batch in batches)
    assert first != second
    assert len({*first, *second}) == len(PAIRS)


# ------------------------------------------------------------------ MONAI's engines


@pytest.mark.parametrize("kind", [CacheDataset, Dataset])
def test_a_supervised_trainer_trains_with_both_and_its_evaluator_sees_the_plain_network(kind):
    network = unet(prob=1.0)
    before = copy.deepcopy(network.state_dict())
    dataset = kind(cases(8), Compose([FedRDNd("image", PAIRS), RandFlipd(["image", "label"], prob=0.5)]))
    engine = trainer(network, ThreadDataLoader(dataset, batch_size=4, shuffle=True))
    engine.run()
    assert all(int(layer.num_active_batches) == 4 for layer in ffa_layers(network).values())
    assert any(not torch.equal(before[key], value) for key, value in network.state_dict().items())

    outputs = {}
    for name, net in (("with", network), ("plain", remove_ffa(copy.deepcopy(network)))):
        own = Dataset(cases(4), FedRDNd("image", PAIRS, site="B"))
        evaluator = SupervisedEvaluator(
            device=torch.device("cpu"),
            val_data_loader=DataLoader(own, batch_size=4),
            network=net,
            decollate=False,
        )
        evaluator.run()
        outputs[name] = evaluator.state.output["pred"]
    assert torch.equal(outputs["with"], outputs["plain"])


# ------------------------------------------------------------------ several processes


def _steps(network, batches) -> None:
    """Three steps of SGD, with noise that is the same number everywhere."""
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    for batch in batches:
        optimiser.zero_grad()
        criterion()(network(batch["image"]), batch["label"]).backward()
        optimiser.step()


def _state(network) -> dict[str, torch.Tensor]:
    state = dict(network.state_dict())
    for name, layer in ffa_layers(network).items():
        state[f"{name}/mean"], state[f"{name}/std"] = layer.statistics()
        state[f"{name}/active"] = layer.num_active_batches.clone()
    return state


def _batches(rows) -> list[dict[str, torch.Tensor]]:
    batch = next(iter(DataLoader(Dataset(cases(6)), batch_size=6)))
    return [{key: batch[key][rows] for key in ("image", "label")}] * 3


def _features() -> torch.Tensor:
    return torch.rand(4, 2, 3, 3, generator=torch.Generator().manual_seed(5)) + torch.arange(4.0).view(
        4, 1, 1, 1
    )


def _process(rank: int, world: int, folder: Path, parts, prob: float) -> None:
    torch.set_num_threads(1)
    torch.randn_like = lambda value: torch.full_like(value, 0.3)
    torch.distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=world)
    network = DistributedDataParallel(unet(prob=prob))
    torch.manual_seed(11 + rank)
    _steps(network, _batches(parts[rank]))
    torch.save(_state(network.module), folder / f"{rank}.pt")
    # A process may have fewer images than another: one, which has no variance of its own.
    shared = FFALayer(2, prob=1.0, momentum=0.0)
    gradient = _features()[[0, 1, 2] if rank == 0 else [3]].requires_grad_()
    shared(gradient).square().sum().backward()
    torch.save((shared.statistics(), gradient.grad), folder / f"layer{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow  # as above
@pytest.mark.parametrize(("parts", "prob"), [(([0, 1, 2], [3, 4, 5]), 1.0), (([0, 1, 2], [3, 4, 5]), 0.5)])
def test_two_processes_have_the_statistics_and_weights_of_one_with_the_same_batch(
    parts, prob, tmp_path, monkeypatch
):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_process, args=(rank, 2, tmp_path, parts, prob)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert [worker.exitcode for worker in workers] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))

    monkeypatch.setattr(torch, "randn_like", lambda value: torch.full_like(value, 0.3))
    network = unet(prob=prob)
    torch.manual_seed(11)
    _steps(network, _batches(list(range(6))))
    alone = _state(network)
    actives = [int(value) for key, value in alone.items() if key.endswith("/active")]
    assert actives == [3] * 5 if prob == 1 else 0 < sum(actives) < 15
    for key, value in alone.items():
        torch.testing.assert_close(first[key], value, rtol=1e-4, atol=1e-6, msg=key)
        assert torch.equal(first[key], second[key]), key

    parts = [torch.load(tmp_path / f"layer{rank}.pt") for rank in range(2)]
    layer, features = FFALayer(2, prob=1.0, momentum=0.0), _features().requires_grad_()
    layer(features).square().sum().backward()
    for statistics, _ in parts:
        for value, expected in zip(statistics, layer.statistics(), strict=True):
            torch.testing.assert_close(value, expected)
    # Each process has the gradients of all processes' losses with respect to its own images.
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), features.grad)


# ------------------------------------------------------------------ export


@pytest.mark.parametrize(
    "make",
    [
        lambda: SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2),
        lambda: DynUNet(2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 8]),
    ],
    ids=["SegResNet", "DynUNet"],
)
def test_a_trained_network_exports_as_the_plain_one(make):
    torch.manual_seed(0)
    network = insert_ffa(make(), prob=1.0)
    three = isinstance(network, SegResNet)
    x = torch.rand(2, 1, *([16] * 3 if three else [32] * 2))
    network.train()
    network(x).square().mean().backward()
    torch.optim.SGD(network.parameters(), lr=0.01).step()
    network.eval()
    exported = torch.export.export(network, (x,))
    plain = torch.export.export(remove_ffa(copy.deepcopy(network)), (x,))
    assert torch.equal(exported.module()(x), network(x))
    operations = [
        [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        for program in (exported, plain)
    ]
    assert operations[0] == operations[1]
    assert exported.state_dict.keys() == plain.state_dict.keys()
