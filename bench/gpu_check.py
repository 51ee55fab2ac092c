"""What only a GPU can show: that the CUDA digest equals the CPU's bit for bit, and how fast it is.

    python bench/gpu_check.py --json gpu.json

Exits with status 0 if all digests agree, 1 if any differs, 3 without a usable GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from weightsync.device.digest import digest_regions_cuda, start_digest_regions, usable_cupy
from weightsync.device.nvrtc import find_nvrtc
from weightsync.digest import digest_spans
from weightsync.errors import DeviceUnavailable

SEEDS = np.random.default_rng(0).integers(0, 2**64, 4096, dtype=np.uint64)


def region(array: Any, whole: Any, start: int, out: int) -> list[int]:
    """A row for a device array, of an item size that numpy has, as part of a whole tensor."""
    pad = 8 - array.ndim
    columns = [array.data.ptr, array.itemsize, array.ndim, start, int(SEEDS[out]), out]
    columns += [*array.shape, *[1] * pad, *array.strides, *[0] * pad]
    return [column % 2**64 for column in [*columns, *whole, *[0] * pad]]


def spans_equal(cupy: Any, rng: np.random.Generator) -> bool:
    """Many contiguous regions in one launch, of every alignment of address and start."""
    sizes = np.concatenate([rng.integers(0, 300, 2000), rng.integers(0, 5 << 20, 40)])
    host = rng.integers(0, 256, int(sizes.sum()), dtype=np.uint8)
    device = cupy.asarray(host)
    at = np.cumsum(sizes) - sizes
    starts = rng.integers(0, 1 << 40, len(sizes))
    out = np.arange(len(sizes)) % 100
    rows = [
        region(device[a : a + n], [1], int(s), int(o))
        for a, n, s, o in zip(at, sizes, starts, out, strict=True)
    ]
    found = digest_regions_cuda(np.array(rows, dtype=np.uint64), 100)
    expected = digest_spans(host.ctypes.data + at, sizes, starts, SEEDS[out], out, 100)
    return bool(np.array_equal(found, expected))


def strided_equal(cupy: Any, rng: np.random.Generator, dtype: str) -> bool:
    """Boxes of tensors, in memory as they come, permuted, reversed and sliced."""
    itemsize = np.dtype(dtype).itemsize
    rows, expected = [], []
    for out in range(60):
        shape = tuple(rng.integers(1, 40, int(rng.integers(1, 5))))
        axes = rng.permutation(len(shape))
        padded = [shape[a] + int(rng.integers(0, 3)) for a in axes]
        raw = rng.integers(0, 256, int(np.prod(padded)) * itemsize, dtype=np.uint8)
        host = raw.view(dtype).reshape(padded).transpose(np.argsort(axes))
        device = cupy.asarray(raw).view(dtype).reshape(padded).transpose(np.argsort(axes).tolist())
        step = int(rng.choice([1, 1, 2, -1]))
        box = (*(slice(0, n) for n in shape[:-1]), slice(None, None, step))
        host, device = host[box], device[box]
        # The same box inside a larger tensor, whose bytes elsewhere are no part of the digest.
        larger = [n + int(rng.integers(0, 3)) for n in host.shape]
        whole = np.empty(larger, dtype).strides
        start = int(rng.integers(0, 100)) * itemsize
        rows.append((region(device, whole, start, out), device))
        run = np.ascontiguousarray(host).reshape(-1, host.shape[-1])
        places = [
            start + sum(i * s for i, s in zip(index, whole, strict=False))
            for index in np.ndindex(host.shape[:-1])
        ]
        addresses = [line.ctypes.data for line in run]
        n = len(places)
        sizes, seeds = [run.shape[1] * itemsize] * n, np.full(n, SEEDS[out])
        expected.append(digest_spans(addresses, sizes, places, seeds, [0] * n, 1)[0])
    found = digest_regions_cuda(np.array([row for row, _ in rows], dtype=np.uint64), 60)
    return bool(np.array_equal(found, np.array(expected)))


def on_a_stream_equal(cupy: Any, rng: np.random.Generator) -> bool:
    """On a stream of its own, queued behind the copy that writes the tensor."""
    host = rng.integers(0, 256, 64 << 20, dtype=np.uint8)
    source, target = cupy.asarray(host), cupy.zeros(host.size, dtype=np.uint8)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupy.copyto(target, source)
    row = np.array([region(target, [1], 0, 0)], dtype=np.uint64)
    found = start_digest_regions(row, 1, stream.ptr).wait()
    expected = digest_spans([host.ctypes.data], [host.size], [0], SEEDS[:1])
    return bool(np.array_equal(found, expected))


def speed(cupy: Any) -> dict[str, float]:
    """GB/s of bytes read, medians of 20 rounds, tables and results included."""
    n = 2 << 30
    n = min(n, cupy.cuda.Device().mem_info[0] // 3)
    matrix = cupy.ones((n // 8192, 4096), dtype=np.uint16)
    target = cupy.empty_like(matrix)
    half = matrix[:, :2048]
    tables = {
        "digest of one tensor": np.array([region(matrix, matrix.strides, 0, 0)], np.uint64),
        "digest of 1000 tensors": np.array(
            [
                region(part, part.strides, 0, i)
                for i, part in enumerate(cupy.array_split(matrix, 1000))
            ],
            np.uint64,
        ),
        "digest of a column slice": np.array([region(half, matrix.strides, 0, 0)], np.uint64),
        "digest of a transposed tensor": np.array(
            [region(matrix.T, np.empty(matrix.T.shape, np.uint16).strides, 0, 0)], np.uint64
        ),
        "digest at an odd address": np.array(
            [region(matrix.reshape(-1).view(np.uint8)[1:], [1], 0, 0)], np.uint64
        ),
    }
    figures = {"copy": matrix.nbytes / seconds(cupy, lambda: cupy.copyto(target, matrix)) / 1e9}
    for name, rows in tables.items():
        nbytes = half.nbytes if "slice" in name else matrix.nbytes
        n_out = len(rows)
        elapsed = seconds(cupy, lambda rows=rows, n_out=n_out: start_digest_regions(rows, n_out))
        figures[name] = nbytes / elapsed / 1e9
    return figures


def seconds(cupy: Any, work: Any) -> float:
    elapsed = []
    for _ in range(23):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        keep = work()
        end.record()
        end.synchronize()
        elapsed.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        del keep
    return float(np.median(elapsed[3:]))


def main() -> int:
    parser = argparse.ArgumentParser(description="the CUDA digest against the CPU's, and its speed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        cupy = usable_cupy()
        nvrtc = find_nvrtc(cupy.cuda.runtime.driverGetVersion() // 1000)
    except DeviceUnavailable as error:
        print(f"gpu_check: {str(error).splitlines()[0]}", file=sys.stderr)
        return 3
    rng = np.random.default_rng(1)
    device = cupy.cuda.Device()
    checks = {
        "contiguous regions": spans_equal(cupy, rng),
        **{
            f"strided regions of {dtype}": strided_equal(cupy, rng, dtype)
            for dtype in ("u1", "u2", "f4", "f8", "c16")
        },
        "behind a copy on a stream": on_a_stream_equal(cupy, rng),
    }
    result = {
        "device": cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode(),
        "compute_capability": device.compute_capability,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "nvrtc": list(nvrtc.version),
        "equal": all(checks.values()),
        "checks": checks,
        "gigabytes_per_second": speed(cupy),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
