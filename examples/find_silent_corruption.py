"""Ask a live vLLM whether it holds the weights that its own reload says it has loaded.

    python examples/find_silent_corruption.py

Two small models, made here, are reloaded on the CPU by vLLM's `reload_weights`, which reports
success. `weightsync.prove` then reads every tensor back out of the live model, and names those that
are not what the checkpoint says. Nothing is sent for that, so it works whatever brought the weights
there. An update through weightsync ends with the same proof, or raises.
"""

from vllm import LLM

import weightsync as ws
from weightsync.errors import ServedMismatch
from weightsync.testing import build_checkpoint


def look(name: str) -> None:
    before, after = build_checkpoint(name, "A"), build_checkpoint(name, "B")
    llm = LLM(
        str(before),
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        weight_transfer_config={"backend": "weightsync"},
    )
    engine = ws.engine(llm)
    trained = ws.SafetensorsSource(after)

    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(after)})
    print(f"{name}: vLLM's own reload raised nothing")
    try:
        ws.prove(trained, [engine])
        print(f"{name}: and is right")
    except ServedMismatch as mismatch:
        wrong = {found.tensor: found.where for found in mismatch.mismatches}
        total = len(trained.manifest())
        print(f"{name}: but {len(wrong)} of {total} tensors are not the checkpoint's:")
        for tensor, where in list(wrong.items())[:3]:
            print(f"    {tensor}, held at {where}")

    with ws.WeightSender(trained, [engine]) as sender:
        receipt = sender.sync("trained")
    print(f"{name}: synced, {receipt.nbytes / 1e6:.1f} MB proven as {receipt.proven!r}")
    ws.prove(trained, [engine])
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    look("qwen2_tied")  # its head shares the embedding, and computes from a packed copy of it
    look("qwen3_moe")  # its experts are packed
