"""What train.py puts together: settings, model, optimizer, gradients, evaluation."""

# the samples of an update
from utils.training.divergence import samples_of_update

# evaluations
from utils.training.evaluation import (
    TOP_CLASSES,
    Evaluator,
    check_finite,
    make_eval_loader,
    model_rate,
)

# gradients of an update
from utils.training.gradients import clip_gradients

# when the ranks synchronise, and numbers whose sums are exact
from utils.training.meter import SyncInterval, rounded

# the data sets and the model
from utils.training.model import adapt_model, make_datasets

# optimizers by name
from utils.training.optim import OPTIMIZERS, build_optimizer, set_learning_rate, unwrap_optimizer

# default learning rates and weight decays
from utils.training.rates import RATES, Rates

# all parts of a run
from utils.training.run import Run

# learning rates by update
from utils.training.schedule import SCHEDULES, after_warmup, due_after, learning_rate

# settings that follow from a checkpoint and from the data
from utils.training.setup import (
    REGISTRIES,
    Setup,
    check_settings,
    fill_settings,
    load_splits,
    resolve,
)

# what is printed at the start and end of a run
from utils.training.start_and_end import log_end, log_start

# what is printed about the data
from utils.training.summary import FEW_IMAGES, always_answering, count_classes

# what happens where the ranks synchronise
from utils.training.sync_points import (
    evaluation_record,
    prepare_save,
    synchronise,
    training_record,
)
