"""An engine worker's side of an update: talks to the sender, keeps the state, and calls the target.

Two threads meet here. The receiver's own thread answers the sender: it maps the arena, digests it
while the engine goes on generating, and notices when a sender dies. The engine's thread calls
`prepare`, `apply` and `finish`, through whatever hook the engine has; these never raise and never
wait for the sender, so that an engine's RPC cannot hang on us.

State and epoch live here, not in the sender, so that a new sender can take over from a dead one.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weightsync.deadline import Deadline
from weightsync.digest import derive_seeds
from weightsync.errors import PeerLost, ProtocolError, UpdateRefused, WeightSyncError
from weightsync.manifest import Manifest
from weightsync.target import StagedWeights, Target
from weightsync.transport.shm import ArenaReader, arena_offsets
from weightsync.update import Phase, UpdateState
from weightsync.wire import (
    PROTOCOL,
    Abort,
    Ack,
    Applied,
    Arm,
    Begin,
    Channel,
    Commit,
    Described,
    Digests,
    Hello,
    Joined,
    Layout,
    Message,
    Partial,
    Poison,
    Refused,
    Resumed,
    Seal,
    Welcome,
    WireProblem,
    WorkerStatus,
    check_peer,
)

__all__ = ["Receiver"]

log = logging.getLogger("weightsync.receiver")

ANSWER_SECONDS = 60.0
"""How long a worker waits for a sender to take an answer, or to welcome it."""


class _Staging:
    """One layout that a sender announced: its manifest and the arena that carries it."""

    def __init__(self, layout: Layout, fd: int) -> None:
        # The reader owns the descriptor from here on, and closes it if it refuses it.
        self.arena = ArenaReader(fd, layout.arena_bytes)
        try:
            self.manifest = Manifest(layout.tensors)
            self.offsets, nbytes = arena_offsets(self.manifest)
            if self.manifest.hash != layout.manifest_hash:
                raise ProtocolError(
                    f"the layout's hash is {layout.manifest_hash}, expected {self.manifest.hash}"
                )
            if nbytes != layout.arena_bytes or self.offsets.tolist() != list(layout.offsets):
                raise ProtocolError("the layout's offsets are not those of its tensors")
        except WeightSyncError:
            self.arena.close()
            raise
        self.described = False
        self.seed: int | None = None
        self.weights: StagedWeights | None = None

    def seeds(self) -> NDArray[np.uint64]:
        if self.seed is None:
            raise UpdateRefused("this update has no seed: it was never sealed")
        return derive_seeds(self.seed, self.manifest.identities)


class Receiver:
    """One worker's receiver.

    Args:
        target: holds the weights; called as its protocol says.
        rank: of this worker among the engine's, from 0.
        world_size: number of the engine's workers.
    """

    def __init__(self, target: Target, *, rank: int, world_size: int) -> None:
        self._target = target
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.RLock()
        self._state = UpdateState()
        self._epoch = 0
        self._holds_pause = False
        self._session_open = False
        self._session: _Session | None = None
        self._staging: _Staging | None = None

    # --- called by the engine's thread ------------------------------------------------------

    def join(self, path: str, session: str) -> None:
        """Dial in at a sender's socket. Returns at once; failures are logged and missed by the
        sender."""
        try:
            _Session(self, path, session).start()
        except (OSError, WeightSyncError) as error:
            log.error("cannot reach the sender at %s: %s", path, error)

    def prepare(self) -> None:
        """Describe the layout that waits, if one does, and tell the sender."""
        with self._lock:
            self._session_open = True
            staging, session = self._staging, self._session
        if staging is None or session is None or staging.described:
            return
        started = time.perf_counter()
        try:
            description = self._target.describe(staging.manifest)
            problems = tuple(WireProblem(p.kind, p.name, p.detail) for p in description.problems)
            partial = tuple(Partial(i, b.offsets, b.lengths) for i, b in description.partial)
        except Exception as error:
            log.exception("cannot tell what the engine takes")
            problems = (WireProblem("loader", "the engine's loader", _text(error)),)
            partial = ()
        staging.described = not problems
        session.answer(
            Described(
                rank=self._rank,
                manifest_hash=staging.manifest.hash,
                problems=problems,
                partial=partial,
                seconds=time.perf_counter() - started,
            )
        )

    def apply(self, update_id: str) -> None:
        """Apply the armed update and tell the sender how it went."""
        started = time.perf_counter()
        load_seconds = 0.0
        error: str | None = None
        with self._lock:
            session = self._session
            try:
                self._state.expect(update_id, Phase.VERIFIED)
                if self._staging is None or self._staging.weights is None:
                    raise UpdateRefused(f"update {update_id} was not armed")
                # Dropped here, so that the mapping goes when the engine lets go of its tensors.
                weights, self._staging.weights = self._staging.weights, None
                self._state.apply(update_id)
            except UpdateRefused as refusal:
                # Nothing was touched; another worker may have been, which the sender settles.
                error = _text(refusal)
        if error is None:
            try:
                load_seconds = self._target.apply(weights).load_seconds
            except Exception as failure:
                log.exception("update %s failed while it was applied", update_id)
                error = _text(failure)
                self._poison(f"update {update_id} failed while it was applied: {error}")
                self._restore()
            except BaseException:
                self._poison(f"update {update_id} was interrupted while it was applied")
                self._restore()
                raise
        if session is not None:
            session.answer(
                Applied(
                    update_id=update_id,
                    rank=self._rank,
                    error=error,
                    seconds=time.perf_counter() - started,
                    load_seconds=load_seconds,
                )
            )

    def finish(self) -> None:
        """The engine's own update session is over."""
        with self._lock:
            self._session_open = False

    def close(self) -> None:
        """Leave the sender and give everything back."""
        with self._lock:
            session, self._session = self._session, None
            self._drop_staging()
        if session is not None:
            session.stop()

    def status(self) -> WorkerStatus:
        """What this worker knows about itself. Any thread."""
        with self._lock:
            return WorkerStatus(
                phase=self._state.phase.value,
                version=self._state.version,
                epoch=self._epoch,
                poisoned=self._state.poisoned,
                holds_pause=self._holds_pause,
                session_open=self._session_open,
            )

    # --- called by a session's thread -------------------------------------------------------

    def _hello(self, session: str) -> Hello:
        target = self._target.status()
        return Hello(
            protocol=PROTOCOL,
            session=session,
            rank=self._rank,
            world_size=self._world_size,
            pid=os.getpid(),
            device=target.device,
            engine=target.engine,
            status=self.status(),
        )

    def _take_over(self, session: _Session, epoch: int) -> None:
        """``session`` holds this worker from now on; what an older one left is cleared."""
        with self._lock:
            if epoch <= self._epoch:
                raise ProtocolError(f"epoch {epoch} is not above {self._epoch}")
            previous, self._session, self._epoch = self._session, session, epoch
            self._sender_lost(f"epoch {epoch} took over")
        if previous is not None:
            previous.supersede(epoch)
            log.info("sender of epoch %d took over", epoch)

    def _lost(self, session: _Session, reason: str) -> None:
        with self._lock:
            if self._session is session:
                self._session = None
                self._sender_lost(reason)

    def _sender_lost(self, reason: str) -> None:
        if self._state.phase is Phase.APPLYING:
            # Other workers may or may not have applied it: nobody is left who knows.
            self._poison(f"the sender was lost while an update was applied ({reason})")
        self._state.abort()
        self._drop_staging()

    def _drop_staging(self) -> None:
        if self._staging is not None:
            self._staging.arena.close()
            self._staging = None

    def _poison(self, reason: str) -> None:
        with self._lock:
            self._state.poison(reason)
        self._target.refuse(reason)
        log.error("poisoned: %s", reason)

    def _restore(self) -> None:
        try:
            self._target.restore()
        except Exception:
            log.exception("the engine could not be restored; only a restart helps")

    def _handle(self, session: _Session, message: Message) -> Message | None:
        """Act on one message; the answer, if it has one."""
        handler = _HANDLERS.get(type(message))
        if handler is None:
            raise ProtocolError(f"{type(message).__name__} is nothing that a worker is told")
        return handler(self, session, message)

    def _on_layout(self, session: _Session, message: Layout) -> Message:
        staging = _Staging(message, session.channel.take_fd())
        with self._lock:
            if not self._state.resting:
                staging.arena.close()
                raise UpdateRefused("a layout cannot change during an update")
            self._drop_staging()
            self._staging = staging
        return self._ack("layout", "")

    def _on_begin(self, session: _Session, message: Begin) -> Message:
        with self._lock:
            if self._staging is None or not self._staging.described:
                raise UpdateRefused("no layout that this engine takes has been announced")
            self._state.begin(message.update_id, message.version)
        return self._ack("begin", message.update_id)

    def _on_seal(self, session: _Session, message: Seal) -> Message:
        with self._lock:
            self._state.seal(message.update_id)
            staging = self._staging
        if staging is None:
            raise UpdateRefused("no layout has been announced")
        started = time.perf_counter()
        staging.seed = message.seed
        with staging.arena.held() as address:
            digests = self._target.verify(
                staging.manifest, staging.offsets + np.uint64(address), staging.seeds()
            )
        return Digests(
            update_id=message.update_id,
            rank=self._rank,
            digests=digests.astype("<u8").tobytes(),
            nbytes=staging.manifest.total_bytes,
            seconds=time.perf_counter() - started,
        )

    def _on_arm(self, session: _Session, message: Arm) -> Message:
        with self._lock:
            staging = self._staging
            if staging is None:
                raise UpdateRefused("no layout has been announced")
            self._state.expect(message.update_id, Phase.SEALED)
            try:
                mapping = staging.arena.private_copy()
            except OSError as error:
                raise UpdateRefused(f"the staging memory cannot be mapped: {error}") from error
            staging.weights = StagedWeights(staging.manifest, staging.offsets, mapping)
            self._state.verify(message.update_id)
            self._holds_pause = message.holds_pause
        return self._ack("arm", message.update_id)

    def _on_commit(self, session: _Session, message: Commit) -> Message:
        with self._lock:
            self._state.commit(message.update_id)
        self._target.admit()
        return self._ack("commit", message.update_id)

    def _on_resumed(self, session: _Session, message: Resumed) -> Message:
        with self._lock:
            self._holds_pause = False
        return self._ack("resumed", message.update_id)

    def _on_abort(self, session: _Session, message: Abort) -> Message:
        with self._lock:
            self._state.abort()
            if self._staging is not None:
                self._staging.weights = None
        return self._ack("abort", message.update_id)

    def _on_poison(self, session: _Session, message: Poison) -> Message:
        self._poison(message.reason)
        return self._ack("poison", message.update_id)

    def _ack(self, of: str, update_id: str) -> Ack:
        return Ack(of=of, update_id=update_id, rank=self._rank)


_HANDLERS: dict[type[Message], Callable[[Receiver, _Session, Message], Message | None]] = {
    Layout: Receiver._on_layout,  # type: ignore[dict-item]
    Begin: Receiver._on_begin,  # type: ignore[dict-item]
    Seal: Receiver._on_seal,  # type: ignore[dict-item]
    Arm: Receiver._on_arm,  # type: ignore[dict-item]
    Commit: Receiver._on_commit,  # type: ignore[dict-item]
    Resumed: Receiver._on_resumed,  # type: ignore[dict-item]
    Abort: Receiver._on_abort,  # type: ignore[dict-item]
    Poison: Receiver._on_poison,  # type: ignore[dict-item]
}


class _Session:
    """One connection to one sender, and the thread that serves it."""

    def __init__(self, receiver: Receiver, path: str, session: str) -> None:
        self._receiver = receiver
        self._name = session
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
            self.channel = Channel(sock, f"the sender (pid {check_peer(sock)})")
        except BaseException:
            sock.close()
            raise
        self._send_lock = threading.Lock()
        # Closed from other threads only through this pair: closing a polled socket would not wake
        # its poller.
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="weightsync-receiver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def answer(self, message: Message) -> None:
        """Send; a lost sender is no error here, the thread notices it."""
        try:
            with self._send_lock:
                if not self._ended:
                    self.channel.send(message, Deadline.after(ANSWER_SECONDS))
        except (WeightSyncError, OSError, ValueError) as error:
            log.warning("an answer did not reach the sender: %s", error)

    def supersede(self, epoch: int) -> None:
        reason = f"a newer sender (epoch {epoch}) has taken over"
        self.answer(Refused(of="session", update_id="", rank=self._receiver._rank, reason=reason))
        self.stop()

    def stop(self) -> None:
        """Let the thread end, and wait for it unless it is the caller."""
        with self._send_lock:
            if not self._ended:
                os.write(self._wake_write, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(ANSWER_SECONDS)

    def _run(self) -> None:
        reason = "its connection was closed"
        try:
            self.answer(self._receiver._hello(self._name))
            welcome = self.channel.receive(Deadline.after(ANSWER_SECONDS))
            if not isinstance(welcome, Welcome):
                raise ProtocolError(f"expected a welcome, got {type(welcome).__name__}")
            self._receiver._take_over(self, welcome.epoch)
            self.answer(Joined(rank=self._receiver._rank, status=self._receiver.status()))
            self._serve()
        except PeerLost as error:
            reason = str(error)
        except WeightSyncError as error:
            reason = str(error)
            log.error("session ended: %s", error)
        except Exception as error:
            reason = _text(error)
            log.exception("session ended by a fault of its own")
        finally:
            self._receiver._lost(self, reason)
            with self._send_lock:
                self._ended = True
                self.channel.close()
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            message = self.channel.poll()
            if message is None:
                # Idle between updates: the wait ends with the next message, the sender's death, or
                # `stop`.
                if any(fd == self._wake_read for fd, _ in poller.poll()):
                    return
                continue
            try:
                reply = self._receiver._handle(self, message)
            except UpdateRefused as error:
                reply = Refused(
                    of=str(message.__struct_config__.tag),
                    update_id=getattr(message, "update_id", ""),
                    rank=self._receiver._rank,
                    reason=str(error),
                )
            if reply is not None:
                self.answer(reply)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:4000]
