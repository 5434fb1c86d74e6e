"""A tiny MAR and autoencoder whose weights their names and shapes determine, so that fixtures need not hold them.

numpy's ``RandomState`` keeps its numbers for ever. ``fixtures/mar/make.py`` imports this module, too: it needs
nothing of the project. Random weights prove plumbing and parity, not quality.
"""

import zlib

import numpy as np
import torch

MAR = {"width": 32, "depth": 2, "heads": 2, "grid": 4, "channels": 4, "buffer": 3, "classes": 6}
MAR |= {"head_width": 24, "head_depth": 2}
KL16 = {"width": 32, "multipliers": (1, 1, 2), "blocks": 1, "channels": 4}


def seeded(name, *shape):
    """Standard normal float32 numbers that ``name`` and ``shape`` determine."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32))


def seeded_state(module):
    """Weights for a module's names and shapes: matrices keep their input's scale, gains are near one."""
    state = {}
    for name, value in module.state_dict().items():
        noise = seeded(name, *value.shape)
        if name.endswith(("_learned", "class_emb.weight", "fake_latent", "mask_token")):
            state[name] = 0.5 * noise
        elif value.ndim > 1:
            state[name] = noise / np.sqrt(np.prod(value.shape[1:]))
        else:
            state[name] = 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)  # a norm's gain
    return state


def tiny_mar(*, calm=False, **settings):
    """The fixtures' model as a policy: 4 x 4 tokens, classes 0..5 without names, K = 5, T = 6, guidance 3.

    ``calm``: diffusion starts at timestep 800, not 999, where a random head's error is not blown up to 1e4 in x_0.
    """
    from trainer.algorithm.transitions import DDPM
    from trainer.policies import kl16, mar, mar_parts

    model, vae = mar_parts.Mar(mar_parts.MarConfig(**MAR)), kl16.KL16(kl16.KL16Config(**KL16))
    for module in (model, vae):
        module.load_state_dict(seeded_state(module))
    policy = mar.MarPolicy(model, vae, **{"ar_steps": 5, "diffusion_steps": 6, "guidance": 3.0} | settings).eval()
    if calm:
        alphas_cumprod = policy.schedule.alphas_cumprod
        policy.schedule = DDPM(alphas_cumprod, [800, 640, 480, 320, 160, 0], "epsilon", "learned_range")
    return policy
