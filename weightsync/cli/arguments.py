"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "Dtype", "Engines", "Json", "Receipts", "parse_dtype"]

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT_DIR", help="Directory with safetensors files.")
]
Engines = Annotated[
    list[str],
    typer.Option("--engine", help="As in vllm+http://127.0.0.1:8000. May be repeated."),
]
Dtype = Annotated[str | None, typer.Option(help="Cast floating-point tensors, as in bfloat16.")]
Receipts = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append the receipt to this file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def parse_dtype(name: str | None) -> torch.dtype | None:
    """
    Raises:
        typer.BadParameter: there is no such dtype.
    """
    if name is None:
        return None
    from weightsync.target import torch_dtype

    try:
        return torch_dtype(name)
    except TypeError as error:
        raise typer.BadParameter(str(error)) from error
