"""A pretended GPU: the numbers of the CPU, no wait of the host, no missing wait of a stream.

The pretended GPU is in helpers/pretended_gpu.py, which says what it finds. Each run is in a process
of its own.
"""

import os
import shlex

import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DynamoBackend
from helpers.make_data import image_folder
from helpers.pretended_gpu import PretendedGpu
from helpers.ranks import returned
from helpers.training_runs import records

import eval
import train
from utils.data import batches
from utils.ranks.accelerator import make_accelerator
from utils.ranks.session import distributed_session
from utils.settings.train import TrainConfig
from utils.tasks.classification import Classification

pytestmark = pytest.mark.full

FLAGS = (
    "--data digits --model mnist_cnn --global_batch_size 64 --max_steps 5 --log_every 1 --lr 0.005"
)
FLAGS += " --report false --threads 1 --mixed_precision no"
# of a loss: a GPU has fused optimizers and norms of lists of tensors, which round differently
TOLERANCE = 2e-6


def on_gpu(commands, plant=None):
    """Run the commands of train.py and eval.py one after another; returns the faults, and the
    operations by update.
    """
    gpu = PretendedGpu()
    gpu.install()
    if plant:
        plant()
    for main, flags in commands:
        main(shlex.split(flags))
    return gpu.faults, gpu.operations


def trained_on_gpu(flags, plant=None):
    commands = [(train.main, f"--run_name gpu {FLAGS} {flags}")]
    ((faults, operations),) = returned(1, on_gpu, commands, plant)
    return faults, operations


def train_on_cpu(flags):
    returned(1, train.main, shlex.split(f"--run_name cpu --cpu {FLAGS} {flags}"))


def losses(name):
    return [record["loss"] for record in records(name) if "loss" in record]


CASES = {
    "float32": ("", 60),
    "images on the host": ("--data_on_device no --crop_padding 2 --flip alternate", 90),
    "EMA, clipping": ("--ema_decay 0.9 --clip_norm 1", 90),
    "mixing": ("--mixup 0.2 --cutmix 1", 90),
    "accumulation": ("--grad_accum 2", 120),
    "microbatches": ("--microbatches 4", 240),
    "AdamW": ("--optimizer adamw", 60),
    "Adagrad": ("--optimizer adagrad --lr 1e-5", 69),
    "ASGD": ("--optimizer asgd", 86),
}
LOWER = {
    "bf16": ("--mixed_precision bf16", 80),
    "fp16, clipping": ("--mixed_precision fp16 --clip_norm 1 --clip_value 1", 140),
}
RESNET = "--model resnet18 --image_size 32 --global_batch_size 16"
MODELS = {
    "fastnet": ("--model fastnet --model_args '{widths: [8, 16, 16]}' --image_size 32", 95),
    "resnet18": (RESNET, 219),
    "synchronised batch statistics": (f"{RESNET} --sync_batchnorm", 219),
}


@pytest.mark.parametrize("case", CASES | LOWER | MODELS)
def test_no_update_waits_for_the_gpu(case):
    # `most`: operations of an update, a quarter more than today
    flags, most = (CASES | LOWER | MODELS)[case]
    faults, operations = trained_on_gpu(flags)
    assert faults == [] and len(operations) == 5
    assert max(operations[2:]) < most
    if case in CASES:
        train_on_cpu(flags)
        assert losses("gpu") == pytest.approx(losses("cpu"), abs=TOLERANCE)
    assert len(losses("gpu")) >= 6  # of five updates, and of the evaluation


def test_batch_statistics_of_microbatches_that_may_be_empty_use_our_own_layer():
    flags = f"{RESNET} --sync_batchnorm --mixup 0.2 --grad_accum 2"
    faults, operations = trained_on_gpu(flags)
    assert faults == [] and min(operations[2:]) > 1000  # with PyTorch's layer, about 350


def test_a_head_on_cached_features_has_no_fault():
    image_folder("photos", {"cats": 24, "dogs": 24}, size=(150, 120), kind="jpg")
    flags = "--data photos --model resnet18 --freeze backbone --image_size 64 --global_batch_size 8"
    faults, operations = trained_on_gpu(flags)
    # some updates draw the features of the next ones
    assert faults == [] and max(operations[2:]) < 42 and min(operations[2:]) < 25
    train_on_cpu(flags)
    assert losses("gpu") == pytest.approx(losses("cpu"), abs=TOLERANCE)


def test_a_resumed_run_and_its_evaluation_have_no_fault():
    resumed = "--resume auto --ema_decay 0.9 --lr_schedule constant --max_steps"
    run = f"--run_name gpu {FLAGS} {resumed}"
    commands = [(train.main, f"{run} {steps}") for steps in (3, 6)]
    commands.append((eval.main, "--ckpt runs/gpu --tta flip --mixed_precision no"))
    ((faults, operations),) = returned(1, on_gpu, commands)
    assert faults == [] and len(operations) == 6
    train_on_cpu(f"{resumed} 6")
    assert losses("gpu")[-1] == pytest.approx(losses("cpu")[-1], abs=TOLERANCE)


def accelerator_of_a_compiled_run():
    """Whether TF32 is on, the precision of products, the compiler, and the backend that `gather`
    uses.
    """
    PretendedGpu().install()
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with distributed_session("train.py", TrainConfig()) as ranks:
        ranks.backend = "gloo"
        accelerator = make_accelerator(
            ranks, TrainConfig(deterministic=True, mixed_precision="no"), fixed_order=False
        )
        precision = torch.get_float32_matmul_precision()
    compiler = accelerator.state.dynamo_plugin.backend
    return torch.backends.cuda.matmul.allow_tf32, precision, compiler, PartialState().backend


def test_a_compiled_deterministic_run_has_no_tf32_and_gathers_over_its_own_backend():
    (found,) = returned(1, accelerator_of_a_compiled_run)
    assert found == (False, "highest", DynamoBackend.INDUCTOR, "gloo")


def plant_a_wait():
    loss = Classification.loss

    def waiting_loss(task, outputs, targets):
        value = loss(task, outputs, targets)
        value.item()
        return value

    Classification.loss = waiting_loss


def plant_a_host_tensor():
    def sums_on_the_host(task, loss, outputs, targets):
        return loss, (outputs.argmax(1) == torch.zeros(len(targets), dtype=torch.int64)).sum()

    Classification.training_sums = sums_on_the_host


def plant_a_missing_wait():
    batches._wait_for_copy = lambda batch, copied, device: batch


PLANTED = {
    plant_a_wait: ("_local_scalar_dense makes the host wait", "waiting_loss"),
    plant_a_host_tensor: (
        "aten::eq.Tensor has tensors on the host and on the GPU",
        "sums_on_the_host",
    ),
    plant_a_missing_wait: ("uses what another stream writes", "utils/data/batches.py"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_found_with_its_place(plant):
    what, place = PLANTED[plant]
    faults, _ = trained_on_gpu("--data_on_device no", plant)
    assert faults and any(what in fault and place in fault for fault in faults), faults
