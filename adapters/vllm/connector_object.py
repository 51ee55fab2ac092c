"""A ``vllm.LLM`` of this process, from the trainer's side. Imports nothing of vLLM before it is
called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from weightsync.adapters.vllm.limits import check_quantization
from weightsync.adapters.vllm.thoughts import check_mode, is_of_request, of_output, refused
from weightsync.adapters.vllm.ways import EXTENSION, Offer, ThroughWay, choose
from weightsync.deadline import Deadline
from weightsync.engines.base import PauseMode
from weightsync.errors import ConnectError, UpdateRefused

__all__ = ["VllmObject"]

CHECK_SECONDS = 0.5
"""How often a call into another process looks whether that is still alive."""


class VllmObject(ThroughWay):
    """A ``vllm.LLM`` of this process. See `weightsync.engines.base.Engine`.

    ``LLM`` takes steps only while its owner calls it. A sender is one more such call: it must not
    run while another thread is in ``generate``. So there is nothing to pause. Requests that were
    enqueued and have not finished go on with the new weights, over the whole context (``keep``), or
    are ended (``abort``, and always when the engine is poisoned); they cannot be waited for.

    Older ones do not report a weight version. Then `version` says what the workers know, where a
    worker extension is there to be asked, else None; the receipt says it in any case.

    Args:
        llm: created with ``weight_transfer_config={"backend": "weightsync"}``, or, where that
            vLLM takes only its own backends, with `weightsync`'s worker extension.
        name: for messages.
        extension: path of your own subclass of `WeightSyncWorkerExtension`, where the engine was
            created with one.

    Attributes:
        way: into its workers, for messages (see `weightsync.adapters.vllm.ways`).

    Raises:
        ConnectError: it was created with neither, and says the argument that would work; or it
            is quantized in a way that was not shown to work.
    """

    in_process = True

    def __init__(self, llm: Any, *, name: str | None = None, extension: str = EXTENSION) -> None:
        self._llm = llm
        self.name = name or f"vllm-llm-{id(llm):x}"
        config = llm.llm_engine.vllm_config
        offer = Offer(
            backend=getattr(getattr(config, "weight_transfer_config", None), "backend", None),
            extension=config.parallel_config.worker_extension_cls or None,
            has_sessions=hasattr(llm, "start_draft_weight_update"),
        )
        way = choose(offer, self, extension)
        if way is None:
            argument = (
                "weight_transfer_config={'backend': 'weightsync'}"
                if offer.backend_would_work
                else f"worker_extension_cls={EXTENSION!r}"
            )
            raise ConnectError(
                f"this LLM was created with {offer.described}; none of them is weightsync's",
                remedy=f"create it so: LLM(..., {argument})",
            )
        check_quantization("this LLM", config.model_config.quantization)
        self._way = way
        self._logprobs_mode = getattr(config.model_config, "logprobs_mode", None)
        self._reports_version = hasattr(llm, "update_weight_version")
        self.workers = int(llm.get_world_size())
        self._multimodal = bool(config.model_config.multimodal_config)
        # Where there is no KV connector, older ones call a reset that asks for it a failure.
        self._connector = config.kv_transfer_config is not None
        core = llm.llm_engine.engine_core
        self._core = core
        self._same_process = any(kind.__name__ == "InprocClient" for kind in type(core).__mro__)

    def is_paused(self, deadline: Deadline) -> bool:
        return False

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Nothing to do for ``keep``, see the class. ``abort`` ends what was enqueued and has not
        finished.

        Raises:
            ConnectError: ``wait``, where something has not finished: nobody else takes the steps.
        """
        engine = self._llm.llm_engine
        count = engine.get_num_unfinished_requests()
        if count and mode == "wait":
            raise ConnectError(
                f"{self.name} has {count} request(s) in flight, and takes steps only while its "
                "owner calls it: they cannot be waited for",
                remedy="let generate() return first, or use pause='keep' or pause='abort'",
            )
        if count and mode == "abort":

            def abort_request() -> None:
                engine.abort_request(list(engine.output_processor.request_states), internal=True)

            self._run(deadline, abort_request)

    def resume(self, deadline: Deadline) -> None:
        """Nothing to do, see the class."""

    def _set_reported_version(self, version: str, deadline: Deadline) -> None:
        self._run(deadline, self._llm.update_weight_version, version)

    def _reported_version(self, deadline: Deadline) -> str | None:
        return str(self._run(deadline, self._llm.get_weight_version))

    def reset_caches(self, deadline: Deadline, *, recompute: bool) -> None:
        while not self._run(deadline, self._llm.reset_prefix_cache, recompute, self._connector):
            deadline.rest(0.05, f"{self.name} to reset its prefix cache")
        if self._multimodal:
            self._run(deadline, self._llm.reset_mm_cache)
            self._run(deadline, self._llm.llm_engine.reset_encoder_cache)

    def logprobs(self, prompt: Sequence[int], deadline: Deadline) -> list[float]:
        """Besides the protocol's: UpdateRefused, where requests of the owner's are in flight:
        taking steps would take their tokens from him."""
        from vllm import SamplingParams

        check_mode(self.name, self._logprobs_mode)
        count = self._llm.llm_engine.get_num_unfinished_requests()
        if count:
            raise UpdateRefused(
                f"{self.name} has {count} request(s) in flight, whose tokens their owner would "
                "miss if others took steps",
                remedy="let generate() return first, or end them with pause='abort'",
            )
        sampling = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False, ignore_eos=True
        )
        request = {"prompt_token_ids": list(prompt)}

        def generate() -> Any:
            return self._llm.generate([request], sampling, use_tqdm=False)

        try:
            (output,) = self._run(deadline, generate)
        except ConnectError as error:
            if is_of_request(error.__cause__):
                raise refused(self.name, str(error.__cause__)) from error
            raise
        return of_output(self.name, prompt, output.prompt_logprobs)

    def close(self) -> None:
        """Nothing to give up."""

    # --- calls ------------------------------------------------------------------------------

    def call(self, name: str, body: dict[str, Any] | None, deadline: Deadline) -> Any:
        """See `weightsync.adapters.vllm.ways.Caller`."""
        return self._run(deadline, getattr(self._llm, name), *([] if body is None else [body]))

    def rpc(self, method: str, arguments: list[str], deadline: Deadline) -> list[Any]:
        """See `weightsync.adapters.vllm.ways.Caller`."""

        def collective_rpc() -> Any:
            return self._llm.collective_rpc(method, args=tuple(arguments))

        return list(self._run(deadline, collective_rpc))

    def _run(self, deadline: Deadline, call: Callable[..., Any], *arguments: Any) -> Any:
        """A call into vLLM, with a deadline and a typed error.

        vLLM waits for its core without a deadline, and for ever if it dies at the wrong moment. So
        where the core is another process, it is waited for on a thread that can be left behind;
        where it is this one, the call is the work itself, and runs here.
        """
        outcome: list[Any] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(call(*arguments))
            except BaseException as error:
                failure.append(error)

        if self._same_process:
            run()
        else:
            self._wait(deadline, threading.Thread(target=run, daemon=True), call.__name__)
        if failure:
            error = failure[0]
            if not isinstance(error, Exception):
                raise error
            raise ConnectError(
                f"{self.name} failed in {call.__name__}: {type(error).__name__}: {error}",
                remedy="see the engine's log",
            ) from error
        return outcome[0]

    def _wait(self, deadline: Deadline, thread: threading.Thread, name: str) -> None:
        thread.start()
        while thread.is_alive():
            thread.join(min(CHECK_SECONDS, deadline.remaining(f"{self.name} to answer {name}")))
            if thread.is_alive() and getattr(self._core.resources, "engine_dead", False):
                # It was alive a moment ago: what it has answered may still be on its way.
                thread.join(CHECK_SECONDS)
                if thread.is_alive():
                    raise ConnectError(
                        f"{self.name}'s core has died", remedy="start the engine anew"
                    )
