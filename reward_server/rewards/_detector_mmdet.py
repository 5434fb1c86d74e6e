"""Mask2Former with a Swin backbone: from mmdet's checkpoint to the names of the models on the Hugging Face hub.

Source of the names: mmdet 2.28 (``configs/mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.py``) and
transformers 5 (``Mask2FormerForUniversalSegmentation``). Both describe one network; apart from names they differ in two
orders: mmdet keeps query, key and value in one matrix, and merges the four neighbours of a patch channel by channel
(``nn.Unfold``) where transformers merges them neighbour by neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Mask2FormerConfig, SwinConfig

from reward_server.rewards.base import RewardLoadError

_DECODER_HEADS = 8
"""Attention heads of the transformer decoder: the one size that the tensors' shapes do not tell"""

_SECTIONS = (  # prefix in mmdet, prefix on the hub, and what is replaced behind it, in this order
    (
        "backbone.",
        "model.pixel_level_module.encoder.",
        (
            ("patch_embed.projection.", "embeddings.patch_embeddings.projection."),
            ("patch_embed.norm.", "embeddings.norm."),
            ("stages.", "encoder.layers."),
            (".norm1.", ".layernorm_before."),
            (".norm2.", ".layernorm_after."),
            (".attn.w_msa.proj.", ".attention.output.dense."),
            (".attn.w_msa.", ".attention.self."),
            (".ffn.layers.0.0.", ".intermediate.dense."),
            (".ffn.layers.1.", ".output.dense."),
            *((f"norm{stage}.", f"hidden_states_norms.stage{stage + 1}.") for stage in range(4)),
        ),
    ),
    (
        "panoptic_head.pixel_decoder.",
        "model.pixel_level_module.decoder.",
        (
            ("input_convs.", "input_projections."),
            ("lateral_convs.0.", "adapter_1."),
            ("output_convs.0.", "layer_1."),
            (".conv.", ".0."),
            (".gn.", ".1."),
            (".attentions.0.", ".self_attn."),
            (".ffns.0.layers.0.0.", ".fc1."),
            (".ffns.0.layers.1.", ".fc2."),
            (".norms.0.", ".self_attn_layer_norm."),
            (".norms.1.", ".final_layer_norm."),
            ("level_encoding.weight", "level_embed"),
            ("mask_feature.", "mask_projection."),
        ),
    ),
    (
        "panoptic_head.transformer_decoder.",
        "model.transformer_module.decoder.",
        (
            (".attentions.0.attn.", ".cross_attn."),
            (".attentions.1.attn.", ".self_attn."),
            (".norms.0.", ".cross_attn_layer_norm."),
            (".norms.1.", ".self_attn_layer_norm."),
            (".norms.2.", ".final_layer_norm."),
            (".ffns.0.layers.0.0.", ".fc1."),
            (".ffns.0.layers.1.", ".fc2."),
            ("post_norm.", "layernorm."),
        ),
    ),
    ("panoptic_head.cls_embed.", "class_predictor.", ()),
    ("panoptic_head.query_embed.", "model.transformer_module.queries_embedder.", ()),
    ("panoptic_head.query_feat.", "model.transformer_module.queries_features.", ()),
    ("panoptic_head.level_embed.", "model.transformer_module.level_embed.", ()),
    *(
        (
            f"panoptic_head.mask_embed.{2 * layer}.",
            f"model.transformer_module.decoder.mask_predictor.mask_embedder.{layer}.0.",
            (),
        )
        for layer in range(3)
    ),
)


def is_mmdet(state: Mapping[str, torch.Tensor]) -> bool:
    """Whether these are the names of an mmdet Mask2Former."""
    return any(key.startswith("panoptic_head.") for key in state)


def convert(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of mmdet's checkpoint under the names and in the orders of the hub's checkpoints.

    A key that mmdet's model does not have gets a name that the hub's does not have: strict loading finds it.
    """
    converted: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if key.endswith("relative_position_index"):
            continue  # a constant of the window size
        if ".qkv." in key:
            parts = zip(("query.", "key.", "value."), value.chunk(3), strict=True)
            converted |= {_rename(key.replace("qkv.", name)): part.contiguous() for name, part in parts}
        elif ".attentions.1.attn.in_proj_" in key:  # cross-attention (.0.) is torch's module in both
            parts = zip(("q_proj.", "k_proj.", "v_proj."), value.chunk(3), strict=True)
            converted |= {_rename(key.replace("in_proj_", name)): part.contiguous() for name, part in parts}
        else:
            converted[_rename(key)] = _reorder(value) if ".downsample." in key else value
    return converted


def _rename(key: str) -> str:
    for prefix, new_prefix, replacements in _SECTIONS:
        if key.startswith(prefix):
            rest = key.removeprefix(prefix)
            for old, new in replacements:
                rest = rest.replace(old, new)
            return new_prefix + rest
    return key


def _reorder(value: torch.Tensor) -> torch.Tensor:
    """Last axis from (channel, row, column) of ``nn.Unfold`` to (column, row, channel) of transformers' slices."""
    channels = value.shape[-1] // 4
    split = value.reshape(*value.shape[:-1], channels, 2, 2)
    return split.transpose(-3, -1).reshape(value.shape)


def config_of(state: Mapping[str, torch.Tensor], labels: tuple[str, ...]) -> Mask2FormerConfig:
    """The network's sizes, read off the shapes of mmdet's checkpoint.

    Args:
        labels: name of each class, in the order of the outputs.

    Raises:
        RewardLoadError: a tensor without which the sizes are unknown is missing, or has another number of classes.
    """
    try:
        depths = [_count(state, rf"backbone\.stages\.{stage}\.blocks\.(\d+)\.") for stage in range(4)]
        table = "backbone.stages.{}.blocks.0.attn.w_msa.relative_position_bias_table"
        points = state["panoptic_head.pixel_decoder.encoder.layers.0.attentions.0.attention_weights.weight"].shape[0]
        backbone: dict[str, Any] = {
            "embed_dim": state["backbone.patch_embed.projection.weight"].shape[0],
            "depths": depths,
            "num_heads": [state[table.format(stage)].shape[1] for stage in range(4)],
            "window_size": (round(state[table.format(0)].shape[0] ** 0.5) + 1) // 2,
            "drop_path_rate": 0.0,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        }
        queries, width = state["panoptic_head.query_feat.weight"].shape
        classes = state["panoptic_head.cls_embed.weight"].shape[0] - 1
        hidden = "panoptic_head.{}.layers.0.ffns.0.layers.0.0.weight"
        sizes: dict[str, Any] = {
            "backbone_config": SwinConfig(**backbone),
            "feature_size": width,
            "hidden_dim": width,
            "mask_feature_size": state["panoptic_head.pixel_decoder.mask_feature.weight"].shape[0],
            "encoder_layers": _count(state, r"panoptic_head\.pixel_decoder\.encoder\.layers\.(\d+)\."),
            "encoder_feedforward_dim": state[hidden.format("pixel_decoder.encoder")].shape[0],
            "decoder_layers": 1 + _count(state, r"panoptic_head\.transformer_decoder\.layers\.(\d+)\."),
            "dim_feedforward": state[hidden.format("transformer_decoder")].shape[0],
            "num_attention_heads": _DECODER_HEADS,
            "num_queries": queries,
            "num_labels": classes,
        }
    except KeyError as error:
        raise RewardLoadError(f"the checkpoint is no Mask2Former with a Swin backbone: it lacks {error}") from None
    if points != _DECODER_HEADS * 3 * 4:
        raise RewardLoadError(
            f"the checkpoint's pixel decoder has {points} sampling weights, not 8 heads x 3 levels x 4 points"
        )
    if classes != len(labels):
        raise RewardLoadError(f"the checkpoint detects {classes} classes, not the {len(labels)} of COCO instances")
    return Mask2FormerConfig(**sizes)


def _count(state: Mapping[str, torch.Tensor], pattern: str) -> int:
    """One more than the largest number that a key has where ``pattern`` has its group."""
    return 1 + max((int(match[1]) for key in state if (match := re.match(pattern, key))), default=-1)
