"""Which parameters an engine's loader writes through their ``weight_loader``.

That attribute is all that layerwise reload sees of a load: it stands in for it, and buffers what is
loaded. A loader that copies into a parameter by other means writes into memory that is thrown away,
and nobody is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["recorded"]


@contextmanager
def recorded(tensors: Iterable[torch.Tensor]) -> Iterator[set[torch.Tensor]]:
    """For the length of the block, notes of which of these parameters and buffers the loader is
    called.

    Yields:
        These tensors, as they come.
    """
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    written: set[torch.Tensor] = set()
    loaders: dict[torch.Tensor, Callable[..., Any]] = {}
    for tensor in tensors:
        if tensor not in loaders:
            loaders[tensor] = getattr(tensor, "weight_loader", default_weight_loader)
            tensor.weight_loader = _recording(loaders[tensor], tensor, written)  # type: ignore[attr-defined]
    try:
        yield written
    finally:
        for tensor, loader in loaders.items():
            tensor.weight_loader = loader  # type: ignore[attr-defined]


def _recording(
    loader: Callable[..., Any], tensor: torch.Tensor, written: set[torch.Tensor]
) -> Callable[..., Any]:
    @functools.wraps(loader, assigned=("__doc__", "__annotations__"))
    def record(*arguments: Any, **options: Any) -> Any:
        written.add(tensor)
        return loader(*arguments, **options)

    return record
