"""The engines of one sender, and their workers while a session with them is open."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from weightsync.control import Worker, close_all, lost
from weightsync.deadline import Deadline
from weightsync.engines.base import Engine
from weightsync.errors import EnginePoisoned, Superseded, UpdateError, UpdateRefused
from weightsync.listener import Listener
from weightsync.settling import release_pause

__all__ = ["Roster"]

log = logging.getLogger("weightsync.sender")
T = TypeVar("T")


class Roster:
    """Opens a session with every engine on demand, and calls all engines at once.

    Args:
        engines: of different names.

    Attributes:
        engines: as given.
        workers: of all engines, in order of engine and rank; empty while no session is open.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        names = [engine.name for engine in engines]
        if not names or len(set(names)) != len(names):
            raise UpdateRefused(f"a sender needs engines of different names, got {names}")
        self.engines = tuple(engines)
        self.workers: list[Worker] = []
        self._listener: Listener | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._superseded: str | None = None

    def open(self, deadline: Deadline) -> bool:
        """Connect to all workers of all engines, unless they are connected.

        Returns:
            Whether this is a new session, in which no worker knows anything of this sender.

        Raises:
            Superseded: a newer sender has taken over, now or earlier.
        """
        if self._superseded is not None:
            raise Superseded(
                self._superseded, remedy="close this sender; create a new one to take over"
            )
        if self.workers:
            try:
                gone = lost(self.workers)
            except Superseded as error:
                self.drop(error)
                raise
            if gone is None:
                return False
            log.warning("%s is gone; opening a new session", gone)
            self.drop()
        try:
            self._listener = Listener()
            path = self._listener.path
            tokens = {engine.name: secrets.token_hex(8) for engine in self.engines}
            expected = {tokens[e.name]: (e.name, e.workers) for e in self.engines}
            self.each(lambda engine: engine.open_session(path, tokens[engine.name], deadline))
            self.workers = self._listener.accept(expected, deadline)
            for engine in self.engines:
                self._clear_leftovers(engine, deadline)
        except BaseException as error:
            self.drop(error)
            raise
        return True

    def of(self, engine: Engine) -> list[Worker]:
        """The connected workers of one engine, by rank."""
        return [worker for worker in self.workers if worker.engine == engine.name]

    def each(self, action: Callable[[Engine], T]) -> list[T]:
        """Run an action for all engines at once; those of this process on this thread.

        All are run to their end before an error is raised, so that no engine is left half-way. The
        gravest error is raised; the others' texts go with it as notes, and what succeeded as
        ``succeeded``, where the error has room for it.
        """
        remote = [engine for engine in self.engines if not engine.in_process]
        if len(self.engines) == 1 or not remote:
            return self._all_or_raise([_attempt(action, engine) for engine in self.engines])
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(remote), thread_name_prefix="weightsync-sender")
        futures = {engine.name: self._pool.submit(_attempt, action, engine) for engine in remote}
        try:
            local = {e.name: _attempt(action, e) for e in self.engines if e.in_process}
            results = [
                local[e.name] if e.in_process else futures[e.name].result() for e in self.engines
            ]
        except BaseException:
            # An interrupt: what runs ends at its deadline, and nobody may hang up on it before.
            wait(futures.values())
            raise
        return self._all_or_raise(results)

    def drop(self, error: BaseException | None = None) -> None:
        """Hang up on everybody, which tells them that nothing comes of what was going on."""
        if isinstance(error, Superseded):
            self._superseded = str(error)  # and never takes the engines back
        close_all(self.workers)
        self.workers = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        self.drop()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _all_or_raise(self, results: Sequence[T | BaseException]) -> list[T]:
        errors = [result for result in results if isinstance(result, BaseException)]
        succeeded = [result for result in results if not isinstance(result, BaseException)]
        if not errors:
            return succeeded
        for error in errors:
            if isinstance(error, Superseded):
                self._superseded = str(error)
        # Poison outweighs everything else; an error that is not ours outweighs a refusal.
        errors.sort(key=lambda e: (not isinstance(e, EnginePoisoned), isinstance(e, UpdateError)))
        first = errors[0]
        for other in errors[1:]:
            first.add_note(f"and: {other}")
        if isinstance(first, UpdateError):
            first.succeeded = tuple(succeeded)
        raise first

    def _clear_leftovers(self, engine: Engine, deadline: Deadline) -> None:
        """What a sender that died left on an engine: an open update session, a version that was
        committed but not set, and a pause."""
        workers = self.of(engine)
        engine.adopt_session(any(worker.status.session_open for worker in workers))
        engine.finish(deadline)
        if any(worker.status.poisoned is not None for worker in workers):
            return
        versions = {worker.status.version for worker in workers}
        committed = versions.pop() if len(versions) == 1 else None
        if committed is not None and engine.version(deadline) != committed:
            engine.set_version(committed, deadline)
        if any(worker.status.holds_pause for worker in workers):
            engine.resume(deadline)
            release_pause(workers, "", deadline)
            log.warning("%s was left paused by an earlier sender; resumed", engine.name)


def _attempt(action: Callable[[Engine], T], engine: Engine) -> T | BaseException:
    try:
        return action(engine)
    except BaseException as error:
        return error
