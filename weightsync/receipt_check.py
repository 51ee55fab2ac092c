"""Reading a log of receipts, and whether it is whole. No I/O.

A log is one receipt per line, as `Receipt.to_json` writes it, each with the hash of the one before.
A line that its writer did not end (it was killed, or the machine stopped) is *torn*. The chain does
not lead through it: the next receipt begins a line of its own and goes on from the last whole one.

What this can find is a fault, or a change by somebody who did not work all later hashes out anew.
Hashes are not signatures. Lines that are missing at the end are found by who has kept the hash of
the last one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from weightsync.receipt import Receipt, chain

__all__ = ["Entry", "Finding", "FindingKind", "check", "entries", "is_torn", "parse"]

HEAD = b'{"version":'
"""What every line begins with."""

FindingKind = Literal["changed", "missing", "moved", "doubled", "branched", "torn", "foreign"]

REMEDIES: dict[FindingKind, str] = {
    "changed": "do not rely on this line; compare it with another copy of the log",
    "missing": "look for an older or a rotated copy of the log; what is missing is not in this one",
    "moved": "put the lines back into their order, or compare with another copy of the log",
    "doubled": "delete this line, it says nothing new",
    "branched": "keep each chain in a file of its own: two logs were joined, or two processes "
    "wrote on a file system without locks",
    "torn": "its update may have been committed: find out what is served (weightsync verify); then "
    "the line may be deleted, the chain does not lead through it",
    "foreign": "find out who writes to this file, and move the line elsewhere",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a log.

    Attributes:
        line: its number, from 1.
        text: without the line's end.
        receipt: None where it is none.
    """

    line: int
    text: bytes
    receipt: Receipt | None

    @property
    def torn(self) -> bool:
        """Whether it is a receipt that was not written to its end."""
        return self.receipt is None and is_torn(self.text)

    @property
    def version(self) -> str:
        """Of the receipt, or of what is left of it; "" where that is unknown."""
        if self.receipt is not None:
            return self.receipt.version
        found = re.match(rb'\{"version":("(?:[^"\\]|\\.)*")', self.text)
        try:
            return msgspec.json.decode(found[1], type=str) if found else ""
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a log.

    Attributes:
        kind: "changed": not as it was written; "missing": receipts before it are not there;
            "moved": elsewhere than its place; "doubled": there before; "branched": two receipts go
            on from the same one; "torn": not written to its end; "foreign": no receipt.
        line: from 1; one more than there are where the end is missing.
        version: "" where it is unknown.
        detail: what was expected, and what is there.
    """

    kind: FindingKind
    line: int
    version: str
    detail: str

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.kind]

    def __str__(self) -> str:
        of = f" (version {self.version!r})" if self.version else ""
        return f"line {self.line}{of}: {self.kind}: {self.detail}"


def parse(text: bytes) -> Receipt | None:
    """The receipt that a line is, or None."""
    try:
        return msgspec.json.decode(text, type=Receipt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_torn(text: bytes) -> bool:
    """Whether a line that is no receipt is the beginning of one. A machine that stops may also
    leave zero bytes."""
    left = text.strip(b"\0")
    if not text or not (left.startswith(HEAD) or HEAD.startswith(left)):
        return False
    try:
        msgspec.json.decode(left)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True
    return False  # a whole one of something else: no beginning of an object is one itself


def entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    """
    Args:
        lines: as a binary file yields them. The last one may lack its end.
    """
    for number, line in enumerate(lines, start=1):
        text = line.removesuffix(b"\n")
        yield Entry(number, text, parse(text))


def check(lines: Iterable[bytes], *, last: str | None = None) -> list[Finding]:
    """What is wrong with a log, by line.

    Args:
        lines: as a binary file yields them.
        last: hash of its last receipt, where that is known.

    Returns:
        Nothing, where every line is a receipt as it was written, and goes on from the line before.
    """
    findings: list[Finding] = []
    links: list[_Link] = []
    lines_read = 0
    for entry in entries(lines):
        lines_read = entry.line
        if entry.receipt is None:
            findings.append(_unreadable(entry))
            continue
        link = _Link.of(entry.line, entry.receipt)
        links.append(link)
        if link.hash != link.content:
            detail = f"its hash is {link.hash[:16]}, that of its content {link.content[:16]}"
            findings.append(Finding("changed", link.line, link.version, detail))
        elif entry.receipt.to_json().encode() != entry.text:
            detail = (
                "its hash is right, but it has fields, an order or spaces that were not written"
            )
            findings.append(Finding("changed", link.line, link.version, detail))
    findings += _check_chain(links)
    if last is not None and (not links or last not in links[-1].names):
        end = f"line {links[-1].line} ({links[-1].hash[:16]})" if links else "nothing"
        detail = f"the last receipt should be {last[:16]}, the log ends with {end}"
        findings.append(Finding("missing", lines_read + 1, "", detail))
    return sorted(findings, key=lambda finding: finding.line)


@dataclass(frozen=True, slots=True)
class _Link:
    """What the chain is made of: a log may be larger than memory."""

    line: int
    version: str
    previous: str
    hash: str
    content: str

    @classmethod
    def of(cls, line: int, receipt: Receipt) -> _Link:
        content = chain(receipt).hash
        return cls(line, receipt.version, receipt.previous, receipt.hash, content)

    @property
    def names(self) -> frozenset[str]:
        """By which the next receipt may know it: of a changed one, either may be what it was."""
        return frozenset((self.hash, self.content))


def _unreadable(entry: Entry) -> Finding:
    if entry.torn:
        detail = f"a receipt that was not written to its end, {len(entry.text)} bytes of it"
        return Finding("torn", entry.line, entry.version, detail)
    return Finding(
        "foreign", entry.line, "", f"no receipt that this weightsync knows: {entry.text[:40]!r}"
    )


def _check_chain(links: list[_Link]) -> Iterator[Finding]:
    lines_of: dict[str, int] = {}
    following: dict[str, list[int]] = defaultdict(list)
    for link in links:
        if link.hash not in lines_of:
            following[link.previous].append(link.line)
        for name in link.names:
            lines_of.setdefault(name, link.line)
    before: _Link | None = None
    for link in links:
        if link.hash != link.content:
            before = link  # what it says of its place is no better than the rest of it
            continue
        if lines_of[link.hash] < link.line:
            detail = f"the same receipt as in line {lines_of[link.hash]}"
            yield Finding("doubled", link.line, link.version, detail)
            continue
        if link.previous not in ({""} if before is None else before.names):
            yield _misplaced(link, before, lines_of, following[link.previous])
        before = link


def _misplaced(
    link: _Link, before: _Link | None, lines_of: dict[str, int], following: list[int]
) -> Finding:
    """
    Args:
        before: the receipt that stands before it.
        lines_of: by hash.
        following: lines of the receipts that go on from the same one.
    """
    others = [line for line in following if line != link.line]
    place = "the beginning" if link.previous == "" else f"line {lines_of.get(link.previous, 0)}"
    kind: FindingKind
    if link.previous and link.previous not in lines_of:
        after = "it is the first" if before is None else f"line {before.line} is before it"
        kind = "missing"
        detail = f"goes on from {link.previous[:16]}, which is not in this log; {after}"
    elif others:
        kind, detail = "branched", f"goes on from {place}, and so does line {others[0]}"
    else:
        kind, detail = "moved", f"its place is right after {place}"
    return Finding(kind, link.line, link.version, detail)
