"""The parts of train.py's loop."""

# from settings to the parts of a run
from utils.training.building import (
    TABLES,
    Setup,
    adapt_model,
    check_settings,
    fill_settings,
    load_splits,
    make_datasets,
    resolve,
)

# the samples of a NaN or infinite loss
from utils.training.divergence import find_samples

# evaluations
from utils.training.evaluation import TOP, Evaluator, check_outputs, make_eval_loader, model_rate

# gradients of an update
from utils.training.gradients import clip_gradients

# what the loop does now and then
from utils.training.loop import (
    evaluation_record,
    make_profiler,
    prepare_save,
    synchronise,
    training_record,
)

# sums over all ranks
from utils.training.meter import SyncInterval, rounded

# optimizers by name
from utils.training.optim import OPTIMIZERS, build_optimizer, init_optimizer, set_learning_rate

# default learning rates and weight decays
from utils.training.rates import RATES, Rates

# all parts of a run; what is printed at its start and end
from utils.training.run import Run, log_end, log_start

# learning rates by update
from utils.training.schedule import SCHEDULES, after_warmup, due_after, learning_rate

# what is printed about the data
from utils.training.summary import FEW, always_answering, count_classes
