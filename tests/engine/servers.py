"""A real vLLM server in a process of its own, on loopback, that ends with the test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
START_SECONDS = 240.0


class Server:
    """A running server.

    Attributes:
        url: ``http://127.0.0.1:port``.
        log: file that its output goes to.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def complete(self, prompt: list[int], tokens: int, *, timeout: float = 120.0) -> dict:
        """One greedy completion by token ids, with logprobs; the response's JSON."""
        answer = httpx.post(
            f"{self.url}/v1/completions",
            json={
                "model": "model",
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "logprobs": 1,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            timeout=timeout,
            trust_env=False,
        )
        answer.raise_for_status()
        return answer.json()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def vllm_server(
    model: Path, log: Path, *flags: str, dtype: str = "float32", env: dict[str, str] | None = None
) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and end it and its children afterwards."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", str(model), "--served-model-name", "model"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", "512", "--max-num-seqs", "8"),
        *("--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--seed", "0"),
        *flags,
    ]
    environment = {**os.environ, **ENVIRONMENT, **(env or {})}
    environment = {name: value for name, value in environment.items() if value != ""}
    url = f"http://127.0.0.1:{port}"
    with _running(command, url, log, environment) as server:
        yield server


@contextmanager
def shell_server(command: str, url: str, log: Path) -> Iterator[Server]:
    """Start a server by a command line as a person would type it, `python` being this one."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    quiet = {name: value for name, value in ENVIRONMENT.items() if "DEV_MODE" not in name}
    environment = {**os.environ, **quiet, "PATH": path}
    with _running(["/bin/sh", "-c", f"exec env {command}"], url, log, environment) as server:
        yield server


@contextmanager
def _running(
    command: list[str], url: str, log: Path, environment: dict[str, str]
) -> Iterator[Server]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait_healthy(process, url, log)
        yield Server(process, url, log)
    finally:
        _end(process)


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at start:\n{log.read_text()[-4000:]}")
        try:
            if httpx.get(f"{url}/health", timeout=1.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)  # polling a foreign process's start, with a deadline
    raise RuntimeError(f"the server did not start in {START_SECONDS} s:\n{log.read_text()[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
