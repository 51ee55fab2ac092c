"""``weightsync demo``: a real engine, a real trainer, and a proven sync after every optimizer
step."""

from __future__ import annotations

import json as jsonlib
import logging
import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.table import Table

from weightsync.cli.output import (
    megabytes,
    milliseconds,
    private_stdout,
    shares_text,
    typed_errors,
)
from weightsync.errors import ConnectError
from weightsync.receipt import LevelShare, ProofLevel

if TYPE_CHECKING:
    import torch

    from weightsync.engines.base import Engine
    from weightsync.receipt import Receipt
    from weightsync.testing.reference import Rollout

__all__ = ["DemoEngine", "demo"]

ENGINES = "weightsync.demo_engines"
TOKENS = 32
MEANINGS: dict[ProofLevel, str] = {
    "served": "what the model holds was read back after each step: every byte is the trainer's",
    "spot": "what the engine has packed was read back at columns that are drawn anew in each step",
    "received": "what cannot be read back: what the engine's loader was handed is the trainer's",
}


class DemoEngine(Protocol):
    """An engine that a demo has started. An adapter offers one under ``weightsync.demo_engines``:

    ``callable(checkpoint: Path) -> context manager of a DemoEngine``.
    """

    engine: Engine
    description: str

    def generate(self, prompts: list[list[int]], tokens: int) -> list[Rollout]:
        """Greedy tokens and their logprobs."""
        ...


def demo(
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps, each followed by a sync.")
    ] = 3,
    model: Annotated[str, typer.Option(help="A tiny model of weightsync.testing.")] = "qwen2",
    engine: Annotated[str, typer.Option(help="Which inference engine.")] = "vllm",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Train a small model in this process, and sync it into a real engine in another after each
    step.

    Shows per step what was moved and proven, how long it took, and how far trainer and engine
    were apart (largest difference of log-probabilities over the engine's own greedy tokens), before
    and after the sync. No GPU is needed.
    """
    _quieten()
    console = Console(stderr=True)
    with private_stdout() as document, typed_errors():
        found = _run(steps, model, engine, console)
        document.write(jsonlib.dumps(found, indent=2) + "\n" if json else "")
        if not json:
            _show(found, Console(file=document))


def _run(steps: int, model: str, engine: str, console: Console) -> dict[str, Any]:
    from weightsync.sender import WeightSender
    from weightsync.sources.module import ModuleSource
    from weightsync.testing.models import MODELS, build_checkpoint, load_trainer

    if model not in MODELS:
        raise typer.BadParameter(f"unknown model {model!r}; known are {', '.join(MODELS)}")
    checkpoint = build_checkpoint(model, "A")
    trainer = load_trainer(model, "A")
    with ExitStack() as stack:
        started = time.perf_counter()
        with console.status(f"starting {engine} on {model} (some seconds)"):
            running = stack.enter_context(_starter(engine)(checkpoint))
        document: dict[str, Any] = {
            "model": model,
            "engine": running.description,
            "start_seconds": time.perf_counter() - started,
            "steps": [],
        }
        with WeightSender(ModuleSource(trainer), engines=[running.engine]) as sender:
            for version in range(1, steps + 1):
                loss = _train_step(trainer, version)
                before = _gap(trainer, running)
                receipt = sender.sync(version=version)
                step = _describe(receipt, loss, before, _gap(trainer, running))
                document["steps"].append(step)
                console.print(
                    f"version {version}: {shares_text(receipt.levels)}, gap {before:.2g} -> "
                    f"{step['logprob_gap_after']:.2g}"
                )
    return document


def _starter(engine: str) -> Callable[[Path], AbstractContextManager[DemoEngine]]:
    known = {point.name: point for point in entry_points(group=ENGINES)}
    if engine not in known:
        raise typer.BadParameter(f"unknown engine {engine!r}; known are {', '.join(sorted(known))}")
    try:
        start: Callable[[Path], AbstractContextManager[DemoEngine]] = known[engine].load()
    except ImportError as error:
        raise ConnectError(
            f"{engine} is not installed here: {error}",
            remedy="run make demo, which installs it, or pip install the engine",
        ) from error
    return start


def _train_step(trainer: torch.nn.Module, step: int) -> float:
    """One step of sign descent on random tokens; the loss before it."""
    import torch

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (4, 64), generator=generator)
    trainer.train()
    trainer.zero_grad()
    loss = trainer(input_ids=tokens, labels=tokens).loss
    loss.backward()
    with torch.no_grad():
        for parameter in trainer.parameters():
            if parameter.grad is not None:
                # The gradient's sign: every weight moves, as far in the first step as in the last.
                parameter.sub_(parameter.grad.sign(), alpha=2e-3)
    trainer.eval()
    return float(loss.detach())


def _gap(trainer: torch.nn.Module, running: DemoEngine) -> float:
    from weightsync.testing.reference import PROMPTS, score

    rollouts = running.generate(PROMPTS, TOKENS)
    return score(trainer, PROMPTS, rollouts).max_abs_logprob_difference


def _describe(receipt: Receipt, loss: float, before: float, after: float) -> dict[str, Any]:
    taken = receipt.engines[0]
    return {
        "version": receipt.version,
        "proven": receipt.proven,
        "levels": {
            level: {"tensors": share.tensors, "bytes": share.nbytes}
            for level, share in receipt.levels.items()
        },
        "tensors": sum(share.tensors for share in receipt.levels.values()),
        "bytes": receipt.nbytes,
        "seconds": {
            **receipt.seconds,
            "paused": taken.paused_seconds,
            "load": max(worker.load_seconds for worker in taken.workers),
        },
        "loss": loss,
        "logprob_gap_before": before,
        "logprob_gap_after": after,
        "receipt": receipt.hash,
    }


def _show(document: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{document['model']} in {document['engine']}")
    for column in ("step", "proven", "bytes", "fill", "verify", "load", "paused"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("logprob gap", justify="right", no_wrap=True)
    for step in document["steps"]:
        seconds = step["seconds"]
        table.add_row(
            step["version"],
            step["proven"],
            megabytes(step["bytes"]),
            *(milliseconds(seconds[phase]) for phase in ("fill", "verify", "load", "paused")),
            f"{step['logprob_gap_before']:.1g} > {step['logprob_gap_after']:.1g}",
        )
    console.print(table)
    console.print("All steps are proven; of their bytes")
    for level, share in _levels(document).items():
        console.print(f"  {share}: {MEANINGS[level]}", soft_wrap=True)


def _levels(document: dict[str, Any]) -> dict[ProofLevel, str]:
    """By level, its share of all steps' bytes."""
    total: dict[ProofLevel, LevelShare] = {}
    for step in document["steps"]:
        for level, found in step["levels"].items():
            so_far = total.get(level, LevelShare(0, 0))
            total[level] = LevelShare(
                so_far.tensors + found["tensors"], so_far.nbytes + found["bytes"]
            )
    return dict(zip(total, shares_text(total).split(", "), strict=True))


def _quieten() -> None:
    """Progress bars and start-up logs of the libraries underneath; set what the user has not
    set."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")
    logging.getLogger("httpx").setLevel(logging.WARNING)
