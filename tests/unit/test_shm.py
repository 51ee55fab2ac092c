"""The arena: sealed, aligned, safe from those who read it, and gone when it is closed."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import MemoryShort, ProtocolError, TransportError
from weightsync.manifest import DTYPE_BYTES, Manifest, TensorSpec
from weightsync.transport import shm
from weightsync.transport.shm import (
    ALIGNMENT,
    ArenaReader,
    ShmArena,
    address_of,
    arena_offsets,
    available_memory,
)

NBYTES = 3 * mmap.PAGESIZE + 64
UNLIMITED = "9223372036854771712"


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:")


def at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


@pytest.fixture
def arena() -> Iterator[ShmArena]:
    made = ShmArena(NBYTES)
    yield made
    made.close()


@pytest.fixture
def reader(arena: ShmArena) -> Iterator[ArenaReader]:
    made = ArenaReader(os.dup(arena.fd), NBYTES)
    yield made
    made.close()


def memfd(nbytes: int, seals: int | None) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


# Offsets

manifests = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 40), max_size=3)),
    min_size=1,
    max_size=8,
).map(lambda found: Manifest(TensorSpec(f"t{i}", d, tuple(s)) for i, (d, s) in enumerate(found)))


@given(manifests)
def test_offsets_are_aligned_disjoint_and_within(manifest: Manifest) -> None:
    offsets, nbytes = arena_offsets(manifest)
    assert offsets.dtype == np.uint64 and offsets.shape == (len(manifest),)
    ends = offsets + manifest.nbytes
    assert not (offsets % np.uint64(ALIGNMENT)).any()
    assert (ends[:-1] <= offsets[1:]).all()
    assert int(ends[-1]) <= nbytes < int(ends[-1]) + ALIGNMENT + mmap.PAGESIZE
    assert nbytes > 0


def test_alignment_serves_every_dtype() -> None:
    assert all(ALIGNMENT % nbytes == 0 for nbytes in DTYPE_BYTES.values())


# Sender's end


def test_the_arena_is_writable_at_its_address(arena: ShmArena) -> None:
    view = arena.view()
    assert view.shape == (NBYTES,) and view.ctypes.data == arena.address
    view[:] = 7
    assert os.pread(arena.fd, NBYTES, 0) == b"\x07" * NBYTES


def test_every_page_is_reserved_at_once(arena: ShmArena) -> None:
    """A hole would be filled on the first write, and where memory is short that is SIGBUS."""
    assert os.fstat(arena.fd).st_blocks * 512 >= NBYTES


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + mmap.PAGESIZE, 1 << 40])
def test_nobody_who_gets_the_arena_can_resize_it(arena: ShmArena, nbytes: int) -> None:
    fd = os.dup(arena.fd)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, nbytes)
    with pytest.raises(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)
    assert os.fstat(arena.fd).st_size == NBYTES


def test_the_arena_has_no_name_and_is_not_inherited(arena: ShmArena) -> None:
    assert os.fstat(arena.fd).st_nlink == 0
    assert not os.get_inheritable(arena.fd)


def test_a_closed_arena_says_so(arena: ShmArena) -> None:
    arena.close()
    arena.close()
    with pytest.raises(TransportError, match="closed"):
        arena.view()


def test_an_impossible_arena_leaves_no_descriptor() -> None:
    before = open_fds()
    with pytest.raises(TransportError):
        ShmArena(0)
    assert open_fds() == before


def test_too_large_an_arena_is_refused_before_anything_is_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "available_memory", lambda: (NBYTES - 1, "a limit of the test"))
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("something was reserved"))
    before = open_fds()
    with pytest.raises(MemoryShort, match="a limit of the test") as caught:
        ShmArena(NBYTES)
    assert (caught.value.needed, caught.value.available) == (NBYTES, NBYTES - 1)
    assert open_fds() == before


def test_an_arena_that_just_fits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "available_memory", lambda: (NBYTES, "a limit of the test"))
    ShmArena(NBYTES).close()


@pytest.mark.parametrize("step", ["posix_fallocate", "ftruncate"])
def test_a_failed_reservation_is_typed_and_leaves_no_descriptor(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = open_fds()
    monkeypatch.setattr(os, step, full)
    with pytest.raises(TransportError, match="No space left"):
        ShmArena(NBYTES)
    assert open_fds() == before


# Worker's end


def test_a_reader_reads_what_was_written_before_and_after_it_came(
    arena: ShmArena, reader: ArenaReader
) -> None:
    for value in (1, 2):
        arena.view()[:] = value
        with reader.held() as address:
            assert at(address, NBYTES) == bytes([value]) * NBYTES


@pytest.mark.parametrize("announced", [NBYTES - 1, NBYTES + 1, NBYTES + (1 << 40), 0, -1])
def test_another_size_than_announced_is_refused(arena: ShmArena, announced: int) -> None:
    before = open_fds()
    with pytest.raises(ProtocolError, match="sealed memory"):
        ArenaReader(os.dup(arena.fd), announced)
    assert open_fds() == before


SEAL, SHRINK, GROW = fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW


@pytest.mark.parametrize("seals", [None, SEAL, SHRINK | GROW, SEAL | GROW, SEAL | SHRINK])
def test_memory_that_could_still_shrink_is_refused(seals: int | None) -> None:
    before = open_fds()
    with pytest.raises(ProtocolError, match="sealed memory"):
        ArenaReader(memfd(NBYTES, seals), NBYTES)
    assert open_fds() == before


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(ProtocolError, match="sealed memory"):
        ArenaReader(memfd(0, SEAL | SHRINK | GROW), 0)


def test_what_is_no_memory_at_all_is_refused_and_closed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(NBYTES))
    before = open_fds()
    pipe_read, pipe_write = os.pipe()
    for fd in (pipe_read, pipe_write, os.open(file, os.O_RDWR), os.open(tmp_path, os.O_RDONLY)):
        with pytest.raises(ProtocolError):
            ArenaReader(fd, NBYTES)
    assert open_fds() == before


def test_the_readers_own_mapping_is_read_only(reader: ArenaReader) -> None:
    with reader.held() as address:
        [line] = [
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.startswith(f"{address:x}-") or line.startswith(f"{address:012x}-")
        ]
    assert line.split()[1] == "r--s"


def test_writes_into_a_private_copy_stay_there(arena: ShmArena, reader: ArenaReader) -> None:
    arena.view()[:] = 1
    mine, other = reader.private_copy(), reader.private_copy()
    mine[:100] = b"\xff" * 100
    assert mine[:101] == b"\xff" * 100 + b"\x01"
    assert (arena.view() == 1).all()
    assert other[:] == b"\x01" * NBYTES
    assert reader.private_copy()[:] == b"\x01" * NBYTES
    with reader.held() as address:
        assert at(address, NBYTES) == b"\x01" * NBYTES


def test_a_fresh_private_copy_shows_what_the_sender_wrote_later(
    arena: ShmArena, reader: ArenaReader
) -> None:
    arena.view()[:] = 1
    first = reader.private_copy()
    first[:] = b"\xff" * NBYTES
    arena.view()[:] = 2
    assert first[:] == b"\xff" * NBYTES
    assert reader.private_copy()[:] == b"\x02" * NBYTES


def test_a_held_mapping_outlives_the_reader_and_the_arena(arena: ShmArena) -> None:
    reader = ArenaReader(os.dup(arena.fd), NBYTES)
    arena.view()[:] = 5
    before = mappings()
    with reader.held() as address:
        reader.close()
        arena.close()
        gc.collect()
        assert at(address, NBYTES) == b"\x05" * NBYTES
    assert mappings() < before


def test_a_private_copy_outlives_the_reader_and_the_arena(arena: ShmArena) -> None:
    reader = ArenaReader(os.dup(arena.fd), NBYTES)
    arena.view()[:] = 5
    copy = reader.private_copy()
    reader.close()
    arena.close()
    gc.collect()
    assert copy[:] == b"\x05" * NBYTES


def test_a_closed_reader_says_so(reader: ArenaReader) -> None:
    reader.close()
    reader.close()
    with pytest.raises(TransportError, match="closed"):
        reader.private_copy()
    with pytest.raises(TransportError, match="closed"), reader.held():
        pass


def test_address_of_a_mapping_is_where_its_bytes_are() -> None:
    mapping = mmap.mmap(-1, mmap.PAGESIZE)
    mapping[:5] = b"hello"
    assert at(address_of(mapping), 5) == b"hello"


def test_fifty_rounds_leave_no_descriptor_and_no_mapping() -> None:
    fds, maps = open_fds(), mappings()
    for _ in range(50):
        arena = ShmArena(NBYTES)
        reader = ArenaReader(os.dup(arena.fd), NBYTES)
        arena.view()[:] = 1
        with reader.held():
            copy = reader.private_copy()
            copy[0] = 2
        del copy
        reader.close()
        arena.close()
    assert open_fds() == fds and mappings() == maps


# How much memory there is

GB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A host with 8 GB to give."""
    path = tmp_path / "proc"
    path.mkdir()
    (path / "meminfo").write_text(
        f"MemTotal: {99 * GB // 1024} kB\nMemFree: 1 kB\nMemAvailable:  {8 * GB // 1024} kB\n"
    )
    return path


def cgroup_v2(root: Path, limit: str, used: int, cache: int = 0) -> Path:
    path = root / "cgroup"
    path.mkdir()
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file {7 * GB}\n")
    return path


def cgroup_v1(root: Path, limit: str, used: int, cache: int = 0) -> Path:
    path = root / "cgroup"
    (path / "memory").mkdir(parents=True)
    (path / "memory" / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (path / "memory" / "memory.usage_in_bytes").write_text(f"{used}\n")
    (path / "memory" / "memory.stat").write_text(
        f"inactive_file 3\ntotal_inactive_file {cache}\ntotal_active_file {7 * GB}\n"
    )
    return path


def test_without_a_cgroup_the_host_decides(proc: Path, tmp_path: Path) -> None:
    assert available_memory(proc, tmp_path / "none") == (8 * GB, "MemAvailable of the host")


@pytest.mark.parametrize("make", [cgroup_v2, cgroup_v1])
def test_a_cgroups_smaller_limit_decides_and_its_cache_counts_as_free(
    make: type, proc: Path, tmp_path: Path
) -> None:
    found, limit = available_memory(proc, make(tmp_path, str(4 * GB), 3 * GB, GB // 2))
    assert found == GB + GB // 2 and re.match("cgroup limit memory", limit)


@pytest.mark.parametrize("make", [cgroup_v2, cgroup_v1])
def test_a_cgroups_larger_limit_does_not_hide_a_full_host(
    make: type, proc: Path, tmp_path: Path
) -> None:
    assert available_memory(proc, make(tmp_path, str(64 * GB), GB))[0] == 8 * GB


def test_an_unlimited_cgroup_leaves_it_to_the_host(proc: Path, tmp_path: Path) -> None:
    assert available_memory(proc, cgroup_v2(tmp_path, "max", GB))[0] == 8 * GB


def test_an_unlimited_old_cgroup_leaves_it_to_the_host(proc: Path, tmp_path: Path) -> None:
    assert available_memory(proc, cgroup_v1(tmp_path, UNLIMITED, GB))[0] == 8 * GB


def test_a_full_cgroup_has_nothing_left(proc: Path, tmp_path: Path) -> None:
    assert available_memory(proc, cgroup_v2(tmp_path, str(GB), GB))[0] == 0


@pytest.mark.parametrize("file", ["memory.current", "memory.stat"])
def test_an_unreadable_cgroup_leaves_it_to_the_host(file: str, proc: Path, tmp_path: Path) -> None:
    path = cgroup_v2(tmp_path, str(GB), 0)
    (path / file).unlink()
    assert available_memory(proc, path)[0] == 8 * GB


def test_this_machine_has_some_memory() -> None:
    assert available_memory()[0] > NBYTES


def test_every_cgroup_above_this_process_binds_it(proc: Path, tmp_path: Path) -> None:
    root = cgroup_v2(tmp_path, "max", 0)
    inner = root / "jobs" / "trainer"
    inner.mkdir(parents=True)
    for path, limit, used in ((root / "jobs", 3 * GB, GB), (inner, 5 * GB, GB)):
        (path / "memory.max").write_text(f"{limit}\n")
        (path / "memory.current").write_text(f"{used}\n")
        (path / "memory.stat").write_text("inactive_file 0\n")
    assert available_memory(proc, root)[0] == 8 * GB, "without knowing its own cgroup"
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text("0::/jobs/trainer\n")
    assert available_memory(proc, root) == (2 * GB, "cgroup limit memory.max")
