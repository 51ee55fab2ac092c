"""Handles on several workers: all of them take the update or none does, and whoever cannot tell
which of both it is serves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import weightsync as ws
from weightsync.adapters.vllm.handle_update import HandleUpdate
from weightsync.errors import (
    EnginePoisoned,
    PlanRefused,
    ServedMismatch,
    TransportError,
    UpdateRefused,
)
from weightsync.handles import ExportedHandles, export_handles, state_dict_info
from weightsync.manifest import Manifest
from weightsync.module_target import ModuleTarget
from weightsync.receiver import Receiver
from weightsync.target import ApplyReport, Description, StagedWeights

WORKERS = 3
SECONDS = 10.0


class Model(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.full((4, 3), float(value)))
        self.second = torch.nn.Parameter(torch.full((5,), float(value)))


class Table:
    """Where workers on threads exchange. Counts what each of them does."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORKERS)
        self._said = [b""] * WORKERS
        self.counts = [0] * WORKERS
        self.lost: set[tuple[int, int]] = set()
        """(rank, number of its exchange) that does not get through."""

    def exchange(self, rank: int, content: bytes) -> list[bytes]:
        self.counts[rank] += 1
        self._said[rank] = content
        try:
            self._barrier.wait(SECONDS)
            if (rank, self.counts[rank]) in self.lost:
                self._barrier.abort()
            heard = list(self._said)
            self._barrier.wait(SECONDS)
        except threading.BrokenBarrierError as error:
            raise TransportError("the others did not come") from error
        return heard

    def start_anew(self) -> None:
        self._barrier.reset()
        self.counts = [0] * WORKERS
        self.lost.clear()


class Breakable(ModuleTarget):
    """Fails half-way where it is told to; notes what is done about it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.first = module.first
        self.describe_raises: BaseException | None = None
        self.apply_raises: BaseException | None = None
        self.restore_raises: BaseException | None = None
        self.spoils = False
        self.done: list[str] = []

    def describe(self, manifest: Manifest, *, whole: bool) -> Description:
        if self.describe_raises is not None:
            raise self.describe_raises
        return super().describe(manifest, whole=whole)

    def apply(self, weights: StagedWeights) -> ApplyReport:
        if self.apply_raises is not None:
            with torch.no_grad():
                self.first.fill_(-1)
            raise self.apply_raises
        report = super().apply(weights)
        if self.spoils:
            with torch.no_grad():
                self.first[-1, -1] = -self.first[-1, -1]
        return report

    def refuse(self, reason: str) -> None:
        self.done.append("refuse")
        super().refuse(reason)

    def restore(self) -> None:
        self.done.append("restore")
        if self.restore_raises is not None:
            raise self.restore_raises


class Worker:
    def __init__(self, rank: int, table: Table) -> None:
        self.model = Model(0)
        self.target = Breakable(self.model)
        self.receiver = Receiver(self.target, rank=rank, world_size=WORKERS)
        self.update = HandleUpdate(self.target, rank, lambda said: table.exchange(rank, said))

    @property
    def values(self) -> set[float]:
        return {float(v) for p in self.model.parameters() for v in p.detach().flatten()}

    @property
    def poisoned(self) -> str | None:
        """As a sender is told, which is what requests are told."""
        reason = self.receiver.status().poisoned
        assert (reason is None) == (self.target.refused is None)
        return reason


class Engine:
    def __init__(self) -> None:
        self.table = Table()
        self.workers = [Worker(rank, self.table) for rank in range(WORKERS)]

    def all(self, call: Callable[[Worker], None]) -> list[BaseException | None]:
        """What each worker raised, by rank."""

        def caught(worker: Worker) -> BaseException | None:
            try:
                call(worker)
            except BaseException as error:
                return error
            return None

        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(caught, self.workers))

    def take(self, value: float, changes: dict[int, Any] | None = None) -> list[Any]:
        """Hand all workers a model that is full of ``value``; ``changes``: other handles by
        rank."""
        with export(Model(value)) as exported:

            def run(worker: Worker) -> None:
                handles = (changes or {}).get(worker.receiver.rank, exported.handles)
                worker.update.run(handles, lambda: "cpu", worker.receiver)

            return self.all(run)

    def assert_serves(self, value: float) -> None:
        assert [worker.values for worker in self.workers] == [{value}] * WORKERS
        assert [worker.poisoned for worker in self.workers] == [None] * WORKERS

    def assert_cured(self) -> None:
        self.table.start_anew()
        for worker in self.workers:
            worker.target.apply_raises = worker.target.describe_raises = None
            worker.target.spoils = False
        assert self.take(9) == [None] * WORKERS
        self.assert_serves(9)


def export(model: torch.nn.Module) -> ExportedHandles:
    return export_handles(ws.ModuleSource(model), ["cpu"])


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    assert found.take(1) == [None] * WORKERS
    found.assert_serves(1)
    found.table.start_anew()
    yield found


def test_all_take_it_and_have_exchanged_twice(engine: Engine) -> None:
    assert engine.take(2) == [None] * WORKERS
    engine.assert_serves(2)
    assert engine.table.counts == [2] * WORKERS


@pytest.mark.parametrize("rank", range(WORKERS))
def test_one_that_refuses_is_named_and_nobody_touches_anything(engine: Engine, rank: int) -> None:
    errors = engine.take(2, {rank: {"other": {}}})
    assert "there is no handle for cpu" in str(errors.pop(rank))
    for error in errors:
        assert isinstance(error, UpdateRefused)
        assert f"worker {rank} refuses: there is no handle for cpu" in str(error)
    engine.assert_serves(1)
    assert engine.table.counts == [1] * WORKERS
    engine.assert_cured()


def test_a_worker_that_does_not_know_its_own_device_tells_the_others(engine: Engine) -> None:
    def unknown() -> str:
        raise OSError("too many open files")

    with export(Model(2)) as exported:

        def run(worker: Worker) -> None:
            own = unknown if worker.receiver.rank == 1 else lambda: "cpu"
            worker.update.run(exported.handles, own, worker.receiver)

        errors = engine.all(run)
    assert isinstance(errors[1], OSError)
    assert all("worker 1 refuses: too many open files" in str(errors[rank]) for rank in (0, 2))
    engine.assert_serves(1)


def test_an_interrupt_while_one_checks_is_told_to_the_others(engine: Engine) -> None:
    class Other(Model):
        def __init__(self) -> None:
            super().__init__(2)
            self.third = torch.nn.Parameter(torch.zeros(1))

    engine.workers[0].target.describe_raises = KeyboardInterrupt()
    with export(Other()) as exported:
        errors = engine.all(lambda w: w.update.run(exported.handles, lambda: "cpu", w.receiver))
    assert isinstance(errors[0], KeyboardInterrupt)
    for error in errors[1:]:
        assert isinstance(error, UpdateRefused) and "worker 0 refuses: Keyb" in str(error)
    engine.assert_serves(1)
    engine.assert_cured()


def test_workers_that_were_handed_different_tensors_refuse(engine: Engine) -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Parameter(torch.zeros(4, 3))

    with export(Half()) as other:
        errors = engine.take(2, {2: other.handles})
    assert all(isinstance(error, UpdateRefused) for error in errors)
    assert all("workers were handed different tensors" in str(error) for error in errors)
    engine.assert_serves(1)


@pytest.mark.parametrize("failure", [RuntimeError("broken on purpose"), KeyboardInterrupt()])
@pytest.mark.parametrize("rank", [0, WORKERS - 1])
def test_one_that_fails_to_load_poisons_all(
    engine: Engine, rank: int, failure: BaseException
) -> None:
    engine.workers[rank].target.apply_raises = failure
    errors = engine.take(2)
    if isinstance(failure, Exception):
        assert isinstance(errors[rank], EnginePoisoned) and errors[rank].__cause__ is failure
    else:
        assert errors[rank] is failure
    said = f"worker {rank}: {failure or 'KeyboardInterrupt'}"
    for other, worker in enumerate(engine.workers):
        assert other == rank or isinstance(errors[other], EnginePoisoned)
        assert said.rstrip() in str(worker.poisoned)
        assert worker.receiver.status().version is None
    assert engine.table.counts == [2] * WORKERS
    engine.assert_cured()


@pytest.mark.parametrize("rank", [0, WORKERS - 1])
def test_one_whose_model_holds_something_else_afterwards_poisons_all(
    engine: Engine, rank: int
) -> None:
    engine.workers[rank].target.spoils = True
    errors = engine.take(2)
    assert isinstance(errors[rank].__cause__, ServedMismatch)
    assert [m.tensor for m in errors[rank].__cause__.mismatches] == ["first"]
    for error, worker in zip(errors, engine.workers, strict=True):
        assert isinstance(error, EnginePoisoned)
        assert f"worker {rank}: the model does not hold" in str(worker.poisoned)
        assert "'first'" in str(error) and "What to do" in str(error)
    engine.assert_cured()


@pytest.mark.parametrize("failure", [RuntimeError("broken on purpose"), KeyboardInterrupt()])
def test_requests_are_refused_before_anything_is_cleaned_up_even_if_that_fails(
    engine: Engine, failure: BaseException
) -> None:
    target = engine.workers[0].target
    target.apply_raises, target.restore_raises = failure, RuntimeError("cannot be restored")
    target.done.clear()
    errors = engine.take(2)
    assert target.done[:2] == ["refuse", "restore"]
    assert "cannot be restored" not in str(errors[0])
    assert all(worker.poisoned for worker in engine.workers)
    target.restore_raises = None
    engine.assert_cured()


def test_workers_that_are_not_heard_before_touch_nothing(engine: Engine) -> None:
    engine.table.lost.add((1, 1))
    assert all(isinstance(error, TransportError) for error in engine.take(2))
    engine.assert_serves(1)
    engine.assert_cured()


def test_workers_that_are_not_heard_afterwards_serve_nothing(engine: Engine) -> None:
    """Each of them has loaded everything, and may be the only one."""
    engine.table.lost.add((1, 2))
    errors = engine.take(2)
    assert all(isinstance(error, EnginePoisoned) for error in errors)
    assert all("the others did not come" in str(worker.poisoned) for worker in engine.workers)
    engine.assert_cured()


def test_an_announcement_is_exchanged_once_and_refused_by_all(engine: Engine) -> None:
    right = state_dict_info(ws.ModuleSource(Model(0)))
    assert engine.all(lambda worker: worker.update.expect(right)) == [None] * WORKERS
    assert engine.table.counts == [1] * WORKERS
    wrong: dict[str, Any] = {**right, "first": ([4, 4], "float32")}
    errors = engine.all(lambda worker: worker.update.expect(wrong))
    assert all(isinstance(error, PlanRefused) for error in errors)
    assert engine.table.counts == [2] * WORKERS
    errors = engine.all(
        lambda worker: worker.update.expect(7 if worker.receiver.rank == 1 else right)
    )
    assert "expected {name: (shape, dtype)}" in str(errors.pop(1))
    assert all("worker 1 refuses: expected {name" in str(error) for error in errors)
    assert engine.table.counts == [3] * WORKERS
