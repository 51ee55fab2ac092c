"""What the toy model's checkpoints look like: its sizes, and random weights under their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["ToyConfig", "checkpoint"]

H, HEADS, KV_HEADS, DIM, INNER, LATENT = 16, 4, 2, 4, 1024, 8
VOCAB, PADDED, EXPERTS, EXPERT_INNER, CHOSEN = 21, 24, 4, 6, 2


@dataclass(frozen=True, slots=True)
class ToyConfig:
    """What kind of toy.

    Attributes:
        experts: see `weightsync.testing.toy_experts.Experts`.
        tied: the head is the embedding.
    """

    experts: Literal["swapped", "4d"] = "swapped"
    tied: bool = True


def checkpoint(seed: int, config: ToyConfig | None = None) -> dict[str, torch.Tensor]:
    """Random weights under the checkpoint's names; other ones for every seed."""
    config = config or ToyConfig()
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, H)}
    for layer in range(2):
        shapes |= {f"layers.{layer}.norm{n}.weight": (H,) for n in (1, 2)}
        shapes[f"layers.{layer}.attn.o_proj.weight"] = (H, H)
    shapes |= {
        "layers.0.attn.q_proj.weight": (HEADS * DIM, H),
        "layers.0.attn.k_proj.weight": (KV_HEADS * DIM, H),
        "layers.0.attn.v_proj.weight": (KV_HEADS * DIM, H),
        "layers.0.attn.q_proj.bias": (HEADS * DIM,),
        "layers.0.attn.k_proj.bias": (KV_HEADS * DIM,),
        "layers.0.attn.v_proj.bias": (KV_HEADS * DIM,),
        "layers.0.attn.k_scale": (),
        "layers.0.mlp.gate_proj.weight": (INNER, H),
        "layers.0.mlp.up_proj.weight": (INNER, H),
        "layers.0.mlp.down_proj.weight": (H, INNER),
        "layers.1.attn.wq.weight": (HEADS * DIM, H),
        "layers.1.attn.kv_a_proj.weight": (LATENT, H),
        "layers.1.attn.kv_b_proj.weight": (HEADS * 2 * DIM, LATENT),
        "layers.1.mlp.gate.weight": (EXPERTS, H),
        "layers.1.mlp.gate.bias": (EXPERTS,),
        "norm.weight": (H,),
        "mtp.fc.weight": (H, 2 * H),
    }
    for expert in range(EXPERTS):
        prefix = f"layers.1.mlp.experts.{expert}"
        shapes |= {f"{prefix}.{m}.weight": (EXPERT_INNER, H) for m in ("gate_proj", "up_proj")}
        shapes[f"{prefix}.down_proj.weight"] = (H, EXPERT_INNER)
    if not config.tied:
        shapes["lm_head.weight"] = (VOCAB, H)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        exact = name in ("layers.0.attn.k_scale", "layers.1.mlp.gate.bias")
        value = torch.randn(shape, generator=generator) * (shape[-1] if shape else 1) ** -0.5
        value = value + 1 if "norm" in name or name.endswith("scale") else value
        found[name] = value if exact else value.to(torch.bfloat16)
    return found
