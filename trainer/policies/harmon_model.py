"""What Harmon (Wu et al., arXiv 2503.21979) has beside its MAR: prompts, the language model between MAR's encoder and
decoder, the autoencoder, and the files of a checkpoint.

Shapes: see :mod:`trainer.algorithm.types`; L text tokens, M image tokens that the language model reads (known ones,
then the buffer), V the language model's width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from trainer.policies.kl16 import KL16, KL16Config
from trainer.policies.mar_parts import MAR_SIZES, MarConfig

PAD = -1
"""Fills up the rows of prompt ids; no token has this number."""
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
OUTPUT_LAYER = "llm.lm_head.weight"
PROMPT, NULL_PROMPT = "Generate an image: {}", "Generate an image."


@dataclass(frozen=True)
class HarmonConfig:
    """Sizes, as ``config.json`` of a checkpoint gives them."""

    llm: Mapping[str, Any]
    """of Qwen2, under transformers' names"""
    mar: MarConfig
    vae: KL16Config

    @staticmethod
    def from_json(content: Mapping[str, Any], source: str) -> HarmonConfig:
        """Raises ValueError, naming ``source``, if an entry is missing or asks for what is not supported.

        ``mar.type`` names a published size; explicit sizes (``encoder_embed_dim`` and so on) go before it. ``vae``
        is not in the published files, which all have the one KL-16 autoencoder.
        """
        try:
            mar, llm = dict(content["mar"]), dict(content["llm"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} is not a configuration of Harmon: it has no objects `mar` and `llm`") from error
        size = MAR_SIZES.get(str(mar.get("type", "mar_base")).removeprefix("mar_"))
        if size is None:
            raise ValueError(f"{source}: mar.type must be one of mar_{', mar_'.join(MAR_SIZES)}, not {mar['type']!r}")
        if mar.get("patch_size", 1) != 1 or mar.get("vae_stride", 16) != 16 or llm.get("use_sliding_window"):
            raise ValueError(
                f"{source}: only patch_size 1, vae_stride 16 and attention without sliding window are supported"
            )
        names = {
            "width": "encoder_embed_dim",
            "depth": "encoder_depth",
            "heads": "encoder_num_heads",
            "mlp_ratio": "mlp_ratio",
            "channels": "vae_embed_dim",
            "buffer": "buffer_size",
            "classes": "class_num",
            "head_width": "diffloss_w",
            "head_depth": "diffloss_d",
        }
        sizes = {ours: mar[theirs] for ours, theirs in names.items() if theirs in mar}
        return HarmonConfig(llm, replace(size, grid=mar.get("img_size", 256) // 16, **sizes), _vae(content))


def _vae(content: Mapping[str, Any]) -> KL16Config:
    return KL16Config(**content.get("vae", {}))


class PromptEncoder:
    """Prompts as the official code puts them into Qwen's chat format, one user's turn and the assistant's beginning.

    ``limit``: the number of ids of every row, template included.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
            raise FileNotFoundError(f"{folder} holds no tokenizer: neither tokenizer.json nor vocab.json")
        from transformers import Qwen2Tokenizer  # here, so that a missing package is told by who asks for this family

        try:
            self.tokenizer = Qwen2Tokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # tokenizers raises no narrower one
            raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error
        self.limit = limit
        self.null_ids: list[int] = self.tokenizer.encode(TURN.format(NULL_PROMPT))
        if any(len(self.tokenizer.encode(mark)) != 1 for mark in ("<|im_start|>", "<|im_end|>")):
            raise ValueError(f"the tokenizer in {folder} is not Qwen's: it does not know the marks of a turn")

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """(B, limit) int64, padded with :data:`PAD`. Raises ValueError naming the first prompt that is too long."""
        rows = []
        for prompt in prompts:
            ids = self.tokenizer.encode(TURN.format(PROMPT.format(prompt)))
            if len(ids) > self.limit:
                raise ValueError(
                    f"the prompt takes {len(ids)} tokens with its template, and policy.options.prompt_tokens is "
                    f"{self.limit}: {prompt!r}"
                )
            rows.append(ids + [PAD] * (self.limit - len(ids)))
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), self.limit)

    def with_null(self, prompt_ids_BL: Tensor) -> Tensor:
        """(2B, L): the null prompt's rows after the prompts'."""
        null_ids = prompt_ids_BL.new_tensor(self.null_ids)
        width = max(prompt_ids_BL.shape[1], len(null_ids))
        rows = prompt_ids_BL.new_full((2 * len(prompt_ids_BL), width), PAD)
        rows[: len(prompt_ids_BL), : prompt_ids_BL.shape[1]] = prompt_ids_BL
        rows[len(prompt_ids_BL) :, : len(null_ids)] = null_ids
        return rows


@dataclass(frozen=True)
class TextContext:
    """The text as the language model has read it: keys and values of every layer, (B, heads, L, head width)."""

    keys: list[Tensor]
    values: list[Tensor]
    valid: Tensor
    """(B, L) bool: text, not padding"""


class LanguageModel(nn.Module):
    """Qwen2 without its output layer, under the official names (``llm.model.``).

    The layers are transformers' own modules; attention is called here, because the text's keys and values stay as they
    are while image tokens are read again and again, with gradients and, in evaluation mode too, with
    ``activation_checkpointing``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import Qwen2Config, Qwen2Model

        self.config = Qwen2Config.from_dict(dict(config))
        self.model = Qwen2Model(self.config)
        self.activation_checkpointing = False

    def renew_buffers(self) -> None:
        """Work out the rotary frequencies, which are in no checkpoint, on the CPU in float32."""
        self.model.rotary_emb = type(self.model.rotary_emb)(self.config)

    @torch.no_grad()
    def prefill(self, ids_BL: Tensor) -> TextContext:
        """Read text that is padded at the right with :data:`PAD`. As in the official code, attention is causal and
        does not mask the padding: it comes after the text, and is masked when image tokens are read."""
        valid_BL = ids_BL != PAD
        length = int(valid_BL.sum(1).max())
        ids_BL, valid_BL = ids_BL[:, :length], valid_BL[:, :length]
        x = self.model.embed_tokens(ids_BL.clamp(min=0))
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        rotation = self.model.rotary_emb(x, torch.arange(length, device=x.device)[None])
        context = TextContext([], [], valid_BL)
        for layer in self.model.layers:
            x, key, value = _layer(layer, x, causal, rotation, None, None)
            context.keys.append(key)
            context.values.append(value)
        return context

    def forward(self, x_BMV: Tensor, context: TextContext) -> Tensor:
        """(B, M, V): read image tokens after the text, each attending to the text and to the image tokens before it."""
        B, M, _ = x_BMV.shape
        x = x_BMV.to(self.model.embed_tokens.weight.dtype)
        causal = torch.ones(M, M, dtype=torch.bool, device=x.device).tril()
        text = context.valid[:, None, None, :].expand(B, 1, M, -1)
        attend = torch.cat([text, causal.expand(B, 1, M, M)], dim=-1)
        positions = context.valid.sum(1, keepdim=True) + torch.arange(M, device=x.device)
        rotation = self.model.rotary_emb(x, positions)
        for layer, key, value in zip(self.model.layers, context.keys, context.values, strict=True):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(_read, layer, x, attend, rotation, key, value, use_reentrant=False)
            else:
                x = _read(layer, x, attend, rotation, key, value)
        out: Tensor = self.model.norm(x)
        return out


def _read(
    layer: nn.Module, x: Tensor, attend: Tensor, rotation: tuple[Tensor, Tensor], key: Tensor, value: Tensor
) -> Tensor:
    return _layer(layer, x, attend, rotation, key, value)[0]


def _layer(
    layer: Any, x: Tensor, attend: Tensor, rotation: tuple[Tensor, Tensor], key: Tensor | None, value: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A Qwen2 layer on (B, L, V): its output, and the keys and values of ``x`` alone; ``key`` and ``value`` are of
    what goes before."""
    attention = layer.self_attn
    h = layer.input_layernorm(x)
    q, k, v = (
        project(h).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )  # (B, heads, L, head width)
    q, k = _rotate(q, rotation), _rotate(k, rotation)
    v = v.to(k.dtype)  # autocast leaves it in half precision where the rotation has made float32
    all_k, all_v = (k, v) if key is None or value is None else (torch.cat([key, k], 2), torch.cat([value, v], 2))
    groups = q.shape[1] // k.shape[1]
    mixed = scaled_dot_product_attention(
        q, all_k.repeat_interleave(groups, dim=1), all_v.repeat_interleave(groups, dim=1), attn_mask=attend
    )
    x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x)), k, v


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of (B, heads, L, head width) by cosines and sines (B or 1, L, head width)."""
    cos, sin = (part[:, None] for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class FrozenParts(nn.Module):
    """All that is not trained, under the official names: ``llm.``, ``proj_in.``, ``proj_out.`` and ``vae.``

    Gradients flow through it, from MAR's decoder to its encoder. Copies of a policy share one.
    """

    def __init__(self, config: HarmonConfig) -> None:
        super().__init__()
        self.llm = LanguageModel(config.llm)
        width = self.llm.config.hidden_size
        self.proj_in = nn.Sequential(nn.Linear(config.mar.width, width), nn.SiLU(), nn.Linear(width, width))
        self.proj_out = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, config.mar.width))
        self.vae = KL16(config.vae)
        self.requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenParts:
        return self

    def read_image(self, x_BLD: Tensor, context: TextContext, buffer: int) -> Tensor:
        """What the language model adds to MAR's encoding (buffer first), with gradient: (B, L, D) -> (H * B, L, D).

        The encoding is the same for all guidance halves. The buffer goes last, so that it can see the image.
        """
        dtype = next(self.proj_in.parameters()).dtype
        x = self.proj_in(x_BLD.to(dtype))
        x = torch.cat([x[:, buffer:], x[:, :buffer]], dim=1)
        x = self.llm(x.repeat(len(context.valid) // len(x), 1, 1), context)
        x = torch.cat([x[:, -buffer:], x[:, :-buffer]], dim=1)
        out: Tensor = self.proj_out(x.to(dtype))
        return out


# ---- files -----------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``. Raises FileNotFoundError or ValueError."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no {path}: a checkpoint of Harmon is a folder as it is on the hub"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold an object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights, whole or in shards; safetensors go before torch's own format.

    Raises FileNotFoundError if there are none, or a shard is missing; ValueError if the index cannot be read.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(f"{index} is not an index of shards: {error!r}") from error
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing:
                raise FileNotFoundError(f"{index} names files that are not there: {', '.join(missing)}")
            return [folder / shard for shard in shards]
        if (folder / name).is_file():
            return [folder / name]
    raise FileNotFoundError(f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, nor shards")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """One file's tensors, mapped rather than copied. Raises ValueError if it cannot be read safely."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        loaded: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return loaded
    except (SafetensorError, RuntimeError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint by their official keys."""
    state: dict[str, Tensor] = {}
    for path in weight_files(folder):
        state.update(read_tensors(path))
    return state


def without_output_layer(state: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """The weights that images need. ``tied``: the language model's output layer is its embedding, which a file may
    hold under either name."""
    needed = {name: tensor for name, tensor in state.items() if name != OUTPUT_LAYER}
    if tied and OUTPUT_LAYER in state:
        needed.setdefault("llm.model.embed_tokens.weight", state[OUTPUT_LAYER])
    return needed
