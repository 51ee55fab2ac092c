"""The digest on CUDA, as far as a machine without a GPU shows it.

The kernel's text runs on a simulated grid (digest_grid.cpp), which refuses loads that hardware
would refuse; the same text compiles for real devices; and what finds, compiles and keeps it is run
as it is. That a device then computes the same is for bench/gpu_check.py to show.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightsync.device import kernels
from weightsync.device.digest import checked_regions, cut_chunks, digest_regions_cuda
from weightsync.device.kernels import KERNEL, compile_kernel, kernel_binary, sources
from weightsync.device.nvrtc import Nvrtc, find_nvrtc, open_nvrtc
from weightsync.digest import Digest, digest_spans, reference_digest
from weightsync.errors import DeviceUnavailable, WeightSyncError

ROOT = Path(__file__).resolve().parents[2]
SEED = 0x0123456789ABCDEF
FAULTS = ("none", "misaligned load", "load outside the region", "threads wait for ever")
Table = NDArray[np.uint64]
Simulate = Callable[..., Table]


# --- the simulated grid -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Simulate:
    """The kernel on the host. Loads are allowed inside `memory` alone."""
    built = tmp_path_factory.mktemp("grid") / "grid.so"
    compiler = os.environ.get("CXX", "").split() or [shutil.which("c++") or "g++"]
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
    source = Path(__file__).with_name("digest_grid.cpp")
    command = [*compiler, *flags, "-shared", "-fPIC", f"-I{ROOT}/csrc", str(source), "-o"]
    subprocess.run([*command, str(built)], check=True, timeout=120)
    function = ctypes.CDLL(str(built)).simulate
    u64, u32, pointer = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p
    function.argtypes = [pointer, pointer, u64, pointer, u32, u32, u64, u64, u64]

    def run(
        rows: Table,
        chunks: Table,
        n_out: int,
        memory: NDArray[np.uint8],
        *,
        blocks: int = 2,
        threads: int = 64,
        order: int = 0,
    ) -> Table:
        table, _ = checked_regions(rows, n_out)
        chunks = np.ascontiguousarray(chunks, dtype=np.uint64)
        out = np.zeros((n_out, 2), dtype=np.uint64)
        fault = function(
            table.ctypes.data,
            chunks.ctypes.data,
            len(chunks),
            out.ctypes.data,
            blocks,
            threads,
            order,
            memory.ctypes.data,
            memory.ctypes.data + memory.nbytes,
        )
        assert fault == 0, FAULTS[fault]
        return out

    return run


def row(
    address: int,
    itemsize: int,
    shape: Sequence[int],
    strides: Sequence[int],
    whole_strides: Sequence[int],
    *,
    start: int = 0,
    seed: int = SEED,
    out: int = 0,
) -> list[int]:
    pad = 8 - len(shape)
    columns = [address, itemsize, len(shape), start, seed, out, *shape, *[1] * pad]
    columns += [*strides, *[0] * pad, *whole_strides, *[0] * pad]
    return [column % 2**64 for column in columns]


def span(address: int, nbytes: int, start: int, *, seed: int = SEED, out: int = 0) -> list[int]:
    return row(address, 1, [nbytes], [1], [1], start=start, seed=seed, out=out)


def table(*rows_: list[int]) -> Table:
    return np.array(rows_, dtype=np.uint64).reshape(-1, 30)


def cut(sizes: Sequence[int], size: int) -> Table:
    """Chunks of one size, a multiple of 16."""
    chunks = [(i, at, min(size, n - at)) for i, n in enumerate(sizes) for at in range(0, n, size)]
    return np.array(chunks, dtype=np.uint64).reshape(-1, 3)


def aligned(n: int, offset: int) -> NDArray[np.uint8]:
    base = np.random.default_rng(n).integers(0, 256, n + 128, dtype=np.uint8)
    skip = -base.ctypes.data % 64 + offset
    return base[skip : skip + n]


def as_digest(sums: Table, index: int = 0) -> Digest:
    return Digest(int(sums[index, 0]), int(sums[index, 1]))


grids = st.fixed_dictionaries(
    {
        "blocks": st.integers(1, 5),
        "threads": st.sampled_from([32, 64, 96, 256]),
        "order": st.integers(0, 2**32),
    }
)
starts = st.one_of(st.integers(0, 64), st.integers(2**35 - 2048, 2**35 + 64), st.integers(0, 2**60))


def test_every_alignment_of_address_and_start_gives_the_reference(simulate: Simulate) -> None:
    for offset, start, n in itertools.product(range(16), range(8), (1, 7, 15, 16, 47, 600)):
        memory = aligned(n, offset)
        expected = reference_digest(memory.tobytes(), start=start, seed=SEED)
        rows = table(span(memory.ctypes.data, n, start))
        found = simulate(rows, cut([n], 256), 1, memory, blocks=1, threads=32)
        assert as_digest(found) == expected, (offset, start, n)


@settings(max_examples=60, deadline=None)
@given(
    n=st.one_of(st.integers(0, 100), st.integers(0, 40_000)),
    offset=st.integers(0, 63),
    start=starts,
    chunk=st.sampled_from([16, 48, 4096, 1 << 20]),
    grid=grids,
)
def test_a_span_gives_the_reference_on_any_grid(
    simulate: Simulate, n: int, offset: int, start: int, chunk: int, grid: dict[str, int]
) -> None:
    chunk = max(chunk, n // 64 // 16 * 16)
    memory = aligned(n, offset)
    rows = table(span(memory.ctypes.data, n, start))
    found = simulate(rows, cut([n], chunk), 1, memory, **grid)
    assert as_digest(found) == reference_digest(memory.tobytes(), start=start, seed=SEED)


@pytest.mark.parametrize("threads", [32, 96, 256])
@pytest.mark.parametrize("offset", [0, 8, 13])
def test_spans_of_many_turns_give_the_reference(
    simulate: Simulate, offset: int, threads: int
) -> None:
    # Long enough for the loop that has several loads under way, as words lie in memory and not.
    memory = aligned(16 * threads * 13 + 77, offset)
    for start in (8 * 10**6 + offset % 8, 8 * 10**6 + 3):
        rows = table(span(memory.ctypes.data, memory.nbytes, start))
        for size in (memory.nbytes // 2 // 16 * 16, 1 << 20):
            found = simulate(rows, cut([memory.nbytes], size), 1, memory, threads=threads)
            assert as_digest(found) == reference_digest(memory.tobytes(), start=start, seed=SEED)


def test_a_warp_that_is_late_loses_no_sums(simulate: Simulate) -> None:
    # Many chunks for one block: its warps may be in different ones at once.
    memory = aligned(16 * 40, 0)
    expected = reference_digest(memory.tobytes(), start=0, seed=SEED)
    rows = table(span(memory.ctypes.data, memory.nbytes, 0))
    for order in range(20):
        chunks = cut([memory.nbytes], 16)
        found = simulate(rows, chunks, 1, memory, blocks=1, threads=96, order=order)
        assert as_digest(found) == expected


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    chunk=st.sampled_from([256, 1024]),
    grid=grids,
    data=st.data(),
)
def test_many_spans_in_one_launch_equal_the_cpus(
    simulate: Simulate, sizes: list[int], chunk: int, grid: dict[str, int], data: st.DataObject
) -> None:
    memory = aligned(sum(sizes), 3)
    addresses = memory.ctypes.data + np.cumsum([0, *sizes[:-1]])
    first = [data.draw(starts) for _ in sizes]
    seeds = [data.draw(st.integers(0, 2**64 - 1)) for _ in sizes]
    out = [data.draw(st.integers(0, 4)) for _ in sizes]
    rows = table(
        *(
            span(int(a), n, s, seed=seed, out=o)
            for a, n, s, seed, o in zip(addresses, sizes, first, seeds, out, strict=True)
        )
    )
    found = simulate(rows, cut(sizes, chunk), 5, memory, **grid)
    np.testing.assert_array_equal(
        found, digest_spans(addresses, sizes, first, np.array(seeds, np.uint64), out, 5)
    )


def elementwise(view: NDArray[np.void], start: int, whole_strides: Sequence[int]) -> Digest:
    """The digest of each element at its own place in the tensor, added up."""
    total = Digest(0, 0)
    for index in np.ndindex(view.shape):
        at = start + sum(i * stride for i, stride in zip(index, whole_strides, strict=True))
        total += reference_digest(view[index].tobytes(), start=at, seed=SEED)
    return total


@st.composite
def strided_boxes(
    draw: st.DrawFn,
) -> tuple[NDArray[np.uint8], NDArray[np.void], int, list[int]]:
    """Memory, a box of a tensor as a view of it, and the box's place in the tensor.

    In memory the axes may be permuted, reversed, padded or repeated; in the tensor the box may
    begin anywhere and take every other element.
    """
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    shape = shape if draw(st.booleans()) else [*shape, draw(st.integers(20, 60))][-3:]
    axes = draw(st.permutations(range(len(shape))))
    # An offset that no item size divides: addresses are promised no alignment.
    shift = draw(st.sampled_from([0, 0, 1, 2, 8]))
    padding = [draw(st.integers(0, 2)) for _ in shape]
    stored = [shape[a] + padding[a] for a in axes]
    memory = aligned(int(np.prod(stored)) * itemsize + shift, 0)
    array = memory[shift:].view(np.dtype((np.void, itemsize))).reshape(stored)
    view = array.transpose(np.argsort(axes)) if shape else array
    box = []
    for length, pad in zip(shape, padding, strict=True):
        at = draw(st.integers(0, pad))
        taken = slice(at, at + length)
        box.append(taken if draw(st.booleans()) else slice(taken.start, taken.stop, 2))
    view = view[(*box, ...)]
    if shape and draw(st.booleans()):
        axis = draw(st.integers(0, len(shape) - 1))
        view = np.flip(view, axis) if draw(st.booleans()) else view
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in view.shape]
    whole_strides, stride = [], itemsize
    for length, step in zip(reversed(view.shape), reversed(steps), strict=True):
        whole_strides.insert(0, stride * step)
        stride *= length * step + draw(st.integers(0, 2))
    start = draw(st.integers(0, 30)) * draw(st.sampled_from([1, itemsize]))
    return memory, view, start, whole_strides


@settings(max_examples=150, deadline=None)
@given(box=strided_boxes(), chunk=st.sampled_from([16, 64, 1 << 20]), grid=grids)
def test_a_strided_region_is_the_sum_of_its_elements(
    simulate: Simulate,
    box: tuple[NDArray[np.uint8], NDArray[np.void], int, list[int]],
    chunk: int,
    grid: dict[str, int],
) -> None:
    memory, view, start, whole_strides = box
    chunk = max(chunk, view.nbytes // 32 // 16 * 16)
    columns = (view.ctypes.data, view.itemsize, view.shape, view.strides, whole_strides)
    rows = table(row(*columns, start=start))
    found = simulate(rows, cut([view.nbytes], chunk), 1, memory, **grid)
    assert as_digest(found) == elementwise(view, start, whole_strides)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("ndim", [0, 1, 8])
def test_the_fewest_and_the_most_dimensions(simulate: Simulate, itemsize: int, ndim: int) -> None:
    shape = (2,) * ndim
    memory = aligned(itemsize << ndim, itemsize)
    view = memory.view(np.dtype((np.void, itemsize))).reshape(shape).transpose()
    whole = np.empty(shape, view.dtype).strides
    rows = table(row(view.ctypes.data, itemsize, shape, view.strides, whole))
    found = simulate(rows, cut([view.nbytes], 64), 1, memory)
    expected = reference_digest(np.ascontiguousarray(view).tobytes(), start=0, seed=SEED)
    assert as_digest(found) == expected


@pytest.mark.parametrize("first", [2**32 - 48, 2**33, 2**45 + 16])
def test_chunks_far_into_a_large_tensor_give_the_reference(simulate: Simulate, first: int) -> None:
    """Beyond 4 GiB: one long run, and more rows than 32 bits count. Only the chunk is in memory."""
    memory = aligned(4096, 16)
    chunks = np.array([[0, first, 4000]])
    rows = table(span(memory.ctypes.data - first, first + 4096, 5))
    expected = reference_digest(memory[:4000].tobytes(), start=5 + first, seed=SEED)
    assert as_digest(simulate(rows, chunks, 1, memory, threads=256)) == expected
    # Rows of 16 bytes, all of which are the same memory.
    again = row(memory.ctypes.data, 1, [first // 16 + 256, 16], [0, 1], [16, 1], start=5)
    expected = reference_digest(memory[:16].tobytes() * 250, start=5 + first, seed=SEED)
    assert as_digest(simulate(table(again), chunks, 1, memory, threads=256)) == expected


@pytest.mark.parametrize("columns", [3, 20, 500])
def test_the_column_slices_of_tensor_parallel_ranks_add_up(
    simulate: Simulate, columns: int
) -> None:
    # Runs shorter than a thread's, a warp's and a chunk's share.
    whole = aligned(40 * 4 * columns * 2, 2).view(np.uint16).reshape(40, 4 * columns)
    shards = [np.ascontiguousarray(shard) for shard in np.split(whole, 4, axis=1)]
    memory = np.concatenate([shard.reshape(-1) for shard in shards]).view(np.uint8)
    rows = table(
        *(
            row(
                memory.ctypes.data + i * shard.nbytes,
                2,
                shard.shape,
                shard.strides,
                whole.strides,
                start=i * columns * 2,
            )
            for i, shard in enumerate(shards)
        )
    )
    found = simulate(rows, cut([shards[0].nbytes] * 4, 4096), 1, memory, blocks=3)
    assert as_digest(found) == reference_digest(whole.tobytes(), start=0, seed=SEED)


def test_regions_of_zeros_differ_by_their_number(simulate: Simulate) -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    found = {
        as_digest(simulate(table(span(memory.ctypes.data, n, 0)), cut([n], 1024), 1, memory))
        for n in (0, 1, 16, 1023, 1024, 1025, 4096)
    }
    assert len(found) == 7


# --- the table ----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 1 << 32)), max_size=30),
    blocks=st.integers(1, 600),
)
def test_chunks_cover_every_byte_once_and_evenly(sizes: list[int], blocks: int) -> None:
    chunks = cut_chunks(np.array(sizes, dtype=np.uint64), blocks)
    assert chunks.dtype == np.uint64 and chunks.shape[1] == 3
    covered = [0] * len(sizes)
    for region, first, count in chunks.tolist():
        assert first == covered[region] and first % 16 == 0 and 0 < count <= 1 << 20
        covered[region] += count
    assert covered == sizes
    # All but the ends of regions have one size.
    assert len({count for r, first, count in chunks.tolist() if first + count < sizes[r]}) <= 1


def test_one_tensor_is_enough_to_keep_every_block_busy() -> None:
    chunks = cut_chunks(np.array([256 << 20], dtype=np.uint64), 528)
    assert len(chunks) >= 4 * 528 * 0.8
    assert len(cut_chunks(np.array([100 << 30], dtype=np.uint64), 528)) == 100 << 10


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({1: 3}, "item size"),
        ({2: 9}, "at most 8"),
        ({2: 0}, "length 1"),
        ({21: 5}, "stride 0"),
        ({29: 5}, "stride 0"),
        ({5: 2}, "n_out 2"),
        ({6: 1 << 62}, r"2\*\*62"),
        ({2: 8, 6: 2**40, 7: 2**24, 8: 2**3}, r"2\*\*62"),
        ({0: 0}, "null"),
    ],
)
def test_impossible_rows_are_refused(changed: dict[int, int], message: str) -> None:
    rows = table(span(4096, 10, 0), span(4096, 10, 0))
    for column, value in changed.items():
        rows[1, column] = value
    with pytest.raises(ValueError, match=f"row 1: .*{message}"):
        digest_regions_cuda(rows, 2)


def test_tables_of_another_shape_dtype_or_order_are_refused() -> None:
    rows = table(span(4096, 10, 0), span(4096, 10, 0))
    for bad in (rows[:, :29], rows.reshape(-1), rows.astype(np.float64), rows[::-1]):
        with pytest.raises(ValueError, match="rows must"):
            digest_regions_cuda(bad, 1)
    with pytest.raises(ValueError, match="n_out"):
        digest_regions_cuda(rows, -1)
    assert checked_regions(rows.view(np.int64), 1)[1].tolist() == [10, 10]


def test_nothing_to_digest_needs_no_gpu() -> None:
    assert digest_regions_cuda(table(), 2).tolist() == [[0, 0]] * 2
    assert digest_regions_cuda(table(span(0, 0, 5)), 1).tolist() == [[0, 0]]


# --- compiling ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return find_nvrtc()
    except DeviceUnavailable as error:
        pytest.skip(str(error))


def resources(log: str) -> tuple[int, int]:
    """Registers and spilled bytes, out of what ptxas says."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    assert registers and spills, log
    return int(registers[1]), sum(map(int, spills))


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_nvrtc_compiles_the_kernel_without_spills(nvrtc: Nvrtc, architecture: int) -> None:
    if architecture not in nvrtc.architectures:
        pytest.skip(f"NVRTC {nvrtc.version} knows no sm_{architecture}")
    kind, binary, log = compile_kernel(architecture, nvrtc)
    assert kind == "cubin" and binary.startswith(b"\x7fELF") and KERNEL.encode() in binary
    registers, spilled = resources(log)
    assert registers <= 64 and spilled == 0, "four blocks of 256 threads must fit"
    assert "warning" not in log


def test_a_device_newer_than_the_compiler_gets_ptx(nvrtc: Nvrtc) -> None:
    kind, binary, _ = compile_kernel(999, nvrtc)
    assert kind == "ptx" and f".entry {KERNEL}".encode() in binary


def test_a_device_older_than_the_compiler_is_refused(nvrtc: Nvrtc) -> None:
    with pytest.raises(DeviceUnavailable, match="compute capability"):
        compile_kernel(10, nvrtc)


def test_a_source_that_does_not_compile_says_why(nvrtc: Nvrtc) -> None:
    broken = {**sources(), "digest.h": "#error broken on purpose\n"}
    with pytest.raises(DeviceUnavailable, match="broken on purpose"):
        compile_kernel(nvrtc.architectures[-1], nvrtc, broken)


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_nvcc_compiles_the_kernel_without_warnings(tmp_path: Path, architecture: int) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False)
    if f"sm_{architecture}" not in known.stdout.split():
        pytest.skip(f"this nvcc knows no sm_{architecture}")
    command = [nvcc, "-std=c++17", "-cubin", f"-arch=sm_{architecture}", "--Werror=all-warnings"]
    command += ["-Xptxas=-v", "-o", str(tmp_path / "digest.cubin"), str(ROOT / "csrc/digest.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    registers, spilled = resources(done.stdout + done.stderr)
    assert registers <= 64 and spilled == 0


# --- kept binaries ------------------------------------------------------------------------------


def kept(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_a_compiled_kernel_is_kept_and_found(nvrtc: Nvrtc, tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    with kernel_binary(90, nvrtc, directory) as first:
        written = first.stat().st_mtime_ns
    assert kept(directory) == [first], "the binary, and no unfinished file"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with kernel_binary(90, nvrtc, directory) as second:
        assert second == first and second.stat().st_mtime_ns == written
    with kernel_binary(80, nvrtc, directory) as other:
        assert other != first
    assert len(kept(directory)) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_binary_is_compiled_anew(nvrtc: Nvrtc, tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "kernels"
    with kernel_binary(90, nvrtc, directory) as path:
        good = path.read_bytes()
    changed = bytearray(good)
    changed[len(good) // 2] ^= 1
    path.write_bytes({"cut": good[:-100], "changed": bytes(changed), "empty": b""}[damage])
    with kernel_binary(90, nvrtc, directory) as path:
        assert path.read_bytes() == good
    assert kept(directory) == [path]


def test_what_killed_processes_left_is_cleaned_up_and_nothing_else(
    nvrtc: Nvrtc, tmp_path: Path
) -> None:
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    ended = subprocess.Popen(["true"])
    ended.wait(10)
    gone, living = (directory / f".unfinished-{pid}-x" for pid in (ended.pid, os.getpid()))
    for path in (gone, living):
        path.write_bytes(b"half")
    with kernel_binary(90, nvrtc, directory):
        assert living.exists() and not gone.exists()


def test_the_key_holds_all_that_the_binary_depends_on(
    nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = sources()
    with kernel_binary(90, nvrtc, tmp_path / "kernels"):
        pass
    for name in texts:
        edited = {**texts, name: texts[name] + "\n// edited\n"}
        monkeypatch.setattr(kernels, "sources", lambda edited=edited: edited)
        with kernel_binary(90, nvrtc, tmp_path / "kernels"):
            pass
    assert len(kept(tmp_path / "kernels")) == 1 + len(texts)
    later = Nvrtc(nvrtc.path, (nvrtc.version[0], 99), nvrtc.architectures, nvrtc.library)
    with kernel_binary(90, later, tmp_path / "kernels"):
        pass
    assert len(kept(tmp_path / "kernels")) == 2 + len(texts)


def test_a_directory_that_others_can_write_is_not_used(nvrtc: Nvrtc, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with kernel_binary(90, nvrtc, tmp_path) as path:
        assert path.parent != tmp_path and path.read_bytes().startswith(b"\x7fELF")
    assert not path.exists() and kept(tmp_path) == []


def test_a_directory_that_cannot_be_made_is_not_needed(nvrtc: Nvrtc, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with kernel_binary(90, nvrtc, tmp_path / "file" / "kernels") as path:
        assert path.read_bytes().startswith(b"\x7fELF")
    assert not path.exists()


def test_a_failed_write_leaves_nothing_behind(
    nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "kernels"
    replace = os.replace

    def fail_there(source: str, target: Path) -> None:
        if Path(target).parent == directory:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_there)
    with kernel_binary(90, nvrtc, directory) as path:
        assert path.read_bytes().startswith(b"\x7fELF")
    assert kept(directory) == []


def test_two_processes_that_compile_at_once_agree(nvrtc: Nvrtc, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from weightsync.device.kernels import kernel_binary\n"
        "from weightsync.device.nvrtc import find_nvrtc\n"
        "with kernel_binary(90, find_nvrtc(), Path(sys.argv[1])) as p: print(p)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "kernels")]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=120)[0] for process in pair}
    assert [process.returncode for process in pair] == [0, 0] and len(printed) == 1
    assert len(kept(tmp_path / "kernels")) == 1


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    for configured, expected in (
        ("/elsewhere", "/elsewhere/weightsync/kernels"),
        ("relative", "/somewhere/.cache/weightsync/kernels"),
        ("", "/somewhere/.cache/weightsync/kernels"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", configured)
        assert str(kernels.cache_directory()) == expected


# --- where something is missing -----------------------------------------------------------------


def test_no_nvrtc_of_a_major_that_the_driver_loads() -> None:
    with pytest.raises(DeviceUnavailable, match="NVRTC") as error:
        find_nvrtc(newest_major=5)
    assert "pip install" in str(error.value.remedy)
    with pytest.raises(OSError):
        open_nvrtc("libnvrtc-that-is-nowhere.so")


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_importing_loads_no_cupy_and_no_compiler() -> None:
    done = run(
        "import sys, weightsync.device.digest\n"
        "print('cupy' in sys.modules, 'nvrtc' in open('/proc/self/maps').read())"
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_without_cupy_the_error_says_what_to_install() -> None:
    done = run(
        "import sys, numpy as np; sys.modules['cupy'] = None\n"
        "from weightsync.device.digest import digest_regions_cuda\n"
        "from weightsync.errors import DeviceUnavailable\n"
        "row = np.zeros((1, 30), np.uint64); row[0, :7] = 64, 1, 1, 0, 0, 0, 8\n"
        "row[0, 7:14] = 1; row[0, 14] = row[0, 22] = 1\n"
        "try: digest_regions_cuda(row, 1)\n"
        "except DeviceUnavailable as error: print(error.remedy)"
    )
    assert done.stdout.strip() == "pip install 'weightsync[cuda]'", done.stdout + done.stderr


def has_gpu() -> bool:
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:
        return False


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_error_is_typed_and_the_check_exits_with_3(tmp_path: Path) -> None:
    # Of host memory, but nothing is read: there is nothing that could.
    with pytest.raises(DeviceUnavailable) as error:
        digest_regions_cuda(table(span(4096, 8, 0)), 1)
    assert error.value.remedy and isinstance(error.value, WeightSyncError)
    command = [sys.executable, str(ROOT / "bench/gpu_check.py"), "--json", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert not (tmp_path / "out").exists() and "Traceback" not in done.stderr
    assert done.stderr.startswith("gpu_check: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.skipif(not has_gpu(), reason="no GPU; bench/gpu_check.py says what one must show")
def test_with_a_gpu_the_check_passes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench/gpu_check.py"), "--json", str(tmp_path / "out")]
    subprocess.run(command, check=True, timeout=280)
    assert json.loads((tmp_path / "out").read_text())["equal"] is True
