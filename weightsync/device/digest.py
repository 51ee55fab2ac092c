"""The digest of tensors in GPU memory: many strided regions, one launch.

The result is bit for bit what `weightsync.digest` computes of the same bytes on the CPU; the kernel
is `csrc/digest_kernel.h`.

    rows = np.zeros((1, 30), np.uint64)
    rows[0, :6] = address, 2, 2, 0, seed, 0           # a whole bf16 matrix, row-major
    rows[0, 6:14] = 1
    rows[0, 6:8] = 4096, 1024                         # its lengths
    rows[0, 14:16] = rows[0, 22:24] = 2048, 2         # its strides, in memory and in the tensor
    table = digest_regions_cuda(rows, 1, stream=torch.cuda.current_stream().cuda_stream)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightsync.device.kernels import KERNEL, kernel_binary
from weightsync.device.nvrtc import find_nvrtc
from weightsync.errors import DeviceUnavailable
from weightsync.tables import U64Array

__all__ = [
    "PendingDigests",
    "checked_regions",
    "cut_chunks",
    "digest_regions_cuda",
    "start_digest_regions",
    "usable_cupy",
]

COLUMNS = 30
MAX_DIMENSIONS = 8
_ITEMSIZES = (1, 2, 4, 8, 16)
_MAX_BYTES = 1 << 62  # of a region: what the kernel multiplies then fits into 64 bits
_THREADS = 256  # per block, as the kernel was compiled for
_BLOCKS_PER_MULTIPROCESSOR = 4  # as many as fit at once
# A chunk is worth several turns of a block's loop (16 KiB each). Larger ones than a MiB only make
# the last blocks end later.
_MIN_CHUNK, _MAX_CHUNK = 64 << 10, 1 << 20
_CHUNKS_PER_BLOCK = 4


class PendingDigests:
    """Digests that are being computed on a stream.

    The tensors must stay as they are until the stream has come this far: until `wait` returns, or
    until an event that was recorded on the stream after the launch has happened.
    """

    def __init__(self, sums: U64Array, event: Any, keep: tuple[object, ...]) -> None:
        self._sums = sums
        self._event = event
        self._keep = keep  # buffers that the stream still reads and writes

    def wait(self) -> U64Array:
        """(n_out, 2) uint64, in host memory. Blocks until the stream has computed it.

        Raises:
            cupy.cuda.runtime.CUDARuntimeError: the kernel, or earlier work on the device, failed;
                an address that cannot be read shows here.
        """
        if self._event is not None:
            self._event.synchronize()
            # The page-locked buffer goes back to its pool; the caller keeps ordinary memory.
            self._sums, self._event, self._keep = self._sums.copy(), None, ()
        return self._sums


def digest_regions_cuda(
    rows: NDArray[np.uint64] | NDArray[np.int64],
    n_out: int,
    stream: int | None = None,
    *,
    device: int | None = None,
) -> U64Array:
    """Digests n regions of device memory and waits for the result.

    Args:
        rows: (n, 30) uint64 or int64, C-contiguous, one box of a checkpoint tensor per row:

            ====== ==================================================================
            0      address of its first element, the one at index (0, ..., 0)
            1      bytes per element: 1, 2, 4, 8 or 16
            2      number of dimensions, at most 8
            3      where that element's first byte lies in the whole tensor
            4      seed of the whole tensor
            5      the digest to which the region adds, in [0, n_out)
            6-13   lengths
            14-21  strides in memory, in bytes; they may be negative
            22-29  strides in the whole tensor, in bytes
            ====== ==================================================================

            Unused dimensions have length 1 and stride 0. Addresses need no alignment. The digest of
            a region is that of exactly its bytes of the tensor, their number included.
        n_out: number of digests.
        stream: handle of the CUDA stream on which to work, after all that was queued there; the
            device's default stream if None. Who writes the tensors on another stream has this
            stream wait for it first.
        device: ordinal of the device that holds all regions; cupy's current one if None.

    Returns:
        (n_out, 2) uint64. A digest without regions is zero.

    Raises:
        ValueError: rows of another shape, dtype or layout, or a row with impossible numbers.
        DeviceUnavailable: cupy, a GPU or NVRTC is missing.
        cupy.cuda.runtime.CUDARuntimeError: the device failed.
    """
    return start_digest_regions(rows, n_out, stream, device=device).wait()


def start_digest_regions(
    rows: NDArray[np.uint64] | NDArray[np.int64],
    n_out: int,
    stream: int | None = None,
    *,
    device: int | None = None,
) -> PendingDigests:
    """Queues one upload, one launch and one download, and returns while they run.

    The first call on a device compiles the kernel, or loads what was compiled before. Arguments and
    errors as in `digest_regions_cuda`; `rows` may be changed after the call.
    """
    table, nbytes = checked_regions(rows, n_out)
    if not nbytes.any():
        return PendingDigests(np.zeros((n_out, 2), dtype=np.uint64), None, ())
    cupy = usable_cupy()
    import cupyx

    with cupy.cuda.Device(device), _on_stream(cupy, stream):
        current = cupy.cuda.Device()
        kernel = _kernel(current.id)
        blocks = current.attributes["MultiProcessorCount"] * _BLOCKS_PER_MULTIPROCESSOR
        chunks = cut_chunks(nbytes, blocks)
        host = np.concatenate([table.reshape(-1), chunks.reshape(-1)])
        uploaded = cupy.empty(host.shape, dtype=np.uint64)
        uploaded.set(host)
        sums = cupy.zeros((n_out, 2), dtype=np.uint64)
        arguments = (uploaded, uploaded[table.size :], np.uint64(len(chunks)), sums)
        kernel((min(len(chunks), blocks),), (_THREADS,), arguments)
        found = cupyx.empty_pinned((n_out, 2), dtype=np.uint64)
        sums.get(out=found, blocking=False)
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
    return PendingDigests(found, event, (host, uploaded, sums))


def checked_regions(
    rows: NDArray[np.uint64] | NDArray[np.int64], n_out: int
) -> tuple[U64Array, U64Array]:
    """The rows as uint64 (n, 30), and the bytes (n,) of each region.

    Raises:
        ValueError: as in `digest_regions_cuda`. Whether an address can be read is the caller's
            promise.
    """
    if n_out < 0:
        raise ValueError(f"n_out must not be negative: {n_out}")
    if rows.ndim != 2 or rows.shape[1] != COLUMNS or rows.dtype not in (np.uint64, np.int64):
        raise ValueError(
            f"rows must be (n, {COLUMNS}) uint64 or int64, not {rows.shape} {rows.dtype}"
        )
    if not rows.flags.c_contiguous:
        raise ValueError("rows must be C-contiguous")
    table: U64Array = rows.view(np.uint64)
    itemsize, lengths = table[:, 1], table[:, 6:14]
    unused = np.arange(MAX_DIMENSIONS, dtype=np.uint64) >= table[:, 2:3]
    strides = table[:, 14:22], table[:, 22:30]
    # Too many bytes would wrap around in integers; as floating-point numbers they stay too many.
    product = itemsize.astype(np.float64) * lengths.astype(np.float64).prod(axis=1)
    nbytes: U64Array = itemsize * lengths.prod(axis=1, dtype=np.uint64)
    for wrong, what in (
        (~np.isin(itemsize, _ITEMSIZES), f"an item size is one of {_ITEMSIZES}"),
        (table[:, 2] > MAX_DIMENSIONS, f"at most {MAX_DIMENSIONS} dimensions are possible"),
        ((unused & (lengths != 1)).any(axis=1), "unused dimensions have length 1"),
        (
            (unused & ((strides[0] != 0) | (strides[1] != 0))).any(axis=1),
            "unused dimensions have stride 0",
        ),
        (table[:, 5] >= n_out, f"its digest is not below n_out {n_out}"),
        (product >= _MAX_BYTES, "it has 2**62 bytes or more"),
        ((table[:, 0] == 0) & (nbytes != 0), "null address"),
    ):
        if wrong.any():
            raise ValueError(f"row {int(wrong.argmax())}: {what}")
    return table, nbytes


def cut_chunks(nbytes: U64Array, blocks: int) -> U64Array:
    """Cuts regions into pieces of work that differ little.

    Args:
        nbytes: (n,) uint64, bytes of each region.
        blocks: how many blocks work at once.

    Returns:
        (m, 3) uint64: region, first byte in row-major order of its elements, number of bytes; all
        multiples of 16 but for the end of a region. An empty region has none.
    """
    share = int(nbytes.sum()) // (blocks * _CHUNKS_PER_BLOCK)
    size = min(max(_MIN_CHUNK, -(-share // _MIN_CHUNK) * _MIN_CHUNK), _MAX_CHUNK)
    counts = ((nbytes + np.uint64(size - 1)) // np.uint64(size)).astype(np.int64)
    region = np.repeat(np.arange(len(nbytes)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    first = ((np.arange(len(region)) - before) * size).astype(np.uint64)
    count = np.minimum(nbytes[region] - first, np.uint64(size))
    return np.stack([region.astype(np.uint64), first, count], axis=1)


def usable_cupy() -> Any:
    """The cupy module, where it and a GPU are there. Raises DeviceUnavailable."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceUnavailable(
            f"digests of GPU memory need cupy, which cannot be imported: {error}",
            remedy="pip install 'weightsync[cuda]'",
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceUnavailable(
            f"no GPU can be used: {error}",
            remedy="run this where nvidia-smi lists a GPU, with a driver for cupy's CUDA version",
        ) from error
    if count == 0:
        raise DeviceUnavailable(
            "no GPU is visible", remedy="see whether CUDA_VISIBLE_DEVICES hides it"
        )
    return cupy


@functools.cache
def _kernel(device: int) -> Any:
    """The kernel, loaded on the device, which is the current one."""
    cupy = usable_cupy()
    driver = cupy.cuda.runtime.driverGetVersion() // 1000
    architecture = int(cupy.cuda.Device(device).compute_capability)
    with kernel_binary(architecture, find_nvrtc(newest_major=driver)) as path:
        function = cupy.RawModule(path=str(path)).get_function(KERNEL)
        # cupy reads the file when something is first asked of the function.
        _ = function.num_regs
    return function


@contextmanager
def _on_stream(cupy: Any, handle: int | None) -> Iterator[None]:
    if handle is None:
        stream = cupy.cuda.Stream.null
    elif hasattr(cupy.cuda.Stream, "from_external"):
        stream = cupy.cuda.Stream.from_external(_Handle(handle))
    else:  # cupy 13
        stream = cupy.cuda.ExternalStream(handle)
    with stream:
        yield


class _Handle:
    """A raw stream handle as an object of the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
