"""What tests of weightsync, and of programs that use it, are built from.

Importing this package imports neither torch nor transformers: the names below are looked up on
first use.

    from weightsync.testing import PROMPTS, build_checkpoint, greedy, load_trainer, score

    checkpoint = build_checkpoint("qwen2", "B")     # a directory; built once, then cached
    model = load_trainer("qwen2", "A")              # what plays the trainer
    print(score(model, PROMPTS, greedy(model, PROMPTS, 32)))
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.testing.models import MODELS as MODELS
    from weightsync.testing.models import ModelSpec as ModelSpec
    from weightsync.testing.models import build_checkpoint as build_checkpoint
    from weightsync.testing.models import load_trainer as load_trainer
    from weightsync.testing.reference import LONG_PROMPT as LONG_PROMPT
    from weightsync.testing.reference import PROMPTS as PROMPTS
    from weightsync.testing.reference import Comparison as Comparison
    from weightsync.testing.reference import Rollout as Rollout
    from weightsync.testing.reference import completions_rollouts as completions_rollouts
    from weightsync.testing.reference import greedy as greedy
    from weightsync.testing.reference import prompt_logprobs as prompt_logprobs
    from weightsync.testing.reference import score as score
    from weightsync.testing.reference import vllm_rollouts as vllm_rollouts

_HOME = {
    "MODELS": "models",
    "ModelSpec": "models",
    "build_checkpoint": "models",
    "load_trainer": "models",
    "LONG_PROMPT": "reference",
    "PROMPTS": "reference",
    "Comparison": "reference",
    "Rollout": "reference",
    "completions_rollouts": "reference",
    "greedy": "reference",
    "prompt_logprobs": "reference",
    "score": "reference",
    "vllm_rollouts": "reference",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
