"""Sources: every tensor's bytes exactly once, whatever its layout, or an error that names it."""

from __future__ import annotations

import copy
import ctypes
import json
import math
import os
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weightsync.digest import derive_seeds, digest_bytes, reference_digest
from weightsync.errors import ManifestError, SourceError
from weightsync.manifest import DTYPE_BYTES, Manifest, TensorSpec
from weightsync.sources import ModuleSource, Pieces, SafetensorsSource, StateDictSource
from weightsync.sources import module as module_file
from weightsync.sources import safetensors as safetensors_file
from weightsync.sources.base import Source, fill
from weightsync.sources.names import clean_name
from weightsync.transport.shm import arena_offsets

UPDATE_SEED = 0xFEEDFACE12345678


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def raw(tensor: torch.Tensor) -> bytes:
    """Row-major bytes of a tensor, as its values are."""
    if not tensor.numel():
        return b""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().clone().reshape(-1)
    return whole.view(torch.uint8).numpy().tobytes()


def deliver(source: Source) -> dict[str, bytes]:
    """What arrives in an arena, after each digest was held against the definition's."""
    manifest = source.manifest()
    offsets, nbytes = arena_offsets(manifest)
    arena = np.full(nbytes + 64, 0xA5, np.uint8)
    seeds = derive_seeds(UPDATE_SEED, manifest.identities)
    done: list[tuple[int, int]] = []
    digests = fill(
        source,
        manifest,
        offsets + np.uint64(arena.ctypes.data),
        seeds,
        lambda *progress: done.append(progress),
    )
    arrived = {}
    untouched = np.ones(arena.size, bool)
    for number, (spec, offset) in enumerate(zip(manifest.tensors, offsets.tolist(), strict=True)):
        data = arena[offset : offset + spec.nbytes].tobytes()
        untouched[offset : offset + spec.nbytes] = False
        seed = int(seeds[number])
        expected = digest_bytes(data, seed=seed)
        if len(data) < 1000:
            assert expected == reference_digest(data, start=0, seed=seed)
        assert digests[number].tolist() == [expected.first, expected.second], spec.name
        arrived[spec.name] = data
    assert (arena[untouched] == 0xA5).all(), "written outside of the tensors' places"
    assert not done or done[-1] == (manifest.total_bytes, manifest.total_bytes)
    return arrived


def assert_delivers(source: Source, tensors: Mapping[str, torch.Tensor]) -> None:
    arrived = deliver(source)
    assert list(arrived) == list(tensors)
    for name, tensor in tensors.items():
        assert arrived[name] == raw(tensor), name
        spec = source.manifest().tensors[source.manifest().index[name]]
        assert spec.shape == tuple(tensor.shape)
        assert f"torch.{spec.dtype}" == str(tensor.dtype)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes: NaNs, infinities, subnormals and both zeros among them."""
    generator = np.random.default_rng(seed)
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:
        return torch.from_numpy(generator.integers(0, 2, count).astype(bool)).view(shape)
    data = generator.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


DTYPES = [getattr(torch, name) for name in sorted(DTYPE_BYTES)]


# Layouts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bytewise_in_every_layout(dtype: torch.dtype) -> None:
    whole = random_tensor((6, 10), dtype)
    tensors = {
        "contiguous": whole,
        "transposed": whole.t(),
        "strided": whole[:, ::2],
        "stepped rows": whole[::3],
        "narrow": whole[:, 2:5],
        "offset": whole[1:],
        "row": whole[4],
        "column": whole[:, 3],
        "element": whole[2, 3],
        "expanded": whole[:1].expand(4, 10),
        "scalar": random_tensor((), dtype, 1),
        "empty": random_tensor((0, 3), dtype),
        "empty rows": random_tensor((3, 0), dtype),
    }
    assert_delivers(StateDictSource(tensors), tensors)


def test_nan_payloads_and_signed_zeros_arrive_as_they_are() -> None:
    bits = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000, -(2**31), 0, 1, -1])
    values = bits.to(torch.int32).view(torch.float32).view(2, 4)
    tensors = {"values": values, "transposed": values.t(), "copy": values.clone()}
    assert_delivers(StateDictSource(tensors), tensors)
    assert deliver(StateDictSource({"zero": torch.zeros(2)})) != deliver(
        StateDictSource({"zero": -torch.zeros(2)})
    )


def test_a_view_ships_its_own_bytes_and_not_its_storages() -> None:
    big = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    source = StateDictSource({"row": big[5:7], "tail": big[1000:].contiguous()})
    assert source.manifest().total_bytes == (2 + 24) * 4096
    assert_delivers(source, {"row": big[5:7], "tail": big[1000:]})


def test_conjugated_and_negated_views_arrive_as_the_values_they_show() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    tensors = {"plain": values, "conj": values.conj(), "imag of conj": values.conj().imag}
    assert tensors["conj"].is_conj() and tensors["imag of conj"].is_neg()
    assert_delivers(StateDictSource(tensors), tensors)
    assert raw(tensors["conj"]) == raw(torch.tensor([1 - 2j, 3 + 4j], dtype=torch.complex64))


@pytest.mark.parametrize("piece_bytes", [1, 6, 24, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_go_through_a_small_buffer_piece_by_piece(
    piece_bytes: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_file, "PIECE_BYTES", piece_bytes)
    whole = torch.randn(7, 11)
    tensors = {"t": whole.t(), "v": whole[:, 2], "s": whole[3, 3], "w": whole, "e": whole[:0].t()}
    source = StateDictSource(tensors, dtype=dtype)
    expected = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
    assert_delivers(source, expected)
    itemsize = (dtype or torch.float32).itemsize
    sizes = [int(n) for batch in list(source.pieces())[dtype is None :] for n in batch.nbytes]
    assert max(sizes) <= max(piece_bytes, 11 * itemsize), "more than a piece and more than a row"
    assert piece_bytes > 100 or len(sizes) > 4


# Casts


def test_a_declared_dtype_casts_floating_point_tensors_only_and_is_recorded() -> None:
    tensors = {
        "w": torch.randn(5, 3),
        "h": torch.randn(4).half(),
        "b": torch.randn(4).bfloat16(),
        "ids": torch.arange(7),
        "mask": torch.tensor([True, False]),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    source = StateDictSource(tensors, dtype=torch.bfloat16)
    expected = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    assert_delivers(source, expected)
    assert source.casts == {"w": "float32 -> bfloat16", "h": "float16 -> bfloat16"}


def test_nothing_is_cast_unless_it_is_declared() -> None:
    tensors = {"w": torch.randn(3), "router.bias": torch.randn(3).double()}
    source = StateDictSource(tensors)
    assert_delivers(source, tensors)
    assert source.casts == {}


def test_the_first_pattern_that_matches_counts_and_others_stay() -> None:
    tensors = {"a.router.bias": torch.randn(3), "a.w": torch.randn(3), "b.w": torch.randn(3)}
    rule = {"*.router.*": torch.float32, "a.*": torch.bfloat16, "a.w": torch.float16}
    source = StateDictSource(tensors, dtype=rule)
    assert_delivers(source, {**tensors, "a.w": tensors["a.w"].bfloat16()})
    assert source.casts == {"a.w": "float32 -> bfloat16"}


def test_patterns_see_the_names_that_are_sent() -> None:
    source = StateDictSource({"_orig_mod.w": torch.randn(3)}, dtype={"w": torch.float16})
    source.manifest()
    assert source.casts == {"w": "float32 -> float16"}


def test_bits_below_the_wires_dtype_are_kept_where_no_cast_is_declared() -> None:
    """A router's fp32 bias among bf16 weights: rounded, it would route differently."""
    bias = torch.tensor([1.0 + 2**-20])
    tensors = {"w": torch.randn(2).bfloat16(), "bias": bias}
    assert raw(bias) != raw(bias.bfloat16().float())
    assert_delivers(StateDictSource(tensors, dtype={"w": torch.bfloat16}), tensors)


# Names


class Wrapper(nn.Module):
    """Holds a module as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def small() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 3, bias=False)])
    model.register_buffer("scale", torch.ones(()))
    model.register_buffer("scratch", torch.zeros(9), persistent=False)
    return model


NAMES = ["scale", "layers.0.weight", "layers.0.bias", "layers.1.weight"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        Wrapper,
        torch.compile,
        lambda m: torch.compile(Wrapper(m)),
        lambda m: Wrapper(torch.compile(m)),
        lambda m: Wrapper(Wrapper(m)),
        lambda m: torch.compile(Wrapper(torch.compile(Wrapper(m)))),
    ],
    ids=["plain", "ddp", "compile", "compile-ddp", "ddp-compile", "ddp-ddp", "all"],
)
def test_wrappers_around_the_model_leave_no_trace_in_names(wrap: Any) -> None:
    model = small()
    source = ModuleSource(wrap(model))
    assert [spec.name for spec in source.manifest().tensors] == NAMES
    assert_delivers(source, model.state_dict())


def test_wrappers_within_the_model_leave_no_trace_in_names() -> None:
    model = small()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(checkpoint_wrapper(model.layers[1]))
    assert_delivers(ModuleSource(Wrapper(model)), expected)


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("module.layers.0.w", "layers.0.w"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w", "layers.0.w"),
        ("_orig_mod.module._fsdp_wrapped_module.a._checkpoint_wrapped_module.w", "a.w"),
        ("a._checkpoint_wrapped_module._orig_mod.mlp._orig_mod.w", "a.mlp.w"),
        ("_checkpoint_wrapped_module._orig_mod.module.module.w", "w"),
        ("a.module.w", "a.module.w"),
        ("module", "module"),
        ("modules.w", "modules.w"),
        ("a._orig_module.w", "a._orig_module.w"),
    ],
)
def test_prefixes_are_stripped_in_any_nesting_and_nothing_else_is(name: str, clean: str) -> None:
    assert clean_name(name) == clean
    assert clean_name(clean) == clean


@pytest.mark.parametrize("order", [0, 1])
def test_a_clash_after_stripping_is_an_error_that_names_both(order: int) -> None:
    names = ["a.w", "a._orig_mod.w"][:: 1 - 2 * order]
    source = StateDictSource({name: torch.randn(3) for name in names})
    with pytest.raises(ManifestError, match=r"'a\._orig_mod\.w'") as caught:
        source.manifest()
    assert "'a.w'" in str(caught.value)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0), (1, 2, 0)])
def test_a_clash_with_the_name_of_a_tied_tensor_is_an_error_too(order: tuple[int, ...]) -> None:
    """Else ``y`` would be both a tensor that is sent and an alias of another."""
    tied = torch.randn(3)
    all_of_them = [("x", tied), ("y", torch.randn(3)), ("_orig_mod.y", tied)]
    source = StateDictSource(dict(all_of_them[i] for i in order))
    with pytest.raises(ManifestError, match="'y'"):
        source.manifest()


def test_the_same_tensor_under_both_of_a_wrappers_names_is_sent_once() -> None:
    tensor = torch.randn(3)
    source = StateDictSource({"a.w": tensor, "a._orig_mod.w": tensor})
    assert_delivers(source, {"a.w": tensor})
    assert source.aliases == {}


# Tied weights


class Tied(nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(self.embed.weight)
        if tie:
            self.head.weight = self.embed.weight


def test_tied_weights_are_sent_once_and_the_alias_is_recorded() -> None:
    model = Tied(tie=True)
    source = ModuleSource(model)
    assert_delivers(source, {"embed.weight": model.embed.weight})
    assert source.aliases == {"head.weight": "embed.weight"}


def test_untied_weights_of_equal_values_are_both_sent() -> None:
    model = Tied(tie=False)
    source = ModuleSource(model)
    assert_delivers(source, model.state_dict())
    assert source.aliases == {}


def test_views_of_one_storage_that_differ_are_all_sent() -> None:
    fused = torch.randn(6, 6)
    tensors = {"a": fused[:3], "b": fused[3:], "all": fused, "t": fused.t(), "flat": fused.view(36)}
    source = StateDictSource(tensors)
    assert_delivers(source, tensors)
    assert source.aliases == {}


def test_empty_tensors_are_not_taken_for_tied() -> None:
    tensors = {"a": torch.empty(0, 3), "b": torch.empty(0, 3)}
    source = StateDictSource(tensors)
    assert_delivers(source, tensors)
    assert source.aliases == {}


def test_tying_and_untying_between_updates_is_noticed() -> None:
    model = Tied(tie=True)
    source = ModuleSource(model)
    source.manifest()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    assert_delivers(source, model.state_dict())
    assert source.aliases == {}
    model.head.weight = model.embed.weight
    assert_delivers(source, {"embed.weight": model.embed.weight})
    assert source.aliases == {"head.weight": "embed.weight"}


# What cannot be sent


class Sharded(torch.Tensor):
    """As far as a source can see, a DTensor."""

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("a source gathers nothing")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.empty(3, device="meta"), "meta device"),
        (torch.randn(3, 3).to_sparse(), "sparse"),
        (torch.eye(3).to_sparse_csr(), "sparse"),
        (torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8), "quantized"),
        (torch.randn(3).as_subclass(Sharded), "DTensor"),
        (nn.UninitializedParameter(), "not initialized"),
        ("text", "str"),
        (None, "NoneType"),
        (np.zeros(3), "ndarray"),
        (torch.zeros(3, dtype=torch.complex128), "complex128"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_sent_is_refused_by_name(bad: Any, message: str) -> None:
    source = StateDictSource({"good": torch.randn(2), "layers.7.bad": bad})
    with pytest.raises((SourceError, ManifestError), match=message) as caught:
        source.manifest()
    assert "'layers.7.bad'" in str(caught.value)


def test_what_was_refused_is_sent_once_it_is_mended() -> None:
    tensors = {"a": torch.randn(2), "b": torch.empty(3, device="meta")}
    source = StateDictSource(tensors)
    with pytest.raises(SourceError):
        source.manifest()
    tensors["b"] = torch.randn(3)
    assert_delivers(source, tensors)


def test_what_is_refused_stays_refused_though_it_was_sent_before() -> None:
    tensors = {"a": torch.randn(2), "b": torch.randn(3)}
    source = StateDictSource(tensors)
    deliver(source)
    tensors["b"] = torch.zeros(3, dtype=torch.complex128)
    for _ in range(3):
        with pytest.raises((SourceError, ManifestError), match="'b'"):
            source.manifest()
    tensors["b"] = torch.randn(3)
    assert_delivers(source, tensors)


def test_a_tensor_that_becomes_one_of_another_class_is_looked_at_anew() -> None:
    """As torch's lazy parameters do, the other way round."""
    tensors = {"a": nn.Parameter(torch.randn(3))}
    source = StateDictSource(tensors)
    deliver(source)
    tensors["a"].__class__ = type("Late", (Sharded, nn.Parameter), {})
    with pytest.raises(SourceError, match="DTensor"):
        source.manifest()


def test_a_module_without_tensors_is_refused() -> None:
    with pytest.raises(ManifestError, match="at least one"):
        ModuleSource(nn.ReLU()).manifest()


# From one update to the next


def test_the_manifest_is_cached_while_nothing_changes() -> None:
    model = small()
    source = ModuleSource(model)
    manifest = source.manifest()
    with torch.no_grad():
        model.layers[0].weight.mul_(3)
    assert source.manifest() is manifest
    assert_delivers(source, model.state_dict())
    assert source.manifest() is manifest


def replace_parameter(model: nn.Module) -> None:
    model.layers[0].weight = nn.Parameter(torch.randn(2, 3))


def replace_data(model: nn.Module) -> None:
    model.layers[0].weight.data = torch.randn(2, 3)


def resize(model: nn.Module) -> None:
    model.layers[0].weight.data = torch.randn(4, 3)


def cast(model: nn.Module) -> None:
    model.layers[0].weight.data = model.layers[0].weight.data.bfloat16()


def restride(model: nn.Module) -> None:
    model.layers[0].weight.data = torch.randn(3, 2).t()


def transpose_in_place(model: nn.Module) -> None:
    square = nn.Parameter(torch.randn(3, 3))
    model.layers[0].weight = square
    square.data = square.data.t()


def add(model: nn.Module) -> None:
    model.register_parameter("more", nn.Parameter(torch.randn(3)))


def remove(model: nn.Module) -> None:
    del model.layers[1]


def rename(model: nn.Module) -> None:
    model.kept = model.layers


def replace_subclass(model: nn.Module) -> None:
    model.layers[0].weight = Mine(torch.randn(2, 3))


def replace_buffer(model: nn.Module) -> None:
    model.scale = torch.full((), 7.0)


def resize_at_the_same_address(model: nn.Module) -> None:
    address = model.layers[0].weight.data_ptr()
    model.layers[0].weight.data = model.layers[0].weight.data[:1]
    assert model.layers[0].weight.data_ptr() == address


def resize_in_place(model: nn.Module) -> None:
    model.layers[0].weight.detach().resize_(1, 3)
    model.scale.resize_(1)


def reshape_at_the_same_address(model: nn.Module) -> None:
    model.layers[0].weight.data = model.layers[0].weight.data.view(3, 2)


def reshape_but_for_the_strides(model: nn.Module) -> None:
    """Neither the address nor the number of dimensions tells."""
    weight = model.layers[0].weight
    weight.data = weight.data.as_strided((1, 3), (1, 1))
    assert weight.stride() == (1, 1)


def restride_at_the_same_address(model: nn.Module) -> None:
    weight = model.layers[0].weight
    weight.data = weight.data.as_strided((2, 3), (1, 2))


def cast_at_the_same_address(model: nn.Module) -> None:
    model.scale.data = model.scale.data.view(torch.int32)


def negate(model: nn.Module) -> None:
    """As torch does it for ``imag`` of a conjugate: by a flag, with memory as it was."""
    model.layers[0].weight.data = torch._neg_view(model.layers[0].weight.data)
    assert model.layers[0].weight.is_neg()


def conjugate(model: nn.Module) -> None:
    model.phase.data = model.phase.data.conj()
    assert model.phase.is_conj()


class Mine(nn.Parameter):
    """A parameter of a class that weightsync does not know."""


@pytest.mark.parametrize("start", [nn.Parameter, Mine])
@pytest.mark.parametrize(
    "change",
    [
        replace_parameter,
        replace_data,
        resize,
        cast,
        restride,
        transpose_in_place,
        add,
        remove,
        replace_subclass,
        replace_buffer,
        resize_at_the_same_address,
        resize_in_place,
        reshape_at_the_same_address,
        reshape_but_for_the_strides,
        restride_at_the_same_address,
        cast_at_the_same_address,
        negate,
        conjugate,
    ],
)
def test_any_change_between_two_updates_is_picked_up(change: Any, start: Any) -> None:
    model = small()
    model.layers[0].weight = start(torch.randn(2, 3))
    model.register_buffer("phase", torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64))
    source = ModuleSource(model)
    assert_delivers(source, model.state_dict())
    change(model)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert_delivers(source, expected)


def test_a_state_dicts_replaced_tensors_count() -> None:
    tensors = {"w": torch.randn(3)}
    source = StateDictSource(tensors)
    deliver(source)
    tensors["w"] = torch.randn(3)
    assert_delivers(source, tensors)
    tensors["v"] = tensors.pop("w")
    assert_delivers(source, tensors)


def test_the_trainers_memory_is_only_read() -> None:
    model = small()
    model.layers[0].weight.data = torch.randn(3, 2).t()
    before = copy.deepcopy(model.state_dict())
    storages = {name: t.untyped_storage().data_ptr() for name, t in model.state_dict().items()}
    versions = {name: t._version for name, t in model.state_dict(keep_vars=True).items()}
    deliver(ModuleSource(model, dtype=torch.bfloat16))
    after = model.state_dict(keep_vars=True)
    for name, tensor in after.items():
        assert raw(tensor) == raw(before[name])
        assert tensor.untyped_storage().data_ptr() == storages[name]
        assert tensor._version == versions[name]
        assert tensor.stride() == before[name].stride()
    assert all(parameter.requires_grad for parameter in model.parameters())


# Sources that do not keep their word


class Liar:
    """A source that yields whatever it is told to."""

    casts: Mapping[str, str] = {}
    aliases: Mapping[str, str] = {}

    def __init__(self, *pieces: tuple[int, int, int]) -> None:
        self._data = np.arange(64, dtype=np.uint8)
        self._pieces = pieces
        self.changed = False

    def manifest(self) -> Manifest:
        return Manifest([TensorSpec("a", "uint8", (16,)), TensorSpec("b", "int8", (8,))])

    def pieces(self, wanted=None) -> Iterator[Pieces]:
        for index, start, nbytes in self._pieces:
            yield Pieces(
                np.array([index], np.int64),
                np.array([start], np.uint64),
                np.array([nbytes], np.uint64),
                np.array([self._data.ctypes.data], np.uint64),
            )


def filled(source: Source) -> NDArray[np.uint8]:
    arena = np.full(256, 0xA5, np.uint8)
    offsets = np.array([64, 128], np.uint64) + np.uint64(arena.ctypes.data)
    try:
        fill(source, source.manifest(), offsets, np.ones(2, np.uint64))
    finally:
        assert (arena[:64] == 0xA5).all() and (arena[80:128] == 0xA5).all()
        assert (arena[136:] == 0xA5).all()
    return arena


def test_pieces_may_come_in_any_order_and_cut() -> None:
    arena = filled(Liar((1, 3, 5), (0, 15, 1), (0, 0, 15), (1, 0, 3)))
    assert arena[64:80].tolist() == [*range(15), 0]
    assert arena[128:136].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "piece",
    [(0, 0, 17), (0, 16, 1), (0, 17, 0), (0, 1, 16), (1, 0, 16), (0, 2**64 - 1, 1), (0, 8, 2**63)],
)
def test_a_piece_beyond_its_tensor_is_refused_before_it_is_copied(
    piece: tuple[int, int, int],
) -> None:
    with pytest.raises(SourceError, match="beyond its tensor"):
        filled(Liar(piece))


@pytest.mark.parametrize("index", [-1, 2, 2**62])
def test_a_piece_of_an_unknown_tensor_is_refused(index: int) -> None:
    with pytest.raises(SourceError, match="lacks"):
        filled(Liar((index, 0, 1)))


@pytest.mark.parametrize("pieces", [[], [(0, 0, 16)], [(0, 0, 16), (1, 0, 7)], [(1, 0, 8)]])
def test_bytes_that_never_come_are_missed_by_name(pieces: list[tuple[int, int, int]]) -> None:
    with pytest.raises(SourceError, match=r"'[ab]' has"):
        filled(Liar(*pieces))


# What changes while it is sent


class Interrupted:
    """A source during whose first piece, or before it, something else happens."""

    def __init__(self, source: Source, event: Callable[[], object], *, before: bool) -> None:
        self._source, self._event, self._before = source, event, before
        self.casts, self.aliases = source.casts, source.aliases
        self.manifest = source.manifest

    def pieces(self, wanted=None) -> Iterator[Pieces]:
        if self._before:
            self._event()
        for number, batch in enumerate(self._source.pieces()):
            if number == 0 and not self._before:
                self._event()
            yield batch


class Counted(dict[str, torch.Tensor]):
    """A mapping that counts how often its names are asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.looks = 0

    def keys(self) -> Any:
        self.looks += 1
        return super().keys()

    def items(self) -> Any:
        self.looks += 1
        return super().items()

    def __iter__(self) -> Iterator[str]:
        self.looks += 1
        return super().__iter__()


@pytest.mark.parametrize("kind", [nn.Parameter, Mine])
def test_sending_does_not_look_through_the_names_again(kind: Any) -> None:
    tensors = Counted({"a": kind(torch.randn(4)), "b": kind(torch.randn(2, 2).t())})
    source = StateDictSource(tensors)
    manifest = source.manifest()
    looks = tensors.looks
    assert looks
    arena = np.zeros(256, np.uint8)
    addresses = np.array([0, 64], np.uint64) + np.uint64(arena.ctypes.data)
    fill(source, manifest, addresses, np.ones(2, np.uint64))
    assert tensors.looks == looks
    assert arena[:16].tobytes() == raw(tensors["a"])
    assert arena[64:80].tobytes() == raw(tensors["b"])


def test_pieces_without_a_manifest_before_are_of_one_made_then() -> None:
    tensors = {"a": torch.randn(4), "b": torch.randn(4)}
    (batch,) = StateDictSource(tensors).pieces()
    assert batch.address.tolist() == [t.data_ptr() for t in tensors.values()]
    assert batch.manifest is not None and [s.name for s in batch.manifest.tensors] == ["a", "b"]


def swap_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def transpose(tensor: torch.Tensor) -> None:
    address = tensor.data_ptr()
    tensor.data = tensor.data.t()
    assert tensor.data_ptr() == address


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("event", [swap_data, transpose])
@pytest.mark.parametrize("name", ["a", "b", "cast", "last"])
def test_a_tensor_whose_memory_is_replaced_while_it_is_sent_is_named(
    name: str, event: Any, before: bool
) -> None:
    tensors = {
        "a": nn.Parameter(torch.randn(3, 3)),
        "b": torch.randn(3, 3),
        "cast": torch.randn(3, 3),
        "last": torch.randn(3, 3),
    }
    source = StateDictSource(tensors, dtype={"cast": torch.bfloat16})
    interrupted = Interrupted(source, lambda: event(tensors[name]), before=before)
    with pytest.raises(SourceError, match=f"^'{name}' was replaced while it was sent") as caught:
        deliver(interrupted)
    assert caught.value.remedy and "between manifest and send" in caught.value.remedy
    if before:
        source.manifest()
        event(tensors[name])
        with pytest.raises(SourceError, match=f"^'{name}' was replaced"):
            next(source.pieces())  # not even one piece: its memory may be gone
    expected = {n: t.bfloat16() if n == "cast" else t for n, t in tensors.items()}
    assert_delivers(source, expected)


@pytest.mark.parametrize("before", [True, False])
def test_a_name_that_gets_another_tensor_is_sent_as_the_manifest_saw_it(before: bool) -> None:
    tensors = {"a": torch.randn(4), "b": torch.randn(2, 2).t()}
    old = dict(tensors)

    def event() -> None:
        tensors["a"], tensors["b"], tensors["c"] = torch.randn(4), torch.randn(5), torch.ones(1)

    source = StateDictSource(tensors)
    arrived = deliver(Interrupted(source, event, before=before))
    assert arrived == {name: raw(tensor) for name, tensor in old.items()}
    assert_delivers(source, tensors)


def test_pieces_of_a_newer_manifest_are_refused() -> None:
    """Two tensors of one size under each other's name would otherwise be sent and proven."""
    tensors = {"a": torch.randn(4), "b": torch.randn(4)}
    source = StateDictSource(tensors)
    old = source.manifest()
    tensors["a"] = tensors.pop("a")
    assert [spec.name for spec in source.manifest().tensors] == ["b", "a"]
    arena = np.full(256, 0xA5, np.uint8)
    addresses = np.array([0, 64], np.uint64) + np.uint64(arena.ctypes.data)
    with pytest.raises(SourceError, match="changed since the manifest"):
        fill(source, old, addresses, np.ones(2, np.uint64))
    assert (arena == 0xA5).all()


def test_memory_that_is_being_read_is_not_given_back() -> None:
    values = np.arange(1000, dtype=np.float32)
    expected, gone = values.tobytes(), weakref.ref(values)
    tensors = {"a": torch.from_numpy(values), "b": torch.ones(3)}
    del values
    source = StateDictSource(tensors)
    source.manifest()
    pieces = source.pieces()
    batch = next(pieces)
    tensors["a"].data = torch.zeros(1000)
    assert gone() is not None
    assert ctypes.string_at(int(batch.address[0]), int(batch.nbytes[0])) == expected
    with pytest.raises(SourceError, match="'a' was replaced"):
        next(pieces)
    assert gone() is None


def step(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model.embed.weight.grad = torch.ones(5, 3)
    optimizer.step()


def add_without_gradient(model: nn.Module) -> None:
    with torch.no_grad():
        model.embed.weight.add_(1)


def add_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model.embed.weight.add_(1)


def write_to_a_view(model: nn.Module) -> None:
    model.embed.weight.detach()[1].zero_()


def write_through_a_state_dict(model: nn.Module) -> None:
    model.state_dict()["embed.weight"].zero_()


def load(model: nn.Module) -> None:
    with torch.no_grad():
        model.embed.load_state_dict({"weight": torch.zeros(5, 3)})


def write_and_restore(model: nn.Module) -> None:
    """The bytes are what they were, and yet others may have been sent."""
    with torch.no_grad():
        model.embed.weight.neg_().neg_()


WRITES = [
    step,
    add_without_gradient,
    add_in_inference_mode,
    write_to_a_view,
    write_through_a_state_dict,
    load,
    write_and_restore,
]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["in place", "cast"])
@pytest.mark.parametrize("write", WRITES)
def test_a_tensor_that_is_written_to_while_it_is_sent_is_named(
    write: Any, dtype: torch.dtype | None
) -> None:
    model = Tied(tie=False)
    source = ModuleSource(model, dtype=dtype)
    interrupted = Interrupted(source, lambda: write(model), before=False)
    with pytest.raises(SourceError, match=r"1 tensor.*: 'embed\.weight'\n") as caught:
        deliver(interrupted)
    assert caught.value.remedy and "between optimizer steps" in caught.value.remedy
    assert_delivers(source, {n: t.to(dtype or t.dtype) for n, t in model.state_dict().items()})


@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_or_after_is_no_fault(write: Any) -> None:
    model = Tied(tie=False)
    source = ModuleSource(model)
    arrived = deliver(Interrupted(source, lambda: write(model), before=True))
    assert arrived == {name: raw(tensor) for name, tensor in model.state_dict().items()}
    write(model)
    assert_delivers(source, model.state_dict())


def test_a_write_through_a_tied_tensor_is_noticed() -> None:
    """Tied by memory alone, each of the two has a counter of its own, and only one is sent."""
    model = Tied(tie=False)
    model.head.weight = nn.Parameter(model.embed.weight.data)
    source = ModuleSource(Wrapper(model))

    def write() -> None:
        with torch.no_grad():
            model.head.weight.add_(1)

    source.manifest()
    assert source.aliases == {"head.weight": "embed.weight"}
    with pytest.raises(SourceError, match=r": 'head\.weight'\n"):
        deliver(Interrupted(source, write, before=False))


@pytest.mark.parametrize("kind", [nn.Parameter, Mine])
def test_another_tensor_of_the_same_memory_is_watched_in_the_olds_place(kind: Any) -> None:
    model = Tied(tie=False)
    source = ModuleSource(model)
    source.manifest()
    model.embed.weight = kind(model.embed.weight.data)

    def write() -> None:
        with torch.no_grad():
            model.embed.weight.add_(1)

    with pytest.raises(SourceError, match=r": 'embed\.weight'\n"):
        deliver(Interrupted(source, write, before=False))


def test_every_tensor_that_was_written_to_is_counted_and_the_first_are_named() -> None:
    tensors = {f"t{number}": torch.zeros(3) for number in range(13)}

    def write() -> None:
        for name in list(tensors)[1:]:
            tensors[name].add_(1)

    with pytest.raises(SourceError) as caught:
        deliver(Interrupted(StateDictSource(tensors), write, before=False))
    message = str(caught.value)
    assert message.startswith("12 tensor(s)") and "'t10' and 2 more" in message
    assert "'t0'" not in message and "'t11'" not in message


def test_inference_tensors_are_sent_and_others_beside_them_are_watched() -> None:
    with torch.inference_mode():
        frozen = torch.randn(3)
    with pytest.raises(RuntimeError, match="version counter"):
        _ = frozen._version
    tensors = {"frozen": frozen, "w": torch.randn(3)}
    source = StateDictSource(tensors)
    assert_delivers(source, tensors)
    with pytest.raises(SourceError, match=r"1 tensor.*: 'w'\n"):
        deliver(Interrupted(source, lambda: tensors["w"].add_(1), before=False))


# Checkpoints on disk

CHECKPOINT = {
    "model.embed.weight": torch.randn(9, 5),
    "model.a": torch.randn(7).bfloat16(),
    "model.b": torch.arange(11),
    "model.c": torch.randn(2, 3).half(),
    "model.mask": torch.tensor([True, False, True]),
    "model.scalar": torch.tensor(3.5),
    "model.empty": torch.empty(0, 4),
}


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(encoded) if length is None else length
    path.write_bytes(struct.pack("<Q", claimed) + encoded + data)
    return path


def index(directory: Path, weight_map: Any) -> None:
    text = weight_map if isinstance(weight_map, bytes) else json.dumps({"weight_map": weight_map})
    encoded = text if isinstance(text, bytes) else text.encode()
    (directory / "model.safetensors.index.json").write_bytes(encoded)


def sharded(directory: Path, tensors: Mapping[str, torch.Tensor], shards: int = 3) -> Path:
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        safetensors.torch.save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index(directory, weight_map)
    return directory


def assert_reads(source: SafetensorsSource, tensors: Mapping[str, torch.Tensor]) -> None:
    arrived = deliver(source)
    assert arrived.keys() == tensors.keys()
    assert all(arrived[name] == raw(tensor) for name, tensor in tensors.items())
    for spec in source.manifest().tensors:
        assert f"torch.{spec.dtype}" == str(tensors[spec.name].dtype)
        assert spec.shape == tuple(tensors[spec.name].shape)


def test_a_single_file_is_read_by_itself_and_in_its_directory(tmp_path: Path) -> None:
    safetensors.torch.save_file(CHECKPOINT, tmp_path / "model.safetensors", {"format": "pt"})
    assert_reads(SafetensorsSource(tmp_path), CHECKPOINT)
    assert_reads(SafetensorsSource(tmp_path / "model.safetensors"), CHECKPOINT)
    assert_reads(SafetensorsSource(str(tmp_path)), CHECKPOINT)


def test_a_sharded_checkpoint_is_read_whole(tmp_path: Path) -> None:
    source = SafetensorsSource(sharded(tmp_path, CHECKPOINT))
    assert_reads(source, CHECKPOINT)
    assert source.casts == {} and source.aliases == {}


def test_what_save_pretrained_writes_is_read_whole(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_reads(SafetensorsSource(tmp_path), model.state_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_as_safetensors_wrote_it(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"w": random_tensor((3, 5), dtype), "s": random_tensor((), dtype, 1)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    assert_reads(SafetensorsSource(tmp_path), tensors)


def test_disk_and_memory_give_the_same_manifest_and_digests(tmp_path: Path) -> None:
    safetensors.torch.save_file(CHECKPOINT, tmp_path / "model.safetensors")
    disk = SafetensorsSource(tmp_path)
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    memory = StateDictSource({spec.name: loaded[spec.name] for spec in disk.manifest().tensors})
    assert disk.manifest() == memory.manifest()
    assert deliver(disk) == deliver(memory)


@pytest.mark.parametrize("batch_bytes", [1, 7, 64, 4096, 5000])
def test_tensors_that_span_batches_arrive_whole(
    batch_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "BATCH_BYTES", batch_bytes)
    tensors = CHECKPOINT if batch_bytes < 4096 else CHECKPOINT | {"big": torch.randn(40, 1000)}
    source = SafetensorsSource(sharded(tmp_path, tensors))
    assert_reads(source, tensors)
    assert max(int(batch.nbytes.sum()) for batch in source.pieces()) <= batch_bytes
    assert_reads(source, tensors)


@pytest.mark.parametrize("piece_bytes", [6, 1 << 20])
def test_a_declared_cast_from_disk_is_made_and_recorded(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_file, "PIECE_BYTES", piece_bytes)
    source = SafetensorsSource(sharded(tmp_path, CHECKPOINT), dtype=torch.bfloat16)
    expected = {n: t.bfloat16() if t.is_floating_point() else t for n, t in CHECKPOINT.items()}
    assert_reads(source, expected)
    assert source.casts == {
        "model.embed.weight": "float32 -> bfloat16",
        "model.c": "float16 -> bfloat16",
        "model.scalar": "float32 -> bfloat16",
        "model.empty": "float32 -> bfloat16",
    }


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_tensors_at_odd_addresses_are_read(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """The format aligns nothing: a writer need not pad its header, nor put bytes last."""
    values = torch.randn(3)
    header = {"b": entry("U8", [1], 0, 1), "w": entry("F32", [3], 1, 13)}
    for pad in range(4):
        text = json.dumps(header).encode() + b" " * pad
        file = write(tmp_path / "model.safetensors", text, b"\x09" + raw(values))
        expected = {
            "b": torch.tensor([9], dtype=torch.uint8),
            "w": values.to(dtype or values.dtype),
        }
        assert_reads(SafetensorsSource(file, dtype=dtype), expected)


F32 = entry("F32", [2], 0, 8)

DAMAGED: dict[str, tuple[Any, bytes, int | None]] = {
    "header longer than the file": ({"w": F32}, bytes(8), 10_000),
    "header of 2**63 bytes": ({"w": F32}, bytes(8), 2**63),
    "header of 2**64-1 bytes": ({"w": F32}, bytes(8), 2**64 - 1),
    "header that swallows the data": ({"w": F32}, bytes(8), len(json.dumps({"w": F32})) + 8),
    "header cut short": ({"w": F32}, bytes(8), 5),
    "header of length zero": (b"", bytes(8), 0),
    "data cut off": ({"w": F32}, bytes(7), None),
    "no data": ({"w": F32}, b"", None),
    "overlapping": ({"w": F32, "v": entry("F32", [2], 4, 12)}, bytes(12), None),
    "one inside another": ({"w": entry("U8", [12], 0, 12), "v": F32}, bytes(12), None),
    "the same bytes twice": ({"w": F32, "v": F32}, bytes(8), None),
    "too many bytes for its shape": ({"w": entry("F32", [2], 0, 12)}, bytes(12), None),
    "too few bytes for its shape": ({"w": entry("F32", [2], 0, 4)}, bytes(8), None),
    "end before begin": ({"w": entry("F32", [2], 8, 0)}, bytes(8), None),
    "negative begin": ({"w": entry("F32", [2], -4, 4)}, bytes(8), None),
    "negative side": ({"w": entry("F32", [-2], 0, 8)}, bytes(8), None),
    "two negative sides": ({"w": entry("F32", [-2, -1], 0, 8)}, bytes(8), None),
    "fraction of a side": ({"w": entry("F32", [2.5], 0, 10)}, bytes(10), None),  # type: ignore[list-item]
    "unknown dtype": ({"w": entry("F33", [2], 0, 8)}, bytes(8), None),
    "dtype that is no text": ({"w": entry(7, [2], 0, 8)}, bytes(8), None),  # type: ignore[arg-type]
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), None),
    "three offsets": ({"w": {**F32, "data_offsets": [0, 4, 8]}}, bytes(8), None),
    "unknown field": ({"w": {**F32, "strides": [1]}}, bytes(8), None),
    "entry that is no object": ({"w": 7}, bytes(8), None),
    "header that is a list": ([F32], bytes(8), None),
    "header that is no JSON": (b"{'w': 1}", bytes(8), None),
    "rubbish behind the JSON": (json.dumps({"w": F32}).encode() + b"}", bytes(8), None),
    "header that is no UTF-8": (json.dumps({"\xe9": F32}, ensure_ascii=False).encode("latin-1"),
                                bytes(8), None),
    "name of half a character": (json.dumps({"\ud800": F32}).encode(), bytes(8), None),
    "one name twice": (
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}', bytes(16), None),
    "one field twice": (
        b'{"w":{"dtype":"F64","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8), None),
    "deep nesting": (b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}", bytes(8), None),
    "infinite side": (json.dumps({"w": entry("F32", [math.inf], 0, 8)}).encode(),  # type: ignore[list-item]
                      bytes(8), None),
    "number of 5000 digits": (b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000
                              + b'],"data_offsets":[0,8]}}', bytes(8), None),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    header, data, length = DAMAGED[damage]
    file = write(tmp_path / "model.safetensors", header, data, length=length)
    for path in (file, tmp_path):
        with pytest.raises(SourceError) as caught:
            SafetensorsSource(path)
        assert str(file) in str(caught.value)


@pytest.mark.parametrize("length", [1000, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file_is_not_even_read(length: int, tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"w": F32}, bytes(8), length=length)
    with pytest.raises(SourceError, match=f"header claims {length} bytes"):
        SafetensorsSource(file)


@pytest.mark.parametrize("nbytes", range(9))
def test_a_file_shorter_than_a_header_is_refused_by_name(nbytes: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x02" + bytes(7) if nbytes == 8 else bytes(nbytes))
    with pytest.raises(SourceError, match=str(file)):
        SafetensorsSource(file)


def test_an_impossible_empty_tensor_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"w": entry("F32", [0, 2**70], 0, 0)})
    with pytest.raises((SourceError, ManifestError), match="'w'"):
        SafetensorsSource(file)


@pytest.mark.parametrize("keep", [0, 1, 8, 100, -1])
def test_a_file_that_is_cut_off_anywhere_is_refused(keep: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(CHECKPOINT, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(SourceError, match=str(file)):
        SafetensorsSource(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened_is_refused_and_not_read(tmp_path: Path) -> None:
    """Reading a mapping beyond the end of its file is SIGBUS."""
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.randn(10_000)}, file)
    source = SafetensorsSource(file)
    os.truncate(file, 8192)
    with pytest.raises(SourceError, match="not the file any more"):
        deliver(source)


@pytest.mark.parametrize("how", ["replaced", "written in place"])
def test_a_file_that_was_changed_since_its_header_was_read_is_refused(
    how: str, tmp_path: Path
) -> None:
    """As long as before, but with two tensors in other places: their bytes would be swapped."""
    path = tmp_path / "model.safetensors"
    first, second = torch.zeros(8), torch.ones(8)
    safetensors.torch.save_file({"a": first, "b": second}, path)
    source = SafetensorsSource(path)
    other = tmp_path / "other"
    safetensors.torch.save_file({"a": second, "b": first}, other)
    if how == "replaced":
        other.rename(path)
    else:
        path.write_bytes(other.read_bytes())
    with pytest.raises(SourceError, match="not the file any more"):
        list(source.pieces())
    list(SafetensorsSource(path).pieces())


def remove_a_file(directory: Path) -> None:
    (directory / "model-00002-of-00003.safetensors").unlink()


def name_a_directory(directory: Path) -> None:
    remove_a_file(directory)
    (directory / "model-00002-of-00003.safetensors").mkdir()


def outside(directory: Path) -> None:
    file = directory.parent / "outside.safetensors"
    safetensors.torch.save_file({"x": torch.randn(2)}, file)
    _extend(directory, x="../outside.safetensors")


def absolute(directory: Path) -> None:
    _extend(directory, x=str(directory / "model-00001-of-00003.safetensors"))


def unlisted(directory: Path) -> None:
    _extend(directory, **{"model.a": None})


def absent(directory: Path) -> None:
    _extend(directory, ghost="model-00001-of-00003.safetensors")


def misplaced(directory: Path) -> None:
    _extend(directory, **{"model.a": "model-00001-of-00003.safetensors"})


def twice(directory: Path) -> None:
    tensors = {"model.a": torch.zeros(7).bfloat16(), "y": torch.zeros(1)}
    safetensors.torch.save_file(tensors, directory / "more.safetensors")
    _extend(directory, y="more.safetensors")


def no_json(directory: Path) -> None:
    index(directory, b"weight_map: {}")


def no_utf8(directory: Path) -> None:
    index(directory, b'{"weight_map": {"\xe9": "a"}}')


def no_map(directory: Path) -> None:
    index(directory, b'{"metadata": {}}')


def numbers(directory: Path) -> None:
    index(directory, {"model.a": 1})


def deep(directory: Path) -> None:
    index(directory, b'{"metadata":' + b"[" * 200_000 + b"]" * 200_000 + b"}")


def endless_name(directory: Path) -> None:
    _extend(directory, x="f" * 5000)


def zero_byte(directory: Path) -> None:
    _extend(directory, x="a\0b")


def empty_name(directory: Path) -> None:
    _extend(directory, x="")


def parent(directory: Path) -> None:
    _extend(directory, x="..")


def nothing(directory: Path) -> None:
    index(directory, {})


def _extend(directory: Path, **names: str | None) -> None:
    path = directory / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"] | names
    index(directory, {name: file for name, file in weight_map.items() if file is not None})


@pytest.mark.parametrize(
    "damage",
    [
        remove_a_file,
        name_a_directory,
        outside,
        absolute,
        unlisted,
        absent,
        misplaced,
        twice,
        no_json,
        no_utf8,
        no_map,
        numbers,
        deep,
        endless_name,
        zero_byte,
        empty_name,
        parent,
        nothing,
    ],
)
def test_a_damaged_index_is_refused_by_name(damage: Any, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    sharded(directory, CHECKPOINT)
    SafetensorsSource(directory)
    damage(directory)
    with pytest.raises(SourceError) as caught:
        SafetensorsSource(directory)
    assert "model.safetensors.index.json" in str(caught.value)


@pytest.mark.parametrize("damage", [outside, absolute, parent, empty_name])
def test_an_index_leads_to_no_file_elsewhere(
    damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    sharded(directory, CHECKPOINT)
    damage(directory)
    opened: list[Path] = []
    read_file = safetensors_file._read_file
    monkeypatch.setattr(
        safetensors_file, "_read_file", lambda file: opened.append(file) or read_file(file)
    )
    with pytest.raises(SourceError, match="expected a file beside it"):
        SafetensorsSource(directory)
    assert all(file.parent == directory for file in opened)


def test_a_damaged_shard_is_refused_by_its_own_name(tmp_path: Path) -> None:
    sharded(tmp_path, CHECKPOINT)
    write(tmp_path / "model-00002-of-00003.safetensors", {"w": F32}, bytes(7))
    with pytest.raises(SourceError, match=r"model-00002-of-00003\.safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.safetensors"])
def test_a_directory_without_a_checkpoint_is_refused_with_advice(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(SourceError, match=str(tmp_path)) as caught:
        SafetensorsSource(tmp_path)
    assert caught.value.remedy


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere"):
        SafetensorsSource(tmp_path / "nowhere")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 20)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["F32", "U8", "F64"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "I64"]) | json_values,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(
    st.sampled_from(["w", "v", "__metadata__", ""]) | st.text(max_size=3),
    entries | json_values,
    max_size=3,
).map(lambda header: json.dumps(header).encode())


def survives(content: bytes) -> None:
    """A typed error, or a source whose bytes can be read: never anything else."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        file.write_bytes(content)
        try:
            source = SafetensorsSource(file)
        except (SourceError, ManifestError):
            return
        deliver(source)


@given(headers, st.binary(max_size=40), st.integers(-2, 2) | st.integers(0, 2**64 - 1))
@settings(max_examples=300)
def test_any_header_is_read_or_refused(header: bytes, data: bytes, shift: int) -> None:
    survives(struct.pack("<Q", len(header)) + header + data)
    survives(struct.pack("<Q", (len(header) + shift) % 2**64) + header + data)


@given(st.data())
@settings(max_examples=200)
def test_any_damage_to_a_header_is_read_or_refused(data: st.DataObject) -> None:
    header = bytearray(
        json.dumps({"w": F32, "v": entry("U8", [2, 4], 8, 16), "__metadata__": {"a": "b"}}).encode()
    )
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    survives(struct.pack("<Q", len(header)) + bytes(header) + bytes(16))


@given(st.binary(max_size=100))
def test_any_file_is_read_or_refused(content: bytes) -> None:
    survives(content)
