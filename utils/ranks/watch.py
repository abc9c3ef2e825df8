"""Who keeps the others waiting: each rank says where it is, and one that waits long says for whom."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from utils.launch.rendezvous import Member
from utils.ranks.stopping import EXIT_RESUME
from utils.waiting import call_with_timeout

_TICK = 0.5  # seconds between two looks
_LATE = 1.0  # seconds that a tick may be late; in any longer time this process was paused
_ANSWER = 3.0  # seconds that the store may take for one
_SILENT = 5.0  # seconds without a sign of life after which a rank is said to be silent
_LATER = 3.0  # seconds after the timeout, at which gloo tells the main thread by itself
_GRACE = 5.0  # seconds that a rank has to notice by itself that another has ended
_STOPPED = "stopped: "  # begins the message of a rank that was told to stop and could not wait for the others


@dataclass
class Heartbeat:
    """What a rank last said: collectives entered, where it is, and a number that changes while it lives."""

    entered: int
    place: str
    tick: int


class _Clock:
    """The seconds that this process has run, without pauses.

    When all ranks are paused (SIGSTOP, a suspended job), none of them waits for another. The clock has a thread of its
    own, as the watch's thread may wait for the store.
    """

    def __init__(self, stop: threading.Event):
        self._ticked = 0.0, time.monotonic()  # seconds until the last tick, and when that was
        threading.Thread(target=self._run, args=[stop], name="clock", daemon=True).start()

    def __call__(self) -> float:
        seconds, last = self._ticked
        return seconds + min(time.monotonic() - last, _TICK + _LATE)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(_TICK):
            self._ticked = self(), time.monotonic()


class Watch:
    """A thread that tells the other ranks where this one is, and the user which ranks the others wait for.

    A rank that has entered fewer collectives than another keeps it waiting. After a tenth of the timeout one of the
    waiting ranks says so, and after all of it the waiting ends. A rank that ends with an error leaves word, so that no
    other waits for it where no launcher ends them.
    """

    def __init__(self, store: dist.Store, members: list[Member], rank: int, timeout: float, prog: str):
        self.members, self.rank, self.timeout, self.prog = members, rank, timeout, prog
        self.entered, self.place, self.waiting, self.patient = 0, "starting", False, False
        self._store, self._tick, self._heard = store.clone(), 0, {}
        self._store.set_timeout(timedelta(seconds=_ANSWER))
        self._ended: tuple[float, str] | None = None  # when another rank did, and why
        self.lost = False  # whether the store cannot be reached
        self._stop = threading.Event()
        self._clock = _Clock(self._stop)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def at(self, place: str = "") -> None:
        """Say that this rank works, and at what."""
        self.waiting, self.place = False, place or self.place

    def enter(self, patient: bool = False) -> None:
        """Say that this rank is through with that and waits for the others; in a `patient` one without an end."""
        self.patient, self.waiting = patient, True
        self.entered += 1

    def end(self, text: str = "") -> None:
        """Stop watching; with a text, tell the others that this rank ends, and why."""
        self._stop.set()
        self._thread.join(2 * _ANSWER)
        if text and not self.lost and not self._thread.is_alive():
            with suppress(RuntimeError):
                self._store.set("ended", f"rank {self.rank} ended: {text}")
                if self.rank == 0:  # which may serve the store: let the others look into it once more
                    time.sleep(1.5 * _TICK)

    def announce_exit(self, text: str, code: int) -> bool:
        """Tell the others, from another thread, that this rank exits now; returns whether it is the first to do so.

        Returns after the others have had time to read it, as their connections break when this rank exits.
        """
        mine = f"{_STOPPED * (code == EXIT_RESUME)}rank {self.rank} ended: {text}"
        first = mine
        with suppress(RuntimeError):
            first = call_with_timeout(lambda: self._store.compare_set("ended", "", mine), _ANSWER).decode()
        time.sleep(4 * _TICK)
        return first == mine

    def waiting_for(self, silence: float = _SILENT) -> str:
        """Who keeps this rank waiting and where those are, as far as they told; empty when nobody does.

        That is who has entered fewer collectives, or was not heard of for `silence` seconds.
        """
        mine, now, parts, heard = self.entered, self._clock(), [], dict(self._heard)
        for member in self.members:
            beat, since = heard.get(member.rank, (Heartbeat(mine, "", 0), now))
            silent = now - since > silence
            if member.rank != self.rank and (silent or beat.entered < mine):
                sign = f"not heard of for {now - since:.0f} s" if silent or not beat.place else ""
                place = beat.place and f"{', then ' * bool(sign)}at: {beat.place}"
                parts.append(f"rank {member.rank} ({member.host}, process {member.process}), {sign}{place}")
        return "; ".join(parts[:4]) + f"; and {len(parts) - 4} more" * (len(parts) > 4)

    def _run(self) -> None:
        entered, since, told = -1, self._clock(), False
        patience = min(60.0, max(2.0, self.timeout / 10))
        while not self._stop.wait(_TICK):
            now = self._clock()
            if self.entered != entered:
                entered, since, told = self.entered, now, False
            waited = now - since
            with suppress(RuntimeError):  # not before it matters: all ranks would ask rank 0 for all that all say
                self._exchange(listen=self.waiting and waited > max(_TICK, patience - 2 * _SILENT))
            whom = self.waiting_for() if self.waiting and waited >= patience and self._ended is None else ""
            if not whom:
                continue
            text = f"rank {self.rank} has waited {waited:.0f} s, at: {self.place}; for {whom}"
            if self._speaks(entered) and not told:
                told = True
                self._say(text)
            enough = self.waiting_for(max(_SILENT, self.timeout / 2))
            if waited > self.timeout + _LATER and enough and not self.patient:
                with suppress(RuntimeError):
                    self._store.set("ended", f"rank {self.rank} ended: {text}")
                self._leave(text)

    def _exchange(self, listen: bool) -> None:
        """Tell the others, and hear from them if it matters."""
        now = self._clock()
        self._tick += 1
        mine = json.dumps([self.entered, self.place, self._tick])
        if self._ended is not None:  # and the store may end with that rank
            if self._ended[1].startswith(_STOPPED) and self.waiting:
                os._exit(EXIT_RESUME)  # that rank says why
            if now - self._ended[0] > (_GRACE if self.waiting else self.timeout):  # it may be saving what can be saved
                self._leave(self._ended[1])
            return
        if not listen:
            self._heard.clear()
        elif not self._heard:
            self._heard = {member.rank: (Heartbeat(0, "", 0), now) for member in self.members}
        if self.lost and not self._found_again():
            return
        try:
            beats, ended = call_with_timeout(partial(self._talk, self._store, mine, listen), _ANSWER)
        except RuntimeError:
            self.lost = True
            raise
        if ended:
            self._ended = now, ended
        for rank, raw in enumerate(beats):
            beat = Heartbeat(*json.loads(raw))
            if self._heard[rank][0].tick != beat.tick:
                self._heard[rank] = beat, now

    def _talk(self, store: dist.Store, mine: str, listen: bool) -> tuple[list[bytes], str]:
        """Say something and hear the others; it may come back long after nobody waits for it any more."""
        store.set(f"beat-{self.rank}", mine)
        keys = [f"beat-{member.rank}" for member in self.members]
        beats = store.multi_get(keys) if listen and store.check(keys) else []
        return beats, store.get("ended").decode() if store.check(["ended"]) else ""

    def _found_again(self) -> bool:
        """Connect to the store anew, whose old connection is of no use; by a plain socket first: PyTorch's is loud."""
        server = self._store.underlying_store
        while isinstance(server, dist.PrefixStore):
            server = server.underlying_store
        try:
            socket.create_connection((server.host, server.port), timeout=1).close()
            self._store = call_with_timeout(self._store.clone, _ANSWER)
        except (OSError, RuntimeError):
            return False
        self.lost = False
        return True

    def _speaks(self, entered: int) -> bool:
        """Whether this rank is the first of those that wait."""
        now = self._clock()
        ahead = [
            rank for rank, (beat, since) in self._heard.items() if beat.entered >= entered and now - since < _SILENT
        ]
        return self.rank <= min(ahead, default=self.rank)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"\n{self.prog}: {text}\n")
        sys.stderr.flush()

    def _leave(self, text: str) -> None:
        """End this process, whose main thread waits where no exception reaches it."""
        self._say(f"error: {text}")
        os._exit(2)
