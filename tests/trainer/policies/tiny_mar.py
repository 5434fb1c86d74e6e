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
        if ".final_layer.linear." in name:
            state[name] *= 0.2  # so that the head's variances stay in their range, as a trained one's do
    return state


def calm(policy):
    """Diffusion from timestep 800 instead of 999, with the same number of steps, for a policy with the cosine schedule.

    At 999 the signal is 1/20000 of x_0: what is wrong in a random head's noise estimate makes chains of 1e4, in which
    float32 rounds off what a log-probability is made of. A trained head cancels nearly all of it.
    """
    from trainer.algorithm.transitions import DDPM

    steps = policy.schedule.steps
    timesteps = [800 * i // (steps - 1) for i in reversed(range(steps))]
    policy.schedule = DDPM(policy.schedule.alphas_cumprod, timesteps, "epsilon", "learned_range")
    return policy


def tiny_mar(**settings):
    """The fixtures' model as a policy: 4 x 4 tokens, classes 0..5 without names, K = 5, T = 6, guidance 3."""
    from trainer.policies import kl16, mar, mar_parts

    model, vae = mar_parts.Mar(mar_parts.MarConfig(**MAR)), kl16.KL16(kl16.KL16Config(**KL16))
    for module in (model, vae):
        module.load_state_dict(seeded_state(module))
    return mar.MarPolicy(model, vae, **{"ar_steps": 5, "diffusion_steps": 6, "guidance": 3.0} | settings).eval()
