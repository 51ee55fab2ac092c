"""Small random models that stand in for real ones, saved as ordinary checkpoints.

    path = build_checkpoint("qwen2_tied", "A")      # 2 s the first time, then a look into the cache
    trainer = load_trainer("qwen2_tied", "B")       # same shapes, other weights

Nothing is downloaded: configuration, weights and a byte-level tokenizer are all made here. The
weights are not trained, but drawn so that greedy decoding wanders over many tokens, depends on
the whole prompt, and has a clear winner at each step. An engine that holds one stale or misplaced
tensor therefore gives other tokens, and one that holds the right ones gives the same.

`MODELS` lists what there is. All are tiny and float32 but `qwen2_0_5b`, which has the size and
the 290 tensors of Qwen2-0.5B in bfloat16. Its rollouts are good for timing and for comparing
log-probabilities, not for counting exact tokens: bfloat16 rounds many of its logits to a tie.
"""

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

BUILDER_VERSION = 1
"""Part of the cache key. Raise it with every change here that changes what is written."""

CACHE_VARIABLE = "WEIGHTSYNC_TEST_CACHE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All that decides a model's bytes, except the variant."""

    architecture: str
    """`model_type` of the transformers configuration class."""
    config: Mapping[str, object]
    """Arguments of that class."""
    seed: int
    """Chosen so that variants A to D have no near tie on the prompts of `reference`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    embedding_std: float = 0.5
    """Also that of the output head. Small where the head is tied to the embedding: a token's own
    embedding would otherwise dominate its output, and the model would repeat itself."""
    logit_std: float = 1.0
    """Spread of the logits, set through the last norm. It scales the gap between first and second
    choice, and rounding errors with it: at 1, engines stay within 1e-5 of the reference."""
    gain: float = 1.5
    """Of linear layers. Above one in queries and keys, it keeps attention from averaging a long
    prompt away; over many layers in bfloat16, it also lets rounding errors grow."""
    norm_offset: float = 0.0
    """What the architecture adds to a norm's weight before use: 1 in Gemma."""
    max_shard_size: str = "5GB"


_TINY: Mapping[str, object] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "tie_word_embeddings": False,
}

MODELS: dict[str, ModelSpec] = {
    "qwen2": ModelSpec(architecture="qwen2", config=_TINY, seed=8),
    "qwen2_tied": ModelSpec(
        architecture="qwen2",
        config={**_TINY, "tie_word_embeddings": True},
        seed=12,
        embedding_std=0.1,
    ),
    "llama": ModelSpec(architecture="llama", config=_TINY, seed=3),
    "qwen3": ModelSpec(architecture="qwen3", config={**_TINY, "head_dim": 32}, seed=6),
    "gemma3": ModelSpec(
        architecture="gemma3_text",
        config={
            **_TINY,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        seed=7,
        embedding_std=0.1 / 128**0.5,  # Gemma multiplies embeddings by the root of the hidden size
        norm_offset=1.0,
    ),
    "qwen3_moe": ModelSpec(
        architecture="qwen3_moe",
        config={
            **_TINY,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        seed=0,
        # Two tensor-parallel workers of vLLM round 1.05e-5 away from transformers at a spread of 1.
        logit_std=0.8,
    ),
    # Experts whose size is no multiple of 32: the CPU engine pads them when it packs them.
    "qwen3_moe_padded": ModelSpec(
        architecture="qwen3_moe",
        config={
            **_TINY,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        seed=15,
    ),
    "qwen2_moe": ModelSpec(
        architecture="qwen2_moe",
        config={
            **_TINY,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        seed=4,
    ),
    "mixtral": ModelSpec(
        architecture="mixtral",
        config={**_TINY, "num_local_experts": 8, "num_experts_per_tok": 2},
        seed=2,
    ),
    "qwen2_0_5b": ModelSpec(
        architecture="qwen2",
        config={
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "pad_token_id": 256,
            "bos_token_id": 257,
            "eos_token_id": 258,
            "tie_word_embeddings": True,
        },
        seed=0,
        dtype="bfloat16",
        embedding_std=0.1,
        gain=1.0,
        max_shard_size="250MB",
    ),
}


def build_checkpoint(name: str, variant: str = "A", *, cache_dir: Path | None = None) -> Path:
    """Return the directory of a checkpoint, building it if the cache has none.

    The directory holds config.json, the tokenizer, and safetensors: one file, or shards with an
    index for `qwen2_0_5b`. It appears under its name only when complete, so processes may build
    the same one at once, and a builder that dies leaves nothing that is taken for a checkpoint.
    Treat it as read-only.

    Args:
        name: A key of `MODELS`.
        variant: A capital letter. Each has its own weights in every tensor.
        cache_dir: Where to keep it. Default: the environment variable WEIGHTSYNC_TEST_CACHE, else
            `~/.cache/weightsync/models`.

    Raises:
        ValueError: There is no such model, or the variant is not one capital letter.
    """
    spec = _spec(name)
    if re.fullmatch("[A-Z]", variant) is None:
        raise ValueError(f"expected one capital letter as variant, got {variant!r}")
    cache = cache_dir or _default_cache()
    final = cache / f"{name}-{variant}-{_key(spec)}"
    if final.is_dir():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final)
    with _private_directory(final) as work:
        _save_model(spec, variant, work)
        _save_tokenizer(spec, work)
        try:
            os.rename(work, final)
        except OSError:
            # A directory that is not empty is never replaced: somebody else was faster.
            if not final.is_dir():
                raise
    return final


def load_trainer(name_or_path: str | Path, variant: str = "A") -> "torch.nn.Module":
    """Load a checkpoint as transformers would for training: its own dtype, plain attention.

    Args:
        name_or_path: A key of `MODELS` (built first if need be), or a checkpoint directory.
        variant: Of the model named; without meaning for a directory.

    Returns:
        An `AutoModelForCausalLM`, in eval mode so that runs can be compared, on the CPU.
    """
    from transformers import AutoModelForCausalLM

    if isinstance(name_or_path, str) and name_or_path in MODELS:
        path = build_checkpoint(name_or_path, variant)
    elif not (path := Path(name_or_path)).is_dir():
        _spec(str(name_or_path))
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", attn_implementation="eager", local_files_only=True
    )
    return model


def _spec(name: str) -> ModelSpec:
    spec = MODELS.get(name)
    if spec is None:
        raise ValueError(f"no test model named {name!r}; there are {', '.join(MODELS)}")
    return spec


def _default_cache() -> Path:
    from_environment = os.environ.get(CACHE_VARIABLE)
    if from_environment:
        return Path(from_environment)
    return Path.home() / ".cache" / "weightsync" / "models"


def _key(spec: ModelSpec) -> str:
    ingredients = {
        "spec": dataclasses.asdict(spec),
        "builder": BUILDER_VERSION,
        "transformers": importlib.metadata.version("transformers"),
    }
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:12]


def _save_model(spec: ModelSpec, variant: str, directory: Path) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config_class: Any = CONFIG_MAPPING[spec.architecture]
    model_class: Any = AutoModelForCausalLM
    config = config_class(**spec.config)
    # On meta first: transformers' own initialization would cost as much as ours again. to_empty
    # loses buffers, but none of these models saves one.
    with torch.device("meta"):
        model = model_class.from_config(config, dtype=getattr(torch, spec.dtype))
    model = model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(1000 * spec.seed + ord(variant))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = _distribution(name, parameter.shape, spec, hidden=config.hidden_size)
            parameter.normal_(mean, std, generator=generator)
    model.save_pretrained(directory, max_shard_size=spec.max_shard_size)


def _distribution(
    name: str, shape: "torch.Size", spec: ModelSpec, *, hidden: int
) -> tuple[float, float]:
    """Mean and standard deviation of a parameter."""
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return 0.0, spec.embedding_std
    if name.endswith(".bias"):
        return 0.0, 0.1
    if "norm" in name:
        if name == "model.norm.weight":
            gain = spec.logit_std / (hidden**0.5 * spec.embedding_std)
        else:
            gain = 2.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        return gain - spec.norm_offset, 0.05 * gain
    return 0.0, spec.gain / shape[-1] ** 0.5


def _save_tokenizer(spec: ModelSpec, directory: Path) -> None:
    """One token per byte, then the three special ones, then a made-up text for each id above."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<bos>", "<eos>"]
    size = spec.config["vocab_size"]
    if not isinstance(size, int):
        raise TypeError(f"vocab_size must be an int, got {size!r}")
    names += [f"<{token_id}>" for token_id in range(len(names), size)]
    vocabulary = {text: token_id for token_id, text in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer_class(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(directory)


@contextmanager
def _private_directory(final: Path) -> Iterator[Path]:
    """A new directory beside `final`, locked while in use and removed if it is still there after.

    The kernel drops the lock with its holder: that is how `_remove_abandoned` tells the directory
    of a dead builder from that of a living one.
    """
    while True:
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        descriptor = _lock(work)
        if descriptor is not None:
            break
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(final: Path) -> None:
    for work in final.parent.glob(f".{final.name}.*"):
        descriptor = _lock(work)
        if descriptor is not None:
            shutil.rmtree(work, ignore_errors=True)
            os.close(descriptor)


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the directory's lock, or None if it is another's or gone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(directory)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
