"""A tiny Harmon checkpoint in the official layout: the fixture's weights, and an autoencoder of random ones.

Random weights prove plumbing and parity, not quality.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from trainer.policies.harmon import HarmonPolicy
from trainer.policies.kl16 import KL16, KL16Config

FIXTURES = Path(__file__).parent / "fixtures" / "harmon"
VAE = {"width": 32, "channels": 8, "multipliers": [1, 1, 1, 1, 1], "blocks": 1}


def tiny_state():
    """name -> tensor under the official keys; the same numbers at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = KL16(KL16Config(**VAE))
    return load_file(FIXTURES / "weights.safetensors") | {f"vae.{k}": v for k, v in vae.state_dict().items()}


def write_checkpoint(folder, state=None):
    """The folder of a checkpoint; ``state``: other weights than :func:`tiny_state`."""
    folder.mkdir(parents=True)
    config = json.loads((FIXTURES / "config.json").read_text()) | {"vae": VAE}
    (folder / "config.json").write_text(json.dumps(config))
    for file in (FIXTURES / "tokenizer").iterdir():
        shutil.copyfile(file, folder / file.name)
    save_file(tiny_state() if state is None else state, folder / "model.safetensors", {"format": "pt"})
    return folder


def tiny_harmon(folder, **changes):
    """The fixture's model as a policy: 6 x 6 tokens, interpolated from 4 x 4, K = 5, T = 5, guidance 3."""
    settings = {"ar_steps": 5, "diffusion_steps": 5, "guidance": 3.0, "image_size": 96, "frozen_dtype": "float32"}
    return HarmonPolicy.load(folder, **settings | changes)
