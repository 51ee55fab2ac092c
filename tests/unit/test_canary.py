"""The canary: trainer and engine must agree on a prompt before an update's version counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from toys import SHAPES, as_hex, canary_of, tensors

from weightsync import Canary, StateDictSource, WeightSender, prove
from weightsync.canary import check_canary
from weightsync.control import close_all
from weightsync.deadline import Deadline
from weightsync.errors import (
    CanaryFailed,
    ConnectError,
    EnginePoisoned,
    NotResumed,
    RolledBack,
    Superseded,
    UpdateAborted,
    UpdateRefused,
)
from weightsync.receipt import Receipt
from weightsync.testing.toy import ToyEngine
from weightsync.testing.toy_logprobs import bias_of, logprobs_of, toy_logprobs

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
PROOFS = ("served", "received", "canary", "off")


def sender_of(values: dict[str, torch.Tensor], engine, proof: str = "canary", **options):
    engines = engine if isinstance(engine, list) else [engine]
    maker = canary_of(values, PROMPT)
    return WeightSender(StateDictSource(values), engines, proof=proof, canary=maker, **options)


def served(engine: ToyEngine, seed: int) -> bool:
    return engine.tensors() == [as_hex(tensors(seed))] * engine.workers


def assert_serves(engine: ToyEngine, version: str, seed: int) -> None:
    """It is as if nothing had ever been wrong."""
    assert served(engine, seed)
    assert engine.version(Deadline.after(1)) == version
    assert not engine.is_paused(Deadline.after(1))
    for worker in engine.status():
        assert worker["version"] == version and worker["poisoned"] is worker["refused"] is None
        assert not worker["holds_pause"] and not worker["session_open"]


def assert_refuses(engine: ToyEngine, version: str) -> None:
    assert engine.version(Deadline.after(1)) == version
    assert engine.is_paused(Deadline.after(1)) and engine.calls[-1] == "pause abort"
    for worker in engine.status():
        assert worker["poisoned"] and worker["refused"] and worker["version"] == version
    engine.resume(Deadline.after(1))
    with pytest.raises(ConnectError, match="refuses requests"):
        engine.logprobs(PROMPT, Deadline.after(5))
    engine.pause("abort", Deadline.after(1))


# --- what a toy thinks ------------------------------------------------------------------------


def test_every_value_of_every_parameter_changes_what_a_toy_thinks() -> None:
    """Else a wrong one would pass."""
    before = toy_logprobs(tensors(1), PROMPT)
    assert len(before) == len(PROMPT) - 1 and all(-50 < one < 0 for one in before)
    for name, value in tensors(1).items():
        for at in range(value.numel()):
            changed = tensors(1)
            element = changed[name].reshape(-1).view(torch.uint8)
            element[(at + 1) * value.itemsize - 1] ^= 0x80
            after = toy_logprobs(changed, PROMPT)
            assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-6, (name, at)


def test_a_toy_of_several_workers_thinks_as_its_trainer_does(engine: ToyEngine) -> None:
    found = engine.logprobs(PROMPT, Deadline.after(5))
    assert found == pytest.approx(toy_logprobs(tensors(0), PROMPT), abs=1e-12)
    with pytest.raises(UpdateRefused, match="tokens are 0 to 31"):
        engine.logprobs((1, 99), Deadline.after(5))


# --- right weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["staged", "streamed"])
@pytest.mark.parametrize("proof", PROOFS)
def test_right_weights_pass_and_the_receipt_says_no_more_than_was_proven(
    engine: ToyEngine, proof: str, mode: str
) -> None:
    values = tensors(1)
    with sender_of(values, engine, proof, mode=mode) as sender:
        for step in (1, 2):
            values.update(tensors(step))
            receipt = sender.sync(step)
            assert_serves(engine, str(step), step)
    assert receipt.proven == proof
    assert {level: share.tensors for level, share in receipt.levels.items()} == {proof: len(SHAPES)}
    (its,) = receipt.engines
    assert its.levels == receipt.levels
    assert its.canary is not None and its.canary <= 1e-9 and its.seconds["canary"] > 0
    assert all((worker.proof is not None) == (proof == "served") for worker in its.workers)
    assert (receipt.digest == "") == (proof in ("canary", "off"))
    assert Receipt.from_json(receipt.to_json()) == receipt and receipt.intact


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_the_canary_alone_digests_nothing_on_either_side(
    engine: ToyEngine, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker that gets its digests wrong, or what it holds, is not heard: it was not asked.
    engine.set_faults({1: {"verify_flips_bit": 0, "served_raises": "nobody is to look"}})
    with sender_of(tensors(1), engine, mode=mode) as sender:
        for name in ("delivery.mismatches", "served.ServedPlan.expect", "evidence.digest_spans"):
            monkeypatch.setattr(f"weightsync.{name}", None)
        sender.sync(1)
    assert served(engine, 1)


def test_without_a_canary_there_is_none_in_the_receipt(engine: ToyEngine) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        assert sender.sync(1).engines[0].canary is None
    assert "logprobs" not in engine.calls


def test_it_is_asked_after_the_caches_are_reset_and_before_the_version_is_set(
    engine: ToyEngine,
) -> None:
    asked: list[tuple[str | None, list[str | None]]] = []
    original = engine.logprobs

    def logprobs(prompt, deadline):
        asked.append((engine.version(deadline), [w["version"] for w in engine.status()]))
        return original(prompt, deadline)

    engine.logprobs = logprobs  # type: ignore[method-assign]
    try:
        with sender_of(tensors(1), engine) as sender:
            sender.sync(1)
    finally:
        del engine.logprobs
    calls = engine.calls[engine.calls.index("logprobs") :]
    assert calls == [
        "logprobs",  # may it be asked at all? While nothing has changed.
        "begin",
        "pause keep",
        "apply",
        "finish",
        "reset_caches",
        "resume",
        "logprobs",
        "set_version",
    ]
    assert asked == [("base", ["base"] * 2)] * 2
    assert_serves(engine, "1", 1)


def test_the_canary_is_of_the_weights_that_are_sent(engine: ToyEngine) -> None:
    values, made = tensors(1), []
    maker = canary_of(values, PROMPT)

    def canary() -> Canary:
        made.append(values["layers.0.bias"].sum().item())
        return maker()

    with WeightSender(StateDictSource(values), [engine], proof="canary", canary=canary) as sender:
        for _ in range(3):
            values["layers.0.bias"].add_(1)
            sender.sync("next")
    assert len(set(made)) == len(made) == 3


# --- wrong weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["staged", "streamed"])
@pytest.mark.parametrize("proof", ["received", "canary", "off"])
def test_wrong_weights_poison_and_the_next_update_cures(
    engine: ToyEngine, proof: str, mode: str
) -> None:
    engine.set_faults({1: {"spoils": "head.weight"}})
    with sender_of(tensors(1), engine, proof, mode=mode) as sender:
        with pytest.raises(EnginePoisoned) as failure:
            sender.sync(1)
        assert_refuses(engine, "base")
        assert sender.last_receipt is None
        engine.set_faults({})
        sender.sync(2)
        assert_serves(engine, "2", 1)
        sender.sync(3)
        assert_serves(engine, "3", 1)
    spoiled = tensors(1)
    spoiled["head.weight"].view(torch.uint8)[-1, -1] ^= 0x80
    there = logprobs_of((bias_of(tensors(1)) + bias_of(spoiled)) / 2, PROMPT)
    here = toy_logprobs(tensors(1), PROMPT)
    at = int(np.argmax(np.abs(np.subtract(there, here))))
    assert isinstance(failure.value.__cause__, CanaryFailed)
    for said in (
        "toy: update 1-",
        "does not think as the trainer does",
        f"token {at + 1} of the canary ({PROMPT[at + 1]})",
        f"log-probability {there[at]:.6g} there and {here[at]:.6g} here",
        "differ by more than 1e-09",
        "raise the tolerance",
        "sync a full update",
    ):
        assert said in str(failure.value), said


def test_the_error_names_the_token_that_differs_most_and_both_values(engine: ToyEngine) -> None:
    right = engine.logprobs(PROMPT, Deadline.after(5))
    for at in range(len(right)):
        wrong = list(right)
        wrong[at] -= 0.25
        wrong[(at + 1) % len(right)] -= 0.2
        with pytest.raises(CanaryFailed) as failure:
            check_canary(engine, Canary(PROMPT, wrong, 0.1), Deadline.after(5))
        assert f"token {at + 1} of the canary ({PROMPT[at + 1]})" in str(failure.value)
        assert f"{right[at]:.6g} there and {wrong[at]:.6g} here" in str(failure.value)
        assert check_canary(engine, Canary(PROMPT, wrong, 0.3), Deadline.after(5)) == (
            pytest.approx(0.25)
        )


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_weights_that_are_no_numbers_are_never_taken_for_right(
    engine: ToyEngine, value: str
) -> None:
    engine.set_faults({0: {"serves": {"layers.1.scale": value}}})
    with sender_of(tensors(1), engine) as sender:
        with pytest.raises(EnginePoisoned, match="log-probability nan there"):
            sender.sync(1)
        assert_refuses(engine, "base")


def answering(engine: ToyEngine, answers: Callable[[list[float]], list[float]]) -> None:
    original = type(engine).logprobs

    def logprobs(prompt, deadline):
        return answers(original(engine, prompt, deadline))

    engine.logprobs = logprobs  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 3, -1])
def test_an_answer_that_is_no_number_fails_at_its_token(
    engine: ToyEngine, value: float, at: int
) -> None:
    def spoiled(found: list[float]) -> list[float]:
        found[at] = value
        return found

    right = engine.logprobs(PROMPT, Deadline.after(5))
    answering(engine, spoiled)
    try:
        with pytest.raises(CanaryFailed, match=f"token {at % len(right) + 1} of"):
            check_canary(engine, Canary(PROMPT, right, 1e6), Deadline.after(5))
    finally:
        del engine.logprobs


@pytest.mark.parametrize("change", [lambda f: f[:-1], lambda f: [*f, 0.0], lambda f: []])
def test_an_engine_that_says_something_of_other_tokens_is_not_updated(
    engine: ToyEngine, change
) -> None:
    answering(engine, change)
    try:
        with (
            sender_of(tensors(1), engine) as sender,
            pytest.raises(UpdateAborted, match=r"log-probabilities for a prompt of 8 tokens"),
        ):
            sender.sync(1)
    finally:
        del engine.logprobs
    assert_serves(engine, "base", 0)


# --- before anything has changed --------------------------------------------------------------


@pytest.mark.parametrize("mode", ["staged", "streamed"])
@pytest.mark.parametrize(
    ("makes", "error", "says"),
    [
        (lambda: 1 // 0, ZeroDivisionError, "division"),
        (lambda: None, UpdateRefused, "made a NoneType"),
        (lambda: Canary((1, 2), (-1.0, -2.0), 0.1), UpdateRefused, "for each but the first"),
    ],
)
def test_a_canary_that_cannot_be_made_moves_nothing(
    engine: ToyEngine, makes, error: type[Exception], says: str, mode: str
) -> None:
    moved: list[int] = []
    makers = [makes, canary_of(tensors(1), PROMPT)]
    with WeightSender(
        StateDictSource(tensors(1)),
        [engine],
        mode=mode,
        canary=lambda: makers.pop(0)(),
        on_progress=lambda done, _: moved.append(done),
    ) as sender:
        with pytest.raises(error, match=says):
            sender.sync(1)
        assert not moved and not any(call.startswith("pause") for call in engine.calls)
        assert_serves(engine, "base", 0)
        sender.sync(2)
    assert_serves(engine, "2", 1)


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_an_engine_that_somebody_else_paused_is_refused_before_anything_is_applied(
    engine: ToyEngine, mode: str
) -> None:
    engine.pause("keep", Deadline.after(1))
    with sender_of(tensors(1), engine, mode=mode) as sender:
        with pytest.raises(UpdateAborted, match="paused by somebody else") as failure:
            sender.sync(1)
        assert "resume it first, or sync without a canary" in str(failure.value)
        assert engine.is_paused(Deadline.after(1)) and "resume" not in engine.calls
        assert served(engine, 0) and engine.version(Deadline.after(1)) == "base"
        engine.resume(Deadline.after(1))
        sender.sync(2)
    assert_serves(engine, "2", 1)


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_a_prompt_that_an_engine_does_not_take_is_found_out_while_nothing_has_changed(
    engine: ToyEngine, mode: str
) -> None:
    """Once new weights are in, it could only be poisoned."""
    bad = Canary((1, 99), (-1.0,), 1e-9)
    makers = [lambda: bad, canary_of(tensors(1), PROMPT)]
    with WeightSender(
        StateDictSource(tensors(1)), [engine], mode=mode, canary=lambda: makers.pop(0)()
    ) as sender:
        with pytest.raises(UpdateAborted, match="takes no such prompt"):
            sender.sync(1)
        assert "apply" not in engine.calls and not any("pause" in c for c in engine.calls)
        assert_serves(engine, "base", 0)
        sender.sync(2)
    assert_serves(engine, "2", 1)


def test_weights_that_make_an_engine_fail_may_be_what_the_update_mends(
    engine: ToyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter([ConnectError("internal server error")])

    def once(found: list[float]) -> list[float]:
        for error in answers:
            raise error
        return found

    answering(engine, once)
    try:
        with caplog.at_level(logging.WARNING), sender_of(tensors(1), engine) as sender:
            sender.sync(1)
    finally:
        del engine.logprobs
    assert "cannot answer the canary yet: internal server error" in caplog.text
    assert_serves(engine, "1", 1)


@pytest.mark.parametrize(
    ("prompt", "logprobs", "tolerance", "says"),
    [
        ((1,), (), 0.1, "two tokens or more"),
        ((1, 2, 3), (-1.0,), 0.1, "3 tokens and 1"),
        ((1, 2), (math.nan,), 0.1, "finite"),
        ((1, 2), (-math.inf,), 0.1, "finite"),
        ((1, 2), (-1.0,), 0.0, "positive"),
        ((1, 2), (-1.0,), math.nan, "positive"),
        ((1, 2), (-1.0,), math.inf, "positive"),
        ((1, 2), (0.5,), 0.1, "not above 0"),
        ((1, -2), (-0.5,), 0.1, "not negative"),
        ((1, 2.5), (-0.5,), 0.1, "token ids"),
        ("ab", (-0.5,), 0.1, "token ids"),
        ((1, 2), ("x",), 0.1, "log-probabilities"),
        (7, (-0.5,), 0.1, "token ids"),
    ],
)
def test_a_canary_that_could_say_nothing_is_refused(prompt, logprobs, tolerance, says) -> None:
    with pytest.raises(UpdateRefused, match=says):
        Canary(prompt, logprobs, tolerance)


def test_tensors_and_arrays_are_taken_apart_when_a_canary_is_made() -> None:
    made = Canary(torch.tensor([1, 2, 3]), np.array([-1.0, -2.0], np.float32), np.float32(0.5))
    assert made == Canary((1, 2, 3), (-1.0, -2.0), 0.5)
    assert all(type(one) is int for one in made.prompt)
    assert all(type(one) is float for one in (*made.logprobs, made.tolerance))


# --- what else may happen meanwhile -----------------------------------------------------------


def test_an_engine_that_does_not_answer_is_poisoned_at_the_deadline(engine: ToyEngine) -> None:
    original, asked = engine.logprobs, []

    def stuck(prompt, deadline):
        asked.append(prompt)
        if len(asked) == 2:
            engine._paused = True  # as somebody else may do in the midst
        return original(prompt, deadline)

    engine.logprobs = stuck  # type: ignore[method-assign]
    try:
        with sender_of(tensors(1), engine) as sender:
            sender._seconds = 3
            with pytest.raises(EnginePoisoned, match="toy to be resumed"):
                sender.sync(1)
            del engine.logprobs
            assert_refuses(engine, "base")
            sender._seconds = 60
            sender.sync(2)
    finally:
        vars(engine).pop("logprobs", None)
    assert_serves(engine, "2", 1)


@pytest.mark.parametrize("proof", ["canary", "received"])
def test_the_version_before_is_given_back_and_thinks_as_it_did(
    engine: ToyEngine, proof: str
) -> None:
    values = tensors(1)
    with sender_of(values, engine, proof, rollback="retain") as sender:
        sender.sync(1)
        values.update(tensors(2))
        engine.set_faults({1: {"spoils_once": "head.weight"}})
        engine.calls.clear()
        with pytest.raises(RolledBack, match="version 1, proven again") as failure:
            sender.sync(2)
        assert "does not think as the trainer does" in str(failure.value)
        assert_serves(engine, "1", 1)
        # What ran on with weights that are gone again holds tokens of a version that never was.
        assert engine.calls.count("pause abort") == 1
        assert engine.calls[-6:] == [
            "apply",
            "finish",
            "reset_caches",
            "resume",
            "logprobs",
            "set_version",
        ]
        sender.sync(3)
        assert_serves(engine, "3", 2)


def test_a_version_before_that_thinks_otherwise_now_is_not_served_either(
    engine: ToyEngine,
) -> None:
    """Proven by the canary alone, nothing else would tell."""
    values = tensors(1)
    with sender_of(values, engine, rollback="retain") as sender:
        sender.sync(1)
        sender._outbox.arena.view()[0] ^= 0x40  # the half that is served
        values.update(tensors(2))
        engine.set_faults({1: {"spoils_once": "head.weight"}})
        with pytest.raises(EnginePoisoned, match="does not think") as failure:
            sender.sync(2)
        assert any("version 1 could not be restored" in note for note in failure.value.__notes__)
        assert_refuses(engine, "1")
        sender.sync(3)
        assert_serves(engine, "3", 2)


def test_a_version_of_which_nothing_was_proven_is_not_said_to_be(engine: ToyEngine) -> None:
    values = tensors(1)
    with WeightSender(StateDictSource(values), [engine], proof="off", rollback="retain") as sender:
        sender.sync(1)
        values.update(tensors(2))
        engine.set_faults({1: {"apply_raises_once": "no more"}})
        with pytest.raises(RolledBack) as failure:
            sender.sync(2)
    assert "given back version 1, and it serves that" in str(failure.value)
    assert "proven" not in str(failure.value)
    assert_serves(engine, "1", 1)


def test_of_two_engines_one_passes_and_the_other_is_poisoned() -> None:
    values = tensors(1)
    with (
        ToyEngine(SHAPES, name="good") as good,
        ToyEngine(SHAPES, name="bad", faults={0: {"spoils": "embed.weight"}}) as bad,
        sender_of(values, [good, bad]) as sender,
    ):
        with pytest.raises(EnginePoisoned, match="bad does not think") as failure:
            sender.sync(1)
        assert [taken.name for taken in failure.value.succeeded] == ["good"]
        assert_serves(good, "1", 1)
        assert bad.status()[0]["refused"] and bad.version(Deadline.after(1)) is None
        bad.set_faults({})
        receipt = sender.sync(2)
        assert_serves(bad, "2", 1)
        assert [engine.canary is not None for engine in receipt.engines] == [True, True]


def test_an_engine_that_does_not_resume_for_its_canary_is_poisoned_not_called_proven(
    engine: ToyEngine,
) -> None:
    original = engine.resume

    def resume(deadline: Deadline) -> None:
        del engine.resume
        raise ConnectError("would not resume")

    engine.resume = resume  # type: ignore[method-assign]
    with sender_of(tensors(1), engine) as sender:
        with pytest.raises(EnginePoisoned, match="would not resume") as failure:
            sender.sync(1)
        assert not isinstance(failure.value, NotResumed) and engine.resume == original
        assert_refuses(engine, "base")
        sender.sync(2)
    assert_serves(engine, "2", 1)


def test_a_version_that_cannot_be_set_after_the_canary_is_tried_again_and_never_poisons(
    engine: ToyEngine,
) -> None:
    failures = [ConnectError("a hiccup")]
    original = engine.set_version

    def set_version(version: str, deadline: Deadline) -> None:
        if failures:
            raise failures.pop()
        original(version, deadline)

    engine.set_version = set_version  # type: ignore[method-assign]
    try:
        with sender_of(tensors(1), engine) as sender:
            sender.sync(1)
            failures += [ConnectError("gone")] * 2
            with pytest.raises(NotResumed):
                sender.sync(2)
            assert not any(worker["refused"] for worker in engine.status())
            sender.sync(3)
    finally:
        del engine.set_version
    assert_serves(engine, "3", 1)


class DiedError(BaseException):
    pass


def test_a_sender_that_dies_while_its_canary_runs_leaves_an_engine_that_refuses(
    engine: ToyEngine,
) -> None:
    """Nobody is left who knows whether it would have passed."""
    dead = sender_of(tensors(1), engine)
    original, asked = engine.logprobs, []

    def killed(prompt, deadline):
        asked.append(prompt)
        if len(asked) == 2:
            close_all(dead._roster.workers)
            raise DiedError
        return original(prompt, deadline)

    engine.logprobs = killed  # type: ignore[method-assign]
    with pytest.raises(DiedError), pytest.MonkeyPatch.context() as patch:
        patch.setattr("weightsync.settling.poison", lambda *_, **__: None)
        dead.sync(1)
    del engine.logprobs
    end = Deadline.after(10)
    while not all(worker["refused"] for worker in engine.status()):
        end.rest(0.01, "the workers to notice")
    assert all(worker["version"] == "base" for worker in engine.status())
    with sender_of(tensors(2), engine) as sender:
        sender.sync(2)
    assert_serves(engine, "2", 2)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sender_that_is_replaced_while_its_canary_runs_touches_the_engine_no_more(
    engine: ToyEngine, when: str
) -> None:
    new = WeightSender(StateDictSource(tensors(2)), [engine])
    original, asked = engine.logprobs, []

    def stalled(prompt, deadline):
        asked.append(prompt)
        if len(asked) == 2 and when == "before":
            new.sync("new")
        found = original(prompt, deadline)
        if len(asked) == 2 and when == "after":
            new.sync("new")
        return found

    engine.logprobs = stalled  # type: ignore[method-assign]
    old = sender_of(tensors(1), engine)
    try:
        with pytest.raises(Superseded):
            old.sync("old")
    finally:
        del engine.logprobs
    assert_serves(engine, "new", 2)
    new.close()
    old.close()


def test_a_poisoned_engine_is_cured_under_a_canary_also_if_somebody_looks_meanwhile(
    engine: ToyEngine,
) -> None:
    """Whoever dials in makes a poisoned worker refuse again: not while it is asked whether it is
    cured."""
    engine.set_faults({1: {"apply_raises_once": "no more"}})
    original = engine.logprobs
    with sender_of(tensors(1), engine) as sender:
        with pytest.raises(EnginePoisoned):
            sender.sync(1)

        def looked_at(prompt, deadline):
            with pytest.raises(UpdateRefused, match="amid an update"):
                prove(StateDictSource(tensors(1)), [engine], deadline=20)
            return original(prompt, deadline)

        engine.logprobs = looked_at  # type: ignore[method-assign]
        try:
            sender.sync(2)
        finally:
            del engine.logprobs
    assert_serves(engine, "2", 1)
