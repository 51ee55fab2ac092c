"""The worker extension on two tensor-parallel workers, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_vllm_worker_extension import ExtensionRig, more_heads

from weightsync.handles import host_id


@pytest.fixture
def two_workers() -> Iterator[ExtensionRig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        found = ExtensionRig("qwen2_tied", tensor_parallel_size=2)
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
