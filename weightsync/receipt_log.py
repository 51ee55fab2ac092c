"""A file that receipts are kept in, one a line.

    log = ReceiptLog("receipts.jsonl")
    receipt = log.append(receipt)       # on disk; goes on from the file's last receipt

Several processes may append to one file. A line is written at once, under a lock, and is on disk
before `append` returns; what fails is taken back. Only a writer that is killed in the midst of it
can leave a torn line. It stays where it is, for `weightsync.receipt_check.check` to report: the
next receipt ends it, begins a line of its own, and goes on from the last whole receipt.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, ReceiptLogError, ReceiptNotWritten
from weightsync.receipt import Receipt, chain
from weightsync.receipt_check import is_torn, parse

__all__ = ["ReceiptLog", "read_lines"]

LOCK_SECONDS = 30.0
"""How long others may keep the file to themselves; one line takes them milliseconds."""
BLOCK = 64 << 10


class ReceiptLog:
    """See the module. Holds nothing open: the file may be moved away, and begins anew then.

    Args:
        path: of the file. It is made where there is none.

    Raises:
        ReceiptLogError: the file is of another kind, or cannot be read or written to.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with _held(self.path, writing=True) as file:
            _last(file, self.path)

    def append(self, receipt: Receipt) -> Receipt:
        """Write a receipt.

        Returns:
            It as it was written: with the hash of the file's last receipt as ``previous``.

        Raises:
            ReceiptNotWritten: it is not in the file, which is as it was before.
        """
        try:
            with _held(self.path, writing=True) as file:
                end = os.fstat(file).st_size
                previous, ended = _last(file, self.path)
                chained = chain(msgspec.structs.replace(receipt, previous=previous))
                line = chained.to_json().encode() + b"\n"
                _write(file, line if ended else b"\n" + line, end)
                if end == 0:
                    _keep_name(self.path)
                return chained
        except ReceiptLogError as error:
            done = "nothing was changed by looking"
            if receipt.mode != "look":
                done = "the update is committed, and the engines serve it"
            raise ReceiptNotWritten(
                f"the receipt of version {receipt.version!r} is not in the log; {done}. {error}",
                remedy="mend that, then ReceiptLog(path).append(error.receipt)",
                receipt=receipt,
            ) from error


def read_lines(path: Path | str) -> Iterator[bytes]:
    """The lines of a log, with their ends, as of now: what is appended meanwhile is left out, so
    that a line that is just being written is not taken for a torn one.

    Raises:
        ReceiptLogError: there is no such file, it cannot be read, or it is of another kind.
    """
    path = Path(path)
    with _held(path, writing=False) as file:
        _last(file, path)
        left = os.fstat(file).st_size
    try:
        with path.open("rb") as stream:
            while left > 0 and (line := stream.readline(left)):
                left -= len(line)
                yield line
    except OSError as error:
        raise _unusable(path, error) from error


@contextmanager
def _held(path: Path, *, writing: bool) -> Iterator[int]:
    """The file, open and locked: against everybody, or against writers.

    Raises:
        ReceiptLogError: it cannot be opened or locked, it is no regular file, or what is done with
            it in the block fails.
    """
    deadline = Deadline.after(LOCK_SECONDS)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if writing else os.O_RDONLY
    file = -1
    try:
        while True:
            # Not to wait for the other end of what turns out to be a pipe.
            file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ReceiptLogError(
                    f"{path} is not a log of receipts: expected a regular file",
                    remedy="name a file; what is there was left as it is",
                )
            _lock(file, fcntl.LOCK_EX if writing else fcntl.LOCK_SH, path, deadline)
            if _is_at(path, file):
                break
            os.close(file)  # moved away while its lock was waited for
            file = -1
        yield file
    except OSError as error:
        raise _unusable(path, error) from error
    finally:
        if file >= 0:
            os.close(file)  # which gives the lock back


def _lock(file: int, how: int, path: Path, deadline: Deadline) -> None:
    while True:
        try:
            return fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        try:
            deadline.rest(0.005, f"the lock of {path}")
        except DeadlineExceeded as error:
            raise ReceiptLogError(
                str(error), remedy="see who holds it: lslocks, or fuser FILE"
            ) from error


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _last(file: int, path: Path) -> tuple[str, bool]:
    """Hash of the last receipt, "" where there is none; and whether nothing comes after the end of
    the last line.

    Raises:
        ReceiptLogError: the file ends with something that is neither a receipt nor torn.
    """
    end = os.fstat(file).st_size
    found = b"" if end == 0 else os.pread(file, 40, 0)
    ended = True
    if found.startswith((b"{", b"\n", b"\0")):
        for number, text in enumerate(_backwards(file, end)):
            ended = ended and (number > 0 or not text)
            if (receipt := parse(text)) is not None:
                return receipt.hash, ended
            if text and not is_torn(text):
                found = text[:40]
                break
        else:
            return "", ended
    elif end == 0:
        return "", True
    raise ReceiptLogError(
        f"{path} is not a log of receipts of this weightsync: expected one in JSON on each line, "
        f"found {found!r}",
        remedy="name another file; this one was left as it is",
    )


def _backwards(file: int, end: int) -> Iterator[bytes]:
    """What stands between line ends, from the back: of a file that ends with one, b"" first."""
    parts: list[bytes] = []
    while end > 0:
        size = min(BLOCK, end)
        end -= size
        pieces = os.pread(file, size, end).split(b"\n")
        parts.append(pieces.pop())
        while pieces:
            yield b"".join(reversed(parts))
            parts = [pieces.pop()]
    yield b"".join(reversed(parts))


def _write(file: int, line: bytes, end: int) -> None:
    """All of it, on disk; or nothing, and an error.

    Args:
        end: size of the file.
    """
    try:
        left = memoryview(line)
        while left:
            left = left[os.write(file, left) :]  # goes round only to learn why it was cut short
        os.fsync(file)
    except BaseException:
        with contextlib.suppress(OSError):  # then it is a torn line like that of a killed writer
            os.ftruncate(file, end)
        raise


def _keep_name(path: Path) -> None:
    """A new file is on disk only when its directory is."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # there are file systems that know no such thing
            os.fsync(directory)
    finally:
        os.close(directory)


def _unusable(path: Path, error: OSError) -> ReceiptLogError:
    return ReceiptLogError(
        f"the log of receipts {path} cannot be used: {error.strerror}",
        remedy="name a file that this process may read and write, on a disk with room",
    )
