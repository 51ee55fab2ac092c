"""The faults that are injected, one each: where, what, and which tensor and worker the error must
name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import senders

from weightsync import WeightSender

__all__ = ["CASES", "Case"]

EVERY = (0, 1)
ATTN, LATENT, MLP = "layers.0.attn", "layers.1.attn", "layers.0.mlp"
EXPERTS = "layers.1.mlp.experts"
BLOCK = {"dim": 1, "one": 0, "size": 256}


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        title: for the table.
        where: the part that it is injected into.
        names: tensors that the error must name; or what else there is to name.
        workers: that the error must name, and that have the fault; none where the sender's process
            alone has it.
        fault: of these workers; None where the sender has it.
        sender: makes the sender have it.
        exact: the error names no other tensors.
        canary: it is a canary that sees it, beside the proof of bytes.
    """

    title: str
    where: str
    names: tuple[str, ...]
    workers: tuple[int, ...]
    fault: Mapping[str, Any] | None = None
    sender: Callable[[WeightSender], None] | None = None
    exact: bool = False
    canary: bool = False


def _fed(title: str, fault: str, tensor: str, workers: tuple[int, ...] = EVERY, **a: Any) -> Case:
    """Something is wrong with a tensor that the loader is given."""
    names = (tensor, a["other"]) if fault == "exchange" else (tensor,)
    return Case(
        title, "loader", names, workers, {"fault": fault, "tensor": tensor, **a}, exact=True
    )


def _held(
    title: str, expected: tuple[str, ...], workers: tuple[int, ...] = EVERY, **fault: Any
) -> Case:
    """Something is wrong with what the model does or holds."""
    return Case(title, "model", expected, workers, fault)


def _sent(title: str, name: str, workers: tuple[int, ...], act: Callable[..., None]) -> Case:
    """Something is wrong on the way from the source to the workers."""
    return Case(title, "transport", (name,), workers, None, act)


K_SCALE, BIAS = f"{ATTN}.k_scale", "layers.1.mlp.gate.bias"
Q, K, V = (f"{ATTN}.{part}_proj.weight" for part in "qkv")
OUT, DOWN, GATE, UP = (
    f"{ATTN}.o_proj.weight",
    f"{MLP}.down_proj.weight",
    f"{MLP}.gate_proj.weight",
    f"{MLP}.up_proj.weight",
)
KV_B, WQ, FC = f"{LATENT}.kv_b_proj.weight", f"{LATENT}.wq.weight", "mtp.fc.weight"

CASES = (
    # Whole tensors
    _fed("a tensor is dropped", "drop", WQ),
    _fed("a bias is dropped", "drop", f"{ATTN}.q_proj.bias"),
    _fed("a 0-dim buffer is dropped", "drop", K_SCALE),
    _fed("one expert's matrix is dropped", "drop", f"{EXPERTS}.3.down_proj.weight"),
    _fed("dropped on one worker", "drop", DOWN, (1,)),
    _fed("one expert is loaded twice", "instead", f"{EXPERTS}.2.gate_proj.weight",
         other=f"{EXPERTS}.1.gate_proj.weight"),
    _fed("two norms change places", "exchange", "layers.0.norm1.weight",
         other="layers.1.norm2.weight"),
    _fed("k and v change places", "exchange", K, other=V),
    _fed("two experts change places", "exchange", f"{EXPERTS}.0.up_proj.weight",
         other=f"{EXPERTS}.3.up_proj.weight"),
    _fed("gate and up halves change places", "exchange", GATE, other=UP),
    _fed("an expert's gate and up change places", "exchange", f"{EXPERTS}.1.gate_proj.weight",
         other=f"{EXPERTS}.1.up_proj.weight"),
    _fed("q of another layer", "instead", WQ, other=Q),
    Case("one worker is left behind", "loader", (Q, DOWN, "norm.weight"), (1,),
         {"fault": "drop_all"}),
    Case("a transport that moves nothing", "loader", (Q, DOWN, "embed.weight"), EVERY,
         {"fault": "drop_all"}),
    Case("the update before, once more", "loader", (Q, DOWN, KV_B), EVERY, {"fault": "older"}),
    Case("the same on one worker", "loader", (Q, DOWN, KV_B), (0,), {"fault": "older"}),
    # Parts of tensors
    _fed("truncated: the last rows stay old", "stale", GATE, (1,), rows=[900, 1024]),
    _fed("the vocabulary's last row stays old", "stale", "embed.weight", (1,), rows=[20, 21]),
    _fed("a stale 16x16 tile", "stale", UP, (0,), rows=[64, 80], columns=[0, 16]),
    _fed("one stale element", "stale", DOWN, (1,), rows=[15, 16], columns=[1023, 1024]),
    _fed("one stale column of a row-parallel matrix", "stale", OUT, (0,), rows=[0, 16],
         columns=[3, 4]),
    _fed("shifted by one element", "roll", f"{LATENT}.kv_a_proj.weight", by=1),
    _fed("shifted by one row", "roll", "embed.weight", by=16),
    _fed("two rows change places", "swap", GATE, (0,), dim=0, one=5, two=77, size=1),
    _fed("two columns change places", "swap", OUT, (1,), dim=1, one=9, two=14, size=1),
    _fed("two q heads change places", "swap", Q, (0,), dim=0, one=0, two=4, size=4),
    _fed("two k heads change places, over workers", "swap", K, dim=0, one=0, two=4, size=4),
    _fed("256-column blocks change places", "swap", DOWN, (0,), two=256, **BLOCK),
    _fed("256-column blocks change places, over workers", "swap", DOWN, two=512, **BLOCK),
    _fed("adjacent 8-byte words change places", "words", UP, (1,), at=30000, nbytes=8),
    _fed("adjacent elements change places", "words", "layers.0.norm2.weight", at=10, nbytes=2),
    _fed("adjacent 64-byte lines change places", "words", DOWN, (1,), at=32512, nbytes=64),
    _fed("transposed, square", "transpose", OUT),
    _fed("transposed, in the same shape", "transpose", FC),
    Case("another worker's slice", "loader", (DOWN,), (1,),
         {"fault": "other_shard", "layer": f"{MLP}.down_proj"}),
    Case("both workers take the other's slice", "loader", (Q, K, V), EVERY,
         {"fault": "other_shard", "layer": f"{ATTN}.qkv_proj"}),
    Case("the vocabulary's parts change places", "loader", ("embed.weight",), EVERY,
         {"fault": "other_shard", "layer": "embed"}),
    # Bits and values
    _fed("bit flip, first element", "flip", Q, (0,), at="first"),
    _fed("bit flip, middle element", "flip", "norm.weight", at="middle"),
    _fed("bit flip, last element", "flip", f"{EXPERTS}.3.down_proj.weight", (1,), at="last"),
    _fed("sign flip, last element", "flip", "embed.weight", (1,), at="last", bit=15),
    _fed("the same bit of two elements", "flip_two", GATE, (0,), apart=4, bit=2),
    _fed("two changes that add up to none", "compensate", UP, (1,)),
    _fed("a zero of the other sign", "negate_zero", "layers.1.norm1.weight"),
    _fed("fp16 bits as bf16", "reinterpret", WQ, dtype="float16"),
    _fed("int32 bits as fp32", "reinterpret", BIAS, dtype="int32"),
    _fed("fp32 rounded through bf16", "through", BIAS, dtype="bfloat16"),
    _fed("a scale rounded through fp16", "through", K_SCALE, dtype="float16"),
    _fed("bf16 rounded through fp8", "through", KV_B, dtype="float8_e4m3fn"),
    _fed("the loader multiplies", "scale", "layers.0.norm1.weight", by=1.0625),
    _fed("zeroed", "scale", f"{EXPERTS}.0.gate_proj.weight", by=0.0),
    # Buffers
    Case("a buffer is used again before it was read", "receiver", (Q, OUT, "embed.weight"), EVERY,
         {"fault": "defers"}),
    Case("the same of one worker", "receiver", (Q, OUT), (1,), {"fault": "defers"}),
    Case("a worker sees other bytes arrive", "receiver", (DOWN,), (1,),
         {"fault": "misread", "tensor": DOWN}),
    Case("a worker does not look at what arrives", "receiver", (DOWN,), (0,),
         {"fault": "unread", "tensor": DOWN}),
    Case("a worker says what it said before", "receiver", (Q, DOWN), (1,),
         {"fault": "says_what_it_said"}),
    # Loading and finalizing
    _held("finalized twice", (f"{EXPERTS}.0.gate_proj.weight",), fault="finalized_twice",
          layer=EXPERTS),
    _held("not finalized", (f"{EXPERTS}.2.up_proj.weight",), fault="not_finalized", layer=EXPERTS),
    _held("finalized per bucket", (f"{EXPERTS}.0.gate_proj.weight",), fault="per_bucket", size=5),
    _held("not finalized: packed copy stale", (DOWN,), (0,), fault="not_finalized",
          layer=f"{MLP}.down_proj"),
    _held("packed in another order", (GATE, UP), (1,), fault="hold_blocks",
          layer=f"{MLP}.gate_up_proj"),
    _held("tied head's packed copy stale", ("embed.weight",), fault="stay",
          names=["lm_head.packed"]),
    _held("a packed copy is new, its parameter old", (OUT,), (1,), fault="stay",
          names=[f"{ATTN}.o_proj.weight"]),
    _held("absorbed matrix stale", (f"{LATENT}.kv_b_proj.w_kc",), fault="stay",
          names=[f"{LATENT}.kv_b_proj.w_kc"]),
    _held("the other absorbed matrix stale", (f"{LATENT}.kv_b_proj.w_vc",), (1,), fault="stay",
          names=[f"{LATENT}.kv_b_proj.w_vc"]),
    _held("draft's embedding left old", ("embed.weight",), fault="stay",
          names=["draft.embed.weight"]),
    _held("draft's norm left old", ("norm.weight",), (0,), fault="stay",
          names=["draft.norm.weight"]),
    _held("draft's packed copy stale", (FC,), fault="stay", names=["draft.fc.packed"]),
    _held("a bias left old", (f"{ATTN}.v_proj.bias",), (1,), fault="stay",
          names=[f"{ATTN}.qkv_proj.bias"]),
    # What the model holds
    _held("bit flip in the model, first element", (Q,), (1,), fault="hold_flip",
          name=f"{ATTN}.qkv_proj.weight", at="first"),
    _held("bit flip in the model, middle element", ("embed.weight",), (0,), fault="hold_flip",
          name="embed.weight", at="middle"),
    _held("bit flip in the model, last element", (f"{EXPERTS}.3.down_proj.weight",), (1,),
          fault="hold_flip", name=f"{EXPERTS}.w2", at="last"),
    _held("bit flip in a packed copy", (UP,), (0,), fault="hold_flip",
          name=f"{MLP}.gate_up_proj.packed", at="last"),
    _held("bit flip in an absorbed matrix", (f"{LATENT}.kv_b_proj.w_kc",), (1,), fault="hold_flip",
          name=f"{LATENT}.kv_b_proj.w_kc", at="middle"),
    _held("new storage, never written (NaN)", ("layers.0.norm2.weight",), (0,), fault="hold_fill",
          name="layers.0.norm2.weight", value=float("nan")),
    _held("a pad is overwritten", ("embed.weight[9:12",), (1,), fault="hold_fill",
          name="embed.weight", value=7.0, rows=[11, 12]),
    _held("a persistent buffer is zeroed", ("embed_scale",), fault="hold_fill",
          name="embed_scale", value=0.0),
    _held("a table that no checkpoint has is rounded", (f"{ATTN}.cos_sin",), (0,),
          fault="hold_through", name=f"{ATTN}.cos_sin", dtype="bfloat16"),
    _held("a plain attribute is zeroed", (f"{ATTN}.slopes",), (1,), fault="hold_fill",
          name=f"{ATTN}.slopes", value=0.0),
    _held("a parameter has moved", ("layers.0.norm1.weight",), fault="move",
          name="layers.0.norm1.weight"),
    _held("a packed copy has moved", (f"{ATTN}.o_proj.packed",), (1,), fault="move",
          name=f"{ATTN}.o_proj.packed"),
    _held("an absorbed matrix has moved", (f"{LATENT}.kv_b_proj.w_vc",), fault="move",
          name=f"{LATENT}.kv_b_proj.w_vc"),
    _held("a constant has moved", (f"{ATTN}.cos_sin",), (0,), fault="move",
          name=f"{ATTN}.cos_sin"),
    _held("a parameter is of another dtype", ("norm.weight",), (1,), fault="replace",
          name="norm.weight", dtype="float32"),
    _held("a parameter is of another shape", ("layers.1.norm2.weight",), fault="replace",
          name="layers.1.norm2.weight", shape=[4, 4]),
    _held("a parameter is gone", ("layers.0.norm1.weight",), (0,), fault="replace",
          name="layers.0.norm1.weight"),
    # The sender's memory
    _sent("bit flip in the arena after proof, first", Q, (0,), senders.flipped(Q, "first")),
    _sent("bit flip in the arena after proof, middle", "norm.weight", EVERY,
          senders.flipped("norm.weight", "middle")),
    _sent("bit flip in the arena after proof, last", DOWN, (1,), senders.flipped(DOWN, "last")),
    _sent("arena filled anew after proof", GATE, (0,), senders.overtaken(GATE)),
    _sent("words change places in the arena", UP, EVERY, senders.words_swapped(UP)),
    _sent("a tensor goes elsewhere in the arena", WQ, EVERY, senders.misplaced(WQ, 8)),
    _sent("two tensors go to each other's place", K, EVERY, senders.crossed(K, V)),
    _sent("a tensor never reaches the arena", OUT, (), senders.lost(OUT)),
    _sent("half of a tensor never reaches the arena", DOWN, (), senders.halved(DOWN)),
    Case("the new version is reported early", "engine", ("'the new one'",), (), None,
         senders.version_early),
    Case("a tensor's memory is replaced before it is read", "sender", (WQ,), (), None,
         senders.replaced(WQ)),
    # Of no tensor: an engine that says that it has reset its caches. With a canary.
    Case("prefixes of old weights are kept (canary)", "engine", ("token",), (), None,
         senders.caches_kept, canary=True),
)  # fmt: skip
