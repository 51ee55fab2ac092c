"""The state machine, walked exhaustively against a table of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from weightsync.errors import UpdateRefused
from weightsync.update import Phase, UpdateState

DEPTH = 8

# What each event does to an update that stands where: None is a refusal.
TABLE = {
    "begin": {
        "idle": "receiving",
        "committed": "receiving",
        "aborted": "receiving",
        "poisoned": "receiving",
    },
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
    "poison": dict.fromkeys((phase.value for phase in Phase), "poisoned"),
}
WITH_ID = ("seal", "verify", "apply", "commit")
EVENTS = (*TABLE, *(f"{event} another" for event in WITH_ID))


@dataclass(frozen=True)
class Expected:
    """An independent model of `UpdateState`."""

    phase: str = "idle"
    begun: int = 0
    version: str | None = None
    poisoned: str | None = None

    def after(self, event: str) -> Expected | None:
        """None where the event must be refused."""
        name, _, another = event.partition(" ")
        to = TABLE[name].get(self.phase)
        if to is None or another or (name in WITH_ID and not self.begun):
            return None
        if name == "begin":
            return replace(self, phase=to, begun=self.begun + 1)
        if name == "commit":
            return replace(self, phase=to, version=f"v{self.begun}", poisoned=None)
        if name == "poison":
            return replace(self, phase=to, poisoned="why")
        if name == "abort" and to == "aborted" and self.poisoned:
            return replace(self, phase="poisoned")
        return replace(self, phase=to)

    def matches(self, state: UpdateState) -> bool:
        return (state.phase.value, state.update_id, state.version, state.poisoned) == (
            self.phase,
            f"u{self.begun}" if self.begun else None,
            self.version,
            self.poisoned,
        )


def fire(state: UpdateState, event: str, begun: int) -> None:
    name, _, another = event.partition(" ")
    update_id = f"u{begun + 17}" if another else f"u{begun}"
    if name == "begin":
        state.begin(f"u{begun + 1}", f"v{begun + 1}")
    elif name == "abort":
        state.abort()
    elif name == "poison":
        state.poison("why")
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

    Refused events change nothing, so that what follows them is what would have followed without.
    """
    number = 0

    def step(state: UpdateState, expected: Expected, depth: int) -> None:
        nonlocal number
        for event in EVENTS:
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
            if wanted is not None and depth + 1 < DEPTH:
                step(after, wanted, depth + 1)

    step(UpdateState(), Expected(), 0)
    return number


def copied(state: UpdateState) -> UpdateState:
    other = UpdateState()
    vars(other).update(vars(state))
    return other


def test_every_sequence_does_what_the_table_says() -> None:
    assert walk(lambda *_: None) > 10_000


def test_refused_events_leave_no_trace() -> None:
    """All sequences with refusals among them, shorter ones, event by event."""
    for events in itertools.product(EVENTS, repeat=3):
        replayed(events)


def test_version_changes_only_on_commit() -> None:
    def visit(before: UpdateState, after: UpdateState, event: str) -> None:
        if before.version != after.version:
            assert event == "commit" and after.phase is Phase.COMMITTED

    walk(visit)


def test_poison_stays_until_a_commit() -> None:
    def visit(before: UpdateState, after: UpdateState, event: str) -> None:
        if before.poisoned and not after.poisoned:
            assert event == "commit"
        if after.phase is Phase.POISONED:
            assert after.poisoned
        if after.resting and after.poisoned:
            assert after.phase is Phase.POISONED, "a poisoned side must not look intact"

    walk(visit)


def test_nothing_is_applied_that_was_not_verified() -> None:
    def visit(before: UpdateState, after: UpdateState, event: str) -> None:
        if after.phase is Phase.APPLYING and before.phase is not Phase.APPLYING:
            assert before.phase is Phase.VERIFIED and before.update_id == after.update_id
        if after.phase is Phase.VERIFIED and before.phase is not Phase.VERIFIED:
            assert before.phase is Phase.SEALED

    walk(visit)


def test_an_update_that_is_being_applied_ends_committed_or_poisoned() -> None:
    def visit(before: UpdateState, after: UpdateState, event: str) -> None:
        if before.phase is Phase.APPLYING and after.phase is not Phase.APPLYING:
            assert after.phase in (Phase.COMMITTED, Phase.POISONED)

    walk(visit)


THROUGH = ("begin", "seal", "verify", "apply", "commit")


def test_a_full_update_cures_poison_and_an_aborted_one_does_not() -> None:
    state, _ = replayed((*THROUGH, "poison", "begin", "seal", "abort"))
    assert (state.phase, state.version, state.poisoned) == (Phase.POISONED, "v1", "why")
    state, _ = replayed((*THROUGH, "poison", "begin", "seal", "abort", *THROUGH))
    assert (state.phase, state.version, state.poisoned) == (Phase.COMMITTED, "v3", None)


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
