"""A real vLLM with the worker extension: updated by a sender, and by handles; refused, poisoned,
cured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_vllm_in_process import PROMPTS, Rig

import weightsync as ws
from weightsync.adapters.vllm.ways import EXTENSION
from weightsync.deadline import Deadline
from weightsync.errors import PlanRefused, UpdateRefused
from weightsync.handles import ExportedHandles, export_handles, host_id, state_dict_info
from weightsync.target import StagedWeights


class ExtensionRig(Rig):
    def __init__(self, name: str, *, extension: str = EXTENSION, **options: Any) -> None:
        super().__init__(
            name,
            extension=extension,
            weight_transfer_config=None,
            worker_extension_cls=extension,
            **options,
        )

    def rpc(self, method: str, *arguments: Any) -> Any:
        """The answer of the only worker."""
        (answer,) = self.llm.collective_rpc(method, args=arguments)
        return answer

    def export(self, state: dict[str, torch.Tensor]) -> ExportedHandles:
        ids = self.llm.collective_rpc("report_device_id")
        return export_handles(ws.StateDictSource(state), ids)

    def take(self, exported: ExportedHandles) -> bool:
        """As over HTTP: nothing but JSON goes in."""
        handles = json.loads(json.dumps(exported.handles))
        done = self.rpc("update_weights_from_ipc_handles", handles)
        self.llm.reset_prefix_cache()
        return bool(done)

    def error(self) -> str:
        return str(self.rpc("weightsync_last_error"))


@pytest.fixture(scope="module")
def rig() -> Iterator[ExtensionRig]:
    found = ExtensionRig("qwen2_tied")
    yield found
    found.close()


def state_of(rig: Rig, variant: str) -> dict[str, torch.Tensor]:
    return dict(rig.models[variant].state_dict())


def test_a_sender_updates_through_the_extension(rig: ExtensionRig) -> None:
    assert rig.engine.way == "worker extension"
    rig.assert_serves("A")
    for version, variant in enumerate("BAB", start=1):
        with rig.sender(variant) as sender:
            sender.sync(version)
        rig.assert_serves(variant)
    assert rig.rpc("weightsync_version") == "3" == rig.llm.get_weight_version()


def test_every_worker_of_a_host_reports_the_hosts_id(rig: ExtensionRig) -> None:
    assert rig.rpc("report_device_id") == rig.rpc("report_device_id") == host_id()


def test_handles_update_the_engine_again_and_again(rig: ExtensionRig) -> None:
    for variant in "ABA":
        with rig.export(state_of(rig, variant)) as exported:
            assert rig.take(exported), rig.error()
        rig.assert_serves(variant)
    assert rig.rpc("weightsync_version") is None  # handles carry none
    assert rig.engine.version(Deadline.after(5)) is None  # and not what vLLM was told before


def test_the_other_names_of_the_field_do_the_same(rig: ExtensionRig) -> None:
    for name in ("update_weights_from_ipc", "update_weights_via_ipc_zmq"):
        with rig.export(state_of(rig, "B")) as exported:
            assert rig.rpc(name, exported.handles) is True
    rig.llm.reset_prefix_cache()
    rig.assert_serves("B")


def test_an_arena_is_filled_anew_for_the_next_step(rig: ExtensionRig) -> None:
    state = {name: tensor.clone() for name, tensor in rig.models["A"].named_parameters()}
    with rig.export(state) as exported:
        assert rig.take(exported)
        rig.assert_serves("A")
        for name, tensor in rig.models["B"].named_parameters():
            state[name].copy_(tensor.detach())
        exported.refill()
        rig.assert_serves("A")  # what it serves is its own
        assert rig.take(exported), rig.error()
    rig.assert_serves("B")


def without(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda state: state.pop(name)


def more_heads(state: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    state[name] = torch.cat([state[name], state[name]])


UNFIT: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (without("model.norm.weight"), "missing: model.norm.weight"),
    "only gate_proj": (without("model.layers.0.mlp.up_proj.weight"), "{gate_proj, up_proj}"),
    "unknown": (lambda s: s.update({"model.extra": torch.zeros(2)}), "unknown: model.extra"),
    "dtype": (
        lambda s: s.update({"model.norm.weight": s["model.norm.weight"].half()}),
        "dtype: model.norm.weight",
    ),
    "untied head": (
        lambda s: s.update({"lm_head.weight": s["lm_head.weight"] + 1}),
        "duplicate: lm_head.weight: is the same memory in the engine",
    ),
    "too many heads": (more_heads, "shape: model.layers.1.self_attn.q_proj.weight"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(
    rig: ExtensionRig, case: str
) -> None:
    change, reason = UNFIT[case]
    before = rig.rollouts(PROMPTS)
    state = state_of(rig, "A")
    change(state)
    with rig.export(state) as exported:
        assert not rig.take(exported)
    assert reason in rig.error()
    assert rig.rollouts(PROMPTS) == before


def other_fd(handle: dict[str, Any]) -> None:
    """Memory of the same size that nobody has sealed."""
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(fd, handle["nbytes"])
    handle.update(fd=fd, inode=os.fstat(fd).st_ino)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "digest": (lambda h: h.update(digests="0" * len(h["digests"])), "ProofFailed"),
    "seed": (lambda h: h.update(seed="1"), "ProofFailed"),
    "offset": (lambda h: h["offsets"].__setitem__(-1, h["nbytes"]), "would lie at bytes"),
    "seals": (other_fd, "seals"),
    "host": (lambda h: h.update(host="cpu-elsewhere"), "reaches no other host"),
    "field": (lambda h: h.update(code="1"), "unknown field"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_handle_is_refused_and_changes_nothing(rig: ExtensionRig, case: str) -> None:
    change, reason = FORGED[case]
    before = rig.rollouts(PROMPTS)
    with rig.export(state_of(rig, "A")) as exported:
        for handle in exported.handles.values():
            change(handle)
        assert not rig.take(exported)
    assert reason in rig.error()
    assert rig.rollouts(PROMPTS) == before


@pytest.mark.parametrize("handles", [None, [], {}, {"GPU-1": {}}, "cpu"])
def test_handles_for_somebody_else_are_refused(rig: ExtensionRig, handles: Any) -> None:
    assert rig.rpc("update_weights_from_ipc_handles", handles) is False
    assert f"there is no handle for {host_id()}" in rig.error()


def test_what_was_announced_is_what_must_come(rig: ExtensionRig) -> None:
    source = ws.ModuleSource(rig.models["A"])
    assert rig.rpc("prepare_refit_info", state_dict_info(source)) is True, rig.error()
    parameters = dict(rig.models["A"].named_parameters())
    announced = {name: (tensor.shape, tensor.dtype) for name, tensor in parameters.items()}
    assert rig.rpc("prepare_refit_info", announced) is True, rig.error()
    plain = {n: {"shape": list(t.shape), "dtype": "float32"} for n, t in parameters.items()}
    assert rig.rpc("prepare_refit_info", plain) is True, rig.error()
    with rig.export(parameters) as exported:
        assert rig.take(exported), rig.error()
    rig.assert_serves("A")
    with rig.export({**parameters, "model.extra": torch.zeros(2)}) as exported:
        assert not rig.take(exported)
    assert "other tensors came than prepare_refit_info announced: 1 differ" in rig.error()


def test_what_does_not_fit_is_refused_when_it_is_announced(rig: ExtensionRig) -> None:
    announced = state_dict_info(ws.ModuleSource(rig.models["A"]))
    del announced["model.norm.weight"]
    assert rig.rpc("prepare_refit_info", announced) is False
    assert "missing: model.norm.weight" in rig.error()
    assert rig.rpc("prepare_refit_info", 7) is False
    assert "expected {name: (shape, dtype)}" in rig.error()
    with rig.export(state_of(rig, "B")) as exported:
        assert rig.take(exported), rig.error()  # nothing is expected any more
    rig.assert_serves("B")


@pytest.mark.parametrize("name", ["init_collective", "update_weights_from_collective"])
def test_process_groups_are_refused_with_what_to_do(rig: ExtensionRig, name: str) -> None:
    assert rig.rpc(name, "127.0.0.1", 1, 2) is False
    assert f"UpdateRefused: {name}: weights do not come by a process group" in rig.error()
    assert "update_weights_from_ipc_handles" in rig.error()


def failing(after: int) -> Callable[[StagedWeights], Iterator[tuple[str, torch.Tensor]]]:
    original = StagedWeights.tensors

    def tensors(weights: StagedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(original(weights)):
            if number == after:
                raise RuntimeError("broken on purpose")
            yield item

    return tensors


@pytest.mark.parametrize("cure", ["handles", "sender"])
def test_a_load_that_fails_half_way_poisons_and_either_way_cures(
    rig: ExtensionRig, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig.export(state_of(rig, "A")) as exported:
        assert rig.take(exported)
        with monkeypatch.context() as patch:
            patch.setattr(StagedWeights, "tensors", failing(after=20))
            assert not rig.take(exported)
        assert "EnginePoisoned" in rig.error() and "broken on purpose" in rig.error()
        with pytest.raises(Exception, match="weightsync: this engine may hold a mixture"):
            rig.rollouts(PROMPTS)
        if cure == "handles":
            assert rig.take(exported), rig.error()
    if cure == "sender":
        with rig.sender("A") as sender:
            with pytest.raises(UpdateRefused, match="full update"):
                sender.sync("a part", only=["model.norm.weight"])
            with pytest.raises(Exception, match="weightsync: this engine may hold a mixture"):
                rig.rollouts(PROMPTS)
            sender.sync("cured")
    rig.assert_serves("A")


def test_a_loader_that_leaves_a_tensor_out_is_noticed(
    rig: ExtensionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = type(rig.llm.llm_engine.model_executor.driver_worker.worker.get_model()).load_weights

    def lazy(model: Any, weights: Any) -> Any:
        some = [item for item, _ in zip(weights, range(20), strict=False)]
        return original(model, some)

    with rig.export(state_of(rig, "B")) as exported:
        assert rig.take(exported)
        with monkeypatch.context() as patch:
            kind = type(rig.llm.llm_engine.model_executor.driver_worker.worker.get_model())
            patch.setattr(kind, "load_weights", lazy)
            assert not rig.take(exported)
        assert "wrote nothing to" in rig.error()
        assert rig.take(exported), rig.error()
    rig.assert_serves("B")


def test_a_sender_loses_a_worker_that_handles_have_updated(rig: ExtensionRig) -> None:
    """Its staged update must not follow: what it knows of the engine is no longer so."""
    with rig.sender("A") as sender:
        sender.sync("held")
        staged = sender.stage("overtaken")
        with rig.export(state_of(rig, "B")) as exported:
            assert rig.take(exported), rig.error()
        with pytest.raises(ws.errors.WeightSyncError):
            staged.commit()
        rig.assert_serves("B")
        sender.sync("again")
    rig.assert_serves("A")
    assert rig.engine.version(Deadline.after(5)) == "again"


def test_a_sender_that_lacks_a_tensor_is_refused_here_too(rig: ExtensionRig) -> None:
    state = state_of(rig, "A")
    del state["model.norm.weight"]
    with (
        ws.WeightSender(ws.StateDictSource(state), [rig.engine]) as sender,
        pytest.raises(PlanRefused, match=r"model\.norm\.weight"),
    ):
        sender.sync("never")
