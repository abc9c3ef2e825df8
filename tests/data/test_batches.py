"""utils/data/batches.py and workers.py: pixels, the way to a GPU, and the processes that load."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from helpers.make_data import CPU, pictures
from helpers.pretended_gpu import GPU, PretendedGpu
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import ROOT, start
from helpers.waiting import lives, until
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as F

from utils.data import workers as worker_process
from utils.data.batches import DeviceLoader, _upload
from utils.data.datasets import ArrayDataset, PhotoDataset
from utils.data.decode import resize
from utils.data.order import Microbatch
from utils.data.samplers import BlockSampler
from utils.data.spec import InputSpec
from utils.data.splits import whole_split
from utils.data.workers import make_loaders
from utils.settings.train import TrainConfig


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(7, 90), (200, 150)])
def test_pixels_are_scaled_like_torchvision_does_it_whatever_their_layout(channels, size):
    whole = torch.from_numpy(pictures(1, (210, 160))[0][..., :channels].copy())
    planes_first = whole.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    part = whole[5:100, 3:77].permute(2, 0, 1).contiguous()
    expected = F.resize(part, size, antialias=True).permute(1, 2, 0)
    for pixels in (whole, planes_first):
        assert torch.equal(resize(pixels[5:100, 3:77], *size), expected)


@pytest.mark.parametrize("channels_last", [True, False])
def test_large_batches_are_normalised_like_single_images(channels_last):
    pixels, spec = pictures(300, (40, 30)), InputSpec(40, 30, 3, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
    config, given = TrainConfig(channels_last=channels_last), [Microbatch(0, 0, 0, np.arange(300))]
    parts = [(ArrayDataset(pixels, np.arange(300)), given)]
    (loader,) = make_loaders(parts, config, CPU.threads, CPU.device)
    (batch,) = DeviceLoader(loader, spec, config, CPU.device, training=False)
    mean, std = torch.tensor(spec.mean), torch.tensor(spec.std)
    expected = (torch.from_numpy(pixels).double() / 255 - mean) / std
    assert torch.allclose(batch.images.double(), expected.permute(0, 3, 1, 2), atol=1e-5)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert batch.images.is_contiguous(memory_format=layout)


def order_of_uploads():
    """What happens, in turn, while batches are trained on a GPU."""
    PretendedGpu().install()
    happened = []

    def loaded():
        for number in range(3):
            happened.append("fetch")
            yield {"number": torch.tensor(number)}

    for batch in _upload(loaded(), GPU):
        happened.append(f"train {batch['number'].item()}")
    return happened


def test_a_batch_is_handed_over_before_the_next_one_is_fetched():
    expected = ["fetch", "train 0", "fetch", "train 1", "fetch", "train 2"]
    assert returned(1, order_of_uploads) == [expected]


@pytest.mark.parametrize(("device", "expected"), [(GPU, 2), (CPU.device, 4)])
def test_fewer_batches_are_in_page_locked_memory(device, expected):
    split = whole_split("train", pictures(4, (9, 9)), np.arange(4), "made")
    photographs = PhotoDataset(split, InputSpec(8, 8, 3, [], [])), BlockSampler(4, 2)
    (loader,) = make_loaders([photographs], TrainConfig(num_workers=2), 1, device)
    assert loader.prefetch_factor == expected


def test_loader_processes_are_chosen_by_physical_cores(monkeypatch):
    for logical, physical, threads, processes, expected in (
        (2, 1, 2, 1, 2),  # up to 8 are started for logical cores
        (192, 96, 24, 8, 12),
        (256, 128, 4, 1, 4),  # --threads
        (64, None, 64, 1, 16),  # unknown, as in some virtual machines
    ):
        cores = physical, logical
        monkeypatch.setattr(psutil, "cpu_count", lambda logical=True, cores=cores: cores[logical])
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, all=logical: range(all))
        assert worker_process.default_workers(threads, processes) == expected


class Large(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return bytes(300_000)


def load_for_ever(when):
    if when == "starting":
        os.register_at_fork(after_in_child=lambda: time.sleep(1))
    workers = worker_process.worker_processes(3, 4)
    batches = iter(DataLoader(Large(), batch_size=1, collate_fn=list, **workers))
    if when == "working":
        next(batches)
    Path("workers.partial").write_text(" ".join(str(worker.pid) for worker in batches._workers))
    os.rename("workers.partial", "workers")
    time.sleep(1000)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no sigtimedwait")
@pytest.mark.parametrize("when", [pytest.param("starting", marks=pytest.mark.full), "working"])
def test_workers_end_with_a_rank_that_is_killed_even_if_nobody_reads_their_batches(when):
    rank = start_ranks(1, load_for_ever, when)
    until(Path("workers").exists)
    workers = [int(pid) for pid in Path("workers").read_text().split()]
    rank.kill()
    rank.finish()
    assert len(workers) == 3
    until(lambda: not any(lives(worker) for worker in workers))


def errors_in_a_worker():
    worker_process._leave_signals_to_parent(os.getppid(), 0)
    for error in (ConnectionResetError("the rank is gone"), EOFError(), ValueError("a real error")):
        sys.excepthook(type(error), error, None)


def test_a_worker_does_not_print_that_its_rank_is_gone():
    (outcome,) = run_ranks(1, errors_in_a_worker)
    assert outcome.err.strip() == "ValueError: a real error"


@pytest.mark.full
def test_more_workers_than_usable_cores_are_no_warning():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); import torch\n"
    code += "from utils.data.workers import worker_processes\n"
    code += "torch.utils.data.DataLoader(range(4), **worker_processes(2))"
    code, _, err = start("python", "-c", code, PYTHONPATH=str(ROOT))
    assert (code, err) == (0, "")
