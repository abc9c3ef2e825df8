"""Private parts of other packages that Lockstep uses do what it relies on.

If a new version of a package changes one, its case here fails. A new use needs a case.
"""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers.ranks import returned
from helpers.training_runs import ROOT
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchvision.transforms import v2

from utils.config.cli import parse_args
from utils.data import workers
from utils.settings.train import TrainConfig

OF_NAMEDTUPLE = {"_replace", "_asdict", "_fields", "_exit"}  # and os._exit: documented


def numbers_of_flags() -> None:
    """Else argparse takes -1e-3 for a flag."""
    assert parse_args(TrainConfig, "", ["--mean", "-0.1,0.2"]).mean == [-0.1, 0.2]


def lists_of_tensors() -> None:
    """Else gradients and averages are wrong, or take a kernel for each tensor."""
    one, two = [torch.ones(2), torch.ones(3)], [torch.zeros(2), torch.full((3,), 5.0)]
    torch._foreach_add_(one, two)
    torch._foreach_lerp_(two, one, 0.5)
    assert (one[1].tolist(), two[0].tolist()) == ([6.0] * 3, [0.5] * 2)
    torch._foreach_copy_(one, two)
    assert all(map(torch.equal, one, two))


def kinds_of_layers() -> None:
    """Else batch statistics are not found in a model."""
    norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    assert all(issubclass(norm, _BatchNorm) for norm in norms)


def waits_of_ddp() -> None:
    """Else DDP waits for the GPU in each 100th update."""

    def last() -> int:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(nn.Linear(1, 1))
        model._set_ddp_runtime_logging_sample_rate(10**9)
        for _ in range(120):
            model(torch.ones(1, 1)).sum().backward()
        return model._get_ddp_logging_data()["iteration"]  # the last measured one

    assert returned(1, last)[0] <= 10


def operations_of_policies() -> None:
    """Else --auto_augment has other operations than torchvision, or none."""
    policy, image = v2.RandAugment(fill=7), torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    assert {"Identity", "ShearX", "Posterize", "Equalize"} < policy._AUGMENTATION_SPACE.keys()
    change = {"magnitude": 2.0, "interpolation": policy.interpolation, "fill": policy._fill}
    moved = policy._apply_image_or_video_transform(image, transform_id="TranslateX", **change)
    assert moved[..., 2:].equal(image[..., :-2]) and (moved[..., :2] == 7).all()


def ends_of_workers() -> None:
    """Else older versions of PyTorch wait 5 s for each worker at the end of a run on a GPU."""
    workers.prepare_pytorch_for_workers()
    ours = getattr(_MultiProcessingDataLoaderIter, "_clean_up_worker", workers._end_worker)
    assert ours is workers._end_worker


def places_of_batches() -> None:
    """Else Accelerate moves the batches, before the host has finished them."""

    def places() -> list[str]:
        loader, found = Accelerator(cpu=True).prepare(DataLoader(torch.ones(2))), []
        for device in (torch.device("meta"), None):
            loader.device = device
            found.append(next(iter(loader)).device.type)
        return found

    assert returned(1, places) == [["meta", "cpu"]]


def states_of_accelerate() -> None:
    """Else a run after another one in the same process is not compiled, or not sharded."""

    def precisions() -> list[str]:
        found = [Accelerator(cpu=True, mixed_precision="bf16").mixed_precision]
        AcceleratorState._reset_state(True)
        return [*found, Accelerator(cpu=True, mixed_precision="no").mixed_precision]

    assert returned(1, precisions) == [["bf16", "no"]]


def replaced_forwards() -> None:
    """Else cached features and --grad_checkpointing compute the whole model as it was."""
    layer = nn.Identity()
    layer.forward = lambda x: x + 1
    assert layer(1) == 2


CASES = {
    numbers_of_flags: "_negative_number_matcher",
    lists_of_tensors: "_foreach_add_ _foreach_copy_ _foreach_lerp_",
    kinds_of_layers: "_BatchNorm",
    waits_of_ddp: "_set_ddp_runtime_logging_sample_rate",
    operations_of_policies: "_AUGMENTATION_SPACE _fill _apply_image_or_video_transform",
    ends_of_workers: "_MultiProcessingDataLoaderIter _clean_up_worker",
    places_of_batches: "",  # attributes that others read
    states_of_accelerate: "_reset_state",
    replaced_forwards: "",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_private_part_does_what_lockstep_relies_on(case):
    case()


def private_names(file: Path) -> set[str]:
    """The names with an underscore that a file takes from other objects and modules."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            found.add(node.attr)
    return {name for name in found if name[0] == "_" != name[1]} - OF_NAMEDTUPLE


@pytest.mark.full
def test_every_use_of_a_private_part_has_a_case():
    files = [*ROOT.glob("*.py"), *ROOT.glob("utils/**/*.py"), *ROOT.glob("extras/**/*.py")]
    assert set().union(*map(private_names, files)) == set(" ".join(CASES.values()).split())
