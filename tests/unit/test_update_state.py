"""The state machine, walked exhaustively against a table of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from weightsync.errors import UpdateRefused
from weightsync.update import Phase, UpdateState

DEPTH = 12

# What each event does to an update that stands where; elsewhere it is refused.
RESTING = ("idle", "committed", "aborted", "poisoned")
ALL = tuple(phase.value for phase in Phase)
TABLE = {
    "begin": dict.fromkeys(RESTING, "receiving"),
    "begin a part": dict.fromkeys(RESTING, "receiving"),
    "stream": {"receiving": "applying"},
    "seal": {"receiving": "sealed"},
    "verify": {"sealed": "verified"},
    "apply": {"verified": "applying"},
    "commit": {"applying": "committed"},
    "abort": {
        "idle": "idle",
        "receiving": "aborted",
        "sealed": "aborted",
        "verified": "aborted",
        "committed": "committed",
        "aborted": "aborted",
        "poisoned": "poisoned",
    },
    "poison": dict.fromkeys(ALL, "poisoned"),
    "poison by it": dict.fromkeys(ALL, "poisoned"),
    "poison by another": dict.fromkeys(ALL, "poisoned"),
    "forget": dict.fromkeys(ALL, "idle"),
}
WITH_ID = ("stream", "seal", "verify", "apply", "commit")
EVENTS = (*TABLE, *(f"{event} by another" for event in WITH_ID))


@dataclass(frozen=True)
class Expected:
    """An independent model of `UpdateState`: the versions are a history, newest last."""

    phase: str = "idle"
    begun: int = 0
    known: bool = False  # whether the last update is remembered
    history: tuple[str | None, ...] = (None,)
    poisoned: str | None = None

    def after(self, event: str) -> Expected | None:
        """None where the event must be refused."""
        to = TABLE.get(event, {}).get(self.phase)
        if to is None or (event == "begin a part" and self.poisoned):
            return None
        if event.startswith("begin"):
            return replace(self, phase=to, begun=self.begun + 1, known=True)
        if event == "commit":
            version = f"v{self.begun}"
            return replace(self, phase=to, history=(*self.history, version), poisoned=None)
        if event.startswith("poison"):
            to_blame = event == "poison by it" and self.phase == "committed"
            history = self.history[:-1] if to_blame else self.history
            return replace(self, phase=to, history=history, poisoned="why")
        if event == "abort" and to == "aborted" and self.poisoned:
            return replace(self, phase="poisoned")
        if event == "forget":
            return Expected(begun=self.begun)
        return replace(self, phase=to)

    def matches(self, state: UpdateState) -> bool:
        return (state.phase.value, state.update_id, state.version, state.poisoned) == (
            self.phase,
            f"u{self.begun}" if self.known else None,
            self.history[-1],
            self.poisoned,
        )


def fire(state: UpdateState, event: str, begun: int) -> None:
    name, _, more = event.partition(" ")
    # Made anew each time, as an identity that came in a message is.
    update_id = f"u{begun + 17}" if more == "by another" else f"u{begun}"
    if event == "begin":
        state.begin(f"u{begun + 1}", f"v{begun + 1}")
    elif event == "begin a part":
        state.begin(f"u{begun + 1}", f"v{begun + 1}", whole=False)
    elif event in ("abort", "forget"):
        getattr(state, name)()
    elif name == "poison":
        state.poison("why", update_id if more else None)
    else:
        getattr(state, name)(update_id)


def replayed(events: tuple[str, ...]) -> tuple[UpdateState, Expected]:
    state, expected = UpdateState(), Expected()
    for event in events:
        after = expected.after(event)
        if after is None:
            with pytest.raises(UpdateRefused):
                fire(state, event, expected.begun)
        else:
            fire(state, event, expected.begun)
            expected = after
        assert expected.matches(state), events
    return state, expected


def walk(visit: Callable[[UpdateState, UpdateState, str], None]) -> int:
    """Call ``visit(before, after, event)`` along all sequences of events up to `DEPTH` long.

    Refused events change nothing, so that what follows them is what would have followed without;
    and sequences that lead to the same state, here and in the model, go on as one.
    """
    number = 0
    reached = [(UpdateState(), Expected())]
    seen = set()
    for _ in range(DEPTH):
        due, reached = reached, []
        for (state, expected), event in itertools.product(due, EVENTS):
            number += 1
            before, after = copied(state), copied(state)
            wanted = expected.after(event)
            try:
                fire(after, event, expected.begun)
                refused = False
            except UpdateRefused:
                refused = True
            assert refused == (wanted is None), (vars(state), event)
            assert (wanted or expected).matches(after), (vars(state), event)
            assert not refused or vars(after) == vars(before), "a refusal left a trace"
            visit(before, after, event)
            key = (wanted, *vars(after).values())
            if wanted is not None and key not in seen:
                seen.add(key)
                reached.append((after, wanted))
    return number


def copied(state: UpdateState) -> UpdateState:
    other = UpdateState()
    vars(other).update(vars(state))
    return other


def test_every_sequence_does_what_the_table_says() -> None:
    assert walk(lambda *_: None) > 4_000


def test_refused_events_leave_no_trace() -> None:
    """All sequences with refusals among them, shorter ones, event by event."""
    for events in itertools.product(EVENTS, repeat=3):
        replayed(events)


def test_version_changes_only_on_commit_and_when_that_is_taken_back() -> None:
    def visit(before: UpdateState, after: UpdateState, event: str) -> None:
        if before.version != after.version:
            took_back = event == "poison by it" and before.phase is Phase.COMMITTED
            assert event in ("commit", "forget") or took_back

    walk(visit)


def test_poison_stays_until_all_weights_are_replaced() -> None:
    def visit(before: UpdateState, after: UpdateState, event: str) -> None:
        if before.poisoned and not after.poisoned:
            assert event in ("commit", "forget")
        if after.phase is Phase.POISONED:
            assert after.poisoned
        if after.resting and after.poisoned:
            assert after.phase is Phase.POISONED, "a poisoned side must not look intact"

    walk(visit)


def test_nothing_is_applied_that_was_not_verified_unless_it_is_streamed() -> None:
    def visit(before: UpdateState, after: UpdateState, event: str) -> None:
        if after.phase is Phase.APPLYING and before.phase is not Phase.APPLYING:
            due = Phase.RECEIVING if event == "stream" else Phase.VERIFIED
            assert before.phase is due and before.update_id == after.update_id
        if after.phase is Phase.VERIFIED and before.phase is not Phase.VERIFIED:
            assert before.phase is Phase.SEALED

    walk(visit)


def test_an_update_that_is_being_applied_ends_committed_or_poisoned() -> None:
    def visit(before: UpdateState, after: UpdateState, event: str) -> None:
        if before.phase is Phase.APPLYING and after.phase is not Phase.APPLYING:
            assert after.phase in (Phase.COMMITTED, Phase.POISONED) or event == "forget"

    walk(visit)


THROUGH = ("begin", "seal", "verify", "apply", "commit")


def test_a_full_update_cures_poison_and_an_aborted_one_does_not() -> None:
    state, _ = replayed((*THROUGH, "poison", "begin", "seal", "abort"))
    assert (state.phase, state.version, state.poisoned) == (Phase.POISONED, "v1", "why")
    state, _ = replayed((*THROUGH, "poison", "begin", "seal", "abort", *THROUGH))
    assert (state.phase, state.version, state.poisoned) == (Phase.COMMITTED, "v3", None)


def test_a_part_cures_no_poison() -> None:
    state, expected = replayed(("begin", "poison"))
    with pytest.raises(UpdateRefused, match=r"u2 is of a part of the model.*: why") as caught:
        state.begin("u2", "v2", whole=False)
    assert caught.value.remedy == "sync a full update: only that cures it"
    assert expected.matches(state)


def test_whether_an_update_is_whole_is_said_by_name() -> None:
    with pytest.raises(TypeError):
        UpdateState().begin("u1", "v1", False)  # type: ignore[misc]


def test_poison_that_blames_a_committed_update_takes_its_version_back() -> None:
    state, _ = replayed((*THROUGH, *THROUGH))
    state.poison("the model does not hold it", "u2")
    assert (state.phase, state.version) == (Phase.POISONED, "v1")
    assert state.poisoned == "the model does not hold it"
    # Blamed twice, as by two engines' senders: it goes back once.
    state.poison("again", "u2")
    assert (state.version, state.poisoned) == ("v1", "again")
    for step in THROUGH[1:]:
        with pytest.raises(UpdateRefused):
            getattr(state, step)("u2")


def test_a_first_update_that_is_to_blame_leaves_no_version() -> None:
    state, _ = replayed((*THROUGH, "poison by it"))
    assert state.version is None


@pytest.mark.parametrize("update_id", ["u1", "u3", "u0", "", "U2", "u2 ", None])
def test_poison_that_blames_another_update_leaves_the_version(update_id: str | None) -> None:
    state, _ = replayed((*THROUGH, *THROUGH))
    state.poison("why", update_id)
    assert (state.phase, state.version) == (Phase.POISONED, "v2")


@pytest.mark.parametrize("steps", range(1, len(THROUGH)))
def test_poison_that_blames_an_update_in_progress_leaves_the_version(steps: int) -> None:
    """It was not committed: the version is still that of the update before."""
    state, _ = replayed((*THROUGH, *THROUGH[:steps]))
    state.poison("why", "u2")
    assert (state.phase, state.version) == (Phase.POISONED, "v1")


def test_after_a_cure_the_next_blame_goes_back_to_the_cure() -> None:
    state, _ = replayed((*THROUGH, *THROUGH, "poison by it", *THROUGH, *THROUGH))
    state.poison("why", "u4")
    assert state.version == "v3"


def test_poison_always_has_a_reason() -> None:
    state = UpdateState()
    state.poison("")
    assert state.poisoned == "no reason was given"


def test_what_is_forgotten_can_neither_go_on_nor_be_blamed() -> None:
    state, _ = replayed((*THROUGH, *THROUGH, "forget"))
    assert state.resting and (state.update_id, state.version) == (None, None)
    state.poison("why", "u2")
    assert state.version is None
    # What comes after it has nothing before it.
    state, _ = replayed((*THROUGH, "forget", *THROUGH, "poison by it"))
    assert state.version is None


@pytest.mark.parametrize("before", range(1, len(THROUGH)))
@pytest.mark.parametrize("update_id", ["u0", "u2", "", "U1", "u1 "])
def test_a_wrong_update_id_is_refused_and_named(before: int, update_id: str) -> None:
    state, expected = replayed(THROUGH[:before])
    with pytest.raises(UpdateRefused, match="is unknown here; the last one is u1") as caught:
        getattr(state, THROUGH[before])(update_id)
    assert f"update {update_id} " in str(caught.value)
    assert expected.matches(state)


def test_refusals_say_where_the_update_stands() -> None:
    state, _ = replayed(("begin", "seal"))
    with pytest.raises(UpdateRefused, match="update u2 cannot begin: update u1 is sealed"):
        state.begin("u2", "v2")
    with pytest.raises(UpdateRefused, match="update u1 is sealed, expected verified"):
        state.apply("u1")
    with pytest.raises(UpdateRefused, match="is being applied"):
        replayed(("begin", "seal", "verify", "apply"))[0].abort()


def test_expect_changes_nothing() -> None:
    state, expected = replayed(("begin", "seal"))
    state.expect("u1", Phase.SEALED)
    for update_id, phase in (("u1", Phase.VERIFIED), ("u2", Phase.SEALED)):
        with pytest.raises(UpdateRefused):
            state.expect(update_id, phase)
    assert expected.matches(state)
