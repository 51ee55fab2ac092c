"""``weightsync push`` and ``verify`` as they are run, into toy engines that a connector starts."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import typer
from receipt_examples import example
from safetensors.torch import save_file
from toys import SHAPES, tensors

import weightsync as ws
from weightsync.cli.verify import verify
from weightsync.receipt import LevelShare, Receipt
from weightsync.receipt_check import check
from weightsync.receipt_log import read_lines

COMMAND = Path(sys.executable).parent / "weightsync"
CONNECTOR = f"""
from weightsync.testing.toy import ToyEngine

def connect(url):
    return ToyEngine({SHAPES!r}, workers=2, name=url)
"""


class Place:
    """A directory in which ``toy://`` is a scheme, its engines all zeros; and two checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "toy_connector.py").write_text(CONNECTOR)
        installed = path / "toy_connector-1.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: toy_connector\nVersion: 1\n"
        )
        points = "[weightsync.engines]\ntoy = toy_connector:connect\n"
        (installed / "entry_points.txt").write_text(points)
        zeros = {name: torch.zeros_like(value) for name, value in tensors(1).items()}
        for name, values in (("zeros", zeros), ("other", tensors(1))):
            (path / name).mkdir()
            save_file(values, path / name / "model.safetensors")

    def run(
        self, *arguments: str | Path, most: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """
        Args:
            most: bytes that a file may have.
        """

        def limit() -> None:
            if most is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

        return subprocess.run(
            [str(COMMAND), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": str(self.path)},
            preexec_fn=limit,
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    ("proof", "says"),
    [("served", "100 % served"), ("received", "100 % received"), ("off", "100 % unproven")],
)
def test_push_proves_what_it_is_told_to_and_keeps_the_receipt(
    place: Place, proof: str, says: str
) -> None:
    log = place.path / "log"
    push = ("push", place.path / "other", "--engine", "toy://a", "--engine", "toy://b")
    done = place.run(*push, "--proof", proof, "--receipts", log)
    assert done.returncode == 0, done.stderr
    for name in ("toy://a", "toy://b"):
        assert f"{name} serves version 'other': 6 tensors, 0.0 MB: {says}, on 2" in done.stdout
    printed = place.run(*push, "--proof", proof, "--receipts", log, "--json")
    receipts = [Receipt.from_json(line) for line in log.read_text().splitlines()]
    assert Receipt.from_json(printed.stdout) == receipts[1]
    assert [receipt.proven for receipt in receipts] == [proof] * 2
    assert check(read_lines(log), last=receipts[1].hash) == []


def test_push_proves_what_is_served_unless_told_otherwise(place: Place) -> None:
    done = place.run("push", place.path / "other", "--engine", "toy://a", "--json")
    assert Receipt.from_json(done.stdout).proven == "served"


def test_verify_passes_where_nothing_differs_and_moves_nothing(place: Place) -> None:
    log = place.path / "log"
    verify = ("verify", place.path / "zeros", "--engine", "toy://a", "--engine", "toy://b")
    done = place.run(*verify, "--receipts", log)
    assert done.returncode == 0, done.stderr
    for name in ("toy://a", "toy://b"):
        assert (
            f"{name} reports no version, and differs in nothing that it can read back: "
            "6 tensors, 0.0 MB: 100 % served, on 2 worker(s)"
        ) in done.stdout
    receipt = Receipt.from_json(place.run(*verify, "--receipts", log, "--json").stdout)
    assert receipt.mode == "look" and receipt.intact and len(receipt.engines) == 2
    assert check(read_lines(log), last=receipt.hash) == []


def test_verify_names_all_that_differs_and_ends_with_1(place: Place) -> None:
    log = place.path / "log"
    verify = ("verify", place.path / "other", "--engine", "toy://a", "--receipts", log)
    done = place.run(*verify)
    assert done.returncode == 1 and done.stdout == ""
    assert "ServedMismatch" in done.stderr and "at toy://a" in done.stderr
    # 12 differ, 10 are shown.
    assert done.stderr.count("digest ") == 10 and "... and 2 more" in done.stderr
    done = place.run(*verify, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["error"] == "ServedMismatch"
    differing = {(one["tensor"], one["worker"]) for one in document["mismatches"]}
    workers = [f"toy://a, worker {rank}" for rank in (0, 1)]
    assert differing == {(name, worker) for name in SHAPES for worker in workers}
    assert log.read_bytes() == b"", "what failed leaves no receipt"


@pytest.mark.parametrize("json_too", [False, True])
@pytest.mark.parametrize("command", ["push", "verify"])
def test_a_receipt_that_cannot_be_written_is_printed_and_the_command_ends_with_1(
    place: Place, command: str, json_too: bool
) -> None:
    log = place.path / "log"
    while not log.exists() or log.stat().st_size < 1 << 20:  # larger than the arena
        ws.ReceiptLog(log).append(example(tensors=20_000))
    before = log.read_bytes()
    done = place.run(
        *(command, place.path / "zeros", "--engine", "toy://a", "--receipts", log),
        *(["--json"] if json_too else []),
        most=len(before),
    )
    assert done.returncode == 1 and "ReceiptNotWritten" in done.stderr, done.stderr
    committed = "the update is committed" if command == "push" else "nothing was changed"
    assert committed in done.stderr and "File too large" in done.stderr
    assert '"hash":"' in done.stdout if json_too else "receipt " in done.stdout
    assert log.read_bytes() == before


def test_a_log_of_another_kind_is_refused_before_anything_moves(place: Place) -> None:
    notes = place.path / "notes"
    notes.write_text("some notes\n")
    for command in ("push", "verify"):
        done = place.run(command, place.path / "zeros", "--engine", "toy://a", "--receipts", notes)
        assert done.returncode == 1 and "is not a log of receipts" in done.stderr
        assert done.stdout == "" and notes.read_text() == "some notes\n"


@pytest.mark.parametrize("json_too", [False, True])
def test_an_engine_that_reads_nothing_back_has_proven_nothing(
    place: Place,
    json_too: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = example().engines[0]
    levels = {"off": LevelShare(5, 10_000)}
    blind = msgspec.structs.replace(engine, name="blind", levels=levels)
    engines = (engine,)
    monkeypatch.setattr("weightsync.engines.connect", lambda url: url)
    monkeypatch.setattr(
        "weightsync.look.prove",
        lambda *_, **__: msgspec.structs.replace(example(), mode="look", engines=engines),
    )
    verify(place.path / "zeros", ["toy://a"], json=json_too)
    engines = (engine, blind)
    with pytest.raises(typer.Exit) as left:
        verify(place.path / "zeros", ["toy://a"], json=json_too)
    assert left.value.exit_code == 1
    printed = capfd.readouterr()
    assert "nothing is proven of blind: no tensor can be read back there" in printed.err
    if not json_too:
        assert "blind reports version '7', and reads nothing back: 5 tensors" in printed.out


def test_a_dtype_that_is_none_is_a_usage_error(place: Place) -> None:
    for command in ("push", "verify"):
        done = place.run(command, place.path / "zeros", "--engine", "toy://a", "--dtype", "float7")
        assert done.returncode == 2 and "float7" in done.stderr
