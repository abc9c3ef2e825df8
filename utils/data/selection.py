"""Select the samples that a run trains and evaluates on."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from utils.config.bounds import require
from utils.config.settings import TrainConfig
from utils.console import join_names, nfc, progress, say
from utils.data.check import check_images
from utils.data.record import Record, is_same, make_record, match_files, table_changes
from utils.data.sources import open_source
from utils.data.splits import (
    EVAL_NAMES,
    Data,
    Source,
    Split,
    hold_out,
    indices_in,
    note_forms,
    random_subset,
)
from utils.errors import UserError

_SHOWN = 8  # images named in an error


def load_data(config: TrainConfig, record: Record | None = None) -> Data:
    """Open the data set and choose its two splits. Raises ValueError or OSError if that fails.

    A resumed run passes the `record` of its checkpoint, to continue with the same samples. All
    images are checked, with a progress bar and messages.
    """
    if record is not None:
        record.check_choices(config)
    source = _open_checked(config, record)
    if record is not None and record.train.names is not None:
        opened = _recorded_splits(record, source, config.bad_images == "skip")
        train = _drop_unreadable(opened[0], config, keep_order=True)
        evaluation = _drop_unreadable(opened[1], config)
    else:
        (train, train_whole), (evaluation, eval_whole) = chosen = _choose_splits(source, config)
        if record is not None:
            changes = [
                *table_changes(record.train, train_whole),
                *table_changes(record.evaluation, eval_whole),
            ]
            fix = "a resumed run needs the same data: restore it"
            require(not changes, "; ".join(dict.fromkeys(changes)), fix)
        record, opened = make_record(config, source.class_names, *chosen), [*source.opened.values()]
    bad = {name: reason for split in opened for name, reason in split.unreadable().items()}
    train = random_subset(train, config.max_train_samples, config.seed)
    evaluation = random_subset(evaluation, config.max_eval_samples, config.seed)
    for split in (train, evaluation):
        check_kind(split, config)
    if len(source.class_names) < 2:
        problem = f"--data {config.data} has one class, {join_names(source.class_names)}"
        raise UserError("; ".join([problem, *train.notes]), "give at least two classes")
    return Data(train, evaluation, source.class_names, record, bad)


def load_split(
    config: TrainConfig,
    name: str | None,
    class_names: list[str] | Callable[[list[str]], list[str]],
    own_data: bool = True,
    record: Record | None = None,
) -> tuple[Split, list[str]]:
    """One split to evaluate, with labels that are indices into `class_names`, and these names.

    `class_names` can also be a function that takes the data's class names and returns this list.

    In the run's `own_data`, None selects the samples that the run evaluated on, and "train" those
    that it trained on, as recorded in the checkpoint's `record`, if there is one. In other data,
    None selects its evaluation split, or its only split. Any other name selects the split of that
    name. A data set that has all images of the record counts as the run's own, even if it has been
    moved.
    """
    source = _open_checked(config, record)
    if (
        not own_data
        and record is not None
        and name in (None, "train")
        and _holds_all(source, record)
    ):
        own_data, config = True, replace(config, **record.choices)
    if own_data and name in (None, "train"):
        split = _own_split(source, config, name == "train", record)
        shown = split.name
    else:
        asked = name or _eval_name(source, "", None)
        default = "train" if len(source.openers) > 1 else next(iter(source.openers))
        split = source.split(_existing(source, asked or default, "--split"))
        _report_trained_on(record, split)
        shown = split.name if asked or len(source.openers) > 1 else "all images"
    split = random_subset(_drop_unreadable(split, config), config.max_eval_samples, config.seed)
    check_kind(split, config)
    if callable(class_names):
        class_names = class_names(source.class_names)
        say(f"classes of the outputs, in order: {join_names(class_names, 6)}")
    return replace(renumber(split, source.class_names, class_names), name=shown), class_names


def _open_checked(config: TrainConfig, record: Record | None) -> Source:
    """The source that --data names. The images of a split are checked when the split is opened.

    The classes are those of the record, in its order, if they only differ in order or Unicode form.
    """
    source = open_source(config)
    # all must be known before samples are counted
    full = config.check_images == "full" or config.bad_images == "skip"
    found = wanted = source.class_names
    if record is not None and sorted(map(nfc, found)) == sorted(map(nfc, record.class_names)):
        source.class_names = wanted = record.class_names
        source.notes += note_forms(wanted, found)
    source.check = lambda split: check_images(
        replace(renumber(split, found, wanted), bits=config.image_bits),
        full,
        config.cache_dir,
        progress("checking images"),
    )
    return source


def _choose_splits(
    source: Source, config: TrainConfig
) -> tuple[tuple[Split, Split], tuple[Split, Split]]:
    """The samples to train on and to evaluate on, each with the whole split that they were taken
    from.
    """
    train_name = _train_name(source, config.train_split)
    whole = source.split(train_name)
    train = _drop_unreadable(whole, config)
    eval_name = None if config.eval_fraction else _eval_name(source, train_name, config.eval_split)
    if eval_name is None:
        train, evaluation = hold_out(train, config.eval_fraction or 0.1, config.seed)
        return (train, whole), (evaluation, whole)
    eval_whole = source.split(eval_name)
    if eval_whole is not whole:
        _check_apart(whole, eval_whole)
    return (train, whole), (_drop_unreadable(eval_whole, config), eval_whole)


def _check_apart(train: Split, evaluation: Split) -> None:
    """Raise ValueError if a link puts a folder of training images into the evaluation split."""
    used, other = (getattr(split.images, "scan", None) for split in (train, evaluation))
    if not (used and other):
        return
    for folder, name in other.class_of.items():
        if name and used.class_of.get(folder):
            raise UserError(
                f"{other.folder}: the folder of class {join_names([name])} is also used for training, in {used.folder}",
                "remove the link (without a split to evaluate on, a tenth of the training images is held out)",
            )


def _drop_unreadable(split: Split, config: TrainConfig, keep_order: bool = False) -> Split:
    """The split without unreadable images, or with others in their places to `keep_order`.

    With --bad_images error, raises UserError, which names them.
    """
    bad = [f"{name} ({reason})" for name, reason in split.unreadable().items()]
    if not bad:
        return split
    count = f"{len(bad)} of {len(split)} images of split {split.name!r}"
    names = ", ".join(bad[:_SHOWN]) + f" and {len(bad) - _SHOWN} more" * (len(bad) > _SHOWN)
    if config.bad_images == "error":
        fix = "fix these files, or leave them out with --bad_images skip"
        raise UserError(f"{count} cannot be read: {names}", fix)
    if not split.readable.any():
        raise UserError(
            f"no image of split {split.name!r} can be used ({len(split)} checked)",
            "give another --data",
        )
    action = "other images of their classes replace them" if keep_order else "will be left out"
    say(f"{count} cannot be used and {action}: {names}")
    return (
        split.replace_unreadable() if keep_order else split.select(np.flatnonzero(split.readable))
    )


def _recorded_splits(record: Record, source: Source, skip: bool) -> list[Split]:
    """The two original splits of a run. With `skip`, changed images are marked as unreadable."""
    wholes = [
        source.split(_existing(source, part.source, "the run used split")) for part in record.parts
    ]
    if source.class_names != record.class_names:
        problem = _class_changes(record.class_names, source.class_names)
        raise UserError(
            problem, "a resumed run needs the same classes: restore them, or start a new run"
        )
    found = [
        match_files(record, part, whole, source.class_names, skip)
        for part, whole in zip(record.parts, wholes, strict=True)
    ]
    changes = [text for one in found for text in one.changes]
    if changes:
        raise UserError(
            "; ".join(changes),
            "a resumed run needs the same images and labels: restore them, replace changed images "
            "with --bad_images skip, or start a new run",
        )
    for text in dict.fromkeys(text for one in found for text in one.new_files):
        say(text)
    return [one.split for one in found]


def _class_changes(before: list[str], now: list[str]) -> str:
    before, now = [*map(nfc, before)], [*map(nfc, now)]
    new, gone = [n for n in now if n not in before], [n for n in before if n not in now]
    parts = [f"new: {join_names(new, 3)}"] * bool(new) + [f"removed: {join_names(gone, 3)}"] * bool(
        gone
    )
    return f"the classes changed since training ({'; '.join(parts)})"


def _holds_all(source: Source, record: Record) -> bool:
    """Whether a data set has all samples of the record."""
    names = {part.source for part in record.parts}
    return names <= source.openers.keys() and all(
        is_same(part, source.split(part.source)) for part in record.parts
    )


def _own_split(source: Source, config: TrainConfig, training: bool, record: Record | None) -> Split:
    """The samples that the run trained on, or those that it evaluated on."""
    part = None if record is None else record.train if training else record.evaluation
    if record is not None and part is not None:
        whole = source.split(_existing(source, part.source, "the run used split"))
        if record.class_names != source.class_names:  # which some sources only know now
            say(_class_changes(record.class_names, source.class_names))
        if part.names is not None:
            found = match_files(record, part, whole, source.class_names)
            for text in (*found.changes, *found.new_files):
                say(text)
            return found.split
    train, evaluation = _choose_splits(source, config)
    split, whole = train if training else evaluation
    changes = table_changes(part, whole) if part else []
    if changes and train[1] is evaluation[1]:
        raise UserError(
            f"{'; '.join(changes)}; the held-out samples cannot be found again",
            f"evaluate all samples with --data {config.data} --split {whole.name}",
        )
    for text in changes:
        say(text)
    return split


def _report_trained_on(record: Record | None, split: Split) -> None:
    """Report how many of the images to evaluate on are training images of the run."""
    if record is not None and record.train.ends is not None and split.ends is not None:
        known = int(np.isin(split.ends[split.rows], record.train.ends).sum())
        if known:
            say(f"the run trained on {known} of the {len(split)} images of split {split.name!r}")


def _train_name(source: Source, wanted: str | None) -> str:
    if wanted is not None:
        return _existing(source, wanted, "--train_split")
    if "train" in source.openers:
        return "train"
    if len(source.openers) == 1 and not set(source.openers) & set(EVAL_NAMES):
        return next(iter(source.openers))
    raise UserError(
        "no split called train", f"set --train_split to one of {join_names(source.openers)}"
    )


def _eval_name(source: Source, train_name: str, wanted: str | None) -> str | None:
    if wanted is not None:
        return _existing(source, wanted, "--eval_split")
    return next(
        (name for name in EVAL_NAMES if name in source.openers and name != train_name), None
    )


def _existing(source: Source, name: str, flag: str) -> str:
    """The name of the split that `name`, or an alias, refers to.

    Raises ValueError, with `flag`, if there is none.
    """
    name = source.aliases.get(name, name)
    if name not in source.openers:
        raise UserError(f"{flag} {name}: no such split", f"use one of {join_names(source.openers)}")
    return name


def renumber(split: Split, class_names: list[str], wanted: list[str]) -> Split:
    """Map labels, indices into `class_names`, to indices into `wanted`.

    Raises ValueError if `wanted` lacks a class of the split.
    """
    if class_names == wanted:
        return split
    table = indices_in(wanted, class_names)
    is_multi = split.labels.ndim == 2
    present = np.flatnonzero(split.labels.any(0)) if is_multi else np.unique(split.labels)
    unknown = sorted({class_names[label] for label in present if table[label] < 0})
    if unknown:
        raise UserError(
            f"the checkpoint does not have the class {unknown[0]!r}, only {join_names(wanted)}",
            "evaluate data with these classes",
        )
    if not is_multi:
        return replace(split, labels=table[split.labels])
    labels = np.zeros((len(split), len(wanted)), np.uint8)
    labels[:, table[present]] = split.labels[:, present]
    return replace(split, labels=labels)


def check_kind(split: Split, config: TrainConfig) -> None:
    """Raise ValueError if the labels of a split do not suit --task, or if none of its images has
    one.
    """
    if split.labels.ndim == 1:
        if config.task == "multilabel":
            problem = f"--task multilabel: each image of --data {config.data} has one label"
            raise UserError(problem, "use lists of labels, or train with --task classification")
    elif config.task not in ("auto", "multilabel"):
        problem = f"--task {config.task}: an image of --data {config.data} may have several labels"
        raise UserError(problem, "use other data, or train with --task multilabel")
    elif not split.labels.any():
        raise UserError(f"no image of split {split.name!r} has a label", "fix the labels")
