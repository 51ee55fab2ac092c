"""NVRTC, CUDA's run-time compiler: found, and called for one source with its headers.

It needs no GPU and no CUDA toolkit: the ``nvidia-cuda-nvrtc-cu12`` wheel, or any ``libnvrtc``, will
do. It is called directly so that headers go to it by name, and so that what compiles on a machine
without a GPU is the very code that compiles on one with it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightsync.errors import DeviceUnavailable

__all__ = ["Nvrtc", "find_nvrtc", "open_nvrtc"]

_MAJORS = (13, 12)


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """A loaded NVRTC.

    Attributes:
        path: what was loaded.
        version: (major, minor) of CUDA.
        architectures: what it compiles for, ascending, as in 90 for ``sm_90``.
    """

    path: str
    version: tuple[int, int]
    architectures: tuple[int, ...]
    library: ctypes.CDLL

    def compile(
        self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> tuple[bytes, str]:
        """Compiles for ``--gpu-architecture``: ``sm_*`` to a cubin, ``compute_*`` to PTX.

        Args:
            name: of the source, for messages.
            source: CUDA C++.
            headers: texts by the name under which they are included.
            options: NVRTC's.

        Returns:
            The binary, and the compiler's log.

        Raises:
            DeviceUnavailable: the source does not compile under these options.
        """
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            name.encode(),
            len(headers),
            _strings(headers.values()),
            _strings(headers),
        )
        try:
            status = self.library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != 0:
                raise DeviceUnavailable(
                    f"NVRTC {self.version[0]}.{self.version[1]} ({self.path}) does not compile "
                    f"{name} with {' '.join(options)}:\n{log}"
                )
            is_ptx = any("compute_" in option for option in options)
            return self._output(program, "PTX" if is_ptx else "CUBIN"), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self.library, function)(*arguments)
        if status != 0:
            raise DeviceUnavailable(f"{function} of {self.path} failed: status {status}")


def find_nvrtc(newest_major: int | None = None) -> Nvrtc:
    """The newest NVRTC of this machine.

    Args:
        newest_major: of CUDA. A driver loads no binaries of a later CUDA than its own.

    Raises:
        DeviceUnavailable: there is none.
    """
    majors = [major for major in _MAJORS if newest_major is None or major <= newest_major]
    for major in majors:
        for path in _candidates(major):
            try:
                return open_nvrtc(path)
            except OSError:
                continue
    raise DeviceUnavailable(
        f"no NVRTC of CUDA {' or '.join(map(str, majors)) or newest_major} was found, in Python's "
        "packages, in CUDA_PATH, or where the system's libraries are",
        remedy="pip install nvidia-cuda-nvrtc-cu12, or set CUDA_PATH to a CUDA toolkit",
    )


def open_nvrtc(path: str) -> Nvrtc:
    """Loads the library at `path`. Raises OSError where that fails."""
    # Of some wheels the compiler does not find its own built-ins beside it, unless they are there.
    directory = Path(path).parent
    if directory != Path():
        for builtins in sorted(directory.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(path)
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) != 0:
        raise OSError(f"{path} does not tell its version")
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    architectures = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(architectures)
    return Nvrtc(path, (major.value, minor.value), tuple(sorted(architectures)), library)


def _candidates(major: int) -> Iterator[str]:
    name = f"libnvrtc.so.{major}"
    directories = []
    package = importlib.util.find_spec("nvidia")  # a namespace; finding it imports nothing
    for root in (package.submodule_search_locations or ()) if package is not None else ():
        directories += [Path(root, "cuda_nvrtc", "lib"), Path(root, f"cu{major}", "lib")]
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if toolkit := os.environ.get(variable):
            directories.append(Path(toolkit, "lib64"))
    directories += [Path(sys.prefix, "lib"), Path("/usr/local/cuda/lib64")]
    yield from (str(path) for directory in directories if (path := directory / name).exists())
    yield name


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)
