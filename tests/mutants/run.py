"""Mutation testing: which small faults in a module do its own tests not notice?

    python tests/mutants/run.py [NAME...]        # of the *.toml beside this file; all by default

Each module is mutated by cosmic-ray in a copy of the package and its tests, in a temporary
directory: the working tree is only read, however this ends. The copy is what the tests import,
which is shown first by breaking it.

A configuration may declare survivors equivalent, one by one and with the reason: such a mutant
computes the same, so no test can notice it. They are run as well. One that a test does notice, and
one that does not exist, is an error.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COPIED = ("pyproject.toml", "weightsync", "tests")
FLOOR = 90  # percent
# How an output ends where tests were run: as pytest ended, or by cosmic-ray's own time limit.
ENDED = re.compile(r"(?:^|\n)(?:exit status (?P<status>-?\d+)|timeout)\s*$")
BY_TIME = (None, str(-signal.SIGXCPU), str(-signal.SIGKILL))


class Failed(Exception):
    """What keeps a figure from being one, in words."""


@dataclass(frozen=True)
class Mutant:
    """One mutation: in which function, and the line before and after (stripped)."""

    function: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"in {self.function}:\n      {self.before}\n   -> {self.after or '(nothing)'}"


@dataclass(frozen=True)
class Outcome:
    killed: bool
    timed_out: bool


@dataclass(frozen=True)
class Copy:
    """A copy of what is tested, and the environment in which it is what gets imported."""

    path: Path

    @property
    def environment(self) -> dict[str, str]:
        # With `python -S` no .pth is read, so no editable install comes before the copy. The native
        # module is in no working tree: the package finds the installed one on this path.
        libraries = [path for path in sys.path if path.endswith("site-packages")]
        return {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(self.path), *libraries]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }

    @classmethod
    def made_in(cls, directory: Path) -> Copy:
        for name in COPIED:
            if (ROOT / name).is_dir():
                unwanted = shutil.ignore_patterns("__pycache__", "*.so", ".*")
                shutil.copytree(ROOT / name, directory / name, ignore=unwanted)
            else:
                shutil.copy2(ROOT / name, directory / name)
        return cls(directory)

    def run(
        self, command: Sequence[str], *, seconds: float, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.path,
            env={**self.environment, **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )

    @contextmanager
    def warm(self) -> Iterator[None]:
        """The process that runs the tests of all mutants (see warm.py)."""
        server = subprocess.Popen(
            ["python", "-S", "tests/mutants/warm.py", "serve"],
            cwd=self.path,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with server:
            try:
                if server.stdout.readline() != "ready\n":
                    raise Failed("the process that runs the tests did not start")
                yield
            finally:
                server.kill()

    def cosmic_ray(self, *arguments: str, seconds: float = 120) -> str:
        command = [sys.executable, "-m", "cosmic_ray.cli", *arguments]
        done = self.run(command, seconds=seconds)
        if done.returncode:
            raise Failed(f"cosmic-ray {' '.join(arguments)} failed:\n{done.stdout}")
        return done.stdout


def check_what_is_tested(copy: Copy, module: Path, command: str) -> None:
    """The tests pass as they are, and import the copy: a broken one fails them.

    Raises:
        Failed: one of these is not so.
    """
    # Bytecode of all that is not mutated saves a tenth of the time. Of the module there must never
    # be any: a mutant of the same size, written in the same second, would pass for the original.
    done = copy.run(shlex.split(command), seconds=120, PYTHONDONTWRITEBYTECODE="")
    for compiled in (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc"):
        compiled.unlink()
    if done.returncode:
        raise Failed(f"the tests fail without any mutation:\n{done.stdout}")
    source = module.read_bytes()
    module.write_bytes(source + b'\nraise RuntimeError("the copy is what is imported")\n')
    done = copy.run(shlex.split(command), seconds=120)
    module.write_bytes(source)
    if done.returncode == 0 or "the copy is what is imported" not in done.stdout:
        raise Failed(f"the tests do not import {module}, so mutants of it would test nothing")


def mutated(copy: Copy, name: str) -> dict[Mutant, Outcome]:
    """All mutants of one configuration, each tested."""
    config, session = f"tests/mutants/{name}.toml", f"{name}.sqlite"
    settings = tomllib.loads((copy.path / config).read_text())["cosmic-ray"]
    copy.cosmic_ray("init", config, session)
    count = len(copy.cosmic_ray("dump", session).splitlines())
    print(f"{settings['module-path']}: {count} mutants", flush=True)
    with copy.warm():
        check_what_is_tested(copy, copy.path / settings["module-path"], settings["test-command"])
        copy.cosmic_ray("exec", config, session, seconds=count * (settings["timeout"] + 1))
    return outcomes(copy.cosmic_ray("dump", session))


def outcomes(dump: str) -> dict[Mutant, Outcome]:
    """What came of each mutant of a finished session.

    Raises:
        Failed: one was not tested.
    """
    found: dict[Mutant, Outcome] = {}
    tested = [json.loads(line) for line in dump.splitlines()]
    for item, result in sorted(tested, key=lambda one: one[0]["mutations"][0]["occurrence"]):
        (mutation,) = item["mutations"]
        if result is None or result["worker_outcome"] != "normal":
            raise Failed(f"a mutant was not tested: {mutation}: {result}")
        function = mutation["definition_name"] or decorated(result["diff"])
        mutant = Mutant(function, *changed_lines(result["diff"]))
        while mutant in found:  # the same line twice in one function
            mutant = replace(mutant, function=f"{mutant.function}, again")
        ended = ENDED.search(result["output"])
        if ended is None:
            raise Failed(f"no test was run for a mutant {mutant}\n{result['output']}")
        slow = ended["status"] in BY_TIME or "Timeout (>" in result["output"]
        found[mutant] = Outcome(result["test_outcome"] == "killed", slow)
    return found


def decorated(diff: str) -> str:
    """The class or function that follows what is changed, as after a decorator; else ""."""
    below = re.split(r"^[+-].*\n", diff, flags=re.MULTILINE)[-1]
    following = re.search(r"^ \s*(?:class|def) (\w+)", below, re.MULTILINE)
    return following[1] if following else ""


def changed_lines(diff: str) -> tuple[str, str]:
    """The lines that a unified diff takes away and brings, each side stripped and joined."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    before, after = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return before.strip(), after.strip()


def declared_equivalent(name: str) -> list[Mutant]:
    """Each `[[equivalent]]` is one line: in it ``of`` is replaced by each of ``by`` in turn."""
    entries = tomllib.loads((HERE / f"{name}.toml").read_text()).get("equivalent", ())
    mutants = []
    for entry in entries:
        if not entry["reason"]:
            raise Failed(f"{name}: no reason for {entry['line']}")
        if entry["line"].count(entry["of"]) != 1:
            raise Failed(f"{name}: {entry['of']!r} is not once in {entry['line']!r}")
        for by in entry["by"]:
            after = entry["line"].replace(entry["of"], by).strip()
            mutants.append(Mutant(entry["function"], entry["line"], after))
    return mutants


def report(name: str, found: Mapping[Mutant, Outcome], seconds: float) -> bool:
    """Print what came of it. Returns whether enough were killed, and every exception is one."""
    killed = {mutant for mutant, outcome in found.items() if outcome.killed}
    equivalent = declared_equivalent(name)
    wrong = [mutant for mutant in equivalent if mutant in killed or mutant not in found]
    counted = len(found) - len(set(equivalent) - set(wrong))
    slow = sum(outcome.timed_out for outcome in found.values())
    percent = 100 * len(killed) / counted
    print(
        f"{name}: killed {len(killed)} of {counted} ({percent:.1f} %), {slow} of them by the time "
        f"limit, in {seconds:.0f} s; of all {len(found)}, with {len(found) - counted} declared "
        f"equivalent, {100 * len(killed) / len(found):.1f} %"
    )
    line = None
    for mutant in sorted(set(found) - killed - set(equivalent), key=str):
        if line != (line := (mutant.function, mutant.before)):
            print(f"  survived, in {mutant.function}:\n      {mutant.before}")
        print(f"   -> {mutant.after or '(nothing)'}")
    for mutant in wrong:
        why = "a test kills it" if mutant in killed else "there is no such mutant"
        print(f"  declared equivalent, but {why}: {mutant}")
    return percent >= FLOOR and not wrong


def main(names: Sequence[str]) -> int:
    names = names or sorted(path.stem for path in HERE.glob("*.toml"))
    for number in (signal.SIGINT, signal.SIGTERM):  # either way the temporary directory goes
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    good = True
    for name in names:
        started = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="weightsync-mutants-") as directory:
                found = mutated(Copy.made_in(Path(directory)), name)
            good &= report(name, found, time.monotonic() - started)
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}")
            good = False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
