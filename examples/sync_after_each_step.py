"""Train a torch model and sync it into a live vLLM server after each step.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \
        --dtype float32 --weight-transfer-config '{"backend": "weightsync"}'
    python examples/sync_after_each_step.py MODEL http://127.0.0.1:8000
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import weightsync as ws


def main(model_path: str, url: str, steps: int = 3) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = ws.connect(f"vllm+{url}")
    with ws.WeightSender(ws.ModuleSource(model), engines=[engine]) as sender:
        for step in range(1, steps + 1):
            tokens = torch.randint(0, 256, (2, 32))  # your data
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            receipt = sender.sync(version=step)
            pause = receipt.engines[0].paused_seconds
            print(f"step {step}: loss {loss:.3f}, {receipt.proven}, paused {pause * 1e3:.0f} ms")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
