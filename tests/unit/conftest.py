"""Examples that are drawn slowly, on a machine that is busy, say nothing of what is tested; and the
engine that many modules test on."""

import pytest
from hypothesis import HealthCheck, settings
from toys import SHAPES, tensors

from weightsync import StateDictSource, WeightSender
from weightsync.deadline import Deadline
from weightsync.testing.toy import ToyEngine

settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")


@pytest.fixture(scope="module")
def shared_engine():
    with ToyEngine(SHAPES, workers=2) as toy:
        yield toy


@pytest.fixture
def engine(shared_engine: ToyEngine):
    """Two workers that serve version "base", whatever the test before has done to them."""
    shared_engine.set_faults({})
    with WeightSender(StateDictSource(tensors(0)), [shared_engine]) as sender:
        sender.sync("base")
    shared_engine.resume(Deadline.after(1))
    shared_engine.calls.clear()
    return shared_engine
