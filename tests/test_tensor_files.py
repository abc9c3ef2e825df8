"""Our safetensors files have the same bytes as those of `save_file`, even if tensors are sharded. A full disk."""

import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.memory import peak_of
from helpers.ranks import returned
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import zeros as sharded_zeros

from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.models.weight_average import WeightAverage
from utils.runs.loading import load_tensors, tensors_to_save
from utils.runs.tensors import read_metadata, write_tensors
from utils.runs.writing import publish, write_partial
from utils.training.optim import build_optimizer

TYPES = (torch.int64, torch.float64, torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16)
TYPES += (torch.int8, torch.uint8, torch.bool)
IMAGES = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
TENSORS = {
    "all types": {f"{shape} {kind}": torch.ones(shape, dtype=kind) for kind in TYPES for shape in ((3,), (), (2, 0))},
    "none": {},
    "empty": {"a": torch.empty(0), "b": torch.empty(2, 0, dtype=torch.int64)},
    "layouts": {
        "channels last": IMAGES.to(memory_format=torch.channels_last),
        "transposed": torch.arange(6).view(2, 3).t(),
        "every other": torch.arange(9.0)[1::2],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "parameter": torch.nn.Parameter(IMAGES[0]),
    },
    "names": dict.fromkeys(("é", "層.0", "🙂", 'a"b\\c/d', "tab\tline\n\x01\x7f", "", "Z", "a.10", "a.9"), IMAGES),
    "values": {"a": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]), "b": torch.arange(-2, 3)},
}


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"values": '{"é": "a\\nb", "c": [1, null]}'}])
@pytest.mark.parametrize("case", TENSORS)
def test_a_file_has_the_bytes_of_the_library(case, metadata):
    assert write_tensors(Path("ours"), TENSORS[case], metadata) is None
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in TENSORS[case].items()}
    save_file(tensors, "theirs", metadata or None)
    assert Path("ours").read_bytes() == Path("theirs").read_bytes()


def test_several_metadata_are_written_in_their_order_and_read_back():
    """The library writes them in a random order, so that equal checkpoints have different bytes."""
    metadata = {"z": "1", "a": "ä\n", "m": "", "b": "2"}
    for name in ("one", "other"):
        assert write_tensors(Path(name), TENSORS["layouts"], metadata) is None
    assert Path("one").read_bytes() == Path("other").read_bytes()
    with safe_open("one", "pt") as file:
        assert file.metadata() == metadata
    assert read_metadata(Path("one")) == metadata and list(read_metadata(Path("one"))) == list(metadata)
    tensors = load_file("one")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS["layouts"].items())


def test_metadata_of_the_library_are_read():
    save_file(TENSORS["values"], "file")
    assert read_metadata(Path("file")) == {}
    save_file(TENSORS["values"], "file", {"format": "pt", "é": '"'})
    assert read_metadata(Path("file")) == {"format": "pt", "é": '"'}


# Errors, and tensors of which each of two ranks has some rows


def weights() -> dict[str, torch.Tensor]:
    """Tensors of 40 to 40,040 bytes. Two ranks have 2 and 1, 1 and 0, 500 and 500, 501 and 500 rows."""
    shapes = {"uneven": (3, 5), "on one": (1, 10), "large": (1000, 10), "larger": (1001, 10)}
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in shapes.items()}


def write_sharded(places: list[str], most: int) -> list[tuple[type, str | None] | None]:
    """Write sharded and plain tensors to each of the places, where a file can have at most `most` bytes.

    At the end they are written to the file `last` without this limit. Returns the kind of each error, and its file.
    """
    dist.init_process_group("gloo")
    mesh, errors = init_device_mesh("cpu", (dist.get_world_size(),)), []
    tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in weights().items()}
    tensors["whole"] = torch.arange(9)  # as the buffers of a sharded model
    for place in (*places, "last"):
        limit = resource.RLIM_INFINITY if place == "last" else most
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        path = Path(place) if dist.get_rank() == 0 else None
        error = write_tensors(path, tensors, {"format": "pt"})
        errors.append(None if error is None else (type(error), error.filename))
    with pytest.raises(AssertionError):  # the file would have a wrong order
        write_tensors(None, {"columns": distribute_tensor(torch.ones(2, 8), mesh, [Shard(1)])}, {})
    dist.destroy_process_group()
    return errors


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.full)])
def test_sharded_tensors_give_the_same_file_and_an_error_on_one_rank_holds_up_no_other(processes):
    """Each tensor is gathered by all ranks, so after an error the writing rank must go on with the others."""
    places = ["missing/file", "full", "cut"]
    if Path("/dev/full").exists():
        places.append("/dev/full")
    first, *others = returned(processes, write_sharded, places, 20_000)
    assert first == [
        (FileNotFoundError, "missing/file"), (OSError, "full"), (OSError, "cut"),
        *[(OSError, place) for place in places[3:]], None,
    ]  # fmt: skip
    assert others == [[None] * (len(places) + 1)] * (processes - 1)
    save_file(weights() | {"whole": torch.arange(9)}, "theirs", {"format": "pt"})
    assert Path("last").read_bytes() == Path("theirs").read_bytes()


def test_a_dtype_that_cannot_be_saved_is_refused():
    module = torch.nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(UserError, match=r"scale has dtype torch.complex128, which cannot be saved"):
        tensors_to_save(module, build_optimizer(TrainConfig(lr=0.1, weight_decay=0.0), module), {})


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
@pytest.mark.parametrize("processes", [2, 3])
def test_a_save_takes_no_more_memory_than_the_largest_tensor(processes):
    largest = 150_000_000

    def write() -> int:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (processes,))
        shape = largest // 4000, 1000
        tensors = {name: sharded_zeros(shape, device_mesh=mesh, placements=[Shard(0)]) for name in "abcd"}
        taken = peak_of(lambda: write_tensors(Path("/dev/null") if dist.get_rank() == 0 else None, tensors, {}))
        dist.destroy_process_group()
        return taken

    found = returned(processes, write)
    assert all(taken < largest * 1.1 for taken in found), found


def offloaded(start: float) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, WeightAverage]]:
    """A layer whose shards are on the host although their mesh is of GPUs, as with fsdp_offload_params."""
    mesh, layer = init_device_mesh("cuda", (dist.get_world_size(),)), torch.nn.Linear(4, 3)
    rank = dist.get_rank()
    for name, parameter in [*layer.named_parameters()]:
        whole = start + torch.arange(float(parameter.numel())).view(parameter.shape)
        rows = [*whole.chunk(mesh.size()), whole[:0], whole[:0]][rank]
        shape = {"shape": whole.shape, "stride": whole.stride()}
        spec = DTensor.from_local(rows.to("meta"), mesh, [Shard(0)], **shape)._spec
        layer.register_parameter(name, torch.nn.Parameter(DTensor(rows.clone(), spec, requires_grad=False)))
    group = {"params": [*layer.parameters()], "param_names": ["weight", "bias"]}
    optimizer = torch.optim.SGD([group], lr=0.1, momentum=0.9)
    for parameter in layer.parameters():
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach() * 2
    return layer, optimizer, {"ema": WeightAverage(layer, 0.9)}


def save_and_load_offloaded() -> list[bool]:
    """Save one run and load it into another. Returns for each tensor whether it is that of the first, on the host."""
    dist.init_process_group("gloo")
    os.environ.pop("LOCAL_RANK")  # otherwise PyTorch selects a GPU
    saved, other = offloaded(1.0), offloaded(100.0)
    write_partial(Path.cwd(), 1, tensors_to_save(*saved), {"config.yaml": b"", "state.json": b""}, dist.get_rank() == 0)
    if dist.get_rank() == 0:
        publish(Path.cwd(), 1)
    dist.barrier()
    load_tensors(Path("step-00000001"), *other)
    ends = [
        [tensor for values, _ in tensors_to_save(*run).values() for tensor in values.values()] for run in (saved, other)
    ]
    found = [a.to_local().device.type == "cpu" and a.to_local().equal(b.to_local()) for a, b in zip(*ends, strict=True)]
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="its processes must not use GPUs")
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.full)])
def test_shards_on_the_host_stay_there_when_they_are_saved_and_loaded(processes):
    """With fsdp_offload_params on GPUs. Here a tensor that is moved to a GPU is an error."""
    assert returned(processes, save_and_load_offloaded) == [[True] * 6] * processes


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("count", [1, 100_000])
def test_a_full_disk_is_an_error_that_names_the_file(count):
    """A small file is written when it is closed."""
    error = write_tensors(Path("/dev/full"), {"a": torch.ones(count)}, {})
    assert isinstance(error, OSError)
    assert error.filename == "/dev/full" and error.strerror == "No space left on device"
