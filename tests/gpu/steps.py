"""Updates on batches that stay on the device, of Lockstep or timm.

They are eager, compiled, or a CUDA graph of forward and backward pass. test_steps_on_gpus.py runs
it: it reads and answers JSON lines. One process serves many cases, because its start takes seconds.
On a CPU, graph_recorder replaces CUDA graphs, and aot_eager replaces Inductor.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import torch  # noqa: E402
from helpers import graph_recorder  # noqa: E402
from helpers.graphs import GraphedPass  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from utils.data.spec import InputSpec  # noqa: E402
from utils.models.zoo import build_model  # noqa: E402
from utils.settings.train import TrainConfig  # noqa: E402
from utils.training.optim import build_optimizer  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
CLASSES = 10


def synchronise() -> None:
    if CUDA:
        torch.cuda.synchronize()


def make_model(case: dict) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The network and its optimizer."""
    torch.manual_seed(0)
    name, channels = case["model"], case["channels"]
    optimizer = "adamw" if "vit" in name else "sgd"
    if case["library"] == "timm":
        import timm
        from timm.optim import create_optimizer_v2

        model = timm.create_model(name, num_classes=CLASSES, in_chans=channels)
        model = model.to(DEVICE, memory_format=torch.channels_last)
        return model, create_optimizer_v2(model, optimizer, 1e-3, 5e-4, 0.9)
    config = TrainConfig(
        model=name, model_args=case["args"], lr=1e-3, weight_decay=5e-4, optimizer=optimizer
    )
    half = [0.5] * channels
    spec = InputSpec(case["side"], case["side"], channels, half, half)
    model = build_model(config, spec, CLASSES).to(DEVICE, memory_format=torch.channels_last)
    return model, build_optimizer(config, model)


class Updates(NamedTuple):
    """The network, its forward and backward pass, and a function that does one update."""

    model: nn.Module
    passes: Any  # a GraphedPass, or a function
    update: Callable[[Tensor, Tensor], None]


def make_batch(case: dict) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    batch, side = case["batch"], case["side"]
    images = torch.randn(batch, case["channels"], side, side, device=DEVICE)
    labels = torch.randint(CLASSES, (batch,), device=DEVICE)
    return images.contiguous(memory_format=torch.channels_last), labels


def make_updates(case: dict) -> Updates:
    """Build the network and the function."""
    model, optimizer = make_model(case)
    if case["mode"] == "compiled":
        model.compile(dynamic=False, backend="inductor" if CUDA else "aot_eager")

    def compute(run, images, labels, scale) -> tuple[Tensor, Any]:
        half = torch.autocast(DEVICE.type, torch.bfloat16)
        with half if case["precision"] == "bf16" else nullcontext():
            outputs = model(images)
        loss = cross_entropy(outputs.float(), labels, reduction="sum")
        (loss * scale).backward()
        return loss, outputs

    passes = GraphedPass(compute, model.parameters()) if case["mode"] == "graph" else compute

    def update(images: Tensor, labels: Tensor) -> None:
        passes(None, images, labels, 1 / len(images))
        optimizer.step()
        optimizer.zero_grad()

    return Updates(model, passes, update)


def measure(case: dict) -> dict:
    """Time the first updates, then images/s on one batch; also returns the most memory."""
    torch.backends.cudnn.benchmark = case["search"]
    torch._dynamo.reset()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    update = partial(make_updates(case).update, *make_batch(case))
    synchronise()
    some = 10 if CUDA else 3
    first = timed(update, some)
    count, seconds = 0, 0.0
    while seconds < case["seconds"]:
        seconds += timed(update, some)
        count += some
    found = {
        f"first {some} updates, s": round(first, 2),
        "ms": round(1e3 * seconds / count, 3),
        "images/s": round(case["batch"] * count / seconds),
    }
    if CUDA:
        found["GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return found


def timed(update: Callable[[], None], count: int) -> float:
    """Do so many updates; returns the seconds that they took."""
    begun = time.perf_counter()
    for _ in range(count):
        update()
    synchronise()
    return time.perf_counter() - begun


def digest(case: dict) -> dict:
    """Hash the weights after deterministic updates, each of which has another batch."""
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        updates = make_updates(case)
        for number in range(case["updates"]):
            torch.manual_seed(number)  # also dropout, as train.py seeds each microbatch
            updates.update(*make_batch(case))
    finally:
        torch.use_deterministic_algorithms(False)
    states = (each.detach().float().cpu() for each in updates.model.state_dict().values())
    bits = hashlib.sha256(b"".join(each.numpy().tobytes() for each in states)).hexdigest()[:16]
    return {"bits": bits, "replays": getattr(updates.passes, "replays", 0)}


def main() -> None:
    if CUDA:
        torch.set_float32_matmul_precision("high")  # as train.py does
    else:
        torch.set_num_threads(1)
        graph_recorder.install()
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps({"digest": digest, "measure": measure}[case["what"]](case)), flush=True)


if __name__ == "__main__":
    main()
