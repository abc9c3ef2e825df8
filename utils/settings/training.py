"""Settings of the loop: length, batch sizes, optimizer, schedule, evaluations and logs."""

from dataclasses import dataclass, field
from typing import Annotated

from utils.config import (
    Arguments,
    Bound,
    Chosen,
    Fixed,
    Fraction,
    FractionBelow1,
    NonNegativeFloat,
    NonNegativeInt,
    OneStart,
    PositiveFloat,
    PositiveInt,
    ProbabilityBelow1,
    at_most,
)
from utils.settings.shared import FROM_DATA, SharedSettings

BatchSize = Annotated[PositiveInt, at_most(2**24)]  # a resumed run tries all smaller sizes
_WHOLE = Bound(
    "an integer, or below 1 for a fraction of the run",
    lambda steps: steps < 1 or steps.is_integer(),
)
Steps = NonNegativeInt | Annotated[NonNegativeFloat, _WHOLE]
_POWER_OF_2 = Bound("a power of two", lambda number: number.bit_count() == 1)


@dataclass(kw_only=True)
class TrainingSettings(SharedSettings):
    """What `utils.training` reads."""

    epochs: PositiveInt = FROM_DATA
    """Passes over the training data (default: 20, or 40 to train only the head)."""
    global_batch_size: Chosen[BatchSize] = FROM_DATA
    """Samples per update over all processes and accumulation steps (default: 128, or less for up to
    896 samples)."""
    lr: Chosen[PositiveFloat] = FROM_DATA
    """Peak learning rate (default: depends on optimizer, start and batch; 0.05 for sgd and 128
    samples)."""
    max_steps: PositiveInt | None = None
    """Updates of the whole run; overrides --epochs."""
    max_seconds: PositiveFloat | None = None
    """End the run after this many seconds of training, added up over all resumes; evaluations and
    saves do not count. The run then evaluates and saves. A schedule that depends on the number of
    updates does not reach its end."""
    stop_after: OneStart[PositiveInt | None] = None
    """Evaluate, save and stop after this update, with exit code 0. The schedule does not change,
    and --resume auto continues the run."""
    early_stopping: PositiveInt | None = None
    """End the run after this many evaluations in a row without a new best value of the metric of
    --best_metric."""
    batch_size: BatchSize | None = None
    """Samples per process and accumulation step; give this or --global_batch_size."""
    grad_accum: Annotated[PositiveInt, at_most(2**16)] | None = None
    """Accumulation steps: forward and backward passes per update (default: 1, or as the batch sizes
    imply)."""
    microbatches: Fixed[Annotated[PositiveInt, at_most(2**16), _POWER_OF_2] | None] = None
    """Cut each global batch into this many parts, a power of two, and add up their gradients in one
    fixed order. The weights are then the same, bit for bit, on any number of processes up to this
    number. This is slower, and on CPUs each process then has one thread by default."""
    optimizer: Fixed[str] = FROM_DATA
    """Optimizer (default: adamw to fine-tune more than the head of a model, else sgd)."""
    weight_decay: Chosen[NonNegativeFloat] = FROM_DATA
    """Weight decay of matrices and kernels; biases, normalisation layers, position embeddings and
    class tokens have none (default: 5e-4 for sgd and asgd, 0.05 for adamw and muon, else 0)."""
    lr_schedule: str = "onecycle"
    """Learning rate schedule."""
    optimizer_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the optimizer, such as '{betas: [0.9, 0.95]}'."""
    momentum: ProbabilityBelow1 = 0.9
    """Momentum of sgd, rmsprop and muon."""
    fit_head: Fixed[bool] = True
    """To fine-tune more than the head: first fit the new rows of the head for 4 epochs, on the
    features of at most 20,000 training images. The result is evaluated as update 0."""
    layer_decay: Fraction | None = None
    """For fine-tuning: each layer has this factor, usually 0.65 to 0.9, times the learning rate of
    the next layer (default: all layers have the same learning rate)."""
    head_scale: PositiveFloat | None = None
    """The learning rate of the head, as a multiple of --lr (default: 10 to fine-tune more than the
    head with adamw and without --layer_decay, else 1)."""
    keep_batch_stats: bool | None = None
    """In training, batch normalisation uses the running statistics of the pretrained weights
    without updating them (default: true to fine-tune more than the head with adamw, if
    --sync_batchnorm is off, else false)."""
    freeze: Fixed[list[str]] = field(default_factory=list)
    """Names or patterns of layers or parameters that are not trained, such as conv1 'layer[12]';
    backbone is everything except the head. Layers whose parameters are all frozen stay in
    evaluation mode. If only the last part is trained, the outputs of the frozen layers are computed
    once and cached, see --feature_views."""
    feature_views: Annotated[NonNegativeInt, at_most(1000)] | None = None
    """With --freeze: the number of random views of each training image for which features are
    cached; epochs use these views in turn. With 0, no features are cached, and each epoch computes
    the frozen layers again (default: one view, the centre of the image)."""
    lr_schedule_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the schedule, such as '{end: 0.01}'."""
    warmup_steps: Steps | None = None
    """Updates over which the learning rate rises to --lr, or, if below 1, the fraction of the run's
    updates (default: 30 percent of the run for onecycle, else 0)."""
    cooldown_steps: Steps = 0
    """Updates at the end of the run over which the learning rate falls linearly to 0, or, if below
    1, the fraction of the run's updates; the schedule ends before them."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of the gradient over all parameters; a larger gradient is scaled down to it."""
    clip_value: PositiveFloat | None = None
    """Largest absolute value of each element of the gradient; it is limited before --clip_norm."""
    ema_decay: FractionBelow1 | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999, and
    evaluate it beside the weights; the average then decides which checkpoint is the best, and
    eval.py evaluates it (default: none)."""
    save_every: PositiveInt | None = None
    """Updates between checkpoints (default: one epoch, unless --save_seconds is given); the last
    update and a new best are always saved."""
    save_seconds: PositiveFloat | None = None
    """Seconds of training between checkpoints, checked about once a second; with --save_every,
    whichever is due first."""
    eval_every: PositiveInt | None = None
    """Updates between evaluations (default: one epoch); the last update is always evaluated."""
    log_every: Chosen[PositiveInt] = FROM_DATA
    """Updates between training records in the log (default: 50, or a quarter of the run's updates
    if that is less)."""
    eval_batch_size: PositiveInt = 256
    """Samples per process in an evaluation batch; the batches are the same on any topology."""
    metrics: bool = False
    """Compute macro F1, precision, recall and per-class accuracy in each evaluation (eval.py always
    does)."""
    profile: OneStart[bool] = False
    """Profile ten early updates, and evaluations and saves between them: write a trace to the run
    folder."""

    @property
    def fixed_order(self) -> bool:
        """Whether gradients are added up in one fixed order."""
        return self.microbatches is not None
