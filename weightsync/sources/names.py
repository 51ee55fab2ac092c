"""Names as checkpoints have them: what wrappers put in front or in between is taken away."""

from __future__ import annotations

__all__ = ["clean_name"]

_ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""torch.compile, FSDP1 and activation checkpointing wrap modules at any depth."""

_LEADING = "module"
"""DistributedDataParallel and DataParallel wrap the whole model; a submodule may well be called
so."""


def clean_name(name: str) -> str:
    """``_orig_mod.module.model.layers.0._checkpoint_wrapped_module.x`` -> ``model.layers.0.x``, in
    any nesting."""
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    while len(parts) > 1 and parts[0] == _LEADING:
        parts = parts[1:]
    return ".".join(parts)
