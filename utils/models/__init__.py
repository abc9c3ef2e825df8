"""Models by name, their layers and weights."""

# parts of a model
from utils.models.layers import (
    TestTimeAugmentation,
    check_batch_norm,
    checkpoint_blocks,
    find_blocks,
    freeze,
    has_batch_norm,
    head_prefixes,
    keep_batch_stats,
    main_output,
    restored_buffers,
    shape_of,
)

# tensors, also of a model that FSDP2 shards
from utils.models.sharded import (
    copy_into,
    count_units,
    distinct_state,
    full_tensor,
    is_sharded,
    local_shard,
    reshard,
    tied_names,
)

# the values of tensors
from utils.models.values import bad_tensors, hash_tensors, sum_bits, sum_words

# --ema_decay
from utils.models.weight_average import WeightAverage

# files of weights
from utils.models.weight_files import load_pickled, read_any, read_weights

# models by name
from utils.models.zoo import OWN_MODELS, build_model, check_model, input_spec, resize_input
