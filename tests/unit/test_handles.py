"""Handles: what is exported arrives; whatever else a handle says or points at is refused."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weightsync as ws
from weightsync import opened_handle
from weightsync.digest import digest_tensors
from weightsync.errors import (
    ManifestError,
    ProofFailed,
    ProtocolError,
    SourceError,
    UpdateRefused,
)
from weightsync.handles import ExportedHandles, export_handles, host_id
from weightsync.opened_handle import open_handle
from weightsync.transport.shm import ShmArena

STATE = {
    "a.weight": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "b.bias": torch.tensor(3.0, dtype=torch.bfloat16),
    "c.empty": torch.zeros(0, 5),
    "d.weight": torch.full((33,), -0.0),
}


@pytest.fixture
def exported() -> Iterator[ExportedHandles]:
    with export_handles(ws.StateDictSource(STATE), ["cpu-1", "cpu-2"]) as found:
        yield found


def handle_of(exported: ExportedHandles) -> dict[str, Any]:
    """A changeable copy, as another process gets it."""
    return json.loads(json.dumps(next(iter(exported.handles.values()))))


def test_another_process_opens_proves_and_reads_the_same_bytes(exported: ExportedHandles) -> None:
    code = (
        "import json, sys\n"
        "from weightsync.opened_handle import open_handle\n"
        "with open_handle(json.load(sys.stdin)['cpu-2']) as opened:\n"
        "    opened.prove()\n"
        "    tensors = dict(opened.weights().tensors())\n"
        "print(json.dumps({n: [str(t.dtype), t.float().tolist()] for n, t in tensors.items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(exported.handles),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = {name: [str(t.dtype), t.float().tolist()] for name, t in STATE.items()}
    assert json.loads(done.stdout) == expected
    assert np.signbit(json.loads(done.stdout)["d.weight"][1]).all()


def test_all_devices_share_one_arena_and_it_goes_with_the_block() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with export_handles(ws.StateDictSource(STATE), ["x", "y", "x"]) as exported:
            assert exported.handles["x"] == exported.handles["y"] and len(exported.handles) == 2
            handle = handle_of(exported)
            with open_handle(handle) as opened:
                opened.prove()
                kept = opened.weights()
                kept.map_privately()
        tensors = dict(kept.tensors())
        assert torch.equal(tensors["a.weight"], STATE["a.weight"])
        del tensors, kept  # which live as long as whoever holds them
        assert len(os.listdir("/proc/self/fd")) == before
        with (
            pytest.raises(ProtocolError, match=r"cannot be opened|not the memory"),
            open_handle(handle),
        ):
            pass


def test_a_refill_has_new_digests_and_the_same_place() -> None:
    state = {name: tensor.clone() for name, tensor in STATE.items()}
    with export_handles(ws.StateDictSource(state), ["cpu-1"]) as exported:
        first = handle_of(exported)
        state["a.weight"].add_(1)
        exported.refill()
        second = handle_of(exported)
        assert (first["fd"], first["inode"]) == (second["fd"], second["inode"])
        with open_handle(second) as opened:
            opened.prove()
        with open_handle(first) as opened, pytest.raises(ProofFailed, match=r"a\.weight"):
            opened.prove()


def test_a_refill_of_other_tensors_is_refused() -> None:
    state = dict(STATE)
    with export_handles(ws.StateDictSource(state), ["cpu-1"]) as exported:
        del state["b.bias"]
        with pytest.raises((UpdateRefused, SourceError)):
            exported.refill()


def test_no_device_is_refused() -> None:
    with pytest.raises(UpdateRefused, match="report_device_id"):
        export_handles(ws.StateDictSource(STATE), [])


def test_one_changed_bit_is_found(exported: ExportedHandles) -> None:
    handle = handle_of(exported)
    exported._arena.view()[handle["offsets"][3] + 131] ^= 1
    with open_handle(handle) as opened, pytest.raises(ProofFailed, match=r"d\.weight") as failure:
        opened.prove()
    assert [mismatch.tensor for mismatch in failure.value.mismatches] == ["d.weight"]


def test_a_comparison_of_two_tensors_reads_those_two(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {**STATE, "tied": STATE["d.weight"].clone(), "zero": torch.zeros(33)}
    read: list[list[int]] = []

    def recorded(addresses: Any, nbytes: Any, seeds: Any) -> Any:
        read.append(nbytes.tolist())
        return digest_tensors(addresses, nbytes, seeds)

    with export_handles(ws.StateDictSource(state), ["cpu-1"]) as exported:
        names = list(state)
        with open_handle(handle_of(exported)) as opened:
            monkeypatch.setattr(opened_handle, "digest_tensors", recorded)
            positions = [opened.manifest.index[name] for name in names]
            place = dict(zip(names, positions, strict=True))
            assert opened.same_bytes(place["tied"], place["d.weight"])
            assert not opened.same_bytes(place["zero"], place["d.weight"])  # 0.0 is not -0.0
    assert read == [[132, 132]] * 2


def set_to(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda handle: handle.update(changes)


def move(index: int, by: int) -> Callable[[dict[str, Any]], Any]:
    return lambda handle: handle["offsets"].__setitem__(index, handle["offsets"][index] + by)


MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no pid": (lambda handle: handle.pop("pid"), "missing required field"),
    "unknown field": (set_to(callback="os.system"), "unknown field"),
    "kind": (set_to(kind="pickle"), "kind"),
    "pid as text": (set_to(pid="1"), "pid"),
    "negative descriptor": (set_to(fd=-1), "fd"),
    "huge": (set_to(nbytes=1 << 63), "nbytes"),
    "seed": (set_to(seed="xyz"), "seed"),
    "long seed": (set_to(seed="1" * 17), "seed"),
    "line for a seed": (set_to(seed="\n"), "seed"),
    "line after the seed": (set_to(seed="1\n"), "seed"),
    "line after the kind": (set_to(kind="shm\n"), "kind"),
    "line after the digests": (lambda h: h.update(digests=h["digests"][:-1] + "\n"), "digests"),
    "digest digits": (set_to(digests="zz"), "digests"),
    "too few digests": (lambda h: h.update(digests=h["digests"][:-2]), "digits of digests"),
    "another host": (set_to(host="cpu-elsewhere"), "reaches no other host"),
    "hash": (set_to(manifest_hash="00"), "expected"),
    "too few offsets": (lambda handle: handle["offsets"].pop(), "3 offsets for 4 tensors"),
    "negative offset": (move(0, -64), "offsets"),
    "unaligned": (move(1, 1), "b.bias would lie"),
    "beyond the end": (move(3, 1 << 20), "d.weight would lie"),
    "at the very end": (lambda h: h["offsets"].__setitem__(3, h["nbytes"]), "d.weight would lie"),
    "overlapping": (lambda h: h["offsets"].__setitem__(1, h["offsets"][0]), "b.bias would lie"),
    "another inode": (lambda handle: handle.update(inode=handle["inode"] + 1), "not the memory"),
    "another size": (lambda handle: handle.update(nbytes=handle["nbytes"] + 64), "not the memory"),
    "no such descriptor": (set_to(fd=1 << 20), "cannot be opened"),
    "no such process": (set_to(pid=(1 << 22) + 1), "cannot be opened"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_handle_that_is_not_what_it_should_be_is_refused(
    exported: ExportedHandles, case: str
) -> None:
    change, reason = MALFORMED[case]
    handle = handle_of(exported)
    change(handle)
    gc.collect()  # what earlier tests left in cycles is not to be counted
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError, match=reason), open_handle(handle):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("raw", [None, 7, "handle", [], b"\x80\x04N.", {"a": 1}])
def test_what_is_no_handle_at_all_is_refused(raw: object) -> None:
    with pytest.raises(ProtocolError, match="no handle"), open_handle(raw):
        pass


def test_two_tensors_of_one_name_are_refused(exported: ExportedHandles) -> None:
    handle = handle_of(exported)
    handle["tensors"][1] = copy.copy(handle["tensors"][0])
    with pytest.raises(ManifestError, match="two tensors"), open_handle(handle):
        pass


def pointing_at(exported: ExportedHandles, fd: int) -> dict[str, Any]:
    handle = handle_of(exported)
    found = os.fstat(fd)
    handle.update(fd=fd, inode=found.st_ino)
    return handle


def test_memory_that_could_shrink_under_its_reader_is_refused(exported: ExportedHandles) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, exported.handles["cpu-1"]["nbytes"])
    with pytest.raises(ProtocolError, match="seals"), open_handle(pointing_at(exported, fd)):
        pass
    os.close(fd)


def test_a_file_is_refused(exported: ExportedHandles, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(exported.handles["cpu-1"]["nbytes"]))
    fd = os.open(path, os.O_RDWR)
    handle = pointing_at(exported, fd)
    with pytest.raises(ProtocolError, match="seal"), open_handle(handle):
        pass
    os.close(fd)


def test_a_pipe_is_refused_without_waiting_for_its_other_end(
    exported: ExportedHandles, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with (
        pytest.raises(ProtocolError, match="not the memory"),
        open_handle(pointing_at(exported, fd)),
    ):
        pass
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make memory of another user")
def test_memory_of_another_user_is_refused(exported: ExportedHandles) -> None:
    arena = ShmArena(exported.handles["cpu-1"]["nbytes"])
    os.fchown(arena.fd, 65534, 65534)
    with (
        pytest.raises(ProtocolError, match="of user 65534"),
        open_handle(pointing_at(exported, arena.fd)),
    ):
        pass
    arena.close()


def test_a_host_has_one_name_in_all_its_processes() -> None:
    code = "from weightsync.handles import host_id; print(host_id())"
    names = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert names == {host_id() + "\n"}


def test_another_boot_or_machine_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host_id()
    monkeypatch.setattr(Path, "read_text", lambda path: "another boot")
    host_id.cache_clear()
    assert host_id() != here and host_id().startswith("cpu-")
    host_id.cache_clear()


def test_a_host_that_cannot_be_told_at_the_moment_is_no_other_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_descriptors(path: Path) -> str:
        raise OSError(24, "Too many open files")

    host_id.cache_clear()
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(Path, "read_text", no_descriptors)
        host_id()
    assert host_id().startswith("cpu-")
