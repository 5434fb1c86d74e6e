"""mPLUG-Owl2, as DeQA-Score and Q-Align use it: one image inside a fixed text, to the logits of the next token.

arXiv 2311.04257: a vision transformer sees the image; an abstractor's queries attend to its patches and become 64
tokens; a LLaMA whose norms, keys and values have one set of weights for text and another for image tokens
("modality-adaptive") reads text, image, text. Modules are named like the keys of the checkpoints, which load as they
are.

Written for one image at one place of one text: all sequences of a batch have the same length, there is no padding,
and the modalities are slices.

Shapes: B images, C width, H heads, L positions, N patches and the class token, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """(B, H, L, C / H) each -> (B, L, C)"""
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, L, C) -> (B, H, L, C / H)"""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, C) -> (B, N, C)"""
        # query, key and value of a head lie side by side
        qkv = self.query_key_value(x).view(*x.shape[:2], self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        return self.dense(attention(qkv[0], qkv[1], qkv[2]))  # type: ignore[no-any-return]


class VisionMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))  # type: ignore[no-any-return]


class VisionLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.self_attn = VisionAttention(width, config["num_attention_heads"])
        self.input_layernorm = nn.LayerNorm(width, eps=eps)
        self.mlp = VisionMLP(width, config["intermediate_size"])
        self.post_attention_layernorm = nn.LayerNorm(width, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class VisionEmbeddings(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, patch = config["hidden_size"], config["patch_size"]
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.position_embedding = nn.Parameter(torch.empty(1, (config["image_size"] // patch) ** 2 + 1, width))
        self.pre_layernorm = nn.LayerNorm(width, eps=config["layer_norm_eps"])

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(B, 3, side, side) -> (B, N, C)"""
        patches = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(pixels), -1, -1), patches], dim=1) + self.position_embedding
        return self.pre_layernorm(x)  # type: ignore[no-any-return]


class VisionModel(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        self.encoder = _Layers(VisionLayer, config)
        self.post_layernorm = nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(B, 3, side, side), normalised -> (B, N, C)"""
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)  # type: ignore[no-any-return]


class _Layers(nn.Module):
    """A list named ``layers``, one level down, as the checkpoint's keys have it."""

    def __init__(self, layer: Callable[[Mapping[str, Any]], nn.Module], config: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(config) for _ in range(config["num_hidden_layers"]))


class CrossAttention(nn.Module):
    """Queries attend to themselves and to the patches; sine positions are added where attention is computed only."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(config["encoder_hidden_size"], width)
        self.value = nn.Linear(config["encoder_hidden_size"], width)
        self.q_pos_embed = nn.Buffer(torch.empty(config["num_learnable_queries"], width))
        self.k_pos_embed = nn.Buffer(torch.empty(config["grid_size"] ** 2 + 1, width))

    def forward(self, queries: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """(B, Q, C), (B, N, C) -> (B, Q, C)"""
        both = torch.cat([queries, patches], dim=1)
        key = self.key(both + torch.cat([self.q_pos_embed, self.k_pos_embed]))
        query = self.query(queries + self.q_pos_embed)
        return attention(_split(query, self.heads), _split(key, self.heads), _split(self.value(both), self.heads))


class AbstractorMLP(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, hidden = config["hidden_size"], config["intermediate_size"]
        self.w1 = nn.Linear(width, hidden)
        self.w2 = nn.Linear(hidden, width)
        self.w3 = nn.Linear(width, hidden)
        self.ffn_ln = nn.LayerNorm(hidden, eps=config["layer_norm_eps"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.ffn_ln(functional.silu(self.w1(x)) * self.w3(x)))  # type: ignore[no-any-return]


class AbstractorOutput(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.out_proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = AbstractorMLP(config)

    def forward(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = residual + self.out_proj(mixed)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class AbstractorAttention(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.attention = CrossAttention(config)
        self.output = AbstractorOutput(config)
        self.norm1 = nn.LayerNorm(config["hidden_size"])
        self.normk = nn.LayerNorm(config["encoder_hidden_size"])

    def forward(self, queries: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        queries = self.norm1(queries)  # the residual, too, is of the normalised queries
        return self.output(self.attention(queries, self.normk(patches)), queries)  # type: ignore[no-any-return]


class AbstractorLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.crossattention = AbstractorAttention(config)

    def forward(self, queries: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        return self.crossattention(queries, patches)  # type: ignore[no-any-return]


class Abstractor(nn.Module):
    def __init__(self, config: Mapping[str, Any], language_width: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.encoder = _Layers(AbstractorLayer, config)
        self.visual_fc = nn.Linear(width, language_width)
        self.query_embeds = nn.Parameter(torch.empty(1, config["num_learnable_queries"], width))
        self.vit_eos = nn.Parameter(torch.empty(1, 1, language_width))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """(B, N, C) -> (B, Q + 1, C of the language model)"""
        x = self.query_embeds.expand(len(patches), -1, -1)
        for layer in self.encoder.layers:
            x = layer(x, patches)
        return torch.cat([self.visual_fc(x), self.vit_eos.expand(len(x), -1, -1)], dim=1)


class Multiway(nn.Module):
    """Two modules alike, the first for text positions, the second for those of the image."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.multiway = nn.ModuleList([make(), make()])

    def forward(self, x: torch.Tensor, image: slice) -> torch.Tensor:
        """(B, L, C) -> (B, L, C'); ``image``: the image's positions"""
        text, picture = self.multiway
        return torch.cat([text(x[:, : image.start]), picture(x[:, image]), text(x[:, image.stop :])], dim=1)


class RMSNorm(nn.Module):
    """In float32, as LLaMA's, whatever the dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class LanguageAttention(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = Multiway(lambda: nn.Linear(width, width, bias=False))
        self.v_proj = Multiway(lambda: nn.Linear(width, width, bias=False))
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, image: slice, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        query = _rotate(_split(self.q_proj(x), self.heads), rotation)
        key = _rotate(_split(self.k_proj(x, image), self.heads), rotation)
        value = _split(self.v_proj(x, image), self.heads)
        return self.o_proj(attention(query, key, value, causal=True))  # type: ignore[no-any-return]


class LanguageMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class LanguageLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = LanguageAttention(config)
        self.mlp = LanguageMLP(width, config["intermediate_size"])
        self.input_layernorm = Multiway(lambda: RMSNorm(width, eps))
        self.post_attention_layernorm = Multiway(lambda: RMSNorm(width, eps))

    def forward(self, x: torch.Tensor, image: slice, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x, image), image, rotation)
        return x + self.mlp(self.post_attention_layernorm(x, image))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """LLaMA, and the image's encoders, which the checkpoint has inside it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, visual = config["hidden_size"], config["visual_config"]
        self.head_width = width // config["num_attention_heads"]
        self.theta = config.get("rope_theta", 10000.0)
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(LanguageLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(width, config["rms_norm_eps"])
        self.vision_model = VisionModel(visual["visual_model"])
        self.visual_abstractor = Abstractor(visual["visual_abstractor"], width)

    def forward(self, pixels: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Pixels (B, 3, side, side), token ids before and after the image -> (B, C), at the last position."""
        picture = self.visual_abstractor(self.vision_model(pixels))
        image = slice(len(before), len(before) + picture.shape[1])
        text = (self.embed_tokens(ids).expand(len(pixels), -1, -1) for ids in (before, after))
        x = torch.cat([next(text), picture, next(text)], dim=1)
        rotation = _rotation(x.shape[1], self.head_width, self.theta, x)
        for layer in self.layers:
            x = layer(x, image, rotation)
        return self.norm(x[:, -1])  # type: ignore[no-any-return]


class MPLUGOwl2(nn.Module):
    """Args: config: the content of the checkpoint's ``config.json`` (``model_type`` mplug_owl2)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = LanguageModel(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(
        self, pixels: torch.Tensor, before: torch.Tensor, after: torch.Tensor, words: Sequence[int]
    ) -> torch.Tensor:
        """Logits (B, len(words)) of the tokens ``words`` as the next one after ``before``, the image and ``after``."""
        return functional.linear(self.model(pixels, before, after), self.lm_head.weight[list(words)])


def _rotation(length: int, width: int, theta: float, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (L, width) of rotary positions 0 .. L - 1, computed in float32."""
    powers = torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), theta**-powers)
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions of (B, H, L, width)."""
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]
