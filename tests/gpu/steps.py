"""Updates of networks on one batch that stays on the device: of Lockstep or timm, eager, compiled, or
as a CUDA graph of forward and backward pass.

It is run by test_steps_on_gpus.py: it reads a case as a line of JSON, and answers with one. One
process serves many cases, because its start takes seconds. On a CPU, a recorder takes the place of
CUDA's graphs, and another compiler that of inductor.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import torch  # noqa: E402
from helpers import graph_recorder  # noqa: E402
from helpers.graphs import GraphedPass  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from utils.config.settings import TrainConfig  # noqa: E402
from utils.data.spec import InputSpec  # noqa: E402
from utils.models.zoo import build_model  # noqa: E402
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


def make_update(case: dict) -> tuple[nn.Module, Callable[[], None]]:
    """The network and a function that does one update."""
    model, optimizer = make_model(case)
    batch, side = case["batch"], case["side"]
    images = torch.randn(batch, case["channels"], side, side, device=DEVICE)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch,), device=DEVICE)
    if case["way"] == "compiled":
        model.compile(dynamic=False, backend="inductor" if CUDA else "aot_eager")

    def compute(run, images, labels, scale) -> tuple[torch.Tensor, Any]:
        half = torch.autocast(DEVICE.type, torch.bfloat16)
        with half if case["precision"] == "bf16" else nullcontext():
            outputs = model(images)
        loss = cross_entropy(outputs.float(), labels, reduction="sum")
        (loss * scale).backward()
        return loss, outputs

    passes = GraphedPass(compute, model.parameters()) if case["way"] == "graph" else compute

    def update() -> None:
        passes(None, images, labels, 1 / batch)
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def measure(case: dict) -> dict:
    """The seconds of the first updates, then images/s, and the most memory."""
    torch.backends.cudnn.benchmark = case["search"]
    torch._dynamo.reset()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _, update = make_update(case)
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
    """The seconds of so many updates."""
    begun = time.perf_counter()
    for _ in range(count):
        update()
    synchronise()
    return time.perf_counter() - begun


def digest(case: dict) -> dict:
    """A hash of the weights after deterministic updates."""
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        model, update = make_update(case)
        for number in range(20 if CUDA else 5):
            torch.manual_seed(number)  # dropout, as train.py seeds each microbatch
            update()
    finally:
        torch.use_deterministic_algorithms(False)
    states = (each.detach().float().cpu().numpy() for each in model.state_dict().values())
    return {"bits": hashlib.sha256(b"".join(each.tobytes() for each in states)).hexdigest()[:16]}


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
