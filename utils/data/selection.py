"""Which samples a run trains and evaluates on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from utils.config.settings import TrainConfig
from utils.console import Terminal, join_names
from utils.data.check import check_images, refuse_bad
from utils.data.decode import peek
from utils.data.record import Record, differences, is_same, make_record, match_files, table_changes
from utils.data.sources import _open
from utils.data.spec import SMALL
from utils.data.splits import EVAL_NAMES, Data, Source, Split, hold_out, random_subset, renumber

SILENT = Terminal(False)


def load_data(
    config: TrainConfig,
    record: Record | None = None,
    terminal: Terminal = SILENT,
) -> Data:
    """Find the data set and its two splits; raises ValueError or OSError with the fix in its text.

    A resumed run passes the `record` of its checkpoint, to continue with the same samples. All images are checked, and
    `terminal` shows progress and messages.
    """
    source = _open(config)
    source.check = partial(_check, config=config, progress=terminal.progress("checking images"))
    if record is not None and record.has_same_choices(config) and record.train.names is not None:
        train, evaluation = _as_recorded(record, source, config, terminal)
        bad = _say_left_out((train, evaluation), terminal)
    else:
        (train, whole), (evaluation, other_whole) = _two_splits(source, config)
        fresh = make_record(config, source.class_names, (train, whole), (evaluation, other_whole))
        if record is not None:
            _check_same(record, fresh, whole, other_whole if record.has_same_choices(config) else None)
        record = fresh
        bad = _say_left_out(source.opened, terminal)
    train = random_subset(train, config.max_train_samples, config.seed)
    evaluation = random_subset(evaluation, config.max_eval_samples, config.seed)
    if len(source.class_names) < 2:
        raise ValueError(f"--data {config.data} has one class, {join_names(source.class_names)}; give at least two")
    return Data(train, evaluation, source.class_names, record, bad)


def _two_splits(source: Source, config: TrainConfig) -> tuple[tuple[Split, Split], tuple[Split, Split]]:
    """What to train on and what to evaluate on, each with the whole split that it was taken from."""
    train_name = _train_name(source, config.train_split)
    whole = source.split(train_name)
    train = _usable(whole, config)
    eval_name = None if config.eval_fraction else _eval_name(source, train_name, config.eval_split)
    if eval_name is None:
        train, evaluation = hold_out(train, config.eval_fraction or 0.1, config.seed)
        return (train, whole), (evaluation, whole)
    return (train, whole), (_usable(source.split(eval_name), config), source.split(eval_name))


def _usable(split: Split, config: TrainConfig) -> Split:
    """The split without unreadable images; with --bad_images refuse, ValueError names them."""
    if config.bad_images == "refuse":
        refuse_bad(split)
    if split.readable.all():
        return split
    _check_any(split)
    return split.select(np.flatnonzero(split.readable))


def _check_any(split: Split) -> None:
    if not split.readable.any():
        raise ValueError(f"no image of split {split.name!r} can be used ({len(split)} checked); give another --data")


def _as_recorded(record: Record, source: Source, config: TrainConfig, terminal: Terminal) -> tuple[Split, Split]:
    """The two splits that a run began with; unreadable images keep their places."""
    wholes = [source.split(_known(source, part.source, "the run used split")) for part in record.parts]
    if source.class_names != record.class_names:
        changes = _class_changes(record.class_names, source.class_names)
        raise ValueError(f"{changes}; a resume needs the same classes: restore them, or start a new run")
    found = [match_files(record, *pair, source.class_names) for pair in zip(record.parts, wholes, strict=True)]
    skip = config.bad_images == "skip"
    changed = [text for one in found for text in one.labels + ([] if skip else one.images)]
    if changed:
        raise ValueError(
            f"{'; '.join(changed)}; a resume needs the same images and labels: restore them, leave out changed images "
            "with --bad_images skip, or start a new run"
        )
    for text in dict.fromkeys(text for one in found for text in one.new):
        terminal.print(text)
    splits = [_without(one.split, one.changed) for one in found]
    for split in splits:
        if not skip:
            refuse_bad(split)
        _check_any(split)
    return splits[0], splits[1]


def _without(split: Split, changed: np.ndarray) -> Split:
    """The split without the images at these positions, which have changed."""
    bad = dict.fromkeys(split.rows[changed].tolist(), "changed since the run began")
    return replace(split, bad={**split.bad, **bad}) if bad else split


def _class_changes(before: list[str], now: list[str]) -> str:
    new, gone = [n for n in now if n not in before], [n for n in before if n not in now]
    parts = [f"new: {join_names(new, 3)}"] * bool(new) + [f"removed: {join_names(gone, 3)}"] * bool(gone)
    return f"the classes changed since training ({'; '.join(parts) or 'another order'})"


def _check_same(record: Record, fresh: Record, whole: Split, other_whole: Split | None) -> None:
    """Raise ValueError unless the training samples are those that the run began with."""
    changes = differences(record.train, fresh.train, whole)
    if not changes and other_whole is not None:
        changes = differences(record.evaluation, fresh.evaluation, other_whole)
    if changes:
        raise ValueError(
            f"{'; '.join(changes)}; a resume needs the same training data, --seed, --train_split, --eval_split and "
            "--eval_fraction"
        )


def _say_left_out(splits: Sequence[Split], terminal: Terminal) -> dict[str, str]:
    """Report the images that cannot be read and are left out; returns them with the reasons."""
    images = {}
    for split in splits:
        bad = {split.describe(p): split.bad[int(split.rows[p])] for p in np.flatnonzero(~split.readable)}
        for name, reason in list(bad.items())[:1]:
            count = f"{len(bad)} of {len(split)} images of split {split.name!r}"
            terminal.print(f"{count} cannot be used and will be left out; the first is {name} ({reason})")
        images |= bad
    return images


def _check(split: Split, config: TrainConfig, progress: Callable, small: bool | None = None) -> Split:
    """Check all images as the settings say."""
    look = partial(check_images, cache_dir=config.cache_dir, progress=progress)
    checked = look(split, full=config.check_images == "full")
    if config.bad_images == "skip" and config.check_images != "full" and checked.ends is not None:
        # Small images are all decoded before training: those that fail must be known before samples are counted.
        if small is None:
            _, size = peek(checked, skip=True)
            small = (config.image_size or max(size or (SMALL + 1,))) <= SMALL
        return look(split, full=True) if small else checked
    return checked


def load_split(
    config: TrainConfig,
    name: str | None,
    class_names: list[str],
    own_data: bool = True,
    record: Record | None = None,
    terminal: Terminal = SILENT,
    small: bool | None = None,
) -> Split:
    """One split to evaluate, its labels counted as in `class_names`.

    Of the run's `own_data`, None means what the run evaluated on and "train" what it trained on, hold-outs included:
    the files in the checkpoint's `record`, if there is one. Of other data, None means its evaluation split, or
    all there is if it has only one. Any other name is that split. A data set that holds all of the run's images counts
    as its own, wherever it is stored. `small` says whether the model's images are decoded beforehand.
    """
    source = _open(config)
    source.check = partial(_check, config=config, progress=terminal.progress("checking images"), small=small)
    if not own_data and record is not None and name in (None, "train") and _holds(source, record):
        own_data, config = True, replace(config, **record.choices)
    if own_data and name in (None, "train"):
        split = _own_split(source, config, name, record, terminal)
    else:
        name = name or _eval_name(source, "", None) or _train_name(source, None)
        split = source.split(_known(source, name, "--split"))
        _say_trained_on(record, split, terminal)
    if config.bad_images == "skip":
        _say_left_out([split], terminal)
    split = _usable(split, config)
    return renumber(random_subset(split, config.max_eval_samples, config.seed), source.class_names, class_names)


def _holds(source: Source, record: Record) -> bool:
    """Whether this is the data set of the record."""
    names = {part.source for part in record.parts}
    return names <= source.openers.keys() and all(is_same(part, source.split(part.source)) for part in record.parts)


def _own_split(
    source: Source, config: TrainConfig, name: str | None, record: Record | None, terminal: Terminal
) -> Split:
    """What the run trained on, or what it evaluated on."""
    if record is not None and record.class_names != source.class_names:
        terminal.print(_class_changes(record.class_names, source.class_names))
    part = record and (record.train if name == "train" else record.evaluation)
    if part and part.names is not None:
        whole = source.split(_known(source, part.source, "the run used split"))
        found = match_files(record, part, whole, source.class_names)
        for text in (*found.images, *found.labels, *found.new):
            terminal.print(text)
        return found.split
    train, evaluation = _two_splits(source, config)
    split, whole = train if name == "train" else evaluation
    if record is None and train[1] is evaluation[1]:
        terminal.print(
            "the checkpoint has no record of its samples: the hold-out is right only if no sample was added since"
        )
    changes = table_changes(part, whole) if part else []
    if changes and train[1] is evaluation[1]:
        raise ValueError(
            f"{'; '.join(changes)}; the held-out samples cannot be found any more; evaluate all samples with "
            f"--data {config.data} --split {whole.name}"
        )
    for text in changes:
        terminal.print(text)
    return split


def _say_trained_on(record: Record | None, split: Split, terminal: Terminal) -> None:
    """Warn when images to evaluate on are the run's training images."""
    if record is not None and record.train.ends and split.ends is not None:
        known = int(np.isin(split.ends[split.rows], record.train.ends).sum())
        if known:
            terminal.print(f"the run trained on {known} of the {len(split)} images of split {split.name!r}")


def _train_name(source: Source, wanted: str | None) -> str:
    if wanted is not None:
        return _known(source, wanted, "--train_split")
    if "train" in source.openers:
        return "train"
    if len(source.openers) == 1 and not set(source.openers) & set(EVAL_NAMES):
        return next(iter(source.openers))
    raise ValueError(f"no split called train; choose one with --train_split out of {join_names(source.openers)}")


def _eval_name(source: Source, train_name: str, wanted: str | None) -> str | None:
    if wanted is not None:
        return _known(source, wanted, "--eval_split")
    return next((name for name in EVAL_NAMES if name in source.openers and name != train_name), None)


def _known(source: Source, name: str, flag: str) -> str:
    name = source.aliases.get(name, name)
    if name not in source.openers:
        raise ValueError(f"{flag} {name}: no such split; there are {join_names(source.openers)}")
    return name
