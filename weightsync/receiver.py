"""An engine worker's side of an update: keeps the state, calls the target, answers the sender.

Two threads meet here. The session's thread answers the sender: it maps the arena, digests what
comes in while the engine goes on generating, and notices when a sender dies. The engine's thread
calls `join`, `prepare`, `apply` and `finish`, through whatever hook the engine has; these never
raise and never wait for the sender, so that an engine's RPC cannot hang on us.

State and epoch live here, not in the sender, so that a new sender can take over from a dead one.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from weightsync.errors import ProtocolError, StreamAborted, TransportError, UpdateRefused
from weightsync.inspection import Inspector, describe, described, found
from weightsync.messages import (
    PROTOCOL,
    Abort,
    Ack,
    Admit,
    Applied,
    Arm,
    Begin,
    Commit,
    Digests,
    Follow,
    Found,
    Hello,
    Inspect,
    Joined,
    Layout,
    Message,
    Poison,
    Resumed,
    WorkerStatus,
)
from weightsync.session import Session
from weightsync.staging import Incoming, Staging
from weightsync.target import StagedWeights, Target
from weightsync.update import Phase, UpdateState
from weightsync.wire import Channel

__all__ = ["Receiver"]

log = logging.getLogger("weightsync.receiver")

HANDOVER_SECONDS = 10.0
"""How long what an earlier sender's update was doing here may take to end, once it was cut off."""


class Receiver:
    """One worker's receiver.

    Args:
        target: holds the weights; called as its protocol says.
        rank: of this worker among the engine's, from 0.
        world_size: number of the engine's workers.
    """

    def __init__(self, target: Target, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self._target = target
        self._world_size = world_size
        self._lock = threading.RLock()
        self._state = UpdateState()
        self._epoch = 0
        self._holds_pause = False
        self._session_open = False
        self._session: Session | None = None
        self._staging: Staging | None = None
        self._incoming: Incoming | None = None
        self._inspector = Inspector(target, rank, self.status)
        self._following = threading.Lock()
        """Held while bytes come in: no update may begin while those of another still do."""

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

    # --- called by the engine's thread ------------------------------------------------------

    def join(self, path: str, token: str) -> None:
        """Dial in at a sender's socket. Does not wait for it; the sender misses who failed."""
        with self._lock:
            # Its mark may have been swept away. While an update is applied, it may have been let
            # in what asks whether that cures.
            if self._state.poisoned is not None and self._state.phase is not Phase.APPLYING:
                self._refuse(self._state.poisoned)
        try:
            Session(self, path, token)
        except Exception as error:
            log.error("cannot join the sender at %s: %s", path, error)

    def prepare(self) -> None:
        """Describe the layout that waits, if one does, and tell the sender."""
        with self._lock:
            self._session_open = True
            staging, session = self._staging, self._session
        if staging is None or session is None or staging.described:
            return
        started = time.perf_counter()
        said = describe(self._target, staging.manifest, whole=staging.whole)
        staging.described = not said.problems
        session.answer_from_engine(
            described(self.rank, staging.manifest, said, seconds=time.perf_counter() - started)
        )

    def look(self) -> None:
        """Answer who asked what the model holds, if somebody did."""
        self._inspector.answer()

    def apply(self, update_id: str) -> None:
        """Apply the armed update and tell the sender how it went."""
        started = time.perf_counter()
        load_seconds, error, held = 0.0, None, None
        with self._lock:
            session, staging = self._session, self._staging
            weights = self._armed(update_id)
        try:
            if isinstance(weights, str):
                # Nothing was touched here; another worker may have been, which the sender settles.
                error = weights
            else:
                load_seconds = self._target.apply(weights).load_seconds
                held = self._found(staging)
        except BaseException as failure:
            error = _text(failure)
            log.exception("update %s failed while it was applied", update_id)
            # First of all: whatever cleaning up does, nothing is to be served from here on.
            self.poison(f"update {update_id} failed while it was applied: {error}")
            self._restore()
            if not isinstance(failure, Exception):
                raise
        finally:
            if session is not None:
                session.answer_from_engine(
                    Applied(
                        update_id=update_id,
                        rank=self.rank,
                        error=error,
                        seconds=time.perf_counter() - started,
                        load_seconds=load_seconds,
                        found=held,
                    )
                )

    def finish(self) -> None:
        """The engine's own update session is over."""
        with self._lock:
            self._session_open = False

    def apply_whole(self, weights: StagedWeights) -> None:
        """Apply a whole model's weights that came another way. A sender that holds this worker
        loses it: what it knows of the weights is no longer so.

        Raises:
            BaseException: as the target does; the worker is poisoned and restored then.
        """
        self.close()
        try:
            with self._lock:
                self._state.forget()
            self._target.apply(weights)
        except BaseException as error:
            self.poison(f"weights that came another way could not be applied: {_text(error)}")
            self._restore()
            raise

    def poison(self, reason: str, update_id: str | None = None) -> None:
        """The weights may be a mixture, whatever brought them there: refuse until a full update
        cures it. Any thread.

        Args:
            update_id: of the update that is to blame, if it may have been committed.
        """
        with self._lock:
            self._state.poison(reason, update_id)
        log.error("poisoned: %s", reason)
        self._refuse(reason)

    def close(self) -> None:
        """Leave the sender and give everything back."""
        with self._lock:
            session, self._session = self._session, None
            self._sender_lost("the engine let it go")
        if session is not None:
            session.stop()

    # --- called by a session's thread -------------------------------------------------------

    def hello(self, token: str) -> Hello:
        """Introduce this worker."""
        target = self._target.status()
        return Hello(
            protocol=PROTOCOL,
            session=token,
            rank=self.rank,
            world_size=self._world_size,
            pid=os.getpid(),
            device=target.device,
            engine=target.engine,
            modes=tuple(sorted(self._target.modes)),
            status=self.status(),
        )

    def take_over(self, session: Session, epoch: int | None) -> Joined:
        """``session`` holds this worker from now on; what an older one left is cleared. Without an
        epoch it may only look, and nothing changes."""
        if epoch is None:
            return Joined(rank=self.rank, status=self.status())
        with self._lock:
            if epoch <= self._epoch:
                raise ProtocolError(f"epoch {epoch} is not above {self._epoch}")
            previous, self._session, self._epoch = self._session, session, epoch
            self._sender_lost(f"epoch {epoch} took over")
        if previous is not None:
            previous.supersede(epoch)
            log.info("sender of epoch %d took over", epoch)
        # Hanging up wakes whoever still takes in an earlier sender's bytes.
        if not self._following.acquire(timeout=HANDOVER_SECONDS):
            raise ProtocolError("an earlier sender's bytes are still coming in")
        self._following.release()
        return Joined(rank=self.rank, status=self.status())

    def lost(self, session: Session, reason: str) -> None:
        """A sender is gone."""
        self._inspector.forget(session)
        with self._lock:
            if self._session is session:
                self._session = None
                self._sender_lost(reason)

    def handle(self, session: Session, message: Message) -> Message:
        """Act on what a sender says; the answer."""
        if isinstance(message, Follow):
            return self._follow(session, message)
        if isinstance(message, Inspect):
            self._inspector.ask(session, message)
        else:
            with self._lock:
                self._check_holder(session)
                self._act(session, message)
        tag = str(message.__struct_config__.tag)
        return Ack(of=tag, update_id=getattr(message, "update_id", ""), rank=self.rank)

    def _act(self, session: Session, message: Message) -> None:
        match message:
            case Layout():
                staging = _staging(session.channel, message)
                if not self._state.resting:
                    staging.close()
                    raise UpdateRefused("a layout cannot change during an update")
                self._drop_staging()
                self._staging = staging
            case Begin():
                if self._staging is None or not self._staging.described:
                    raise UpdateRefused("no layout that this engine takes has been announced")
                incoming = self._staging.incoming(message, session.channel)
                self._state.begin(message.update_id, message.version, whole=self._staging.whole)
                self._staging.base = message.base
                self._incoming = incoming
            case Arm():
                if self._staging is None:
                    raise UpdateRefused("no layout has been announced")
                if self._staging.mode == "streamed":
                    self._state.expect(message.update_id, Phase.RECEIVING)
                else:
                    self._state.expect(message.update_id, Phase.SEALED)
                    self._staging.arm(wants_tensors=self._target.wants_tensors)
                    self._state.verify(message.update_id)
                self._holds_pause = message.holds_pause
            case Admit():
                self._state.expect(message.update_id, Phase.APPLYING)
                self._target.admit()
            case Commit():
                self._state.commit(message.update_id)
                self._target.admit()
            case Resumed():
                self._holds_pause = False
            case Abort():
                self._state.abort()
                if self._staging is not None:
                    self._staging.weights = None
            case Poison():
                self.poison(message.reason, message.update_id)
            case _:
                raise ProtocolError(f"{type(message).__name__} is nothing that a worker is told")

    def _follow(self, session: Session, message: Follow) -> Message:
        """Take in what comes, without the lock: the engine's thread must not wait for it."""
        with self._lock:
            self._check_holder(session)
            staging, incoming, self._incoming = self._staging, self._incoming, None
            if staging is None or incoming is None:
                raise UpdateRefused(f"update {message.update_id} has not begun")
            streamed = staging.mode == "streamed"
            if streamed:
                self._state.stream(message.update_id)
            else:
                self._state.expect(message.update_id, Phase.RECEIVING)
            if not self._following.acquire(blocking=False):
                raise ProtocolError("bytes of another update are still coming in")
        started = time.perf_counter()
        try:
            take = self._target.stream if streamed else self._target.verify
            digests = take(incoming)
            held = self._found(staging) if streamed else None
        except StreamAborted:
            return Ack(of="follow", update_id=message.update_id, rank=self.rank)
        except UpdateRefused as refusal:
            # Nobody reads the ring any more: hanging up tells a sender that waits for room in it.
            raise TransportError(f"the update cannot be taken in: {refusal}") from refusal
        finally:
            self._following.release()
        with self._lock:
            self._check_holder(session)
            if not streamed:
                self._state.seal(message.update_id)
        return Digests(
            update_id=message.update_id,
            rank=self.rank,
            digests=digests.astype("<u8").tobytes(),
            found=held,
            seconds=time.perf_counter() - started,
        )

    def _check_holder(self, session: Session) -> None:
        if session is not self._session:
            raise ProtocolError("this sender does not hold the worker any more")

    # --- shared -----------------------------------------------------------------------------

    def _found(self, staging: Staging | None) -> Found | None:
        """What the model holds of the update that has just been taken in, where that is asked."""
        if staging is None or staging.prove != "served":
            return None
        return found(self._target, staging.manifest, staging.seed, staging.seeds)

    def _armed(self, update_id: str) -> StagedWeights | str:
        """The weights to apply from here on, or why there are none."""
        try:
            self._state.expect(update_id, Phase.VERIFIED)
        except UpdateRefused as refusal:
            return _text(refusal)
        weights = None if self._staging is None else self._staging.take()
        if weights is None:
            return f"update {update_id} was not armed"
        self._state.apply(update_id)
        return weights

    def _sender_lost(self, reason: str) -> None:
        if self._state.phase is Phase.APPLYING:
            # Other workers may or may not have applied it: nobody is left who knows.
            self.poison(f"the sender was lost while an update was applied ({reason})")
        self._state.abort()
        self._drop_staging()

    def _drop_staging(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _refuse(self, reason: str) -> None:
        try:
            self._target.refuse(reason)
        except Exception:
            # The sender leaves the engine paused, which is what holds now.
            log.exception("requests cannot be refused at admission")

    def _restore(self) -> None:
        try:
            self._target.restore()
        except Exception:
            log.exception("the engine could not be restored; only a restart helps")


def _staging(channel: Channel, layout: Layout) -> Staging:
    arena_fd = channel.take_fd() if layout.mode == "staged" else None
    try:
        ring_fd = channel.take_fd()
    except ProtocolError:
        if arena_fd is not None:
            os.close(arena_fd)
        raise
    return Staging(layout, ring_fd, arena_fd)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:4000]
