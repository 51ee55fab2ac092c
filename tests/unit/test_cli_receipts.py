"""``weightsync receipts`` as it is run, on logs that real senders wrote; and how commands put
receipts into words."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from receipt_examples import UNPROVEN, example
from rich.console import Console
from toys import SHAPES, tensors

import weightsync as ws
from weightsync.cli.output import plain, print_unproven, shares_text, unproven
from weightsync.receipt import LevelShare, Receipt
from weightsync.testing.toy import ToyEngine

COMMAND = Path(sys.executable).parent / "weightsync"


def run(*arguments: str | Path, columns: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), "receipts", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=None if columns is None else {"COLUMNS": str(columns)},
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Two updates, the second of a part; a look; and one by an engine that packs."""
    path = tmp_path_factory.mktemp("log") / "receipts.jsonl"
    source = ws.StateDictSource(tensors(1))
    with ToyEngine(SHAPES, workers=2) as engine:
        with ws.WeightSender(source, [engine], receipts=path) as sender:
            sender.sync("first [red]\x1b[31m")
            sender.sync("second", only=["embed*"])
        ws.prove(source, [engine], receipts=path)
    ws.ReceiptLog(path).append(example("packed"))
    return path.read_bytes()


@pytest.fixture
def log(written: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(written)
    return path


def receipts_in(log: Path) -> list[Receipt]:
    return [Receipt.from_json(line) for line in log.read_text().splitlines()]


def cells(table: str) -> list[list[str]]:
    """By receipt, its cells' text; columns stand below their titles."""
    lines = table.splitlines()
    title = next(line for line in lines if "version" in line)
    starts = [title.index(name) for name in ("line", "version", "written", "delivered", "proof")]
    starts += [title.index("took"), len(title)]
    rows: list[list[str]] = []
    for line in lines[lines.index(title) + 2 :]:
        found = [line[a:b].strip() for a, b in zip(starts, [*starts[1:-1], None], strict=False)]
        if found[0]:
            rows.append(found)
        elif any(found):
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], found, strict=True)]
    return rows


@pytest.mark.parametrize("columns", [None, 80, 160])
def test_show_tells_what_each_line_is_of(log: Path, columns: int | None) -> None:
    done = run("show", log, columns=columns)
    assert done.returncode == 0 and done.stderr == "" and "…" not in done.stdout
    assert all(len(line) <= (columns or 80) for line in done.stdout.splitlines())
    rows = cells(done.stdout)
    receipts = receipts_in(log)
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert rows[0][1].replace(" ", "") == r"first[red]\x1b[31m"
    assert [row[1] for row in rows[1:]] == ["second", "second", "packed"]
    modes = ["staged", "staged, part", "look", "staged"]
    for row, receipt, mode in zip(rows, receipts, modes, strict=True):
        assert row[2] == f"{receipt.at[:10]} {receipt.at[11:19]} {mode}"
        assert row[3] == "0.0 MB 1 x 2"
    assert [row[4] for row in rows[:3]] == [f"100 % served ({n})" for n in (len(SHAPES), 1, 6)]
    assert rows[3][4] == "60.0 % served (3) 40.0 % spot (1) < 0.1 % received (1)"
    assert rows[3][5] == "fill 1500 ms, commit 750 ms; paused 750 ms"
    assert "plan " in rows[0][5] and "commit " in rows[0][5] and "read " in rows[2][5]
    assert "paused" in rows[0][5] and "paused" not in rows[2][5]


def test_show_of_one_line_tells_everything(log: Path) -> None:
    text = run("show", log, "--line", "4").stdout
    receipt = receipts_in(log)[3]
    worker = receipt.engines[0].workers[0]
    proof = worker.proof
    assert proof is not None
    hashes = (receipt.hash, receipt.previous, receipt.manifest_hash, receipt.digest, receipt.seed)
    for told in (*hashes, proof.digest, receipt.engines[0].plan_hash, worker.name, "toy, worker 1"):
        assert told in text
    for name, why in UNPROVEN.items():
        assert f"{name}: {why}" in text
    assert f"looked at {proof.boxes} places, {proof.nbytes} bytes" in text
    assert "spot, 1:\n      layers.0.weight\n" in text
    assert "differ by 0.062 at most" in text and "what its model holds was not looked at" in text
    assert "\x1b" not in run("show", log, "--line", "1").stdout


def test_json_is_one_document_of_whole_receipts(log: Path) -> None:
    done = run("show", log, "--json")
    document = json.loads(done.stdout)
    assert [one["line"] for one in document] == [1, 2, 3, 4]
    found = [Receipt.from_json(json.dumps(one["receipt"])) for one in document]
    assert found == receipts_in(log) and all(one["intact"] for one in document)
    single = json.loads(run("show", log, "--line", "2", "--json").stdout)
    assert single == document[1]


def test_what_is_torn_or_changed_is_shown_as_that(log: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"second"', b'"other"')
    log.write_bytes(b"".join(lines) + lines[0][:200])
    done = run("show", log)
    assert done.returncode == 0 and cells(done.stdout)[4][2] == "torn"
    assert done.stdout.count("changed: not intact") == 1
    assert "NOT that of its content" in run("show", log, "--line", "2").stdout
    assert "line 5 is torn" in run("show", log, "--line", "5").stdout
    document = json.loads(run("show", log, "--json").stdout)
    assert [one.get("intact") for one in document] == [True, False, True, True, None]
    assert document[4]["torn"] and document[4]["text"] == lines[0][:200].decode()


def test_check_of_a_sound_log_ends_with_0(log: Path, tmp_path: Path) -> None:
    last = receipts_in(log)[-1].hash
    for arguments in ((log,), (log, "--last", last)):
        done = run("check", *arguments)
        assert (done.returncode, done.stdout) == (0, "sound: 4 receipt(s)\n"), done.stderr
    empty = tmp_path / "empty"
    empty.touch()
    assert run("check", empty).stdout == "sound: 0 receipt(s)\n"


def test_check_names_each_fault_with_what_to_do_and_ends_with_1(log: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + lines[2] + lines[1].replace(b'"nbytes":', b'"nbytes":1') + b'{"vers')
    done = run("check", log)
    assert done.returncode == 1 and done.stderr == ""
    said = done.stdout.splitlines()
    assert said[0].startswith("line 2 (version 'second'): moved: its place is right after line 3")
    assert said[2].startswith("line 3 (version 'second'): changed: its hash is ")
    assert said[4].startswith("line 4: torn: ")
    assert [line[:14] for line in said[1:6:2]] == ["  What to do: "] * 3
    assert said[6:] == ["3 fault(s) in 4 line(s)"]


def test_check_finds_a_missing_end_where_the_last_hash_is_known(log: Path) -> None:
    last = receipts_in(log)[-1].hash
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    assert run("check", log).returncode == 0
    done = run("check", log, "--last", last)
    assert done.returncode == 1 and "line 4: missing: the last receipt should be" in done.stdout
    assert run("check", log, "--last", "abc").returncode == 2


@pytest.mark.parametrize("command", ["show", "check"])
def test_what_is_no_log_is_an_error_in_words(command: str, tmp_path: Path) -> None:
    stranger = tmp_path / "notes"
    stranger.write_text("some notes\n")
    for path, says in ((stranger, "is not a log of receipts"), (tmp_path / "none", "No such file")):
        done = run(command, path)
        assert done.returncode == 1 and done.stdout == ""
        assert says in done.stderr and "What to do:" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_line_that_is_not_there_is_a_usage_error(log: Path) -> None:
    done = run("show", log, "--line", "9")
    assert done.returncode == 2 and "has no line 9" in done.stderr


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        ({"served": (3, 10)}, "100 % served"),
        ({"served": (3, 989), "spot": (1, 11)}, "98.9 % served, 1.1 % spot"),
        ({"served": (9, 999_999), "received": (1, 1)}, "> 99.9 % served, < 0.1 % received"),
        ({"off": (1, 4)}, "100 % unproven"),
        ({"served": (1, 0), "spot": (1, 5)}, "0.0 % served, 100 % spot"),
        ({"served": (1, 0), "off": (3, 0)}, "25.0 % served, 75.0 % unproven"),
        ({}, ""),
    ],
)
def test_shares_are_of_bytes_and_never_rounded_to_all_or_nothing(
    levels: dict[str, tuple[int, int]], text: str
) -> None:
    assert shares_text({name: LevelShare(*share) for name, share in levels.items()}) == text  # type: ignore[misc]


def test_what_cannot_be_read_back_is_named_once_with_all_its_workers() -> None:
    engine = example().engines[0]
    worker = engine.workers[0]
    assert worker.proof is not None
    many = {f"layers.{i}.weight": "it is packed" for i in range(12)}
    proof = msgspec.structs.replace(worker.proof, unproven=many)
    workers = tuple(msgspec.structs.replace(worker, name=f"w{i}", proof=proof) for i in range(2))
    engine = msgspec.structs.replace(engine, workers=workers)
    assert unproven(engine) == [(name, "it is packed", ["w0", "w1"]) for name in many]
    printed = io.StringIO()
    print_unproven(engine, Console(file=printed))
    lines = printed.getvalue().splitlines()
    assert lines[0] == "  'layers.0.weight' cannot be read back: it is packed (on w0, w1)"
    assert len(lines) == 11 and lines[-1] == "  ... and 2 more; --json names all"


def test_text_from_elsewhere_cannot_command_a_terminal() -> None:
    assert plain("a\x1b[31m\n\u202e ö") == "a\\x1b[31m\\n\\u202e ö"
