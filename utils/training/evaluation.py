"""The evaluation loop of train.py and eval.py. It counts each sample once, on any number of processes."""

import time

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from utils.config.settings import TrainConfig
from utils.console import Terminal
from utils.data.batches import Batches
from utils.errors import UserError
from utils.ranks.accelerator import sum_over_ranks
from utils.ranks.ranks import Ranks
from utils.ranks.stopping import Stopping
from utils.training.losses import loss_sum
from utils.training.meter import Pace


@torch.no_grad()
def evaluate_split(
    ranks: Ranks,
    accelerator: Accelerator,
    model: nn.Module,
    batches: Batches,
    config: TrainConfig,
    stopping: Stopping | None = None,
) -> dict | None:
    """Loss, accuracy, top-5 accuracy and count of a split, and with --metrics macro scores and per-class accuracy.

    Collective. `model` is the module without DDP's wrapper, because ranks may have different numbers of blocks. About
    once a second the ranks agree whether to stop early, because a rank could not read a sample or, with `stopping`, was
    asked to stop. The result is None if the evaluation was stopped. Only the main process's result has the metrics. The
    result has `left_out` if images were skipped. Raises ValueError if images cannot be read, and RuntimeError if a
    sample was missed or counted twice.
    """
    start, samples, count = time.perf_counter(), len(batches.labels), 0
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)  # loss, hits, top-5 hits
    # Each rank adds 1 + its predictions to zeros. The sum over the ranks has all of them, and 0 for missing ones.
    predicted = torch.zeros(samples, dtype=torch.int64, device=accelerator.device)
    was_training = model.training
    model.eval()
    bar = Terminal(ranks.is_main).progress("evaluating")
    pace, stopped, shared_blocks = Pace(), False, -(-samples // config.eval_batch_size) // accelerator.num_processes
    for block, (images, labels, indices, *_) in enumerate(bar(batches), 1):
        with accelerator.autocast():
            logits = model(images)
        logits = logits.float()
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = ranked == labels[:, None]
        sums += torch.stack([loss_sum(config, logits, labels).double(), hits[:, 0].sum(), hits.sum()])
        predicted[indices] += ranked[:, 0] + 1
        count += len(labels)
        if block <= shared_blocks and pace.due(block):
            wants_to_stop = batches.error is not None or (stopping is not None and stopping.requested)
            stopped = _any_wants_to_stop(ranks, accelerator, wants_to_stop, pace, block)
            if stopped:
                break
    model.train(was_training)
    ranks.run_on_all(batches.check)
    if stopped and stopping is not None:
        stopping.agreed = True
        return None
    counts = torch.tensor([count, batches.left_out], dtype=torch.float64, device=accelerator.device)
    result, predictions = _result(accelerator, torch.cat([sums, counts]), predicted)
    if config.metrics and accelerator.is_main_process:
        from utils.training.metrics import label_metrics  # its imports take a second

        seen = predictions >= 0
        result |= label_metrics(predictions[seen], batches.labels[seen], classes=logits.shape[1])
    return result | {"seconds": time.perf_counter() - start}


def _result(accelerator: Accelerator, sums: Tensor, predicted: Tensor) -> tuple[dict, np.ndarray]:
    """The metrics over all ranks, and the predicted classes, int64 [N], -1 for samples that were left out."""
    loss, correct, top5, count, left_out = sum_over_ranks(accelerator, sums).tolist()
    predictions = sum_over_ranks(accelerator, predicted).cpu().numpy() - 1
    samples = len(predictions)
    if count + left_out != samples or (predictions < 0).sum() != left_out:
        raise RuntimeError(f"evaluation counted {int(count)} of {samples} samples; please report this")
    if not count:
        raise UserError(f"none of the {samples} images to evaluate can be read", "set another --eval_split or --data")
    result = {"loss": loss / count, "accuracy": correct / count, "top5": top5 / count, "count": int(count)}
    return result | ({"left_out": int(left_out)} if left_out else {}), predictions


def _any_wants_to_stop(ranks: Ranks, accelerator: Accelerator, wants_to_stop: bool, pace: Pace, block: int) -> bool:
    ranks.mark_waiting(f"block {block} of the evaluation")
    own = [wants_to_stop, time.perf_counter() - pace.time]
    values = torch.tensor(own, dtype=torch.float64, device=accelerator.device)
    stops, seconds = sum_over_ranks(accelerator, values).tolist()
    ranks.mark("evaluating")
    pace.synced(block, seconds / accelerator.num_processes)
    return stops > 0
