"""Runs the tests of one mutant after another, each in a fork of a process that is ready for it.

    python -S tests/mutants/warm.py serve                      # until stdin closes
    python -S tests/mutants/warm.py ask PYTEST_ARGUMENTS...    # exits as pytest does

Starting Python, pytest, hypothesis and numpy takes longer than most tests, and they are no mutants.
The package itself is imported in the fork alone. Both sides meet at a socket in the working
directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys

SOCKET = "warm.socket"
CPU_SECONDS = 10  # a mutant may count for ever
WALL_SECONDS = 45  # or wait for ever; less than the time limits in *.toml
MEMORY = 8 << 30  # or ask for all there is


def ask(arguments: list[str]) -> int:
    """Have pytest run in a fork, with this process's output."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(SOCKET)
        question = {"arguments": arguments, "bytecode": not sys.dont_write_bytecode}
        socket.send_fds(server, [json.dumps(question).encode()], [1, 2])
        answer = server.recv(64)
    if not answer:
        raise ConnectionError("whoever runs the tests is gone")
    # run.py takes nothing for an outcome that lacks this line.
    print(f"\nexit status {(status := int(answer))}")
    return status if status >= 0 else 1


def serve() -> None:
    import select

    import hypothesis.strategies  # noqa: F401
    import numpy.testing  # noqa: F401
    import pytest_timeout  # noqa: F401

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(SOCKET)
        listener.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            client, _ = listener.accept()
            with client:
                message, outputs, _, _ = socket.recv_fds(client, 1 << 16, 2)
                child = os.fork()
                if child == 0:
                    run_tests(json.loads(message), outputs)
                for output in outputs:
                    os.close(output)
                _, status = os.waitpid(ended(child), 0)
                # Whoever asked may have been ended by the time limit.
                with contextlib.suppress(OSError):
                    client.send(str(os.waitstatus_to_exitcode(status)).encode())


def ended(child: int) -> int:
    """The child, once it has ended, by itself or by us."""
    import select
    import signal

    watch = os.pidfd_open(child)
    if not select.select([watch], [], [], WALL_SECONDS)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(watch)
    return child


def run_tests(question: dict, outputs: list[int]) -> None:
    """Become one run of the tests. Does not return."""
    status = 1
    try:
        import resource

        import pytest
        from hypothesis import HealthCheck, Phase, settings

        for mine, theirs in zip((1, 2), outputs, strict=True):
            os.dup2(theirs, mine)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        sys.dont_write_bytecode = not question["bytecode"]
        if "weightsync" in sys.modules:
            raise RuntimeError("the package was imported before the mutant was there")
        # The same examples every time, and none judged by how long it takes: what kills a mutant
        # today kills it tomorrow, and a busy machine kills none.
        settings.register_profile(
            "mutants",
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=25,
            phases=[Phase.explicit, Phase.generate],  # nobody reads a shrunken failure
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("mutants")
        # The profile of the ordinary tests would take its place.
        plugins = ["--noconftest", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        status = int(pytest.main(["-x", "-q", "--tb=line", *plugins, *question["arguments"]]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        sys.exit(ask(sys.argv[2:]))
