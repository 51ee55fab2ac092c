"""Whatever torch allows in a trainer arrives byte for byte, staged and streamed, in buckets of any
size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from toys import as_hex

from weightsync import ModuleSource, StateDictSource, WeightSender
from weightsync.deadline import Deadline
from weightsync.errors import EnginePoisoned, PlanRefused, SourceError, UpdateRefused
from weightsync.testing.toy import ToyEngine


def nan_payloads() -> torch.Tensor:
    bits = torch.tensor([0x7FC00001, 0x7F800123, -0x003FFEDD, 0x7FFFFFFF, -0x80000000])
    return bits.to(torch.int32).view(torch.float32)


BUCKET = 1024
ODD: dict[str, torch.Tensor] = {
    "transposed.weight": torch.randn(33, 65).t(),
    "strided.weight": torch.randn(40, 60)[:, ::3],
    "backwards.weight": torch.arange(24).reshape(2, 3, 4).flip(0).permute(2, 0, 1),
    "expanded.weight": torch.randn(1, 7).expand(300, 7),
    "offset.weight": torch.randn(40, 16)[5:],
    "odd_offset.weight": torch.arange(999, dtype=torch.uint8)[3:],
    "conjugated.weight": torch.randn(9, 5, dtype=torch.complex64).conj(),
    "scalar": torch.tensor(-0.0),
    "empty.weight": torch.zeros(0, 8, dtype=torch.bfloat16),
    "router.bias": torch.randn(64) * 1e-3,  # float32 in a bfloat16 model
    "layer.weight": torch.randn(64, 32).to(torch.bfloat16),
    "nan.weight": nan_payloads(),
    "zeros.weight": torch.tensor([0.0, -0.0]).repeat(700),
    "flags": torch.tensor([True, False, True]),
    "eight.weight": torch.randn(50).to(torch.float8_e4m3fn),
    **{
        f"bucket.{name}": torch.randint(0, 255, (n,), dtype=torch.uint8)
        for name, n in (
            ("less", BUCKET - 1),
            ("exactly", BUCKET),
            ("more", BUCKET + 1),
            ("ten", 10 * BUCKET),
        )
    },
    "one_row.weight": torch.randn(1, 5000),
}


@pytest.fixture(scope="module")
def engine():
    shapes = {n: (str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in ODD.items()}
    with ToyEngine(shapes, workers=3) as toy:
        yield toy


def expected(values: dict[str, torch.Tensor]) -> dict[str, str]:
    return as_hex({name: value.resolve_conj().contiguous() for name, value in values.items()})


@pytest.mark.parametrize("bucket_bytes", [None, BUCKET, 64])
@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_every_odd_tensor_arrives_as_it_is(
    engine: ToyEngine, mode: str, bucket_bytes: int | None
) -> None:
    zeros = {name: torch.zeros_like(value) for name, value in ODD.items()}
    with WeightSender(StateDictSource(zeros), [engine]) as sender:
        sender.sync("zeros")
    source = StateDictSource(ODD)
    with WeightSender(source, [engine], mode=mode, bucket_bytes=bucket_bytes) as sender:
        sender.sync("odd")
    assert engine.tensors() == [expected(ODD)] * 3


class Cut(StateDictSource):
    """Its pieces come in halves, the last ones first, each in a batch of its own."""

    def pieces(self, wanted=None):
        for batch in super().pieces(wanted):
            for row in reversed(range(batch.index.size)):
                one = slice(row, row + 1)
                half = batch.nbytes[one] // 2
                for start, nbytes in ((half, batch.nbytes[one] - half), (half * 0, half)):
                    yield dataclasses.replace(
                        batch,
                        index=batch.index[one],
                        start=batch.start[one] + start,
                        nbytes=nbytes,
                        address=batch.address[one] + start,
                    )


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_pieces_arrive_in_any_order_and_cut(engine: ToyEngine, mode: str) -> None:
    zeros = {name: torch.zeros_like(value) for name, value in ODD.items()}
    with WeightSender(StateDictSource(zeros), [engine]) as sender:
        sender.sync("zeros")
    with WeightSender(Cut(ODD), [engine], mode=mode) as sender:
        sender.sync("cut")
    assert engine.tensors() == [expected(ODD)] * 3


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_a_parameter_of_the_engine_that_was_made_anew_is_written_where_it_is_now(
    engine: ToyEngine, mode: str
) -> None:
    values = {name: torch.zeros_like(value) for name, value in ODD.items()}
    with WeightSender(StateDictSource(values), [engine], mode=mode) as sender:
        sender.sync("zeros")
        engine.set_faults({1: {"replaces": "layer.weight"}})
        values.update(ODD)
        sender.sync("odd")
    assert engine.tensors() == [expected(ODD)] * 3


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_a_parameter_that_is_another_object_at_the_next_sync_counts(mode: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    shapes = {name: ("float32", list(t.shape)) for name, t in module.state_dict().items()}
    with (
        ToyEngine(shapes) as engine,
        WeightSender(ModuleSource(module), [engine], mode=mode) as sender,
    ):
        sender.sync(1)
        kept = module[0].weight  # alive, so that its place is not given to the other
        module[0].weight = torch.nn.Parameter(torch.randn(8, 8))
        module[1].bias.data = torch.randn(8)
        sender.sync(2)
        assert engine.tensors() == [as_hex(dict(module.state_dict()))]
        module[1] = torch.nn.Linear(8, 8)
        receipt = sender.sync(3)
        assert engine.tensors() == [as_hex(dict(module.state_dict()))]
        module[0].weight = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        with pytest.raises(Exception, match=r"dtype: 0\.weight"):
            sender.sync(4)
        assert engine.version(Deadline.after(1)) == receipt.version == "3"
    assert kept.shape == (8, 8)


def test_a_parameter_that_is_replaced_while_it_is_sent_is_an_error(engine: ToyEngine) -> None:
    values = {name: value.clone() for name, value in ODD.items()}

    def replace(done: int, total: int) -> None:
        values["layer.weight"].data = torch.zeros(64, 32, dtype=torch.bfloat16)

    with (
        WeightSender(StateDictSource(values), [engine], on_progress=replace) as sender,
        pytest.raises(SourceError, match=r"layer\.weight"),
    ):
        sender.sync("torn")


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_a_tied_parameter_that_was_made_anew_is_not_taken_for_the_one_that_it_was(
    mode: str,
) -> None:
    """Nothing is written under its name, and nothing would be looked at."""
    values = {"head.weight": torch.randn(4, 3)}
    values["embed.weight"] = values["head.weight"]
    shapes = {"head.weight": ("float32", (4, 3))}
    with ToyEngine(shapes, tied={"embed.weight": "head.weight"}) as engine:
        with WeightSender(StateDictSource(values), [engine], mode=mode) as sender:
            sender.sync(1)
            engine.set_faults({0: {"replaces": "embed.weight"}})
            values["head.weight"].add_(1)
            error = EnginePoisoned if mode == "streamed" else UpdateRefused
            with pytest.raises(error, match=r"'embed\.weight' was one memory with 'head\.weight'"):
                sender.sync(2)
            with pytest.raises(PlanRefused, match=r"missing: embed\.weight"):
                sender.sync(3)
        refused = [bool(worker["refused"]) for worker in engine.status()]
        assert refused == [mode == "streamed"]
