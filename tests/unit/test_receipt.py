"""Receipts: none can be changed, lost or swapped unnoticed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import receipt as receipt_file
from weightsync.proof import digest_of_digests
from weightsync.receipt import (
    EngineReceipt,
    LevelShare,
    Receipt,
    WorkerProof,
    WorkerReceipt,
    chain,
)

LEVELS = {"served": LevelShare(3, 600), "spot": LevelShare(1, 300), "received": LevelShare(1, 100)}
PROOF = WorkerProof(
    boxes=7,
    nbytes=900,
    digest="ef" * 32,
    seconds=0.0625,
    spot=("layers.0.weight",),
    unproven={"router.weight": "only 3 of 4 elements can be read back"},
)
LOOKED = WorkerReceipt("toy/0", "cpu", 0.5, 0.25, 0.125, PROOF)
UNASKED = WorkerReceipt("toy/1", "cpu", 0.5, 0.25, 0.125)
ENGINE = EngineReceipt(
    name="toy",
    engine="toy 1",
    pause="keep",
    paused_seconds=0.75,
    seconds={"pause": 0.1, "apply": 0.3},
    workers=(LOOKED, UNASKED),
    plan_hash="12" * 32,
    levels=LEVELS,
    canary=0.0625,
)
RECEIPT = chain(
    Receipt(
        version="7",
        update_id="u",
        proven="received",
        levels=LEVELS,
        mode="staged",
        only=("layers.*",),
        nbytes=1000,
        manifest_hash="ab" * 32,
        seed="0123456789abcdef",
        digest="cd" * 32,
        casts={"w": "float32 -> bfloat16"},
        aliases={"lm_head.weight": "embed.weight"},
        untouched={"toy": ("normalizer",)},
        engines=(ENGINE,),
        seconds={"fill": 1.5, "verify": 0.1 + 0.2},
        versions={"weightsync": "0.1.0", "torch": "2.13.0"},
        at="2026-01-02T03:04:05.678+00:00",
        previous="",
    )
)


def test_a_digest_of_digests_is_of_the_seed_too() -> None:
    """BLAKE2b-256 of the seed as eight little-endian bytes, and what follows."""
    expected = hashlib.blake2b(bytes([7, 1, 0, 0, 0, 0, 0, 0]) + b"abc", digest_size=32)
    assert digest_of_digests(0x107, b"abc") == expected.hexdigest()


def test_a_chained_receipt_is_intact_and_an_unchained_one_is_not() -> None:
    assert RECEIPT.intact and len(RECEIPT.hash) == 64
    assert not msgspec.structs.replace(RECEIPT, hash="").intact
    assert chain(RECEIPT) == RECEIPT


def test_json_and_back_is_the_same_receipt_and_intact() -> None:
    again = Receipt.from_json(RECEIPT.to_json())
    assert again == RECEIPT and again.intact
    assert isinstance(again.engines[0].workers, tuple)
    assert json.loads(RECEIPT.to_json())["engines"][0]["workers"][0]["device"] == "cpu"


def test_the_order_of_json_fields_and_spaces_do_not_matter() -> None:
    shuffled = json.dumps(json.loads(RECEIPT.to_json()), indent=3, sort_keys=True)
    assert Receipt.from_json(shuffled).intact


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [p for key in value for p in leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in leaves(item, (*path, i))]
    return [path]


def other(value: Any) -> Any:
    """A value of the same type; for an absent proof, one that nobody made."""
    if value is None:
        return json.loads(msgspec.json.encode(PROOF))
    if isinstance(value, int | float):
        return value + 1
    return {"received": "served", "keep": "wait"}.get(value, f"{value}x")


@pytest.mark.parametrize("path", leaves(json.loads(RECEIPT.to_json())), ids=str)
def test_a_change_of_any_field_is_noticed(path: tuple[Any, ...]) -> None:
    content = json.loads(RECEIPT.to_json())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = other(inner[path[-1]])
    assert not Receipt.from_json(json.dumps(content)).intact


@pytest.mark.parametrize(
    "change",
    [
        {"casts": {}},
        {"aliases": {"lm_head.weight": "embed.weight", "x": "y"}},
        {"engines": ()},
        {"engines": (ENGINE, ENGINE)},
        {"levels": {"served": LevelShare(5, 1000)}},
        {"engines": (msgspec.structs.replace(ENGINE, workers=(LOOKED,)),)},
        {"engines": (msgspec.structs.replace(ENGINE, workers=(UNASKED, UNASKED)),)},
        {"engines": (msgspec.structs.replace(ENGINE, canary=None),)},
        {"mode": "look"},
    ],
)
def test_what_is_added_or_left_out_is_noticed(change: dict[str, Any]) -> None:
    assert not msgspec.structs.replace(RECEIPT, **change).intact


@dataclasses.dataclass
class Log:
    """A sender's receipts, as somebody would keep them."""

    receipts: list[Receipt]

    def sound(self) -> bool:
        links = [receipt.previous for receipt in self.receipts]
        hashes = ["", *(receipt.hash for receipt in self.receipts)]
        return all(r.intact for r in self.receipts) and links == hashes[:-1]


def log(length: int) -> Log:
    receipts: list[Receipt] = []
    for number in range(length):
        previous = receipts[-1].hash if receipts else ""
        content = msgspec.structs.replace(RECEIPT, version=str(number), previous=previous)
        receipts.append(chain(content))
    return Log(receipts)


def test_a_log_is_sound_and_one_that_lost_or_swapped_an_entry_is_not() -> None:
    whole = log(5).receipts
    assert Log(whole).sound()
    for i in range(4):
        assert not Log(whole[:i] + whole[i + 1 :]).sound()
        assert not Log([*whole[:i], whole[i + 1], whole[i], *whole[i + 2 :]]).sound()
        forged = chain(msgspec.structs.replace(whole[i], version="forged"))
        assert forged.intact
        assert not Log([*whole[:i], forged, *whole[i + 1 :]]).sound()


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(
    st.dictionaries(texts, st.floats(0, 1e9), max_size=4), st.dictionaries(texts, texts, max_size=4)
)
def test_any_numbers_and_names_survive_json(
    seconds: dict[str, float], aliases: dict[str, str]
) -> None:
    receipt = chain(msgspec.structs.replace(RECEIPT, seconds=seconds, aliases=aliases))
    again = Receipt.from_json(receipt.to_json())
    assert again == receipt and again.intact


@given(st.dictionaries(texts, texts, min_size=2, max_size=5))
def test_the_order_in_which_a_dict_was_filled_does_not_matter(casts: dict[str, str]) -> None:
    one = msgspec.structs.replace(RECEIPT, casts=casts)
    other = msgspec.structs.replace(RECEIPT, casts=dict(reversed(casts.items())))
    assert receipt_file._hash(one) == receipt_file._hash(other)


def test_what_is_no_receipt_is_not_read() -> None:
    for text in ("", "{}", "[]", RECEIPT.to_json()[:-1], RECEIPT.to_json().replace("1000", "true")):
        with pytest.raises(msgspec.DecodeError):
            Receipt.from_json(text)
