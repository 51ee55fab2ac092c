"""CUDA kernels of csrc/ as files that a driver loads: compiled once per machine and kept.

    with kernel_binary(90, find_nvrtc()) as path:       # a cubin for compute capability 9.0
        cupy.RawModule(path=str(path)).get_function(KERNEL)

Binaries are kept under the user's cache directory (``$XDG_CACHE_HOME/weightsync/kernels``, else
``~/.cache/...``), named by all that they were made of and by a hash of themselves. One that was
changed, or was cut short, is thus seen before a driver is given it, and compiled anew.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from weightsync.device.nvrtc import Nvrtc
from weightsync.errors import DeviceUnavailable

__all__ = ["KERNEL", "OPTIONS", "cache_directory", "compile_kernel", "kernel_binary", "sources"]

KERNEL = "weightsync_digest_regions"
OPTIONS = ("--std=c++17",)
_SOURCE = "digest.cu"
_HEADERS = ("digest.h", "digest_kernel.h")

UNFINISHED = ".unfinished-"
"""How files begin that a process, whose number follows, is still writing."""


def sources() -> dict[str, str]:
    """The kernel and its headers, by name: beside this module in a wheel, in csrc/ of a clone.

    Raises:
        DeviceUnavailable: they are in neither place.
    """
    here = Path(__file__).resolve().parent
    for directory in (here / "csrc", here.parents[1] / "csrc"):
        if (directory / _SOURCE).is_file():
            return {name: (directory / name).read_text() for name in (_SOURCE, *_HEADERS)}
    raise DeviceUnavailable(
        f"the CUDA sources are missing from this installation ({here})",
        remedy="install weightsync again, from a wheel or from its repository",
    )


def compile_kernel(
    architecture: int, nvrtc: Nvrtc, texts: Mapping[str, str] | None = None
) -> tuple[str, bytes, str]:
    """Compiles the kernel.

    Args:
        architecture: compute capability without its dot, as in 90.
        nvrtc: the compiler.
        texts: other sources than `sources()`.

    Returns:
        ``"cubin"``, or ``"ptx"`` where the device is newer than the compiler and the driver has to
        finish the work; the binary; the compiler's log.

    Raises:
        DeviceUnavailable: the device is too old for this compiler, or the sources do not compile.
    """
    headers = dict(sources() if texts is None else texts)
    source = headers.pop(_SOURCE)
    kind, target = _target(architecture, nvrtc)
    options = [*OPTIONS, f"--gpu-architecture={target}"]
    if kind == "cubin":
        options.append("--ptxas-options=-v")  # registers and spills, into the log
    binary, log = nvrtc.compile(_SOURCE, source, headers, options)
    return kind, binary, log


@contextmanager
def kernel_binary(architecture: int, nvrtc: Nvrtc, directory: Path | None = None) -> Iterator[Path]:
    """A file with the compiled kernel, to be loaded before the context ends.

    Args:
        architecture, nvrtc: as in `compile_kernel`.
        directory: where binaries are kept, the user's cache directory by default. It must belong
            to this user, and be writable for nobody else: who writes there decides what runs. Where
            that is not so, or nothing can be written, a temporary file serves.

    Raises:
        DeviceUnavailable: as in `compile_kernel`.
    """
    texts = sources()
    directory = cache_directory() if directory is None else directory
    key = _key(texts, nvrtc, _target(architecture, nvrtc)[1])
    usable = _prepare(directory)
    if usable and (kept := _find(directory, key)) is not None:
        yield kept
        return
    kind, binary, _ = compile_kernel(architecture, nvrtc, texts)
    if usable:
        try:
            path = _write(directory, key, kind, binary)
        except OSError:  # full, or over quota
            usable = False
        else:
            yield path
            return
    with tempfile.TemporaryDirectory(prefix="weightsync-") as temporary:
        yield _write(Path(temporary), key, kind, binary)


def cache_directory() -> Path:
    """Where this user's binaries are kept."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    base = Path(configured) if os.path.isabs(configured) else Path("~/.cache").expanduser()
    return base / "weightsync" / "kernels"


def _target(architecture: int, nvrtc: Nvrtc) -> tuple[str, str]:
    if architecture in nvrtc.architectures:
        return "cubin", f"sm_{architecture}"
    older = [known for known in nvrtc.architectures if known < architecture]
    if not older:
        raise DeviceUnavailable(
            f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]} ({nvrtc.path}) compiles for compute "
            f"capability {nvrtc.architectures[0]} and later, this device has {architecture}",
            remedy="install the NVRTC of an earlier CUDA",
        )
    return "ptx", f"compute_{older[-1]}"


def _key(texts: Mapping[str, str], nvrtc: Nvrtc, target: str) -> str:
    """All that decides what the compiler makes."""
    fields = [target, repr(nvrtc.version), repr(OPTIONS)]
    fields += [field for item in sorted(texts.items()) for field in item]
    hasher = hashlib.sha256()
    for field in fields:
        encoded = field.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
    return f"digest-{target}-{hasher.hexdigest()[:32]}"


def _prepare(directory: Path) -> bool:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError:
        return False
    private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return private and os.access(directory, os.W_OK | os.X_OK)


def _find(directory: Path, key: str) -> Path | None:
    """The kept binary. One that is not what its name says is removed."""
    for path in sorted(directory.glob(f"{key}.*.*")):
        try:
            if path.name.split(".")[1] == _checksum(path.read_bytes()):
                return path
            path.unlink(missing_ok=True)
        except OSError:
            continue
    return None


def _write(directory: Path, key: str, kind: str, binary: bytes) -> Path:
    """In one step: other processes see the whole file or none."""
    path = directory / f"{key}.{_checksum(binary)}.{kind}"
    _remove_abandoned(directory)
    prefix = f"{UNFINISHED}{os.getpid()}-"
    descriptor, unfinished = tempfile.mkstemp(prefix=prefix, dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(binary)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return path


def _remove_abandoned(directory: Path) -> None:
    """What killed processes left half-written."""
    for path in directory.glob(f"{UNFINISHED}*"):
        pid = path.name.removeprefix(UNFINISHED).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


def _checksum(binary: bytes) -> str:
    return hashlib.sha256(binary).hexdigest()[:32]
