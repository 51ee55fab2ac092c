"""Receipts for tests of what is done with them."""

from __future__ import annotations

from weightsync.receipt import EngineReceipt, LevelShare, Receipt, WorkerProof, WorkerReceipt

LEVELS = {
    "served": LevelShare(3, 6000),
    "spot": LevelShare(1, 3995),
    "received": LevelShare(1, 5),
}
UNPROVEN = {"router.weight": "the engine keeps it in a layout of its own"}


def example(version: str = "7", *, tensors: int = 0) -> Receipt:
    """A receipt that is not part of a chain.

    Args:
        tensors: number of declared casts, to make it large.
    """
    proof = WorkerProof(
        boxes=7,
        nbytes=9995,
        digest="ef" * 32,
        seconds=0.0625,
        spot=("layers.0.weight",),
        unproven=UNPROVEN,
    )
    engine = EngineReceipt(
        name="toy",
        engine="toy 1",
        pause="keep",
        paused_seconds=0.75,
        seconds={"pause": 0.125, "apply": 0.5},
        workers=(
            WorkerReceipt("toy, worker 0", "cpu", 0.5, 0.25, 0.125, proof),
            WorkerReceipt("toy, worker 1", "cpu", 0.5, 0.25, 0.125),
        ),
        plan_hash="12" * 32,
        levels=LEVELS,  # type: ignore[arg-type]
        canary=0.0625,
    )
    return Receipt(
        version=version,
        update_id=f"{version}-00112233",
        proven="received",
        levels=LEVELS,  # type: ignore[arg-type]
        mode="staged",
        only=(),
        nbytes=10_000,
        manifest_hash="ab" * 32,
        seed="0123456789abcdef",
        digest="cd" * 32,
        casts={f"layers.{i}.weight": "float32 -> bfloat16" for i in range(tensors)},
        aliases={},
        untouched={},
        engines=(engine,),
        seconds={"fill": 1.5, "commit": 0.75},
        versions={"weightsync": "0.1.0", "torch": "2.13.0"},
        at="2026-01-02T03:04:05.678+00:00",
        previous="",
    )
