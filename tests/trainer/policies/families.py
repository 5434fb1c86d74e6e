"""A tiny checkpoint of every family, by name: what the tests that hold for all of them are run on.

Random weights prove plumbing, not quality. To add a family, write a function that makes its files in a folder, and
name it in FAMILIES.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.trainer.policies.tiny_mar import calm
from trainer.families import family_of

K, T = 4, 5


@dataclass(frozen=True)
class Family:
    """Where a tiny checkpoint is and how to read it."""

    name: str
    source: Path
    prompts: list
    """four, of different lengths where it matters"""
    options: dict = field(default_factory=dict)

    def load(self, source=None, **changes):
        settings = {"ar_steps": K, "diffusion_steps": T, "guidance": 2.5, **self.options, **changes}
        policy = family_of(self.name).load(self.source if source is None else source, **settings)
        return calm(policy) if getattr(policy.schedule, "variance", None) == "learned_range" else policy


def small(folder):
    from trainer.policies.small import SmallConfig, SmallPolicy

    torch.manual_seed(0)
    policy = SmallPolicy(SmallConfig(width=32, depth=2, heads=2, head_width=32, head_depth=1, channels=8))
    for name, parameter in policy.named_parameters():
        if "modulation" in name:  # zero at the start of a real training: nothing would reach z
            torch.nn.init.normal_(parameter, std=0.1)
    policy.codec_basis.normal_(std=0.1)
    policy.save(folder / "small.safetensors")
    prompts = ["a red circle", "two blue squares", "a green triangle left of a red circle", "three circles"]
    return Family("small", folder / "small.safetensors", prompts)


def mar(folder):
    from safetensors.torch import save_file

    from tests.trainer.policies.tiny_mar import tiny_mar

    policy = tiny_mar()
    policy.save(folder / "mar.safetensors")
    save_file(policy.vae.state_dict(), folder / "kl16.safetensors")
    options = {"vae": str(folder / "kl16.safetensors")}
    return Family("mar", folder / "mar.safetensors", ["0", "1", "5", "3"], options)


def harmon(folder):
    from tests.trainer.policies.tiny_harmon import write_checkpoint

    options = {"image_size": 96, "frozen_dtype": "float32"}
    prompts = ["a red cube", "two small dogs on a sofa, 3 cats behind", "a cat", "the sea"]
    return Family("harmon", write_checkpoint(folder / "harmon"), prompts, options)


def nova(folder):
    from tests.trainer.policies.tiny_nova import our_shapes, write_pipeline

    prompts = ["a red cat", "two dogs left of a very long blue table", "a dog", "the sea"]
    return Family("nova", write_pipeline(folder / "nova", our_shapes()), prompts, {"frozen_dtype": "float32"})


FAMILIES = {"small": small, "mar": mar, "harmon": harmon, "nova": nova}
