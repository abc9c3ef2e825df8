"""Select the samples that a run trains and evaluates on."""

from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from utils.config import require
from utils.console import join_names, nfc, say
from utils.data.check import check_images
from utils.data.folders import left_out_notes
from utils.data.hold_out import group_keys, hold_out, random_subset
from utils.data.labels import check_kind, renumber
from utils.data.samples import (
    ListedSplit,
    SampleList,
    is_same,
    list_samples,
    match_files,
    table_changes,
)
from utils.data.sources import eval_split_name, known_split, open_source, train_split_name
from utils.data.spelling import doubts
from utils.data.splits import Data, Source, Split
from utils.settings.data import DataSettings


def load_data(config: DataSettings, samples: SampleList | None = None) -> Data:
    """Open the data set and choose its two splits. Raises ValueError or OSError if that fails.

    A resumed run passes the `samples` of its checkpoint, to continue with the same ones. All images
    are checked, with a progress bar and messages.
    """
    source = _open_checked(config, samples)
    if not samples:
        pairs = _choose_splits(source, config)
        samples = list_samples(config, source.class_names, *pairs)
        splits = [split for split, _ in pairs]
    else:
        skip = config.bad_images == "skip"
        splits, changes = _find_again(source, config, samples, samples.parts, skip)
        changes += _class_changes(samples.class_names, source.class_names)
        fix = (
            "a resumed run needs the same images and labels: restore them, or start a new run "
            "(--bad_images skip replaces changed files)"
        )
        require(not changes, "; ".join(dict.fromkeys(changes)), fix)
    checked = *source.opened.values(), *splits
    bad = {name: reason for split in checked for name, reason in split.unreadable().items()}
    train = _drop_unreadable(splits[0], config, keep_order=True)
    evaluation = _drop_unreadable(splits[1], config)
    train = random_subset(train, config.max_train_samples, config.seed)
    evaluation = random_subset(evaluation, config.max_eval_samples, config.seed)
    for split in (train, evaluation):
        check_kind(split, config)
    problem = f"--data {config.data} has one class, {join_names(source.class_names)}"
    problem = "; ".join([problem, *train.notes])
    require(len(source.class_names) > 1, problem, "give at least two classes")
    return Data(train, evaluation, source.class_names, samples, bad)


def load_split(
    config: DataSettings,
    name: str | None,
    class_names: list[str] | Callable[[list[str]], list[str]],
    samples: SampleList | None = None,
    own_data: bool = False,
) -> tuple[Split, list[str]]:
    """One split to evaluate, with labels that are indices into `class_names`, and these names.

    `class_names` can also be a function that takes the data's class names and returns this list.

    In the `own_data` of the run that listed the `samples`, None selects those that it evaluated on,
    and "train" those that it trained on. In other data, None selects its evaluation split, or its
    only split. Any other name selects the split of that name. A data set that has all images of the
    list counts as the run's own, even if it has been moved.
    """
    by = samples and samples.choices["group_by"]
    source = _open_checked(replace(config, group_by=by or config.group_by), samples)
    if samples and name in (None, "train") and (own_data or _holds_all(source, samples)):
        config = replace(config, **samples.choices)
        split = _split_of_run(source, config, samples, name)
        shown = split.name
    else:
        split, shown = _split_of_data(source, name)
        if samples:
            _report_trained_on(samples, split)
    split = random_subset(_drop_unreadable(split, config), config.max_eval_samples, config.seed)
    check_kind(split, config)
    if callable(class_names):
        class_names = class_names(source.class_names)
        say(f"classes of the outputs, in order: {join_names(class_names, 6)}")
    return replace(renumber(split, source.class_names, class_names), name=shown), class_names


def _split_of_run(
    source: Source, config: DataSettings, samples: SampleList, name: str | None
) -> Split:
    """The samples that the run evaluated on, or with "train" those that it trained on.

    Prints what has changed since. Raises UserError if a change could mix the two.
    """
    part = samples.train if name else samples.evaluation
    (split,), changes = _find_again(source, config, samples, [part])
    is_lost = part.names is None and samples.train.source == samples.evaluation.source
    problem = f"{'; '.join(changes)}; the held-out samples cannot be found again"
    fix = f"evaluate all samples with --data {config.data} --split {part.source}"
    require(not (changes and is_lost), problem, fix)
    for line in [*_class_changes(samples.class_names, source.class_names), *changes]:
        say(line)
    return split


def _split_of_data(source: Source, name: str | None) -> tuple[Split, str]:
    """The split `name`, or by default the evaluation split or the only one; and how a record names
    it.
    """
    asked = name or eval_split_name(source, "", None)
    if not asked and len(source.openers) == 1:
        return source.split(next(iter(source.openers))), "all images"
    split = source.split(known_split(source, asked or "train", "--split"))
    return split, split.name


def _open_checked(config: DataSettings, samples: SampleList | None) -> Source:
    """The source that --data names. The images of a split are checked when the split is opened.

    The classes are those of the samples, in their order, if only the order or the Unicode form
    differs.
    """
    source = open_source(config)
    # all must be known before samples are counted
    full = config.check_images == "full" or config.bad_images == "skip"
    found = source.class_names
    source.notes += left_out_notes(f"--data {config.data}", doubts(found))
    if samples and sorted(map(nfc, found)) == sorted(map(nfc, samples.class_names)):
        source.class_names = samples.class_names
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


def _find_again(
    source: Source,
    config: DataSettings,
    samples: SampleList,
    parts: Collection[ListedSplit],
    skip_changed: bool = False,
) -> tuple[list[Split], list[str]]:
    """These parts of a run's samples, and lines about what has changed since it listed them."""
    flag = "the run used split"
    pairs = [(part, source.split(known_split(source, part.source, flag))) for part in parts]
    changes: list[str] = []
    if samples.train.names is None:
        train, evaluation = (part.source for part in samples.parts)
        # not another split that has appeared since
        if train != evaluation or config.eval_split:
            config = replace(config, eval_split=evaluation, eval_fraction=None)
        elif not config.fold:
            config = replace(config, eval_fraction=config.eval_fraction or 0.1)
        splits_now = _choose_splits(source, replace(config, train_split=train))
        chosen = zip(samples.parts, splits_now, strict=True)
        for part, whole in pairs:
            changes += table_changes(part, whole)
        return [split for own, (split, _) in chosen if any(own is p for p in parts)], changes
    splits = []
    for part, whole in pairs:
        split, lines, new = match_files(samples, part, whole, source.class_names, skip_changed)
        splits.append(split)
        changes += lines
        if new:
            problem = f"split {whole.name!r} has new files since training, which are left out"
            say(f"{problem}: {join_names(new, 3)}")
    return splits, changes


def _class_changes(before: list[str], now: list[str]) -> list[str]:
    old, new = {*map(nfc, before)}, {*map(nfc, now)}
    if old == new:
        return []
    added = join_names(sorted(new - old), 3) or "none"
    removed = join_names(sorted(old - new), 3) or "none"
    return [f"the classes changed since training (new: {added}, removed: {removed})"]


def _holds_all(source: Source, samples: SampleList) -> bool:
    """Whether a data set has all samples of the list."""
    return all(
        part.source in source.openers and is_same(part, source.split(part.source))
        for part in samples.parts
    )


def _report_trained_on(samples: SampleList, split: Split) -> None:
    """Report how many of the images to evaluate on are training images of the run."""
    if samples.train.ends is None or split.checksums is None:
        return
    if known := np.isin(split.checksums[split.image_index], samples.train.ends).sum():
        say(f"the run trained on {known} of the {len(split)} images of split {split.name!r}")
