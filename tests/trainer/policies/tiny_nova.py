"""A tiny NOVA pipeline in the official layout, with weights that a name and a shape determine.

numpy's ``RandomState`` keeps its numbers for ever, so the fixtures hold only what the official code computed from
these weights, not the weights. ``fixtures/nova/make.py`` uses this module, too: it needs neither the project's
trainer nor any of the official code.
"""

import hashlib
import json
import math
import re
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

TRANSFORMER = {
    "_class_name": "NOVATransformer3DModel",
    "image_dim": 4,
    "image_size": [64, 96],
    "image_stride": 8,
    "text_token_dim": 32,
    "text_token_len": 12,
    "rotary_pos_embed": False,
    "video_base_size": [1, 2, 3],
    "image_base_size": [4, 6],
    "arch": ["vit_d2w32h2", "vit_d4w32h2", "mlp_d2w48"],
}
ROTARY = TRANSFORMER | {"rotary_pos_embed": True, "arch": ["vit_d2w32h1", "vit_d4w32h1", "mlp_d2w48"]}
DDPM = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,  # milder than the official ones: a random head would blow up the latents,
    "beta_end": 0.002,  # and rounding with them
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
    "variance_type": "fixed_small",
    "timestep_spacing": "trailing",
    "clip_sample": False,
}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 2.0}
VAE = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [32, 32, 32, 32],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "scaling_factor": 0.5,
    "shift_factor": 0.1,
    "sample_size": 96,
}
PHI = {
    "architectures": ["PhiEncoderModel"],
    "model_type": "phi",
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "torch_dtype": "float32",
}
OFFICIAL = {
    name: TRANSFORMER
    | {
        "image_size": [pixels, pixels],
        "text_token_dim": 2560,
        "text_token_len": 256,
        "video_base_size": [1, pixels // 32, pixels // 32],
        "image_base_size": [pixels // 16, pixels // 16],
        "arch": [f"vit_d16w{width}", f"vit_d32w{width}", f"mlp_d6w{width}"],
    }
    for name, pixels, width in (
        ("nova-d48w1024-sd512", 512, 1024),
        ("nova-d48w768-sdxl1024", 1024, 768),
        ("nova-d48w1536-sdxl1024", 1024, 1536),
    )
}
OFFICIAL["a mixer of frames"] = OFFICIAL["nova-d48w768-sdxl1024"] | {"video_mixer_rank": 24}
KINDS = {"abs": (TRANSFORMER, DDPM), "rotary": (ROTARY, FLOW)}
SETTINGS = {"ar_steps": 6, "diffusion_steps": 5, "guidance": 3.0, "frozen_dtype": "float32"}
"""of the fixtures' rollouts, and of the policies that are compared with them"""
PROMPTS = ["a red cat", "two dogs left of a very long blue table"]  # the second is longer than 12 tokens


def seeded(name, *shape):
    """Standard normal float32 numbers that ``name`` and ``shape`` determine."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32))


def seeded_state(shapes):
    """name -> shape to name -> weights: matrices keep their input's scale (but for the
    head's last), norms are near one, biases near zero."""
    state = {}
    for name, shape in shapes.items():
        noise = seeded(name, *shape)
        if len(shape) > 1:
            gain = 0.3 if name.endswith(".head.weight") else 1.0
            state[name] = noise * (gain / np.sqrt(np.prod(shape[1:])))
        else:
            state[name] = noise * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return state


def shapes_of(module):
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def summary(shapes):
    """How many tensors and numbers, a hash of all names and shapes, and the shapes with layers counted."""
    lines = [f"{name} {list(shape)}" for name, shape in sorted(shapes.items())]
    patterns = Counter(re.sub(r"blocks\.\d+", "blocks.*", line) for line in lines)
    return {
        "tensors": len(lines),
        "numbers": sum(math.prod(shape) for shape in shapes.values()),
        "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        "patterns": dict(sorted(patterns.items())),
    }


def write_tokenizer(folder):
    """Byte-level BPE in the files of CodeGen's tokenizer: 256 bytes, an end-of-text token, a few merges."""
    folder.mkdir(parents=True)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    symbols = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(rest))]
    merges = ["Ġ a", "r e", "Ġ t", "Ġt w", "d o", "l e", "o f"]
    words = [*symbols, "<|endoftext|>", *(m.replace(" ", "") for m in merges)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    end = "<|endoftext|>"
    special = {"bos_token": end, "eos_token": end, "unk_token": end, "pad_token": end}
    config = {"tokenizer_class": "CodeGenTokenizer", "model_max_length": 2048, "add_prefix_space": False, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


SCHEDULER_MODULES = {"DDPMScheduler": "scheduling_ddpm", "FlowMatchEulerDiscreteScheduler": "scheduling_cfm"}


def write_pipeline(folder: Path, shapes, transformer=TRANSFORMER, scheduler=DDPM):
    """The folder of a pipeline. ``shapes``: part -> name -> shape, for transformer, vae and text_encoder."""
    index = {
        "_class_name": "NOVAPipeline",
        "transformer": ["diffnext.models.transformers.transformer_nova", "NOVATransformer3DModel"],
        "scheduler": [f"diffnext.schedulers.{SCHEDULER_MODULES[scheduler['_class_name']]}", scheduler["_class_name"]],
        "vae": ["diffnext.models.autoencoders.autoencoder_kl", "AutoencoderKL"],
        "text_encoder": ["diffnext.models.text_encoders.phi", "PhiEncoderModel"],
        "tokenizer": ["transformers", "CodeGenTokenizerFast"],
    }
    configs = {"transformer": transformer, "vae": VAE, "text_encoder": PHI}
    files = {"transformer": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}
    for part, config in configs.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(config))
        state = seeded_state(shapes[part])
        save_file(state, folder / part / f"{files[part]}.safetensors", metadata={"format": "pt"})
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "model_index.json").write_text(json.dumps(index))
    write_tokenizer(folder / "tokenizer")
    return folder


def our_shapes(transformer=TRANSFORMER):
    """Part -> name -> shape of the modules that the trainer reads: the official ones, by a test."""
    from diffusers import AutoencoderKL
    from transformers import PhiConfig, PhiModel

    from trainer.policies.nova_model import NovaConfig, NovaTransformer

    phi = PhiModel(PhiConfig(**{k: v for k, v in PHI.items() if k != "architectures"}))
    text = {f"model.{name}": shape for name, shape in shapes_of(phi).items()}
    text |= {"lm_head.weight": (PHI["vocab_size"], PHI["hidden_size"]), "lm_head.bias": (PHI["vocab_size"],)}
    vae = AutoencoderKL(**{k: v for k, v in VAE.items() if not k.startswith("_")})
    model = NovaTransformer(NovaConfig.read(transformer))
    return {"transformer": shapes_of(model), "vae": shapes_of(vae), "text_encoder": text}
