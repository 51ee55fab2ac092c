"""Looking at what engines hold, whoever brought it there: nothing moves, and nobody is replaced."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toys import SHAPES, as_hex, canary_of, tensors

from weightsync import Canary, StateDictSource, WeightSender, prove
from weightsync.control import ask_all, close_all, gather
from weightsync.deadline import Deadline
from weightsync.errors import (
    CanaryFailed,
    ConnectError,
    DeadlineExceeded,
    EnginePoisoned,
    PlanRefused,
    RolledBack,
    ServedMismatch,
    TransportError,
    UpdateRefused,
)
from weightsync.listener import Listener
from weightsync.manifest import Manifest
from weightsync.messages import Ack, Begin, Described, Digests, Follow, Inspect
from weightsync.receipt import Receipt
from weightsync.testing.toy import ToyEngine
from weightsync.testing.toy_worker import resources

PROMPT = (3, 1, 4, 1, 5)


def looked(engine, seed: int = 0, **options) -> Receipt:
    engines = engine if isinstance(engine, list) else [engine]
    return prove(StateDictSource(tensors(seed)), engines, **{"deadline": 30.0, **options})


def test_equal_weights_give_a_receipt_and_nothing_else_happens(engine: ToyEngine) -> None:
    before = engine.status()
    receipt = looked(engine)
    assert (receipt.version, receipt.mode, receipt.proven) == ("base", "look", "served")
    assert {k: v.tensors for k, v in receipt.levels.items()} == {"served": len(SHAPES)}
    assert receipt.intact and receipt.previous == "" and receipt.only == () and receipt.digest
    (its,) = receipt.engines
    assert (its.pause, its.paused_seconds, its.canary) == ("none", 0.0, None)
    assert [worker.name for worker in its.workers] == ["toy, worker 0", "toy, worker 1"]
    assert all(worker.proof and worker.proof.unproven == {} for worker in its.workers)
    assert engine.calls == ["open_session", "look"]
    for one, two in zip(before, engine.status(), strict=True):
        assert {**one, "resources": 0} == {**two, "resources": 0}
    assert Receipt.from_json(receipt.to_json()) == receipt


@pytest.mark.parametrize("name", SHAPES)
def test_what_differs_is_named_with_tensor_worker_and_place(engine: ToyEngine, name: str) -> None:
    other = tensors(0)
    other[name].reshape(-1).view(torch.uint8)[-1] ^= 1
    with pytest.raises(ServedMismatch) as failure:
        prove(StateDictSource(other), [engine])
    assert [(m.tensor, m.worker) for m in failure.value.mismatches] == [
        (name, "toy, worker 0"),
        (name, "toy, worker 1"),
    ]
    place = ", ".join(f"0:{side}" for side in SHAPES[name][1])
    assert f"'{name}' on toy, worker 0 in {name}, [{place}]: digest" in str(failure.value)
    assert "send them with weightsync" in str(failure.value.remedy)
    assert not engine.is_paused(Deadline.after(1)) and not engine.status()[0]["refused"]


def test_only_the_worker_that_differs_is_named(engine: ToyEngine) -> None:
    engine.set_faults({1: {"spoils": "head.weight"}})
    with WeightSender(StateDictSource(tensors(1)), [engine], proof="received") as sender:
        sender.sync(1)  # nobody notices
    with pytest.raises(ServedMismatch) as failure:
        looked(engine, 1)
    (mismatch,) = failure.value.mismatches
    assert (mismatch.tensor, mismatch.worker) == ("head.weight", "toy, worker 1")


def test_a_sender_keeps_the_engine_also_in_the_midst_of_a_staged_update(engine: ToyEngine) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        sender.sync(1)
        epoch = engine.status()[0]["epoch"]
        assert looked(engine, 1).version == "1"
        source = sender.stage(2)
        assert engine.status()[0]["phase"] == "sealed"
        assert looked(engine, 1).version == "1"
        with pytest.raises(ServedMismatch):
            looked(engine, 2)
        assert engine.status()[0]["phase"] == "sealed"
        source.commit()
        assert engine.status()[0]["epoch"] == epoch
        sender.sync(3)
        assert looked(engine, 1).version == "3"


@pytest.mark.parametrize("mode", ["staged", "streamed"])
@pytest.mark.parametrize("call", ["begin", "pause", "reset_caches", "set_version"])
def test_a_look_between_any_two_steps_of_an_update_disturbs_neither(
    engine: ToyEngine, call: str, mode: str
) -> None:
    original = getattr(engine, call)
    seen: list[int] = []

    def with_look(*args, **kwargs):
        result = original(*args, **kwargs)
        if not seen:
            seen.append(1 if call in ("reset_caches", "set_version") else 0)
            if call == "reset_caches":
                # The new weights lie there, and the engine still reports the old version.
                with pytest.raises(UpdateRefused, match="reports version 'same' until"):
                    looked(engine, seen[0])
            else:
                assert looked(engine, seen[0]).version == ("1" if seen[0] else "same")
        return result

    with WeightSender(StateDictSource(tensors(0)), [engine], mode=mode) as sender:
        sender.sync("same")
    with WeightSender(StateDictSource(tensors(1)), [engine], mode=mode) as sender:
        sender._agreement.reach(sender._source, None, Deadline.after(30))
        setattr(engine, call, with_look)
        try:
            sender.sync(1)
        finally:
            delattr(engine, call)
        assert seen
        sender.sync(2)
    assert engine.tensors() == [as_hex(tensors(1))] * 2
    assert not any(worker["refused"] or worker["holds_pause"] for worker in engine.status())


def test_a_poisoned_engine_can_be_looked_at_and_stays_poisoned(engine: ToyEngine) -> None:
    engine.set_faults({1: {"apply_raises": "no more"}})
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with pytest.raises(EnginePoisoned):
            sender.sync(1)
        with pytest.raises(ServedMismatch) as failure:
            looked(engine, 1)
        # Half of the second worker's tensors were written.
        found = {(m.worker, m.tensor) for m in failure.value.mismatches}
        assert {worker for worker, _ in found} == {"toy, worker 1"} and 0 < len(found) < len(SHAPES)
        assert all(worker["poisoned"] and worker["refused"] for worker in engine.status())
        engine.set_faults({})
        sender.sync(2)
    assert looked(engine, 1).version == "2"


def test_what_a_poisoned_engine_refuses_to_serve_is_proven_of_no_version(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its workers hold the new weights, and it reports the version before."""

    def failing(deadline: Deadline, *, recompute: bool) -> None:
        raise ConnectError("the caches stay")

    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "reset_caches", failing)
            with pytest.raises(EnginePoisoned):
                sender.sync(1)
        assert engine.tensors() == [as_hex(tensors(1))] * 2
        with pytest.raises(UpdateRefused, match=r"toy, worker 0 is poisoned.*the caches stay"):
            looked(engine, 1)
        sender.sync(2)
    assert looked(engine, 1).version == "2"


def test_committed_weights_whose_version_is_not_set_yet_are_proven_of_no_version(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = engine.set_version, []

    def after_a_look(version: str, deadline: Deadline) -> None:
        seen.append(version)
        with pytest.raises(UpdateRefused, match="reports version 'base' until"):
            looked(engine, 1)
        original(version, deadline)

    monkeypatch.setattr(engine, "set_version", after_a_look)
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        sender.sync(1)
    assert seen == ["1"] and looked(engine, 1).version == "1"


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (lambda t: t.update({"lm.extra": torch.zeros(2)}), "unknown", "lm.extra"),
        (lambda t: t.pop("head.weight"), "missing", "head.weight"),
        (lambda t: t.update({"layers.0.bias": torch.zeros(6)}), "shape", "layers.0.bias"),
    ],
)
def test_another_model_is_refused_by_name(engine: ToyEngine, change, kind: str, name: str) -> None:
    other = tensors(0)
    change(other)
    with pytest.raises(PlanRefused) as refusal:
        prove(StateDictSource(other), [engine])
    assert [(p.kind, p.name) for p in refusal.value.problems] == [(kind, name)]
    looked(engine)


@pytest.mark.parametrize("moment", ["join", "inspect", "after_inspect", "look", "after_look"])
def test_a_worker_that_dies_meanwhile_is_named_in_time(moment: str) -> None:
    with ToyEngine(SHAPES, workers=2, faults={1: {"kills_at": moment}}) as dying:
        started = time.monotonic()
        zeros = {name: torch.zeros_like(value) for name, value in tensors(0).items()}
        with pytest.raises((ConnectError, TransportError), match="worker 1"):
            prove(StateDictSource(zeros), [dying], deadline=60)
        assert time.monotonic() - started < 20


def test_a_worker_that_stands_still_is_named_at_the_deadline(engine: ToyEngine) -> None:
    pid = engine._processes[1].pid
    original = engine.look

    def stopped(deadline: Deadline) -> None:
        os.kill(pid, signal.SIGSTOP)
        original(deadline)

    engine.look = stopped  # type: ignore[method-assign]
    started = time.monotonic()
    try:
        with pytest.raises(DeadlineExceeded, match="worker 1"):
            looked(engine, deadline=2.0)
    finally:
        os.kill(pid, signal.SIGCONT)
        del engine.look
    assert time.monotonic() - started < 10
    engine._answer(1, engine._processes[1], Deadline.after(10))  # what it said too late
    looked(engine)


def test_what_cannot_be_read_is_an_error_that_says_so(engine: ToyEngine) -> None:
    engine.set_faults({1: {"served_raises": "no memory left"}})
    with pytest.raises(ServedMismatch, match=r"no memory left.*worker 1"):
        looked(engine)
    engine.set_faults({})
    looked(engine)


def test_what_cannot_be_read_back_is_proven_by_an_update_and_not_by_a_look(
    engine: ToyEngine,
) -> None:
    """To whom only looks, nothing was handed that could have been digested."""
    engine.set_faults({1: {"unreadable": {"head.weight": "it is packed"}}})
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        sent = sender.sync(1)
    others = len(SHAPES) - 1
    assert {k: v.tensors for k, v in sent.levels.items()} == {"served": others, "received": 1}
    for canary, level in ((None, "off"), (canary_of(tensors(1), PROMPT), "canary")):
        receipt = looked(engine, 1, canary=canary)
        assert {k: v.tensors for k, v in receipt.levels.items()} == {"served": others, level: 1}
        assert receipt.proven == level
    for one in (sent, receipt):
        unproven = [worker.proof.unproven for worker in one.engines[0].workers]
        assert unproven == [{}, {"head.weight": "it is packed"}]


def test_of_two_engines_both_are_looked_at_and_all_that_differ_are_named() -> None:
    with (
        ToyEngine(SHAPES, name="one") as one,
        ToyEngine(SHAPES, name="two") as two,
        ToyEngine(SHAPES, name="three") as three,
        WeightSender(StateDictSource(tensors(1)), [one, two, three]) as sender,
    ):
        sender.sync(1)
        assert [its.name for its in looked([one, two, three], 1).engines] == ["one", "two", "three"]
        for bad in (one, three):
            bad.set_faults({0: {"spoils": "head.weight"}})
        sender._proof = "received"
        sender.sync(2)
        for engine in (one, two, three):
            engine.calls.clear()
        with pytest.raises(ServedMismatch, match="one, worker 0") as failure:
            looked([one, two, three], 1)
        assert "at one" in failure.value.__notes__
        assert any("three, worker 0" in note for note in failure.value.__notes__)
        assert not any("two, worker 0" in note for note in failure.value.__notes__)
        assert all("look" in engine.calls for engine in (one, two, three))


@pytest.mark.parametrize("first", ["look", "update"])
def test_an_engine_that_is_updated_while_it_is_looked_at_gets_no_receipt(
    engine: ToyEngine, first: str
) -> None:
    """It would name a version that was not looked at; and what was delivered is nobody's fault."""
    original = engine.look

    def then_updated(deadline: Deadline) -> None:
        if first == "look":
            original(deadline)
        with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
            sender.sync("next")
        if first == "update":
            original(deadline)

    engine.look = then_updated  # type: ignore[method-assign]
    try:
        with pytest.raises(UpdateRefused, match="served version base when the look"):
            looked(engine)
    finally:
        del engine.look


def test_an_engine_that_reports_no_version_is_proven_without_one() -> None:
    with ToyEngine(SHAPES) as fresh:
        zeros = {name: torch.zeros_like(value) for name, value in tensors(0).items()}
        assert prove(StateDictSource(zeros), [fresh]).version == ""


def test_many_looks_leave_nothing_on_either_side(engine: ToyEngine) -> None:
    def held() -> tuple:
        gc.collect()
        deadline = Deadline.after(10)
        # Workers notice a hang-up on threads of their own.
        while any(worker["resources"]["threads"] > 1 for worker in engine.status()):
            deadline.rest(0.01, "the workers to notice")
        return resources(), [worker["resources"] for worker in engine.status()]

    looked(engine)
    with pytest.raises(ServedMismatch):
        looked(engine, 1)
    before = held()
    for number in range(20):
        if number % 4:
            looked(engine)
        else:
            with pytest.raises(ServedMismatch):
                looked(engine, 1)
    assert held() == before
    assert threading.active_count() == before[0]["threads"]


def test_two_who_look_at_once_are_both_answered(engine: ToyEngine) -> None:
    """The second's question must not take the place of the first's."""
    gate = threading.Barrier(2, timeout=20)
    original = ToyEngine.look
    calls = threading.Lock()

    def together(deadline: Deadline) -> None:
        gate.wait()  # both have asked
        with calls:  # an engine takes one call at a time
            original(engine, deadline)

    opens = ToyEngine.open_session

    def open_session(path: str, token: str, deadline: Deadline) -> None:
        with calls:
            opens(engine, path, token, deadline)

    engine.look, engine.open_session = together, open_session  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(2) as pool:
            flying = [pool.submit(looked, engine, deadline=20.0) for _ in range(2)]
            assert [one.result(30).version for one in flying] == ["base"] * 2
    finally:
        del engine.look, engine.open_session


def test_arguments_that_make_no_sense_are_refused(engine: ToyEngine) -> None:
    source = StateDictSource(tensors(0))
    for engines in ([], [engine, engine]):
        with pytest.raises(UpdateRefused, match="different names"):
            prove(source, engines)
    for options in ({"proof": "received"}, {"proof": "canary"}, {"proof": "off"}):
        with pytest.raises(UpdateRefused, match="proof is 'served', or 'canary' with one"):
            prove(source, [engine], **options)
    assert engine.calls == []


# --- one memory in the engine, two tensors in the source ---------------------------------------


TIED = {"lm_head.weight": "embed.weight"}


def with_head(seed: int) -> dict[str, torch.Tensor]:
    values = tensors(seed)
    return {**values, "lm_head.weight": values["embed.weight"].clone()}


def test_tied_tensors_must_have_the_same_bytes_in_the_source() -> None:
    with ToyEngine(SHAPES, tied=TIED) as toy:
        with WeightSender(StateDictSource(with_head(1)), [toy]) as sender:
            sender.sync(1)
        receipt = prove(StateDictSource(with_head(1)), [toy])
        assert receipt.levels["served"].tensors == len(SHAPES) + 1
        apart = with_head(1)
        apart["lm_head.weight"].view(torch.uint8)[-1, -1] ^= 1
        with pytest.raises(ServedMismatch, match=r"lm_head\.weight.*has other bytes") as failure:
            prove(StateDictSource(apart), [toy])
        assert [fault.kind for fault in failure.value.faults] == ["duplicate"]


# --- with a canary ----------------------------------------------------------------------------


def test_a_canary_may_be_asked_beside_a_look_or_alone(engine: ToyEngine) -> None:
    maker = canary_of(tensors(0), PROMPT)
    both = looked(engine, canary=maker)
    assert both.proven == "served" and both.engines[0].canary <= 1e-9
    assert both.engines[0].seconds.keys() == {"look", "canary"}
    engine.calls.clear()
    alone = looked(engine, 1, proof="canary", canary=maker)  # nobody looks at what the source has
    assert engine.calls == ["logprobs"]
    assert (alone.proven, alone.digest, alone.engines[0].canary) == ("canary", "", 0.0)
    assert alone.levels["canary"].tensors == len(SHAPES) and alone.engines[0].workers == ()


def test_an_engine_that_thinks_otherwise_or_cannot_is_told(engine: ToyEngine) -> None:
    with pytest.raises(CanaryFailed, match="toy does not think as the trainer does"):
        looked(engine, canary=canary_of(tensors(1), PROMPT))
    with pytest.raises(UpdateRefused, match="made a NoneType"):
        looked(engine, canary=lambda: None)
    with pytest.raises(UpdateRefused, match="takes no such prompt"):
        looked(engine, canary=lambda: Canary((1, 99), (-1.0,), 0.1))
    engine.pause("keep", Deadline.after(1))
    with pytest.raises(UpdateRefused, match="is paused"):
        looked(engine, canary=canary_of(tensors(0), PROMPT))
    looked(engine)  # which a paused one can be
    assert engine.is_paused(Deadline.after(1))


# --- answers that no socket holds --------------------------------------------------------------


MANY = {f"layers.{number}.weight": ("float32", (2,)) for number in range(20_000)}


@pytest.fixture(scope="module")
def large_engine():
    with ToyEngine(MANY) as toy:
        yield toy


def test_a_look_and_an_update_with_large_answers_take_no_time_to_wait_for(
    large_engine: ToyEngine,
) -> None:
    """What describes them, and what was found of them, are each more than a socket holds; nobody
    reads before the engine call is over."""
    values = tensors(1, MANY)
    started = time.monotonic()
    with WeightSender(StateDictSource(values), [large_engine], deadline=40) as sender:
        sender.sync(1)
        receipt = prove(StateDictSource(values), [large_engine], deadline=40)
        sender.sync(2)
        values["layers.19999.weight"][1] += 1
        with pytest.raises(ServedMismatch, match=r"'layers\.19999\.weight'"):
            prove(StateDictSource(values), [large_engine], deadline=40)
        sender.sync(3)
    assert time.monotonic() - started < 40
    assert receipt.levels["served"].tensors == len(MANY)
    assert len(receipt.to_json()) < 20_000, "a receipt does not grow with the number of tensors"


def test_whoever_dies_while_such_an_answer_is_under_way_leaves_no_thread(
    large_engine: ToyEngine,
) -> None:
    manifest = Manifest(StateDictSource(tensors(1, MANY)).manifest().tensors)
    for whole in (False, True):
        listener = Listener()
        large_engine.open_session(listener.path, "token", Deadline.after(10))
        workers = listener.accept({"token": ("toy", 1)}, Deadline.after(10), only_look=True)
        question = Inspect("look", manifest.tensors, manifest.hash, whole=True, seed=1)
        ask_all(workers, question, Ack, Deadline.after(10))
        large_engine.look(Deadline.after(10))
        if whole:
            gather(workers, Described, Deadline.after(10), belongs_to=manifest.hash)
        else:
            # The engine's thread is free, though not a byte of its answers was read.
            assert large_engine.status()[0]["resources"]["threads"] >= 3
        close_all(workers)
        listener.close()
        deadline = Deadline.after(10)
        while large_engine.status()[0]["resources"]["threads"] > 1:
            deadline.rest(0.01, "the answer to be given up")
    with WeightSender(StateDictSource(tensors(1, MANY)), [large_engine], deadline=40) as sender:
        sender.sync("again")


def test_a_sender_that_dies_with_a_large_answer_under_way_is_followed_by_another(
    large_engine: ToyEngine,
) -> None:
    dead = WeightSender(StateDictSource(tensors(1, MANY)), [large_engine])
    original = large_engine.apply

    class DiedError(BaseException):
        pass

    def killed(update_id: str, deadline: Deadline) -> None:
        original(update_id, deadline)
        close_all(dead._roster.workers)
        raise DiedError

    staged = dead.stage(1)
    large_engine.apply = killed  # type: ignore[method-assign]
    with pytest.raises(DiedError), pytest.MonkeyPatch.context() as patch:
        patch.setattr("weightsync.settling.poison", lambda *_, **__: None)
        staged.commit()
    del large_engine.apply
    deadline = Deadline.after(10)
    while large_engine.status()[0]["resources"]["threads"] > 1:
        deadline.rest(0.01, "the answer to be given up")
    assert "sender was lost" in large_engine.status()[0]["refused"]
    with WeightSender(StateDictSource(tensors(2, MANY)), [large_engine], deadline=40) as sender:
        sender.sync(2)
    assert large_engine.tensors() == [as_hex(tensors(2, MANY))]


# --- through a real update ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_a_model_that_does_not_hold_what_it_was_handed_is_poisoned(
    engine: ToyEngine, mode: str
) -> None:
    engine.set_faults({1: {"spoils": "head.weight"}})
    with WeightSender(StateDictSource(tensors(1)), [engine], mode=mode) as sender:
        with pytest.raises(EnginePoisoned) as failure:
            sender.sync(1)
        cause = failure.value.__cause__
        assert isinstance(cause, ServedMismatch)
        assert [(m.tensor, m.worker) for m in cause.mismatches] == [
            ("head.weight", "toy, worker 1")
        ]
        for said in ("'head.weight' on toy, worker 1 in head.weight", "how the engine loads"):
            assert said in str(failure.value)
        assert engine.version(Deadline.after(1)) == "base"
        assert engine.is_paused(Deadline.after(1)) and engine.calls[-1] == "pause abort"
        for worker in engine.status():
            assert worker["poisoned"] and worker["refused"] and worker["version"] == "base"
        assert sender.last_receipt is None and "reset_caches" not in engine.calls
        engine.set_faults({})
        sender.sync(2)
    assert engine.tensors() == [as_hex(tensors(1))] * 2
    assert engine.version(Deadline.after(1)) == "2" and not engine.is_paused(Deadline.after(1))
    assert not any(worker["poisoned"] or worker["refused"] for worker in engine.status())


def test_it_gets_the_version_before_where_that_is_kept(engine: ToyEngine) -> None:
    values = tensors(1)
    with WeightSender(StateDictSource(values), [engine], rollback="retain") as sender:
        sender.sync(1)
        values.update(tensors(2))
        engine.set_faults({0: {"spoils_once": "layers.0.bias"}})
        with pytest.raises(RolledBack, match=r"'layers\.0\.bias' on toy, worker 0"):
            sender.sync(2)
        assert looked(engine, 1).version == "1"
        engine.set_faults({0: {"spoils": "layers.0.bias"}})
        with pytest.raises(EnginePoisoned, match=r"layers\.0\.bias") as failure:
            sender.sync(3)
        assert any("version 1 could not be restored" in note for note in failure.value.__notes__)
        engine.set_faults({})
        sender.sync(4)
        assert looked(engine, 2).version == "4"


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_a_look_that_fails_after_an_update_poisons(engine: ToyEngine, mode: str) -> None:
    engine.set_faults({1: {"served_raises": "no memory left"}})
    with WeightSender(StateDictSource(tensors(1)), [engine], mode=mode) as sender:
        with pytest.raises(EnginePoisoned, match="no memory left"):
            sender.sync(1)
        assert all(worker["refused"] for worker in engine.status())
        engine.set_faults({})
        sender.sync(2)
    assert looked(engine, 1).version == "2"


@pytest.mark.parametrize("mode", ["staged", "streamed"])
@pytest.mark.parametrize("proof", ["received", "off"])
def test_what_was_not_done_is_not_claimed(engine: ToyEngine, proof: str, mode: str) -> None:
    engine.set_faults({0: {"served_raises": "nobody is to look"}})
    with WeightSender(StateDictSource(tensors(1)), [engine], mode=mode, proof=proof) as sender:
        receipt = sender.sync(1)
    assert receipt.proven == proof
    assert {k: v.nbytes for k, v in receipt.levels.items()} == {proof: receipt.nbytes}
    assert all(worker.proof is None for worker in receipt.engines[0].workers)
    assert (receipt.digest == "") == (proof == "off")


class Counted(StateDictSource):
    """How often it was read."""

    reads = 0

    def pieces(self, wanted=None):
        self.reads += 1
        yield from super().pieces(wanted)


@pytest.mark.parametrize("mode", ["staged", "streamed"])
@pytest.mark.parametrize("proof", ["served", "received", "off"])
def test_a_source_is_read_once_whatever_is_proven_of_whole_tensors(
    engine: ToyEngine, proof: str, mode: str
) -> None:
    source = Counted(tensors(1))
    with WeightSender(source, [engine], mode=mode, proof=proof) as sender:
        for step in range(1, 4):
            sender.sync(step)
            assert source.reads == step


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_without_proof_a_wrong_digest_is_not_even_taken(engine: ToyEngine, mode: str) -> None:
    engine.set_faults({1: {"verify_flips_bit": 3}})
    source = StateDictSource(tensors(1))
    with WeightSender(source, [engine], mode=mode, proof="off") as sender:
        sender.sync(1)
    assert engine.tensors() == [as_hex(tensors(1))] * 2


def test_the_bytes_of_an_update_without_proof_are_digested_by_no_worker(
    engine: ToyEngine,
) -> None:
    """Asked by hand: what it says then are zeros."""
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        sender.sync(1)
        workers = sender._roster.workers
        for prove_, none in (("nothing", True), ("received", False)):
            update_id = f"by hand {prove_}"
            begin = Begin(update_id, "1", 7, 0, 0, True, 30.0, prove_)
            ask_all(workers, begin, Ack, Deadline.after(10), belongs_to=update_id)
            follow = Follow(update_id)
            found = ask_all(workers, follow, Digests, Deadline.after(10), belongs_to=update_id)
            assert all((not any(one.digests)) == none for one in found)
            sender._tell_abort(update_id, "seen")
