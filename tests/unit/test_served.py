"""What workers hold against what they must: hand-made workers, real digests."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weightsync.box import Box
from weightsync.digest import derive_seeds, digest_tensors
from weightsync.errors import ProofFailed, ProtocolError, ServedMismatch
from weightsync.evidence import ArenaEvidence, Part, digest_part
from weightsync.holding import Holding, canonical, spot_columns
from weightsync.manifest import DTYPE_BYTES, Manifest, TensorSpec
from weightsync.messages import Described, Found, Partial, WireProblem
from weightsync.served import Judge, ServedPlan, shares

SEED = 0xC0FFEE
SPECS = (
    TensorSpec("q", "float32", (8, 6)),
    TensorSpec("k", "bfloat16", (4, 6)),
    TensorSpec("scale", "float32", ()),
    TensorSpec("head", "float32", (8, 6)),
    TensorSpec("none", "float32", (0, 3)),
)
MANIFEST = Manifest(SPECS)
SEEDS = derive_seeds(SEED, MANIFEST.identities)
Q, K, SCALE, HEAD, NONE = range(len(SPECS))
ALL = tuple(Holding(i, s.name, (0,) * len(s.shape), s.shape) for i, s in enumerate(SPECS))


def trainer(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    found = {
        spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for spec in SPECS
    }
    return {**found, **changes}


def raw(values: dict[str, torch.Tensor]) -> list[NDArray[np.uint8]]:
    return [values[s.name].contiguous().reshape(-1).view(torch.uint8).numpy() for s in SPECS]


class Worker:
    """One that holds real bytes, and says of them what a target would.

    Args:
        holds: what its model holds, whole.
        holdings: what it says of that.
    """

    def __init__(
        self,
        holds: dict[str, torch.Tensor],
        holdings: tuple[Holding, ...] = ALL,
        *,
        partial: tuple[Partial, ...] = (),
        tied: tuple[tuple[int, int], ...] = (),
        unproven: tuple[tuple[int, str], ...] = (),
        unread: tuple[tuple[int, str], ...] = (),
        faults: tuple[WireProblem, ...] = (),
    ) -> None:
        self.said = Described(0, MANIFEST.hash, (), partial, tied, (), (), 0.0, holdings, unproven)
        memory = raw(holds)
        digests = [self._digest(memory[holding.index], holding) for holding in holdings]
        content = np.array(digests, np.uint64).reshape(-1, 2).astype("<u8").tobytes()
        self.found = Found(content, unread, faults, 0.25)

    def _digest(self, content: NDArray[np.uint8], holding: Holding) -> NDArray[np.uint64]:
        spec = SPECS[holding.index]
        box = holding.box
        parts = (box,)
        if holding.level == "spot":
            parts = tuple(
                Box((*box.offsets[:-1], box.offsets[-1] + c), (*box.lengths[:-1], 1))
                for c in spot_columns(SEED, holding.holder, box.lengths[-1])
            )
        if holding.by_value:
            content = canonical(content, spec.dtype)
        part = Part(holding.index, parts)
        size = DTYPE_BYTES[spec.dtype]
        return digest_part(content, spec.shape, size, part, SEEDS[holding.index])


def verdict(workers: list[Worker], values: dict[str, torch.Tensor] | None = None, level="received"):
    memory = raw(trainer() if values is None else values)
    addresses = np.array([one.ctypes.data for one in memory], np.uint64)
    evidence = ArenaEvidence(MANIFEST, addresses)
    plan = ServedPlan(MANIFEST, [(f"toy, worker {i}", w.said) for i, w in enumerate(workers)])
    whole = digest_tensors(addresses, MANIFEST.nbytes, SEEDS)
    expected = plan.expect(evidence, SEED, SEEDS, whole)
    return Judge(plan, expected, level).verdict([worker.found for worker in workers])


def levels(found) -> dict[str, list[str]]:
    """By level, names of tensors."""
    names = np.array([spec.name for spec in SPECS])
    order = ("served", "spot", "received", "canary", "off")
    return {
        level: names[found.levels == number].tolist()
        for number, level in enumerate(order)
        if (found.levels == number).any()
    }


EVERY = [spec.name for spec in SPECS]


def without(*dropped: str) -> list[str]:
    return [name for name in EVERY if name not in dropped]


def test_whole_tensors_that_are_held_are_served() -> None:
    found = verdict([Worker(trainer()), Worker(trainer())])
    assert levels(found) == {"served": EVERY}
    assert found.shares == shares(MANIFEST, found.levels)
    assert found.shares["served"].tensors == len(SPECS)
    assert found.shares["served"].nbytes == MANIFEST.total_bytes
    assert [(p.boxes, p.spot, p.unproven) for p in found.proofs] == [(5, (), {})] * 2
    assert found.proofs[0].nbytes == MANIFEST.total_bytes and found.proofs[0].seconds == 0.25


@pytest.mark.parametrize("name", without("none"))
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_bit_anywhere_is_named_with_tensor_worker_and_place(
    name: str, at: int, rank: int
) -> None:
    wrong = trainer()
    wrong[name] = wrong[name].clone()
    wrong[name].reshape(-1).view(torch.uint8)[at] ^= 1
    workers = [Worker(trainer()), Worker(trainer())]
    workers[rank] = Worker(wrong)
    with pytest.raises(ServedMismatch) as failure:
        verdict(workers)
    (mismatch,) = failure.value.mismatches
    assert (mismatch.tensor, mismatch.worker) == (name, f"toy, worker {rank}")
    assert mismatch.where.startswith(f"{name}, [") and mismatch.expected != mismatch.found
    assert f"'{name}' on toy, worker {rank} in {name}, [" in str(failure.value)


HALVES = tuple(
    (
        *(Holding(Q, "qkv", (4 * rank, 0), (4, 6)), Holding(K, "qkv", (2 * rank, 0), (2, 6))),
        Holding(HEAD, "head", (0, 3 * rank), (8, 3)),
        Holding(SCALE, "scale", (), ()),
    )
    for rank in range(2)
)
TAKES = tuple(
    (
        *(Partial(Q, (4 * rank, 0), (4, 6)), Partial(K, (2 * rank, 0), (2, 6))),
        Partial(HEAD, (0, 3 * rank), (8, 3)),
    )
    for rank in range(2)
)


def halves(values=None, ranks=(0, 1)) -> list[Worker]:
    values = trainer() if values is None else values
    return [Worker(values, HALVES[rank], partial=TAKES[rank]) for rank in ranks]


def test_parts_of_two_ranks_are_served() -> None:
    assert levels(verdict(halves())) == {"served": EVERY}


def test_a_part_that_lies_where_another_belongs_is_found() -> None:
    """Both ranks hold bytes of the trainer, only not theirs."""
    swapped = trainer()
    swapped["head"] = torch.cat([swapped["head"][:, 3:], swapped["head"][:, :3]], 1)
    with pytest.raises(ServedMismatch) as failure:
        verdict(halves(swapped))
    assert {(m.tensor, m.worker) for m in failure.value.mismatches} == {
        ("head", "toy, worker 0"),
        ("head", "toy, worker 1"),
    }
    assert "head, [0:8, 3:6]" in str(failure.value)


def test_what_no_rank_can_read_is_not_proven_though_the_rest_is() -> None:
    worker = Worker(trainer(), HALVES[0], partial=TAKES[0])
    less = Worker(trainer(), HALVES[1][1:], partial=TAKES[1])
    found = verdict([worker, less])
    assert levels(found) == {"served": without("q"), "received": ["q"]}
    assert found.proofs[1].unproven == {"q": "only 0 of 24 elements can be read back"}
    assert found.proofs[0].unproven == {}


def test_a_holding_that_covers_only_a_part_of_what_is_taken_does_not_count_as_all() -> None:
    holdings = (Holding(Q, "q", (0, 0), (8, 5)), Holding(Q, "q", (0, 0), (3, 6)), *ALL[1:])
    found = verdict([Worker(trainer(), holdings)])
    assert levels(found)["received"] == ["q"]
    assert found.proofs[0].unproven == {"q": "only 43 of 48 elements can be read back"}
    both = (Holding(Q, "q", (0, 0), (8, 5)), Holding(Q, "q", (0, 5), (8, 1)), *ALL[1:])
    assert levels(verdict([Worker(trainer(), both)])) == {"served": EVERY}


def test_missing_holdings_are_unproven_with_the_reason_that_was_given() -> None:
    worker = Worker(trainer(), ALL[1:], unproven=((Q, "its kernel packs it"),))
    found = verdict([worker, Worker(trainer())])
    assert levels(found) == {"served": without("q"), "received": ["q"]}
    assert found.proofs[0].unproven == {"q": "its kernel packs it"}
    assert found.proofs[1].unproven == {}, "of another worker it says nothing"
    assert levels(verdict([worker], level="off"))["off"] == ["q"]


def test_nothing_is_held_of_an_empty_tensor() -> None:
    assert levels(verdict([Worker(trainer(), ALL[:NONE])])) == {"served": EVERY}


# --- columns that are drawn ------------------------------------------------------------------


SPOT = (Holding(Q, "qkv", (0, 0), (8, 6), "spot"), *ALL[1:])


def test_drawn_columns_are_at_a_level_of_their_own() -> None:
    found = verdict([Worker(trainer(), SPOT), Worker(trainer())])
    assert levels(found) == {"served": without("q"), "spot": ["q"]}
    assert [proof.spot for proof in found.proofs] == [("q",), ()]


@pytest.mark.parametrize("column", range(6))
def test_a_drawn_column_is_compared_and_another_is_not(column: int) -> None:
    wrong = trainer()
    wrong["q"] = wrong["q"].clone()
    wrong["q"][5, column] += 1
    drawn = spot_columns(SEED, "qkv", 6)
    assert len(drawn) == 4
    workers = [Worker(wrong, SPOT)]
    if column in drawn:
        with pytest.raises(ServedMismatch, match="'q' on toy, worker 0 in qkv"):
            verdict(workers)
    else:
        verdict(workers)


def test_columns_count_within_the_part_that_is_held() -> None:
    holdings = (Holding(Q, "qkv", (2, 1), (5, 5), "spot"), *ALL[1:])
    worker = Worker(trainer(), holdings, partial=(Partial(Q, (2, 1), (5, 5)),))
    assert levels(verdict([worker]))["spot"] == ["q"]
    wrong = trainer()
    wrong["q"] = wrong["q"].clone()
    wrong["q"][2, 1 + spot_columns(SEED, "qkv", 5)[-1]] += 1
    with pytest.raises(ServedMismatch):
        verdict([Worker(wrong, holdings, partial=(Partial(Q, (2, 1), (5, 5)),))])


# --- read back through arithmetic ------------------------------------------------------------


def by_value(*, level: str = "served") -> tuple[Holding, ...]:
    return tuple(
        Holding(h.index, h.holder, h.offsets, h.lengths, level if h.offsets else "served", True)  # type: ignore[arg-type]
        for h in ALL
    )


def odd(value: float, name: str = "q") -> dict[str, torch.Tensor]:
    values = trainer()
    values[name] = values[name].clone()
    values[name].reshape(-1)[0] = value
    return values


@pytest.mark.parametrize("level", ["served", "spot"])
@pytest.mark.parametrize("name", ["q", "k", "scale"])
@pytest.mark.parametrize("value", [-0.0, 1e-39, -1e-39])
def test_values_that_arithmetic_does_not_give_back_pass(
    name: str, value: float, level: str
) -> None:
    values = odd(value, name)
    found = verdict([Worker(values, by_value(level=level))], values)
    assert "received" not in levels(found)
    # In a place that is read byte for byte, the same difference counts.
    flushed = odd(0.0, name)
    with pytest.raises(ServedMismatch, match=f"'{name}'"):
        verdict([Worker(flushed)], values)


@pytest.mark.parametrize("level", ["served", "spot"])
def test_a_value_that_truly_differs_fails_also_beside_a_negative_zero(level: str) -> None:
    values = odd(-0.0)
    column = spot_columns(SEED, "q", 6)[0]
    wrong = {**values, "q": values["q"].clone()}
    wrong["q"][7, column] += 1e-3
    with pytest.raises(ServedMismatch) as failure:
        verdict([Worker(wrong, by_value(level=level))], values)
    assert [m.tensor for m in failure.value.mismatches] == ["q"]


def test_a_place_that_could_not_be_read_fails_where_the_trainer_has_only_numbers() -> None:
    worker = Worker(trainer(), by_value(), unread=((K, "is not finite"),))
    with pytest.raises(ServedMismatch, match=r"'k' on toy, worker 0 in k, .*is not finite"):
        verdict([worker])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("level", ["served", "spot"])
def test_a_place_that_could_not_be_read_is_unproven_where_the_trainer_has_no_number(
    value: float, level: str
) -> None:
    values = odd(value, "k")
    worker = Worker(values, by_value(level=level), unread=((K, "is not finite"),))
    found = verdict([worker], values)
    assert levels(found)["received"] == ["k"]
    (proof,) = found.proofs
    assert proof.unproven == {"k": "k: is not finite"} and "k" not in proof.spot
    assert levels(verdict([worker], values, level="off"))["off"] == ["k"]


def test_what_only_another_rank_holds_of_a_tensor_excuses_nothing() -> None:
    values = odd(float("nan"), "q")  # in rank 0's rows
    holdings = [
        tuple(Holding(h.index, h.holder, h.offsets, h.lengths, "served", True) for h in its)
        for its in HALVES
    ]
    reason = ((0, "is not finite"),)
    fine = Worker(values, holdings[1], partial=TAKES[1])
    spoiled = Worker(values, holdings[0], partial=TAKES[0], unread=reason)
    assert levels(verdict([spoiled, fine], values))["received"] == ["q"]
    also = Worker(values, holdings[1], partial=TAKES[1], unread=reason)
    with pytest.raises(ServedMismatch, match="'q' on toy, worker 1"):
        verdict([spoiled, also], values)


def test_a_place_that_is_read_byte_for_byte_has_no_excuse() -> None:
    values = odd(float("nan"), "k")
    with pytest.raises(ServedMismatch, match="'k'"):
        verdict([Worker(values, ALL, unread=((K, "is not finite"),))], values)


# --- what else is wrong ----------------------------------------------------------------------


def test_faults_that_a_worker_finds_itself_are_named() -> None:
    fault = WireProblem("changed", "norm.buffer", "has other bytes than before")
    with pytest.raises(ServedMismatch, match=r"changed: norm\.buffer.*worker 1") as failure:
        verdict([Worker(trainer()), Worker(trainer(), faults=(fault,))])
    assert not failure.value.mismatches and len(failure.value.faults) == 1


def test_a_worker_that_could_not_look_at_all_is_named_and_so_is_all_else_that_differs() -> None:
    fault = WireProblem("engine", "what the model holds", "no memory left")
    blind = Worker(trainer(), faults=(fault,))
    blind.found = Found(b"", (), (fault,), 0.0)
    wrong = Worker(odd(5.0))
    with pytest.raises(ServedMismatch, match="no memory left") as failure:
        verdict([blind, wrong])
    assert [m.worker for m in failure.value.mismatches] == ["toy, worker 1"]


def test_an_engine_of_which_a_worker_did_not_look_has_proven_nothing() -> None:
    plan = ServedPlan(MANIFEST, [("toy, worker 0", Worker(trainer()).said)])
    memory = raw(trainer())
    addresses = np.array([one.ctypes.data for one in memory], np.uint64)
    whole = digest_tensors(addresses, MANIFEST.nbytes, SEEDS)
    expected = plan.expect(ArenaEvidence(MANIFEST, addresses), SEED, SEEDS, whole)
    with pytest.raises(ProtocolError, match="did not say"):
        Judge(plan, expected, "received").verdict([None])


@pytest.mark.parametrize("level", ["received", "canary", "off"])
def test_where_nobody_looks_nothing_is_claimed(level: str) -> None:
    plan = ServedPlan(MANIFEST, [("toy, worker 0", Worker(trainer()).said)])
    judge = Judge(plan, None, level)
    found = judge.verdict([None])
    assert levels(found) == {level: EVERY} and found.proofs is None and not judge.looks


# --- tensors that are one memory -------------------------------------------------------------


def tied(**changes):
    values = trainer()
    values["head"] = values["q"]
    return {**values, **changes}


UNTIED = ALL[:HEAD] + ALL[HEAD + 1 :]


def test_a_tied_tensor_is_proven_as_the_one_that_it_is() -> None:
    values = tied()
    found = verdict([Worker(values, UNTIED, tied=((HEAD, Q),))], values)
    assert levels(found) == {"served": EVERY}


@pytest.mark.parametrize(
    ("holdings", "options", "level"),
    [
        ((SPOT[0], *UNTIED[1:]), {}, "spot"),
        (UNTIED[1:], {"unproven": ((Q, "packed"),)}, "received"),
        (UNTIED[1:], {}, "received"),
        (by_value()[:HEAD], {"unread": ((Q, "is not finite"),)}, "received"),
    ],
    ids=["drawn columns", "unproven", "not held", "not finite"],
)
def test_a_tied_tensor_is_proven_no_better_than_the_one_that_it_is(
    holdings, options, level: str
) -> None:
    values = tied()
    if "unread" in options:
        values["q"] = values["head"] = odd(float("nan"))["q"]
    found = verdict([Worker(values, holdings, tied=((HEAD, Q),), **options)], values)
    assert levels(found)[level] == ["q", "head"]
    (proof,) = found.proofs
    named = proof.spot if level == "spot" else tuple(proof.unproven)
    assert set(named) == {"q", "head"}


@pytest.mark.parametrize(
    "pairs", [((HEAD, HEAD),), ((HEAD, Q), (Q, HEAD)), ((HEAD, K),), ((HEAD, 9),), ((-1, Q),)]
)
def test_pairs_that_would_prove_themselves_are_refused(pairs) -> None:
    values = tied()
    with pytest.raises(ProtocolError, match=r"toy, worker 0 described tensors? .*tied"):
        verdict([Worker(values, UNTIED[1:], tied=pairs)], values)


# --- what comes from outside -----------------------------------------------------------------


@pytest.mark.parametrize(
    "holding",
    [
        Holding(9, "w", (0, 0), (1, 1)),
        Holding(-1, "w", (0, 0), (1, 1)),
        Holding(Q, "w", (0, 0), (9, 6)),
        Holding(Q, "w", (8, 0), (1, 6)),
        Holding(Q, "w", (0,), (8, 6)),
        Holding(Q, "w", (0,), (8,)),
        Holding(Q, "w", (-1, 0), (8, 6)),
        Holding(Q, "w", (0, 0), (8, -6)),
        Holding(SCALE, "w", (), (), "spot"),
        Holding(SCALE, "w", (0,), (1,)),
    ],
    ids=str,
)
def test_an_impossible_holding_is_refused_by_the_workers_name(holding: Holding) -> None:
    said = changed(Worker(trainer()).said, holdings=(*ALL, holding))
    with pytest.raises(ProtocolError, match="toy, worker 1"):
        ServedPlan(MANIFEST, [("toy, worker 0", Worker(trainer()).said), ("toy, worker 1", said)])


def changed(said: Described, **changes) -> Described:
    return msgspec.structs.replace(said, **changes)


@pytest.mark.parametrize(
    "part",
    [
        Partial(Q, (0,), (8, 6)),
        Partial(Q, (0, 0), (9, 6)),
        Partial(9, (0, 0), (1, 1)),
        Partial(Q, (0, -1), (1, 1)),
    ],
    ids=str,
)
def test_an_impossible_part_is_refused_by_the_workers_name(part: Partial) -> None:
    said = changed(Worker(trainer()).said, partial=(part,))
    with pytest.raises(ProtocolError, match="toy, worker 0"):
        ServedPlan(MANIFEST, [("toy, worker 0", said)])


@pytest.mark.parametrize("index", [-1, 5, 2**40])
def test_a_reason_for_a_tensor_that_is_not_there_is_refused(index: int) -> None:
    said = changed(Worker(trainer()).said, unproven=((index, "why not"),))
    with pytest.raises(ProtocolError, match="toy, worker 0 speaks of tensor"):
        ServedPlan(MANIFEST, [("toy, worker 0", said)])


@pytest.mark.parametrize("cut", [slice(0, -16), slice(0, -1), slice(0, 8), slice(0, 0)])
def test_another_number_of_digests_is_refused(cut: slice) -> None:
    worker = Worker(trainer())
    worker.found = Found(worker.found.digests[cut], (), (), 0.0)
    with pytest.raises(ProtocolError, match="toy, worker 0 looked at"):
        verdict([worker])
    more = Worker(trainer())
    more.found = Found(more.found.digests + bytes(16), (), (), 0.0)
    with pytest.raises(ProtocolError, match="looked at 6 places, expected 5"):
        verdict([more])


@pytest.mark.parametrize("number", [-1, 5, 10**12])
def test_a_place_that_nobody_described_is_refused(number: int) -> None:
    """A negative one would be taken for one of the last."""
    values = odd(float("nan"))
    worker = Worker(values, by_value(), unread=((number, "is not finite"),))
    with pytest.raises(ProtocolError, match="toy, worker 0 speaks of a place"):
        verdict([worker], values)


# --- the plan's hash -------------------------------------------------------------------------


def test_the_hash_of_a_plan_changes_with_whatever_is_taken_and_held() -> None:
    said = Worker(trainer(), HALVES[0], partial=TAKES[0]).said
    other = Manifest((*SPECS[:-1], TensorSpec("another", "float32", (0, 3))))

    def plan(manifest: Manifest, *workers: Described) -> str:
        pairs = [(f"toy, worker {rank}", worker) for rank, worker in enumerate(workers)]
        return ServedPlan(manifest, pairs).hash

    first = said.holdings[0]
    variants = [
        said,
        changed(said, partial=TAKES[0][:-1]),
        changed(said, partial=(*TAKES[0], Partial(SCALE, (), ()))),
        changed(said, tied=((HEAD, Q),)),
        changed(said, unproven=((Q, "packed"),)),
        changed(said, unproven=((Q, "packed otherwise"),)),
        *(
            changed(said, holdings=(holding, *said.holdings[1:]))
            for holding in (
                Holding(HEAD, "qkv", first.offsets, first.lengths),
                Holding(Q, "other", first.offsets, first.lengths),
                Holding(Q, "qkv", (0, 0), (*first.lengths[:1], 5)),
                Holding(Q, "qkv", (1, 0), first.lengths),
                Holding(Q, "qkv", first.offsets, first.lengths, "spot"),
                Holding(Q, "qkv", first.offsets, first.lengths, "served", True),
            )
        ),
        changed(said, holdings=said.holdings[1:]),
        changed(said, holdings=(said.holdings[1], first, *said.holdings[2:])),
    ]
    hashes = [plan(MANIFEST, one) for one in variants]
    hashes += [plan(MANIFEST, said, said), plan(other, said)]
    second = Worker(trainer(), HALVES[1], partial=TAKES[1]).said
    hashes += [plan(MANIFEST, said, second), plan(MANIFEST, second, said)]
    assert len(set(hashes)) == len(hashes)
    assert plan(MANIFEST, changed(said, seconds=9.0)) == hashes[0]


# --- evidence that is not what was sent any more ---------------------------------------------


def changed_meanwhile(
    holdings: tuple[Holding, ...], *, before_expecting: bool, partial: tuple[Partial, ...] = ()
):
    """The arena is overwritten once its bytes were proven, and a model is loaded from it then."""
    memory = [one.copy() for one in raw(trainer())]
    addresses = np.array([one.ctypes.data for one in memory], np.uint64)
    wrong = trainer()
    wrong["q"] = wrong["q"].clone()
    wrong["q"][3, spot_columns(SEED, "q", 6)[0]] += 1
    worker = Worker(wrong, holdings, partial=partial)
    plan = ServedPlan(MANIFEST, [("toy, worker 0", worker.said)])
    whole = digest_tensors(addresses, MANIFEST.nbytes, SEEDS)
    if before_expecting:
        memory[Q][:] = raw(wrong)[Q]
    expected = plan.expect(ArenaEvidence(MANIFEST, addresses), SEED, SEEDS, whole)
    memory[Q][:] = raw(wrong)[Q]
    return Judge(plan, expected, "received").verdict([worker.found])


@pytest.mark.parametrize("before_expecting", [False, True])
def test_values_are_compared_with_what_was_proven_and_not_with_what_the_arena_holds_by_now(
    before_expecting: bool,
) -> None:
    with pytest.raises(ProofFailed, match="'q'"):
        changed_meanwhile(by_value(), before_expecting=before_expecting)


@pytest.mark.parametrize(
    ("holding", "partial"),
    [
        (Holding(Q, "q", (0, 0), (8, 6), "spot"), ()),
        (Holding(Q, "q", (0, 0), (8, 6), "spot", True), ()),
        (Holding(Q, "q", (1, 0), (4, 6)), (Partial(Q, (1, 0), (4, 6)),)),
    ],
)
def test_parts_that_make_no_whole_are_of_what_was_proven(
    holding: Holding, partial: tuple[Partial, ...]
) -> None:
    with pytest.raises(ProofFailed, match="'q'"):
        changed_meanwhile((holding, *ALL[1:]), before_expecting=True, partial=partial)
