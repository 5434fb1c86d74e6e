"""Models without weights, from their configuration alone: what ``--dry-run`` measures.

Sizes come from the configuration in the folder that ``policy.checkpoint`` names, or, for the published checkpoints,
from here, so that nothing need be downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import families
from trainer.config import Config, UserError
from trainer.policies.masked import MaskedPolicy

NOVA_SIZES = {
    "BAAI/nova-d48w1024-sd512": (512, 1024),
    "BAAI/nova-d48w768-sdxl1024": (1024, 768),
    "BAAI/nova-d48w1024-sdxl1024": (1024, 1024),
    "BAAI/nova-d48w1536-sdxl1024": (1024, 1536),
}
"""Pixels and width of the published models"""
PHI_2: dict[str, Any] = {
    "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 51200,
}  # fmt: skip
QWEN = {"model_type": "qwen2", "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "num_key_value_heads": 2}
HARMON_SIZES: dict[str, dict[str, Any]] = {
    "wusize/Harmon-0_5B": {
        "llm": QWEN
        | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
        "mar": {"type": "mar_base", "diffloss_d": 6, "diffloss_w": 1024},
    },
    "wusize/Harmon-1_5B": {
        "llm": QWEN
        | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
        "mar": {"type": "mar_huge", "diffloss_d": 12, "diffloss_w": 1536},
    },
}


@dataclass
class Outline:
    """A policy on the meta device, and what runs beside it without ever being trained."""

    policy: MaskedPolicy
    prompt_ids: Callable[[int], Tensor]
    """(B, L) ids of prompts of usual length, which need no tokenizer"""
    frozen: dict[str, nn.Module] = field(default_factory=dict)
    """by name; what is a module of the policy's own is not among them"""
    in_forward: Sequence[nn.Module] = ()
    """those of them that a gradient flows through"""


def outline(config: Config) -> Outline:
    """Raises UserError for a family that has none, or a model whose configuration is not here."""
    name = config.policy.name
    build = {"small": _small, "mar": _mar, "nova": _nova, "harmon": _harmon}.get(name)
    families.family_of(name)
    if build is None:
        raise UserError(f"--dry-run does not know how to build {name} without weights")
    arguments = families.load_arguments(config.policy)
    checkpoint = config.policy.checkpoint or ""
    path = Path(checkpoint)
    if checkpoint and path.exists():
        path = Path(families.policy_source(checkpoint, name))
    sampling = {k: v for k, v in arguments.items() if k in families.EVERY_FAMILY}
    options = {k: v for k, v in arguments.items() if k not in families.EVERY_FAMILY}
    try:
        model = build(checkpoint, path, sampling, options)
    except (ValueError, OSError) as error:
        raise UserError(f"policy: {error}") from error
    model.policy.head_precision = options.get("head_precision", model.policy.head_precision)
    return model


def _unknown(name: str, checkpoint: str, known: Sequence[str]) -> UserError:
    return UserError(
        f"the configuration of {name} {checkpoint or '(no policy.checkpoint)'} is not here: name its folder, or one of "
        f"{', '.join(known)}"
    )


def _small(checkpoint: str, path: Path, sampling: dict[str, Any], options: dict[str, Any]) -> Outline:
    from trainer.policies.small import MAX_WORDS, SmallPolicy

    policy = SmallPolicy.load(families.policy_source(checkpoint or None, "small"), **sampling).to("meta")
    return Outline(policy, lambda count: torch.full((count, MAX_WORDS), 2))


def _mar(checkpoint: str, path: Path, sampling: dict[str, Any], options: dict[str, Any]) -> Outline:
    from trainer.policies.kl16 import KL16, KL16Config
    from trainer.policies.mar import MarPolicy
    from trainer.policies.mar_parts import MAR_SIZES, Mar

    size = options.get("size") or "base"
    if size not in MAR_SIZES:
        raise UserError(f"policy.options.size: there is no MAR {size!r}; there are {', '.join(MAR_SIZES)}")
    guidance = {k: v for k, v in options.items() if k == "guidance_schedule"}
    with torch.device("meta"):
        model, vae = Mar(MAR_SIZES[size]), KL16(KL16Config())
    return Outline(
        MarPolicy(model, vae, **sampling, **guidance), lambda count: torch.zeros(count, 1, dtype=torch.int64)
    )


class _NoText:
    """In the place of NOVA's text encoder: prompts of which nothing is known but their length."""

    def __init__(self, length: int, width: int) -> None:
        self.length, self.width = length, width

    def tokenize(self, prompts: Sequence[str]) -> Tensor:
        return torch.full((len(prompts), self.length), -1)

    def embed(self, prompt_ids: Tensor) -> list[Tensor]:
        return [torch.empty(0, self.width) for _ in prompt_ids]


def _nova(checkpoint: str, path: Path, sampling: dict[str, Any], options: dict[str, Any]) -> Outline:
    from transformers import PhiConfig, PhiModel

    from trainer.algorithm.transitions import DDPM, FlowSDE
    from trainer.policies.nova import NovaPolicy
    from trainer.policies.nova_model import NovaConfig, NovaTransformer
    from trainer.policies.nova_parts import read_json

    if (path / "transformer" / "config.json").is_file():
        content = read_json(path / "transformer" / "config.json")
    elif checkpoint in NOVA_SIZES:
        pixels, width = NOVA_SIZES[checkpoint]
        content = {
            "image_dim": 4, "image_size": [pixels, pixels], "image_stride": 8, "text_token_dim": 2560,
            "text_token_len": 256, "image_base_size": [pixels // 16] * 2,
            "video_base_size": [1, pixels // 32, pixels // 32],
            "arch": [f"vit_d16w{width}", f"vit_d32w{width}", f"mlp_d6w{width}"],
        }  # fmt: skip
    else:
        raise _unknown("NOVA", checkpoint, list(NOVA_SIZES))
    sizes = NovaConfig.read(content)
    ar_steps, steps = sampling.get("ar_steps", 64), sampling.get("diffusion_steps", 25)
    flow = torch.linspace(1, 0, steps + 1)
    schedule = FlowSDE(flow, options.get("flow_noise", 0.7)) if sizes.image_size[0] > 512 else DDPM.linear(steps=steps)
    with torch.device("meta"):
        transformer = NovaTransformer(sizes)
        text = PhiModel(PhiConfig(**PHI_2))
        vae = import_module("diffusers").AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=sizes.image_dim,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )
    prompts: Any = _NoText(sizes.text_token_len, sizes.text_token_dim)
    images: Any = None
    policy = NovaPolicy(
        transformer, prompts, images, schedule, ar_steps=ar_steps, guidance=sampling.get("guidance", 5.0), base=""
    )
    frozen: dict[str, nn.Module] = {"VAE": vae, "text encoder (Phi-2; freed once all prompts are embedded)": text}
    return Outline(policy, lambda count: torch.arange(count)[:, None].expand(-1, sizes.text_token_len), frozen)


def _harmon(checkpoint: str, path: Path, sampling: dict[str, Any], options: dict[str, Any]) -> Outline:
    from trainer.policies.harmon import HarmonPolicy
    from trainer.policies.harmon_model import HarmonConfig, read_config

    if checkpoint and path.is_dir():
        content = read_config(path)
    elif checkpoint in HARMON_SIZES:
        content = HARMON_SIZES[checkpoint]
    else:
        raise _unknown("Harmon", checkpoint, list(HARMON_SIZES))
    chosen = {k: v for k, v in options.items() if k == "image_size"}
    with torch.device("meta"):
        policy = HarmonPolicy(HarmonConfig.from_json(content, checkpoint), _NoTokenizer(), **sampling, **chosen)  # type: ignore[arg-type]
    parts = policy.frozen
    frozen: dict[str, nn.Module] = {
        "language model": parts.llm,
        "projections": nn.ModuleList([parts.proj_in, parts.proj_out]),
    }
    parts.llm.renew_buffers()
    return Outline(
        policy, lambda count: torch.ones(count, 64, dtype=torch.int64), frozen | {"autoencoder": parts.vae}, [parts]
    )


class _NoTokenizer:
    """In the place of Harmon's: a null prompt of the same length as the others."""

    def with_null(self, prompt_ids_BL: Tensor) -> Tensor:
        return prompt_ids_BL.repeat(2, 1)
