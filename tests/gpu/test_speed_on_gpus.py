"""Speed on GPUs: no wait of the host, no wait for data, and figures beside the step and timm."""

import gzip
import importlib
import json
import shlex
import sys
from pathlib import Path
from statistics import median

import pytest
from helpers.gpu_runs import (
    NCCL_CLASSES,
    ON_CPU,
    ROOT,
    begin,
    finish,
    in_start_table,
    losses,
    pick,
    train,
    trained,
)
from helpers.training_runs import same_tensors, weights

pytestmark = pytest.mark.gpu

WATCHED = "tests/gpu/watched/train.py"
SYNTHETIC = "--eval_every 100000 --save_every 100000 --max_eval_samples 64 --lr 0.01"
MNIST = f"{SYNTHETIC} --data synthetic/10x28x{pick(60000, 600)} --channels 1 --crop_padding 2"
CIFAR = f"{SYNTHETIC} --data synthetic/10x32x{pick(50000, 600)} --crop_padding 4 --flip"
WAITS = {
    "fp32": "--mixed_precision no",
    "bf16, images on the host": "--mixed_precision bf16 --data_on_device no",
    "fp16, clipping": f"--mixed_precision {pick('fp16', 'no')} --clip_norm 1",
    "BCE, flips": "--mixed_precision no --loss binary_cross_entropy --flip",
    "accumulation, shifts": "--mixed_precision no --grad_accum 2 --crop_padding 2",
    "alternating flips, erasing": "--mixed_precision no --flip alternate --random_erasing 0.5"
    " --cutout 8",
    "augmented by loader processes": "--mixed_precision no --auto_augment trivialaugment",
}


def on_device():
    """Whether the last command had its images or features on the device, both those for training
    and those for evaluation.
    """
    where = f" on {pick('cuda:0', 'cpu')}"
    found = {part.endswith(where) for part in in_start_table("images").split("; evaluation: ")}
    (same,) = found
    return same


def rate_of(records):
    return round(median(record["images_per_second"] for record in records))


@pytest.mark.waits
@pytest.mark.limit(90)
@pytest.mark.parametrize("case", WAITS)
def test_the_host_waits_for_the_gpu_in_no_update(case):
    """PyTorch raises an error at each synchronisation, in the updates 6 to 40."""
    flags = f"--model mnist_cnn --max_steps 45 {SYNTHETIC} {WAITS[case]}"
    log = train(1, "run", flags, script=WATCHED, LOCKSTEP_WATCHED="sync")
    assert log[-1]["step"] == 45


@pytest.mark.waits
def test_a_run_has_the_same_weights_with_images_on_the_gpu_and_on_the_host():
    flags = f"{MNIST} --flip alternate --random_erasing 0.5 --cutout 8 --model mlp --deterministic"
    flags += f" --mixed_precision no --log_every 1 --max_steps {pick(200, 20)}"
    places = {"yes": "--data_on_device yes", "no": "--data_on_device no", "cpu": "--cpu"}
    found = {}
    for name, more in places.items():
        found[name] = losses(train(1, name, f"{flags} {more}"))
        assert on_device() == (name == "yes")
    assert same_tensors(weights("yes"), weights("no"))
    assert found["yes"][:5] == pytest.approx(found["cpu"][:5], rel=1e-3)  # also the augmentation


# The GPU computes an update in about a millisecond, of which the host needs a tenth to hand over a
# batch (estimated).
SMALL = [(MNIST, "mnist_cnn", "no", 0.2), (CIFAR, pick("resnet18", "mlp"), "bf16", 0.05)]


@pytest.mark.waits
@pytest.mark.parametrize(("data", "model", "precision", "most"), SMALL, ids=["MNIST", "CIFAR"])
def test_small_images_are_hardly_waited_for(data, model, precision, most, record_property):
    flags = f"{data} --model {model} --global_batch_size {pick(1024, 64)}"
    flags += f" --log_every {pick(100, 5)} --max_steps {pick(600, 20)}"
    flags += f" --mixed_precision {pick(precision, 'no')}"
    for place in ("yes", "no"):
        records = trained(train(1, place, f"{flags} --data_on_device {place}"))[1:]
        assert on_device() == (place == "yes")
        wait = median(record["data_wait"] for record in records)
        name = "on the device" if place == "yes" else "on the host"
        record_property(f"images/s {name}", rate_of(records))
        record_property(f"data_wait {name}", f"{wait:.1%}")
        assert wait < pick(most, 1) or place == "no"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """An image folder of pictures like photographs."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        make = importlib.import_module("input_pipeline").make_photographs
        make(folder / "train", 500, 400, 12, pick(1500, 40), classes=2)
    return folder


# The most that may be waited for them. Sixteen processors decode 2,600 to 5,200 images/s, and an
# H100 takes up to 3,700 in bf16, more if it is compiled; a loader process alone decodes a tenth.
ARRIVE = [
    ("no", 0.05),
    pytest.param("bf16", 0.5, marks=pytest.mark.first(20)),
    ("compiled", 0.6),
]


@pytest.mark.photographs
@pytest.mark.limit(180)
@pytest.mark.parametrize(("precision", "most"), ARRIVE, ids=["no", "bf16", "compiled"])
def test_photographs_arrive_in_time(precision, most, photos, record_property):
    flags = f"{SYNTHETIC} --data {photos} --model {pick('resnet50', 'mlp')} --drop_last"
    flags += f" --global_batch_size {pick(256, 8)} --max_steps {pick(60, 8)}"
    flags += f" --log_every {pick(15, 2)} --num_workers {pick(16, 1)}"
    flags += f" --image_size {pick(224, 112)}"
    flags += f" --mixed_precision {pick('no' if precision == 'no' else 'bf16', 'no')}"
    backend = f"--dynamo_backend {pick('inductor', 'aot_eager')}"
    compiled = backend if precision == "compiled" else ""
    records = trained(train(1, "run", flags, launcher=compiled))[1:]
    wait = median(record["data_wait"] for record in records)
    record_property("images/s", rate_of(records))
    record_property("data_wait", f"{wait:.1%}")
    assert records[-1]["step"] == pick(60, 8) and wait < pick(most, 1)
    assert in_start_table("images").startswith("decoded for each batch")


HEAD = f"{SYNTHETIC} --model resnet18 --freeze backbone --epochs {pick(20, 2)} --report false"
HEAD += f" --data synthetic/10x32x{pick(20000, 200)} --log_every {pick(500, 1)}"
HEAD += f" --global_batch_size {pick(128, 64)}"


@pytest.mark.first(21)
@pytest.mark.limit(120)
def test_cached_features_have_the_same_losses_on_the_device_and_on_the_host(record_property):
    found = {}
    for place in ("yes", "no"):
        log = train(1, place, f"{HEAD} --data_on_device {place}")
        name = "on the device" if place == "yes" else "on the host"
        found[place] = losses(log)
        assert "features of each view" in in_start_table("images")
        assert on_device() == (place == "yes")
        record_property(f"images/s {name}", rate_of(trained(log)[1:]))
        record_property(f"data_wait {name}", f"{trained(log)[-1]['data_wait']:.1%}")
    assert found["yes"] == pytest.approx(found["no"], rel=1e-3)
    assert found["yes"][-1] < found["yes"][0]


@pytest.mark.waits
@pytest.mark.limit(120)
@pytest.mark.parametrize("nccl", NCCL_CLASSES)
def test_the_exchange_of_gradients_overlaps_with_the_backward_pass(
    nccl, pair, over_nccl, own_gpus, record_property
):
    flags = f"{CIFAR} --model {pick('resnet50', 'mlp')} --max_steps 40 --log_every 10 --profile"
    flags += f" --global_batch_size {pick(256, 32)} {pair}"
    log = train(2, "run", flags, TORCH_DIST_USE_NCCL2="1" if nccl == "NCCL2" else "0")
    record_property("images/s", round(trained(log)[-1]["images_per_second"]))
    with gzip.open("runs/run/trace-rank0.json.gz") as file:
        exchanged, hidden = overlap(json.load(file)["traceEvents"])
    record_property("NCCL, ms", f"{exchanged / 1e3:.1f}")
    record_property("under other kernels", f"{hidden / exchanged:.0%}" if exchanged else "none")
    assert (exchanged > 0) == (not ON_CPU)


def overlap(events):
    """Microseconds of NCCL's kernels in a trace, and how many of them other kernels ran too."""
    kernels = [
        (e["ts"], e["ts"] + e["dur"], "nccl" in e["name"].lower())
        for e in events
        if e.get("cat") == "kernel"
    ]
    others = sorted((begun, end) for begun, end, is_nccl in kernels if not is_nccl)
    exchanged = hidden = 0.0
    for begun, end, is_nccl in kernels:
        if is_nccl:
            exchanged += end - begun
            at = begun
            for start, stop in others:  # those of several streams are counted once
                if stop > at and start < end:
                    hidden += min(stop, end) - max(start, at)
                    at = min(stop, end)
    return exchanged, hidden


KINDS = [
    pytest.param(kind, marks=mark)
    for mark, kinds in (
        (pytest.mark.peers, ["generated", "small images", "all GPUs"]),
        (pytest.mark.photographs, ["photographs"]),
    )
    for kind in kinds
]


@pytest.mark.limit(540)
@pytest.mark.parametrize("kind", KINDS)
def test_train_py_is_as_fast_as_its_step_and_as_timm(kind, gpus, record_property):
    if kind == "all GPUs" and gpus < 2 and not ON_CPU:
        pytest.skip("needs two GPUs")
    trial = "--model resnet18 --image_size 32 --batch_size 8 --small_batch_size 64 --steps 8"
    trial = f"--rounds 1 {trial} --photos_count 40 --num_workers 1"
    flags = f"--kinds '{kind}' --json gpu.json {pick('--rounds 3', trial)}"
    words = [sys.executable, f"{ROOT}/benchmarks/gpus.py", *shlex.split(flags)]
    ended = finish(begin(words))
    assert ended.code == 0, ended.out
    results = json.loads(Path("gpu.json").read_text())["results"].get(kind, {})
    for side, runs in results.items():
        record_property(f"images/s, {side}", rate_of(runs))
        if memory := [run["gpu_memory"] for run in runs if run["gpu_memory"]]:
            record_property(f"GB, {side}", round(max(memory) / 1e9, 2))
    # The host hands over a batch of small images in a third of the time of a step. The others are
    # equal but for noise.
    least = {
        "small images": ("its step alone", 0.6),
        "generated": ("timm", 0.9),
        "all GPUs": ("DataParallel", 1),
    }
    side, ratio = least.get(kind, ("", 0))
    if side in results:
        ours, theirs = (
            [run["images_per_second"] for run in results[name]] for name in ("train.py", side)
        )
        found = median(a / b for a, b in zip(ours, theirs, strict=True))  # of the same round
        record_property(f"beside {side}", f"{found:.2f}")
        assert found >= pick(ratio, 0)
    assert results or kind == "all GPUs"
