"""Select the samples that a run trains and evaluates on."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from utils.config import require
from utils.console import join_names, say
from utils.data.check import check_images
from utils.data.finding import find_again
from utils.data.folders import left_out_notes
from utils.data.hold_out import group_keys, hold_out, random_subset
from utils.data.labels import check_kind, distinct, renumber
from utils.data.sources import eval_split_name, known_split, open_source, train_split_name
from utils.data.spelling import doubts
from utils.data.splits import Data, Source, Split
from utils.data.table import Part, SampleTable
from utils.errors import UserError
from utils.settings.data import DataSettings


def load_data(config: DataSettings, table: SampleTable | None = None) -> Data:
    """Open the data set and choose its two splits. Raises ValueError or OSError if that fails.

    A resumed run passes the `table` of its checkpoint, to continue with the same samples. A new run
    checks all images. Shows progress bars and messages.
    """
    data = _kept(config, table) if table else _new(config)
    train = _drop_unreadable(data.train, config, keep_order=True)
    evaluation = _drop_unreadable(data.evaluation, config)
    train = random_subset(train, config.max_train_samples, config.seed)
    evaluation = random_subset(evaluation, config.max_eval_samples, config.seed)
    for split in (train, evaluation):
        check_kind(split, config)
    problem = f"--data {config.data} has one class, {join_names(data.class_names)}"
    problem = "; ".join([problem, *train.notes])
    require(len(data.class_names) > 1, problem, "give at least two classes")
    return replace(data, train=train, evaluation=evaluation)


def _new(config: DataSettings) -> Data:
    """The samples of a new run, and their table."""
    source = _open_checked(config)
    pairs = _choose_splits(source, config)
    checked = source.opened.values()
    bad = {name: reason for split in checked for name, reason in split.unreadable().items()}
    train, evaluation = (Part.of(*pair) for pair in pairs)
    table = SampleTable(train, evaluation, source.class_names, bad)
    return Data(train.split, evaluation.split, source.class_names, table, bad)


def _kept(config: DataSettings, table: SampleTable) -> Data:
    """The samples of a table. Raises UserError if one is missing or has changed.

    With --bad_images skip, these get errors instead, also in the table.
    """
    source = cache(lambda: _open_checked(config, table))
    skip = config.bad_images == "skip"
    (train, evaluation), lines = find_again(table.parts, config, source, skip)
    changes = dict.fromkeys(lines)
    fix = (
        "a resumed run needs the same images and labels: restore them, or start a new run "
        "(--bad_images skip replaces missing and changed files)"
    )
    require(not changes, "; ".join(changes), fix)
    table = table.renewed(train, evaluation)
    bad = table.left_out | train.unreadable() | evaluation.unreadable()
    return Data(train, evaluation, table.class_names, table, bad)


def load_split(
    config: DataSettings,
    name: str | None,
    class_names: list[str] | Callable[[list[str]], list[str]],
    table: SampleTable | None = None,
    own_data: bool = False,
) -> tuple[Split, list[str]]:
    """One split to evaluate, with labels that are indices into `class_names`, and these names.

    `class_names` can also be a function that takes the data's class names and returns this list.

    In the `own_data` of the run with this `table`, None selects the samples that it evaluated on,
    and "train" those that it trained on. In other data, None selects its evaluation split, or its
    only split. Any other name selects the split of that name. A data set that has all images of the
    table counts as the run's own, even if it has been moved.
    """
    source = cache(lambda: _open_checked(config, table))
    if own_data and not table and name in (None, "train"):
        say("the checkpoint has no table of its samples: they are chosen again from --data")
        (train, _), (evaluation, _) = _choose_splits(source(), config)
        split = train if name else evaluation
        own_names = source().class_names
        shown = split.name
    elif table and name in (None, "train") and (own_data or _has_all(source, config, table)):
        split = _split_of_run(source, config, table, name)
        own_names = table.class_names if table.train.has_files else source().class_names
        shown = split.name
    else:
        split, shown = _split_of_data(source(), name)
        own_names = source().class_names
        if table:
            _report_trained_on(table, split)
    split = random_subset(_drop_unreadable(split, config), config.max_eval_samples, config.seed)
    check_kind(split, config)
    if callable(class_names):
        class_names = class_names(own_names)
        say(f"classes of the outputs, in order: {join_names(class_names, 6)}")
    return replace(renumber(split, own_names, class_names), name=shown), class_names


def _split_of_run(
    source: Callable[[], Source], config: DataSettings, table: SampleTable, name: str | None
) -> Split:
    """The samples that the run evaluated on, or with "train" those that it trained on.

    Prints what has changed since. Raises UserError if a change could mix the two.
    """
    part = table.train if name else table.evaluation
    (split,), changes = find_again([part], config, source)
    is_lost = not part.has_files and table.train.source == table.evaluation.source
    if changes and is_lost:
        problem = f"{'; '.join(changes)}; the held-out samples cannot be found again"
        fix = f"evaluate all samples with --data {config.data} --split {part.source}"
        raise UserError(problem, fix)
    for line in changes:
        say(line)
    return split


def _has_all(source: Callable[[], Source], config: DataSettings, table: SampleTable) -> bool:
    """Whether a data set has all samples of the table."""
    try:
        splits, changes = find_again(table.parts, config, source)
    except ValueError:  # it lacks a split, or has other kinds of images
        return False
    return not (changes or any(split.errors for split in splits))


def _split_of_data(source: Source, name: str | None) -> tuple[Split, str]:
    """The split `name`, or by default the evaluation split or the only one; and how a record names
    it.
    """
    asked = name or eval_split_name(source, "", None)
    if not asked and len(source.openers) == 1:
        return source.split(next(iter(source.openers))), "all images"
    split = source.split(known_split(source, asked or "train", "--split"))
    return split, split.name


def _open_checked(config: DataSettings, table: SampleTable | None = None) -> Source:
    """The source that --data names. The images of a split are checked when the split is opened.

    The classes of the table, if any, come first and in its order.
    """
    source = open_source(config)
    # all must be known before samples are counted
    full = config.check_images == "full" or config.bad_images == "skip"
    found = source.class_names
    source.notes += left_out_notes(f"--data {config.data}", doubts(found))
    if table:
        source.class_names = distinct([*table.class_names, *found])
    wanted = source.class_names
    source.check = lambda split: check_images(
        replace(renumber(split, found, wanted), bits=config.image_bits), full, config.cache_dir
    )
    return source


def _choose_splits(source: Source, config: DataSettings) -> tuple[tuple[Split, Split], ...]:
    """The samples to train on and to evaluate on, each with the whole split that they were taken
    from.
    """
    train_name = train_split_name(source, config.train_split)
    by = config.group_by
    is_part = config.fold or by
    if is_part and len(source.openers) > 1:
        source.notes += (f"evaluation is on a part of split {train_name}; others are not used",)
    whole = source.split(train_name)
    train = _drop_unreadable(whole, config)
    fraction = config.eval_fraction
    eval_name = None
    if not is_part and not fraction:
        eval_name = eval_split_name(source, train_name, config.eval_split)
    if eval_name is None:
        keys: list[str] = []
        if by:
            keys = group_keys(train, by, source.class_names)
            problem = "no such column and no match in file names that two images share"
            fix = "name a column, folder or pattern"
            require(len({*keys}) < len(keys), f"--group_by {by}: {problem}", fix)
        train, evaluation = hold_out(train, fraction or 0.1, config.seed, config.fold, keys)
        return (train, whole), (evaluation, whole)
    eval_whole = source.split(eval_name)
    return (train, whole), (_drop_unreadable(eval_whole, config), eval_whole)


def _drop_unreadable(split: Split, config: DataSettings, keep_order: bool = False) -> Split:
    """The split without unreadable images, or with others in their places to `keep_order`.

    With --bad_images error, raises UserError, which names them.
    """
    bad = [f"{name} ({reason})" for name, reason in split.unreadable().items()]
    if not bad:
        return split
    count = f"{len(bad)} of {len(split)} images of split {split.name!r}"
    fix = "correct these paths or files, or leave them out with --bad_images skip"
    problem = f"{count} cannot be read: {join_names(bad, 8)}"
    require(config.bad_images == "skip", problem, fix)
    problem = f"no image of split {split.name!r} can be used ({len(split)} checked)"
    require(split.readable.any(), problem, "give another --data")
    action = "other images of their classes replace them" if keep_order else "will be left out"
    say(f"{count} cannot be used and {action}: {join_names(bad, 8)}")
    if keep_order:
        return split.replace_unreadable()
    return split.select(np.flatnonzero(split.readable))


def _report_trained_on(table: SampleTable, split: Split) -> None:
    """Report how many of the images to evaluate on are training images of the run."""
    if table.train.checksums is None or split.checksums is None:
        return
    if known := np.isin(split.checksums[split.image_index], table.train.checksums).sum():
        say(f"the run trained on {known} of the {len(split)} images of split {split.name!r}")
