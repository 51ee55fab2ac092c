"""The worker extension on two tensor-parallel workers, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_vllm_worker_extension import ExtensionRig, more_heads

from weightsync.deadline import Deadline
from weightsync.errors import UpdateRefused
from weightsync.handles import host_id


@pytest.fixture
def two_workers() -> Iterator[ExtensionRig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        patch.setenv("PYTHONPATH", path.rstrip(os.pathsep))
        found = ExtensionRig(
            "qwen2_tied",
            tensor_parallel_size=2,
            extension="fault_extension.FaultyWorkerExtension",
        )
    yield found
    found.close()


def test_two_workers_take_one_handle_and_each_answers_for_itself(
    two_workers: ExtensionRig,
) -> None:
    llm, models = two_workers.llm, two_workers.models
    assert llm.collective_rpc("report_device_id") == [host_id(), host_id()]
    long = dict(models["B"].state_dict())
    more_heads(long)
    with two_workers.export(long) as exported:
        arguments = (exported.handles,)
        assert llm.collective_rpc("update_weights_from_ipc_handles", args=arguments) == [False] * 2
        for error in llm.collective_rpc("weightsync_last_error"):
            assert "shape: model.layers.1.self_attn.q_proj.weight" in error
    two_workers.assert_serves("A")
    with two_workers.export(dict(models["B"].state_dict())) as exported:
        arguments = (exported.handles,)
        assert llm.collective_rpc("update_weights_from_ipc_handles", args=arguments) == [True] * 2
    llm.reset_prefix_cache()
    two_workers.assert_serves("B")
    with two_workers.sender("A") as sender:
        sender.sync("by sender")
    two_workers.assert_serves("A")
    assert llm.collective_rpc("weightsync_version") == ["by sender"] * 2
    for rank in "01":
        one_refuses(two_workers, rank)
        one_fails(two_workers, rank)


def take(rig: ExtensionRig, variant: str) -> list[bool]:
    with rig.export(dict(rig.models[variant].state_dict())) as exported:
        arguments = (exported.handles,)
        answers = rig.llm.collective_rpc("update_weights_from_ipc_handles", args=arguments)
    rig.llm.reset_prefix_cache()
    return list(answers)


def one_refuses(rig: ExtensionRig, rank: str) -> None:
    """Then no worker touches anything."""
    assert take(rig, "A") == [True] * 2
    rig.llm.collective_rpc("weightsync_test_refuse_handle", args=(rank,))
    assert take(rig, "B") == [False] * 2
    errors = rig.llm.collective_rpc("weightsync_last_error")
    assert "ProofFailed" in errors[int(rank)]
    assert f"nothing was touched: worker {rank} refuses" in errors[1 - int(rank)]
    rig.assert_serves("A")


def one_fails(rig: ExtensionRig, rank: str) -> None:
    """Then both are poisoned, whoever comes next, until a full update cures both."""
    rig.llm.collective_rpc("weightsync_test_fail_after", args=("10", "raise", rank))
    assert take(rig, "B") == [False] * 2
    for error in rig.llm.collective_rpc("weightsync_last_error"):
        assert f"worker {rank}: " in error and "broken on purpose" in error
    with pytest.raises(Exception, match="weightsync: this engine may hold a mixture"):
        rig.rollouts([[1, 2, 3]])
    with rig.sender("B") as sender, pytest.raises(UpdateRefused, match="full update"):
        sender.sync("part", only=["model.norm.weight"])
    assert take(rig, "B") == [True] * 2
    assert rig.engine.version(Deadline.after(10)) is None
    rig.assert_serves("B")
