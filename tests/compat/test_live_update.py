"""One live engine per way into the vLLM of this environment: updated A, B, A, B, refused, poisoned,
cured."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import hooks
import pytest
from safetensors.torch import load_file
from test_vllm_in_process import PROMPTS, Rig

import weightsync as ws
from weightsync.adapters.vllm.ways import EXTENSION
from weightsync.deadline import Deadline
from weightsync.errors import ConnectError, EnginePoisoned, PlanRefused
from weightsync.handles import export_handles
from weightsync.target import StagedWeights
from weightsync.testing import build_checkpoint

OPTIONS = {
    "backend": {"weight_transfer_config": {"backend": "weightsync"}},
    "extension": {"weight_transfer_config": None, "worker_extension_cls": EXTENSION},
}
EXECUTOR = "UniProcExecutor"


def expected_way(options: str) -> str | None:
    """From this vLLM's source, apart from what the connector detects; None where it takes no
    backend but its own."""
    if options == "extension":
        return "worker extension"
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    _, ways = hooks.unmet(Path(next(iter(spec.submodule_search_locations))))
    offered = [way for way in ("backend session", "backend messages") if not ways[way]]
    return offered[0] if offered else None


class FileRig(Rig):
    """Sends the tensors of a checkpoint's files: older releases know a mixture's experts by no
    other names."""

    def source(self, variant: str) -> ws.SafetensorsSource:
        return ws.SafetensorsSource(build_checkpoint(self.name, variant))

    def sender(self, variant: str, **options) -> ws.WeightSender:
        return ws.WeightSender(self.source(variant), [self.engine], **options)


CELLS = [("qwen2_tied", "backend"), ("qwen2_tied", "extension"), ("qwen3_moe", "extension")]


@pytest.fixture(scope="module", params=CELLS, ids="-".join)
def rig(request: pytest.FixtureRequest):
    name, options = request.param
    if expected_way(options) is None:
        pytest.skip("this vLLM takes no backend but its own")
    found = FileRig(name, **OPTIONS[options])
    assert found.engine.way == expected_way(options)
    yield found
    found.close()


def test_updates_serve_exactly_the_trainers_weights(rig: Rig) -> None:
    rig.assert_serves("A")
    for version, variant in enumerate("BAB", start=1):
        with rig.sender(variant) as sender:
            sender.sync(version)
        rig.assert_serves(variant)
    reports = hasattr(rig.llm, "get_weight_version") or rig.engine.way == "worker extension"
    assert rig.engine.version(Deadline.after(5)) == ("3" if reports else None)


def test_a_missing_tensor_is_refused_by_name_and_changes_nothing(rig: Rig) -> None:
    before = rig.rollouts(PROMPTS)
    state = load_file(build_checkpoint(rig.name, "A") / "model.safetensors")
    del state["model.norm.weight"]
    with (
        ws.WeightSender(ws.StateDictSource(state), [rig.engine]) as sender,
        pytest.raises(PlanRefused, match=r"model\.norm\.weight"),
    ):
        sender.sync("never")
    assert rig.rollouts(PROMPTS) == before


def test_a_failed_apply_refuses_requests_until_a_full_update_cures_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if type(rig.llm.llm_engine.engine_core.engine_core.model_executor).__name__ != EXECUTOR:
        pytest.skip("its worker is another process, in which nothing can be broken from here")
    with rig.sender("B") as sender:
        sender.sync("before")
    with rig.sender("A") as sender:
        with monkeypatch.context() as patch, pytest.raises(EnginePoisoned, match="on purpose"):
            patch.setattr(StagedWeights, "tensors", broken(StagedWeights.tensors))
            sender.sync("broken")
        # Of a type of its own in newer releases.
        with pytest.raises(Exception, match="weightsync: this engine may hold a mixture"):
            rig.rollouts(PROMPTS)
        sender.sync("cured")
    rig.assert_serves("A")


def broken(original):
    def tensors(weights: StagedWeights):
        for number, item in enumerate(original(weights)):
            if number == 20:
                raise RuntimeError("broken on purpose")
            yield item

    return tensors


def test_handles_are_taken_by_the_extension(rig: Rig) -> None:
    if rig.engine.way != "worker extension":
        pytest.skip("a backend takes no handles")
    with export_handles(rig.source("B"), rig.llm.collective_rpc("report_device_id")) as exported:
        arguments = (exported.handles,)
        assert rig.llm.collective_rpc("update_weights_from_ipc_handles", args=arguments) == [True]
    rig.llm.reset_prefix_cache()
    rig.assert_serves("B")


def test_an_engine_that_offers_no_way_is_refused_with_one_that_works(rig: Rig) -> None:
    """The same engine, as a connector sees it that looks for something else."""
    if rig.engine.way != "worker extension":
        pytest.skip("has a way that cannot be hidden")
    with pytest.raises(ConnectError, match="create it so: LLM") as refusal:
        ws.engine(rig.llm, extension="somebody.elses.Extension")
    works = "weight_transfer_config=" if expected_way("backend") == "backend session" else EXTENSION
    assert works in str(refusal.value)
