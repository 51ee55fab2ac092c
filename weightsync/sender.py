"""The sender: stage, prove, then flip; or, where the user cannot spare the memory, stream.

``stage()`` fills the arena while every worker of every engine digests it, and compares; engines go
on generating meanwhile. ``commit()`` pauses each engine just long enough to apply what was proven.
``sync()`` does both. A streamed update goes straight into the models of paused engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from weightsync.agreement import Agreement
from weightsync.arguments import check_arguments, check_pause, label_of
from weightsync.canary import CanaryMaker
from weightsync.commit import Flipped
from weightsync.control import ask_all
from weightsync.deadline import Deadline
from weightsync.delivery import Delivery
from weightsync.engines.base import Engine, PauseMode
from weightsync.errors import (
    ManifestError,
    MemoryShort,
    PlanRefused,
    ProofFailed,
    SourceError,
    UpdateError,
    UpdateRefused,
)
from weightsync.messages import Abort, Ack, Mode
from weightsync.outbox import Outbox
from weightsync.receipt import ProofLevel, Receipt, chain
from weightsync.receipt_log import ReceiptLog
from weightsync.rollback import Keeper
from weightsync.roster import Roster
from weightsync.sources.base import Source
from weightsync.streaming import Flips

__all__ = ["Rollback", "StagedUpdate", "WeightSender"]

Rollback = Literal["none", "retain"]
"""What becomes of an engine that fails while it applies an update: it refuses to serve until a full
update cures it; or it gets back the version before, which costs its memory once more."""

ABORT_SECONDS = 10.0
"""What giving an update up may take before the sender hangs up instead, which says the same."""

HARMLESS = (PlanRefused, SourceError, ManifestError, MemoryShort, ProofFailed)
"""Errors that leave the connections in a known state."""


class StagedUpdate:
    """An update that every worker has proven to hold, not yet served by any.

    Attributes:
        version: that it will be.
        update_id: of this update.
        seconds: that staging took, by phase.
    """

    def __init__(self, sender: WeightSender, delivery: Delivery) -> None:
        self._sender = sender
        self._delivery = delivery
        self.version = delivery.version
        self.update_id = delivery.update_id
        self.seconds = delivery.seconds

    def commit(self, pause: PauseMode = "keep") -> Receipt:
        """Flip all engines to this update. See `WeightSender.sync`."""
        return self._sender._commit(self._delivery, pause)

    def abort(self) -> None:
        """Give it up; engines keep what they serve."""
        self._sender._abort(self._delivery)


class WeightSender:
    """Delivers a trainer's weights to live engines.

    Connects on first use, holds its memory and one connection per worker, and reuses them. A sender
    that is created for an engine that another sender holds takes it over and clears what that one
    left. Not thread-safe.

    Args:
        source: what the trainer has.
        engines: from `weightsync.connect` or `weightsync.engine`.
        proof: what must be proven of every tensor before `sync` returns. ``"served"``: what is
            ``received``, and then what the model holds, wherever that can be read back; the receipt
            names every tensor of which it cannot, and why, and those that were probed at random
            columns (``spot``). ``"received"``: the bytes that each worker hands to its engine's
            loader, digested where they lie; workers of one host, who share that memory, each
            digest a part of it. ``"canary"``: a prompt of which trainer and engine must think
            alike, and nothing else. ``"off"``: nothing.
        canary: makes a `weightsync.Canary`, called for each update, right before it moves, with the
            weights that it is of. Demanded by ``proof="canary"``, possible with any. The engine is
            asked once it has resumed, before its version counts: what else it computes meanwhile
            comes of weights that the canary has not passed. If it thinks otherwise than the
            trainer, that is a failure while applying, and requests in flight are ended.
        mode: ``"staged"``: all bytes go into an arena of shared memory as large as the model, are
            proven there while the engines go on generating, and are then applied, or nothing is.
            ``"streamed"``: bytes go through a small ring straight into the models of paused
            engines; in bounded memory and fewer passes, but any failure poisons. Only for engines
            whose workers copy at once.
        rollback: ``"retain"`` keeps the version before in the arena, at its size once more, and
            gives it back to an engine that fails while applying. Until the first update of a
            sender there is none to give back.
        bucket_bytes: that are copied, digested and announced at once; None for what measures best.
        deadline: seconds that one `stage` or one `commit` may take. Leaving the engines of a failed
            one in a defined state may take half a minute more, and so may the lock of `receipts`.
        receipts: a file that each receipt is appended to (`weightsync.ReceiptLog`), after the
            engines have resumed, and before `on_receipt` is called. Receipts then go on from the
            file's last one, also in a new process. Where one cannot be written, `sync` raises
            ReceiptNotWritten although the update is committed; `on_receipt` is not called, and the
            receipt stays in `last_receipt`.
        on_receipt: called with each receipt, after the engines have resumed. What it raises goes
            through `sync`; the receipt stays in `last_receipt`.
        on_progress: called with (bytes filled, bytes in all) while staging.

    Attributes:
        last_receipt: of the last update that was committed everywhere, or None.

    Raises:
        UpdateRefused: no engine, two of one name, or arguments that do not go together.
        ReceiptLogError: `receipts` is no file for receipts.
    """

    def __init__(
        self,
        source: Source,
        engines: Iterable[Engine],
        *,
        proof: ProofLevel = "served",
        canary: CanaryMaker | None = None,
        mode: Mode = "staged",
        rollback: Rollback = "none",
        bucket_bytes: int | None = None,
        deadline: float = 600.0,
        receipts: Path | str | None = None,
        on_receipt: Callable[[Receipt], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        check_arguments(proof, canary, mode, rollback, bucket_bytes, deadline)
        self._source = source
        self._roster = Roster(tuple(engines))
        self._proof: ProofLevel = proof
        self._canary = canary
        self._mode: Mode = mode
        self._seconds = deadline
        self._log = None if receipts is None else ReceiptLog(receipts)
        self._on_receipt = on_receipt
        self._on_progress = on_progress
        retain = rollback == "retain"
        self._outbox = Outbox(mode, halves=2 if retain else 1, bucket_bytes=bucket_bytes)
        self._keeper = Keeper(retains=retain, seconds=deadline)
        self._agreement = Agreement(self._roster, self._outbox, mode)
        self._staged: Delivery | None = None
        self.last_receipt: Receipt | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def sync(
        self,
        version: int | str,
        *,
        only: Sequence[str] | None = None,
        pause: PauseMode = "keep",
    ) -> Receipt:
        """Deliver the source's weights as of now; returns only when every worker has proven them.

        Args:
            version: that the engines report afterwards.
            only: names of the tensors to send, or patterns of names (`fnmatch`); all others are
                declared to stay what they are. Everything that an engine loads together must come
                together: all of a fused or stacked parameter, and of a module. None sends all.
            pause: what happens to requests in flight: ``"keep"`` freezes them and goes on with the
                new weights, ``"wait"`` lets them end first, ``"abort"`` ends them. On an engine
                that is paused already, ``"wait"`` is ``"keep"``: nothing there can end.

        Returns:
            The receipt.

        Raises:
            PlanRefused: source and engine do not fit; nothing moved.
            SourceError, ConnectError, TransportError: something could not be read, reached or
                reserved.
            ProofFailed, UpdateAborted: given up before anything was applied; the engines serve the
                old version.
            EnginePoisoned: an engine failed while applying, and refuses to serve until the next
                full update.
            RolledBack: an engine failed while applying, and serves the version before again.
            NotResumed: applied and proven, but an engine could not be told so.
            ReceiptNotWritten: all went well, but the receipt is not in the log.
            Superseded: a newer sender has taken over.
        """
        check_pause(pause)
        if self._mode == "streamed":
            return self._stream(version, only, pause)
        staged = self.stage(version, only=only)
        try:
            return staged.commit(pause)
        except BaseException:
            staged.abort()  # nothing, unless it was interrupted before the flip began
            raise

    def stage(self, version: int | str, *, only: Sequence[str] | None = None) -> StagedUpdate:
        """Move and prove, while the engines go on generating. Arguments and errors as of `sync`."""
        if self._mode != "staged":
            raise UpdateRefused("a streamed update is not staged", remedy="call sync()")
        started = time.perf_counter()
        deadline = Deadline.after(self._seconds)
        delivery = self._announce(version, only, deadline)
        try:
            self._keeper.make_room(self._outbox, delivery.manifest)
            delivery.begin(deadline)
            delivery.move(deadline, self._on_progress)
        except BaseException as error:
            self._give_up(delivery, error)
            raise
        delivery.seconds["stage"] = time.perf_counter() - started
        self._staged = delivery
        return StagedUpdate(self, delivery)

    def close(self) -> None:
        """Leave the engines as they are and give everything back. Harmless when called twice."""
        if self._staged is not None:
            self._abort(self._staged)
        self._roster.close()
        self._outbox.close()

    def _announce(
        self, version: int | str, only: Sequence[str] | None, deadline: Deadline
    ) -> Delivery:
        """Agree with all workers on what is to come; nothing has begun."""
        if self._staged is not None:
            raise UpdateRefused(
                f"update {self._staged.update_id} is staged already",
                remedy="commit() or abort() it first",
            )
        if only is not None and self._keeper.retains:
            raise UpdateRefused(
                "a part of the model was to be sent, by a sender that keeps whole versions to go "
                "back to",
                remedy="leave `only` out, or create the sender without rollback='retain'",
            )
        label = label_of(version)
        started = time.perf_counter()
        try:
            agreed = self._agreement.reach(self._source, only, deadline)
        except BaseException as error:
            if not isinstance(error, HARMLESS):
                self._roster.drop(error)
            raise
        delivery = Delivery(
            self._roster,
            self._outbox,
            agreed,
            label,
            only or (),
            proof=self._proof,
            canary=self._canary,
        )
        delivery.seconds["plan"] = time.perf_counter() - started
        return delivery

    def _commit(self, delivery: Delivery, pause: PauseMode) -> Receipt:
        if self._staged is not delivery:
            raise UpdateRefused(f"update {delivery.update_id} is not staged any more")
        check_pause(pause)
        started = time.perf_counter()
        deadline = Deadline.after(self._seconds)
        self._staged = None
        try:
            flipped = self._roster.each(
                lambda engine: self._keeper.flip(engine, delivery, pause, deadline)
            )
        except BaseException as error:
            # Whatever state the connections are in, the next update starts with new ones.
            self._roster.drop(error)
            _name_succeeded(error)
            raise
        delivery.seconds["commit"] = time.perf_counter() - started
        return self._hand_out(delivery.receipt(self._mode, flipped))

    def _stream(self, version: int | str, only: Sequence[str] | None, pause: PauseMode) -> Receipt:
        check_pause(pause)
        deadline = Deadline.after(self._seconds)
        delivery = self._announce(version, only, deadline)
        started = time.perf_counter()
        try:
            delivery.begin(deadline)
            flips = Flips(self._roster, delivery, pause, deadline)
            flips.enter()
        except BaseException as error:
            self._give_up(delivery, error)
            raise
        try:
            flipped = flips.stream(self._on_progress)
        except BaseException as error:
            self._roster.drop(error)
            _name_succeeded(error)
            raise
        delivery.seconds["commit"] = time.perf_counter() - started
        return self._hand_out(delivery.receipt(self._mode, flipped))

    def _hand_out(self, receipt: Receipt) -> Receipt:
        previous = "" if self.last_receipt is None else self.last_receipt.hash
        self.last_receipt = chain(msgspec.structs.replace(receipt, previous=previous))
        if self._log is not None:
            self.last_receipt = self._log.append(self.last_receipt)
        if self._on_receipt is not None:
            self._on_receipt(self.last_receipt)
        return self.last_receipt

    def _abort(self, delivery: Delivery) -> None:
        if self._staged is delivery:
            self._staged = None
            self._tell_abort(delivery.update_id, "given up by the trainer")

    def _give_up(self, delivery: Delivery, error: BaseException) -> None:
        """Nothing was applied. Workers are told so, or hung up on, which tells them the same."""
        self._outbox.abort()
        if isinstance(error, HARMLESS):
            self._tell_abort(delivery.update_id, str(error))
        else:
            self._roster.drop(error)

    def _tell_abort(self, update_id: str, reason: str) -> None:
        message = Abort(update_id=update_id, reason=reason[:1000])
        deadline = Deadline.after(ABORT_SECONDS)
        try:
            ask_all(self._roster.workers, message, Ack, deadline, belongs_to=update_id)
        except Exception as failure:
            self._roster.drop(failure)


def _name_succeeded(error: BaseException) -> None:
    """Of several engines, those that went well are told by their receipts."""
    if isinstance(error, UpdateError):
        error.succeeded = tuple(
            one.receipt if isinstance(one, Flipped) else one for one in error.succeeded
        )
