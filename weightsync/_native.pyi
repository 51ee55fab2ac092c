"""Types of the native module (csrc/*module.cpp). `weightsync.digest`,
`weightsync.regions` and `weightsync.transport.ring` are the ways to use it."""

import numpy as np
from numpy.typing import NDArray

def digest_table(
    rows: NDArray[np.uint64], n_out: int, isa: int = -1, threads: int = 1
) -> NDArray[np.uint64]: ...
def copy_digest_table(
    rows: NDArray[np.uint64],
    n_out: int,
    isa: int = -1,
    threads: int = 1,
    streaming: int = -1,
) -> NDArray[np.uint64]: ...
def copy_table(rows: NDArray[np.uint64], threads: int = 1, streaming: int = -1) -> None: ...
def digest_regions(
    rows: NDArray[np.uint64] | NDArray[np.int64], n_out: int, isa: int = -1, threads: int = 1
) -> NDArray[np.uint64]: ...
def check_regions(rows: NDArray[np.uint64] | NDArray[np.int64], n_out: int) -> None: ...
def memcpy(destination: int, source: int, nbytes: int) -> None: ...
def read(source: int, nbytes: int) -> int: ...
def isa() -> int: ...
def isa_name(isa: int) -> str: ...
def ring_bytes(readers: int, capacity: int) -> int: ...
def open_ring_reader(
    address: int, nbytes: int, reader: int
) -> tuple[tuple[int, int, str], RingReader | None]: ...

class RingWriter:
    def __init__(
        self,
        address: int,
        nbytes: int,
        readers: int,
        capacity: int,
        carries_bytes: bool,
        chunk: int,
    ) -> None: ...
    def begin(self, tensors: int) -> int: ...
    def push(
        self,
        rows: NDArray[np.uint64],
        arena: bool,
        digests: bool,
        peers: list[int],
        deadline: float,
    ) -> tuple[int, int, str]: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...
    def sums(self) -> NDArray[np.uint64]: ...

class RingReader:
    @property
    def carries_bytes(self) -> bool: ...
    def follow(
        self,
        update: int,
        rows: NDArray[np.uint64],
        digests: bool,
        peers: list[int],
        deadline: float,
    ) -> tuple[tuple[int, int, str], NDArray[np.uint64]]: ...
