"""A real vLLM with two tensor-parallel workers, each in a process of its own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from engine_settings import python_path
from test_vllm_in_process import Rig

import weightsync as ws
from weightsync.errors import EnginePoisoned, PlanRefused, ServedMismatch


class ParallelRig(Rig):
    """Workers inherit what they need to import the fault extension."""

    def __init__(self, name: str, **options) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
            patch.setenv("PYTHONPATH", python_path(Path(__file__).parent))
            super().__init__(
                name,
                tensor_parallel_size=2,
                **{"worker_extension_cls": "fault_extension.FaultExtension", **options},
            )

    def fail_next_apply(self, rank: int, how: str) -> None:
        answers = self.llm.collective_rpc(
            "weightsync_test_fail_after", args=("10", how, str(rank)), timeout=30
        )
        assert sorted(answers) == ["armed", "not me"]


@pytest.fixture(scope="module", params=["qwen2_tied", "qwen3_moe"])
def rig(request: pytest.FixtureRequest):
    found = ParallelRig(request.param)
    yield found
    found.close()


def test_both_workers_serve_exactly_the_trainers_weights(rig: ParallelRig) -> None:
    rig.assert_serves("A")
    for version, variant in enumerate("BAB", start=1):
        with rig.sender(variant) as sender:
            receipt = sender.sync(version)
        rig.assert_serves(variant)
        assert len(receipt.engines[0].workers) == 2


def test_each_worker_proves_its_own_part_of_every_tensor(rig: ParallelRig) -> None:
    sources = {variant: ws.ModuleSource(rig.models[variant]) for variant in "AB"}
    with ws.WeightSender(sources["B"], [rig.engine], proof="served") as sender:
        receipt = sender.sync("B")
    assert receipt.proven == "served" and list(receipt.levels) == ["served"]
    for proven in (receipt, ws.prove(sources["B"], [rig.engine])):
        proofs = [worker.proof for worker in proven.engines[0].workers]
        assert all(proof and not proof.spot and not proof.unproven for proof in proofs)
        sizes = [proof.nbytes for proof in proofs if proof]
        # Norms are on both; tied embeddings are proven twice, as they lie and packed.
        assert max(sizes) < receipt.nbytes < sum(sizes)
    with pytest.raises(ServedMismatch) as refusal:
        ws.prove(sources["A"], [rig.engine])
    wrong = {(mismatch.tensor, mismatch.worker) for mismatch in refusal.value.mismatches}
    names = {spec.name for spec in sources["A"].manifest().tensors}
    assert {name for name, _ in wrong} == names and len({worker for _, worker in wrong}) == 2


def test_what_no_worker_takes_is_refused_also_where_each_takes_a_part(rig: ParallelRig) -> None:
    state = dict(rig.models["A"].state_dict())
    name = "model.layers.1.self_attn.q_proj.weight"
    state[name] = torch.cat([state[name], state[name]])
    gone, missing = {
        "qwen2_tied": ("mlp.up_proj.weight", "mlp.{gate_proj, up_proj}.weight"),
        "qwen3_moe": ("mlp.gate.weight", "mlp.gate.weight"),
    }[rig.name]
    del state[f"model.layers.0.{gone}"]
    with (
        ws.WeightSender(ws.StateDictSource(state), [rig.engine]) as sender,
        pytest.raises(PlanRefused) as refusal,
    ):
        sender.sync("never")
    assert {(problem.kind, problem.name) for problem in refusal.value.problems} == {
        ("shape", name),
        ("missing", f"model.layers.0.{missing}"),
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_one_failing_worker_poisons_both_and_a_full_update_cures_both(
    rig: ParallelRig, rank: int
) -> None:
    with rig.sender("A") as sender:
        sender.sync("A")
    rig.fail_next_apply(rank, "raise")
    with rig.sender("B") as sender:
        with pytest.raises(EnginePoisoned, match=f"worker {rank}: RuntimeError: broken on purpose"):
            sender.sync("B")
        assert rig.llm.get_weight_version() == "A"
        with pytest.raises(Exception, match="weightsync: this engine may hold a mixture"):
            rig.rollouts([[1, 2, 3]])
        # Three good ones after it: each is applied, proven and answered as itself.
        for version, variant in enumerate("ABA"):
            with rig.sender(variant) as other:
                receipt = other.sync(version)
            assert receipt.version == str(version) == rig.llm.get_weight_version()
            rig.assert_serves(variant)
    # Replies of one call are not taken for another's: what vLLM answers is what was asked.
    assert rig.llm.collective_rpc("weightsync_test_fail_after", args=("1", "raise", "9")) == [
        "not me",
        "not me",
    ]


def test_a_worker_that_is_killed_while_it_applies_ends_the_sync_with_an_error(
    rig: ParallelRig,
) -> None:
    """Last of all: this engine does not come back."""
    rig.fail_next_apply(1, "kill")
    started = time.monotonic()
    with rig.sender("A", deadline=60) as sender, pytest.raises(EnginePoisoned):
        sender.sync("never")
    assert time.monotonic() - started < 60
