"""Private places: nobody else's directory is used, and the dead leave nothing for long."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsync.errors import TransportError
from weightsync.runtime import OwnedDirectory, remove_stale, runtime_directory

HOLDER = """
from weightsync.runtime import OwnedDirectory
held = OwnedDirectory("session")
(held.path / "socket").touch()
print(held.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of this test alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"weightsync-{os.geteuid()}"


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class Holder:
    """Another process that owns a directory."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        assert ready, "the holder did not start"
        self.path = Path(self.process.stdout.readline().strip())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.kill()


# The runtime directory


def test_the_runtime_directory_is_this_users_alone(base: Path) -> None:
    before = os.umask(0)
    try:
        path = runtime_directory()
    finally:
        os.umask(before)
    assert path == base == runtime_directory()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_without_a_runtime_directory_it_is_in_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    assert runtime_directory().parent == tmp_path / "tmp"


@pytest.mark.parametrize("mode", [0o770, 0o750, 0o710, 0o701, 0o755, 0o777])
def test_a_directory_that_others_may_enter_is_refused(mode: int, base: Path) -> None:
    base.mkdir()
    base.chmod(mode)
    with pytest.raises(TransportError, match="mode 0700") as caught:
        runtime_directory()
    assert str(base) in str(caught.value) and caught.value.remedy


def test_a_symlink_is_refused_even_to_a_good_directory(base: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir(mode=0o700)
    base.symlink_to(good)
    with pytest.raises(TransportError, match="must be a directory"):
        runtime_directory()
    assert not list(good.iterdir())


def test_a_dangling_symlink_is_refused(base: Path, tmp_path: Path) -> None:
    base.symlink_to(tmp_path / "nowhere")
    with pytest.raises(TransportError, match="must be a directory"):
        runtime_directory()
    assert not (tmp_path / "nowhere").exists()


def test_a_file_in_its_place_is_refused(base: Path) -> None:
    base.write_text("mine")
    with pytest.raises(TransportError, match="must be a directory"):
        runtime_directory()
    assert base.read_text() == "mine"


def test_somebody_elses_directory_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base.mkdir(mode=0o700)
    me = os.geteuid()
    base.rename(base.with_name(f"weightsync-{me + 1}"))
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(TransportError, match=f"belongs to user {me + 1}"):
        runtime_directory()


def test_a_missing_parent_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    with pytest.raises(TransportError, match="gone"):
        runtime_directory()


# Owned directories


def test_an_owned_directory_is_private_and_gone_when_closed(base: Path) -> None:
    before = open_fds()
    owned, other = OwnedDirectory("session"), OwnedDirectory("session")
    assert owned.path != other.path and owned.path.parent == base
    assert stat.S_IMODE(owned.path.stat().st_mode) == 0o700
    (owned.path / "socket").touch()
    owned.close()
    assert not owned.path.exists() and other.path.exists()
    other.close()
    assert not list(base.iterdir())
    assert open_fds() == before


def test_closing_twice_closes_nobody_elses_descriptor() -> None:
    owned = OwnedDirectory("session")
    owned.close()
    bystander = os.open(os.devnull, os.O_RDONLY)
    owned.close()
    os.fstat(bystander)
    os.close(bystander)


# The dead and the living


def test_the_directory_of_a_killed_process_is_removed(holder: Holder) -> None:
    holder.kill()
    assert holder.path.exists(), "nothing was left to clean up"
    before = open_fds()
    remove_stale("session")
    assert not holder.path.exists()
    assert open_fds() == before


def test_the_directory_of_a_living_process_stays(holder: Holder) -> None:
    mine = OwnedDirectory("session")
    remove_stale("session")
    assert (holder.path / "socket").exists()
    assert (mine.path / "lock").exists()
    mine.close()


def test_only_that_prefix_is_cleaned(holder: Holder) -> None:
    holder.kill()
    remove_stale("sess")
    remove_stale("other")
    assert holder.path.exists()


def test_what_has_no_lock_is_left_alone(base: Path) -> None:
    strange = runtime_directory() / "session-strange"
    strange.mkdir()
    (base / "session-file").write_text("mine")
    remove_stale("session")
    assert strange.exists() and (base / "session-file").exists()


def test_a_link_to_elsewhere_is_not_followed(base: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "lock").touch()
    (victim / "precious").touch()
    (runtime_directory() / "session-link").symlink_to(victim)
    remove_stale("session")
    assert (victim / "precious").exists()
