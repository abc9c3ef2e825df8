"""helpers/graphs.py: the experimental CUDA graph matches eager updates bitwise, on a CPU."""

import shlex

import pytest
import torch
from helpers import graph_recorder, graphs
from helpers.ranks import returned
from helpers.training_runs import full, records, same_tensors, weights

import train
from utils.runs.manifest import OPTIMIZER

FLAGS = "--data digits --threads 1 --report false --log_every 3"
FLAGS += " --max_train_samples 150 --max_eval_samples 20"
FLAGS += " --global_batch_size 64 --max_steps"
FASTNET = "--model fastnet --model_args '{widths: [8, 8, 8]}' --flip alternate"
RESNET = "--model resnet18 --mixup 0.2 --cutmix 1 --global_batch_size 8 --max_train_samples 20"
VIT = "--model timm/test_vit --model_args '{img_size: 32, drop_path_rate: 0.2}' --optimizer adamw"
NETWORKS = {  # flags, from --max_steps on; epochs have two full batches and a smaller one
    "mnist_cnn": "9 --model mnist_cnn --crop_padding 2",
    "AdamW, EMA, clipping": "9 --model mnist_cnn --optimizer adamw --ema_decay 0.9 --clip_norm 1",
    "fastnet": f"9 --image_size 32 {FASTNET} --mixed_precision bf16",
    "ResNet-18": f"6 --image_size 32 {RESNET}",
    "ViT": f"6 --image_size 32 {VIT}",
}


def train_in(name, flags, graphed, inject=None):
    """Train in runs/NAME. Returns the counts of the recorder."""
    counts = graph_recorder.install()
    if graphed:
        graphs.train_with_a_graph()
    if inject:
        inject()
    train.main(shlex.split(f"--run_name {name} {FLAGS} {flags}"))
    return counts


def both(flags, inject=None):
    """Train as usual and with a graph. Returns the counts of the recorder."""
    returned(1, train_in, "usual", flags, False)
    return returned(1, train_in, "graph", flags, True, inject)[0]


def losses(name):
    return [record["loss"] for record in records(name) if "loss" in record]


CASES = [name if name == "mnist_cnn" else full(name) for name in NETWORKS]


@pytest.mark.full
@pytest.mark.parametrize("network", CASES)
def test_a_graph_is_bitwise_equal_to_eager(network):
    counts = both(NETWORKS[network])
    updates = int(NETWORKS[network].split()[0])
    # the first batch and the smaller ones run eagerly
    assert counts["captures"] == 1 and counts["replays"] == updates * 2 // 3 - 1
    assert counts["operations"] > 50
    assert losses("graph") == losses("usual") and len(losses("graph")) > updates // 3
    for file in ("model.safetensors", OPTIMIZER):
        assert same_tensors(weights("graph", file=file), weights("usual", file=file))


def inject_results_without_copies():
    graphs.copied = lambda result: result


def inject_a_gradient_that_is_not_handed_over():
    usual = graphs.GraphedPass.__call__

    def call(self, *batch):
        results = usual(self, *batch)
        if self.graph is not None:
            self.parameters[0].grad = torch.zeros_like(self.parameters[0])
        return results

    graphs.GraphedPass.__call__ = call


@pytest.mark.full
@pytest.mark.parametrize(
    "inject", [inject_results_without_copies, inject_a_gradient_that_is_not_handed_over]
)
def test_an_injected_fault_is_found(inject):
    both(NETWORKS["mnist_cnn"], inject)
    assert losses("graph") != losses("usual")
    if inject is inject_a_gradient_that_is_not_handed_over:
        assert not same_tensors(weights("graph"), weights("usual"))


def read_a_value(run, images, labels, scale):
    return images.sum().item(), None


def sync_in_a_capture():
    graph_recorder.install()
    graphed = graphs.GraphedPass(read_a_value, [])
    batch = None, torch.ones(2), torch.ones(2), 1.0
    graphed(*batch)
    with pytest.raises(AssertionError, match="sync in a capture"):
        graphed(*batch)


def test_a_wait_of_the_host_is_an_error_as_in_a_capture_on_a_gpu():
    returned(1, sync_in_a_capture)
