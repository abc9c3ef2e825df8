"""Heartbeats: what each rank is doing, exchanged through the store."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import Store

from utils.waiting import call_with_timeout

if TYPE_CHECKING:
    from utils.launch.rendezvous import Member

TICK = 0.5  # seconds between heartbeats
ANSWER = 3.0  # seconds that the store may take to answer
SILENT = 5.0  # seconds without a heartbeat after which a rank is reported as silent


class Beat(NamedTuple):
    """What a rank writes to the store."""

    entered: int  # the collectives that it has entered
    place: str  # what it is doing
    seconds: float  # how long it has run, without pauses


class Heard(NamedTuple):
    """The last heartbeat of a rank, and when it arrived."""

    beat: Beat
    since: float


@dataclass
class Ended:
    """Which rank has exited and why, and when this rank has read it."""

    text: str
    since: float


class Heartbeats:
    """Writes the heartbeat of this rank to the store, and reads those of the others only while this
    rank waits for them. Otherwise N ranks would each read N heartbeats from one store.

    Times are as in `own_beat`, in seconds.
    """

    def __init__(
        self, rank: int, store: Store, members: list["Member"], own_beat: Callable[[], Beat]
    ):
        self.ended: Ended | None = None  # once another rank has exited
        self._rank = rank
        self._members = members
        self._own_beat = own_beat
        self._heard: dict[int, Heard] = {}  # empty unless this rank waits
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=ANSWER))
        self._answered = self._now  # when the store last answered
        self._failed = False

    @property
    def _now(self) -> float:
        return self._own_beat().seconds

    @property
    def store_lost(self) -> bool:
        """Whether the store cannot be reached."""
        return self._failed or self._now - self._answered > ANSWER + TICK

    def run(self, stop: threading.Event) -> None:
        """Exchange heartbeats, in a thread of its own, because the store may never answer."""
        try:
            while not stop.wait(TICK):
                self._exchange()
                self._answered = self._now
        except RuntimeError:  # not tried again, because PyTorch logs each failure
            self._failed = True

    def _exchange(self) -> None:
        store = self._store
        store.set(f"beat-{self._rank}", json.dumps(self._own_beat()))
        if self.ended is None and store.check(["ended"]):
            self.ended = Ended(store.get("ended").decode(), self._now)
        heard = self._heard
        keys = [f"beat-{rank}" for rank in heard]
        if keys and store.check(keys):
            for rank, text in zip(heard, store.multi_get(keys), strict=True):
                beat = Beat(*json.loads(text))
                if heard[rank].beat != beat:
                    heard[rank] = Heard(beat, self._now)

    def listen(self, to_others: bool) -> None:
        """Start or stop reading the heartbeats of the others."""
        if not to_others:
            self._heard = {}
        elif not self._heard:
            nothing = Heard(Beat(0, "", 0.0), self._now)
            self._heard = dict.fromkeys([member.rank for member in self._members], nothing)

    def write_end(self, text: str) -> bool:
        """Let the others read why this rank exits; returns whether it is the first that exits."""
        with suppress(RuntimeError):
            compare_set = partial(self._store.compare_set, "ended", "", text)
            return call_with_timeout(compare_set, ANSWER).decode() == text
        return True

    def describe_late(self, silence: float = SILENT) -> str:
        """The ranks that keep this rank waiting, and what they are doing; empty if there are none.

        These are the ranks that have entered fewer collectives or have been silent for `silence`
        seconds.
        """
        own = self._own_beat()
        heard = self._heard
        parts = []
        for member in self._members:
            if member.rank == self._rank or member.rank not in heard:
                continue
            beat, since = heard[member.rank]
            seconds = own.seconds - since
            is_silent = seconds > silence
            if is_silent or beat.entered < own.entered:
                who = f"rank {member.rank} ({member.host}, process {member.process})"
                parts.append(f"{who}, {_doing(beat.place, seconds, is_silent)}")
        if len(parts) > 4:
            parts = [*parts[:4], f"and {len(parts) - 4} more"]
        return "; ".join(parts)

    def longest_silence(self) -> float:
        """The longest time without a heartbeat from another rank, in seconds."""
        others = [heard.since for rank, heard in self._heard.items() if rank != self._rank]
        return self._now - min(others)

    def is_first(self) -> bool:
        """Whether this rank is the lowest of those that wait."""
        own = self._own_beat()
        for rank, (beat, since) in self._heard.items():
            waits = beat.entered >= own.entered and own.seconds - since < SILENT
            if waits and rank < self._rank:
                return False
        return True


def _doing(place: str, seconds: float, is_silent: bool) -> str:
    silent = f"silent for {seconds:.0f} s"
    if not place:
        return silent
    return f"{silent}, last at: {place}" if is_silent else f"at: {place}"
