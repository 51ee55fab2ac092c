"""Inject every fault of the catalogue, and print what sees it: ``python tests/mutations/run.py``.

Exits with 1 if `sync` lets a fault pass, blames the wrong tensor or worker, or raises where there
is no fault.
"""

from __future__ import annotations

import os
import sys
import time

from catalogue import CASES
from rig import RIVALS, Rig

COLUMNS = ("weightsync", *RIVALS)


def main() -> int:
    """Run all, print the table and the kill rates."""
    _silence_workers()
    started = time.perf_counter()
    killed = dict.fromkeys(COLUMNS, 0)
    failed: list[str] = []
    with Rig() as rig:
        control = rig.run(None)
        if control.error is not None or control.rivals:
            print(f"the control failed: {control.error}, {sorted(control.rivals)}")
            return 1
        width = max(len(case.title) for case in CASES)
        print(f"{'fault':{width}}  {'where':9}  {'error':15}  " + "  ".join(COLUMNS))
        for case in CASES:
            outcome = rig.run(case)
            saw = {"weightsync": outcome.error is not None}
            saw |= {rival: rival in outcome.rivals for rival in RIVALS}
            marks = [f"{'yes' if saw[name] else '-':{len(name)}}" for name in COLUMNS]
            kind = type(outcome.error).__name__ if outcome.error else "none"
            print(f"{case.title:{width}}  {case.where:9}  {kind:15}  " + "  ".join(marks))
            for name in COLUMNS:
                killed[name] += saw[name]
            failed += [f"{case.title}: {c}" for c in rig.complaints(case, outcome)]
    for line in failed:
        print(line)
    total = len(CASES)
    print()
    print(f"{total} faults in {time.perf_counter() - started:.1f} s")
    for name in reversed(COLUMNS):
        rate = 100 * killed[name] / total
        print(f"{name:10} kill rate: {rate:.1f}% ({killed[name]} of {total})")
    return 1 if failed else 0


def _silence_workers() -> None:
    """What workers log of the faults goes nowhere; this process keeps its standard error."""
    sys.stderr = os.fdopen(os.dup(2), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
