"""What every rank of a test needs, made once in the process from which the ranks are forked."""

import encodings.idna  # noqa: F401
import functools
import importlib.metadata
import multiprocessing.synchronize  # noqa: F401
import threading

import matplotlib.figure
import matplotlib.font_manager  # noqa: F401  for the picture of the first batch
import numpy.ctypeslib
import numpy.ma  # noqa: F401
import torch
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.utils.serialization
from accelerate.utils import is_datasets_available
from PIL import Image
from tqdm import tqdm

import doctor  # noqa: F401
import eval  # noqa: F401
import extras.copies
import extras.dry_run
import extras.first_batch
import extras.page.report  # noqa: F401
import predict  # noqa: F401
import utils.data.csv_file
import utils.data.hf_datasets
import utils.launch.rendezvous
import utils.models.fastnet
import utils.ranks.batchnorm
import utils.tasks.metrics
import utils.tasks.multilabel
import utils.training.feature_cache
import utils.training.muon
import utils.training.sharding  # noqa: F401
from extras.page.html import template
from utils.config import cli
from utils.settings.scripts import DoctorConfig, EvalConfig, PredictConfig
from utils.settings.train import TrainConfig

torch.set_num_threads(1)
Image.init()
# tqdm's own lock would be shared with ranks that a test kills, and its thread forked
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0
# PyTorch and Accelerate read these from the disk in each rank.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
importlib.metadata.entry_points(group="torch.distributed.backends")
is_datasets_available()


def _keep_parsers() -> None:
    """Forked ranks use the parsers of flags that are made here: making one takes longer than a
    small training run.
    """
    make, made = cli.make_parser, {}

    def parser(cls, prog, tables=()):
        key = cls, prog, repr([table.helps() for table in tables])  # a test may have added a name
        if key not in made:
            made[key] = make(cls, prog, tables)
        return made[key]

    cli.make_parser = parser
    parser(TrainConfig, "train.py")
    parser(EvalConfig, "eval.py")
    parser(PredictConfig, "predict.py")
    parser(DoctorConfig, "doctor.py")


_keep_parsers()
for page in ("page.html", "gallery.html"):  # compiling a template takes a third of a small run
    template(page).environment.get_template("base.html")
cli.parse_args(TrainConfig, "train.py", [])  # imports what reads flags
