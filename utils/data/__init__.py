"""From files to batches on the device."""

# random changes of training images
from utils.data.augment import AUGMENTATIONS, Transform, make_augmentation

# batches on the device, from those of a loader
from utils.data.batches import DeviceLoader

# arrays in files of the cache
from utils.data.cache import cached, open_cached

# finds unreadable images
from utils.data.check import check_images

# data sets that return one microbatch at a time
from utils.data.datasets import (
    ArrayDataset,
    Batch,
    ImageDataset,
    PhotoDataset,
    describe_place,
    keep_on_device,
)

# pixels from the bytes of an image
from utils.data.decode import decode_image, pixels_key

# the data set of a split; small images are decoded once
from utils.data.decoded import make_dataset

# the libraries that decode
from utils.data.decoders import DECODERS

# image folders
from utils.data.folders import left_out_notes

# groups of samples that stay together, and random subsets
from utils.data.hold_out import group_keys, random_subset

# what is in folders
from utils.data.listing import Scan, archives_at, files_below, is_archive

# which samples form which update
from utils.data.order import Microbatch, Plan, fold_in, make_plan

# samplers of updates and of evaluation blocks
from utils.data.samplers import UpdateSampler, evaluation_blocks

# the samples to train and evaluate on
from utils.data.selection import load_data, load_split

# photographs that are reduced once
from utils.data.shrunk import shrink, suggest_shrink

# what --data names
from utils.data.sources import SOURCES, absolute_data, check_source, has_columns

# the input of a model
from utils.data.spec import EVAL_CROP, SMALL, InputSpec, sides

# splits: their labels, and images that are not decoded yet
from utils.data.splits import Data, Files, Source, Split, fingerprint_of, whole_split

# the table of a run's samples
from utils.data.table import TABLE_FILE, SampleTable, name_of_table, read_table, sha256_in

# policies of --auto_augment
from utils.data.transforms import AUTO_AUGMENTS

# loaders and their processes
from utils.data.workers import make_loaders
