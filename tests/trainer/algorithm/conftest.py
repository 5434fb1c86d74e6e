"""A toy policy whose head is a formula, and trajectories that it could have made."""

import pytest
import torch

from trainer.algorithm.transitions import DDPM, sample
from trainer.algorithm.types import Gaussian, Queries, Trajectory


class Toy:
    """prediction = tanh(x/2 + z + time/1000), nonlinear; z (K, B, N, C) is the condition, and the parameter."""

    def __init__(self, images=4, tokens=6, channels=2, ar_steps=4, diffusion_steps=5, extra=3, seed=0, schedule=None):
        self.generator = torch.Generator().manual_seed(seed)
        self.schedule = schedule or DDPM.cosine(steps=diffusion_steps, prediction="v")
        self.shape = (images, tokens, channels)
        self.ar_steps, self.extra = ar_steps, extra
        self.z_KBNC = self.normal(ar_steps, *self.shape)
        self.seeds = [seed * 1000 + i for i in range(images)]

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def transition(self, x_QC, z_QC, step_Q):
        time = self.schedule.timesteps.double()[step_Q].unsqueeze(-1) / 1000
        return self.schedule.transition(torch.tanh(0.5 * x_QC + z_QC + time), x_QC, step_Q)

    def chains(self, z_BNC):
        """(B, N, T+1, C) sampled from one condition."""
        z_QC = z_BNC.reshape(-1, z_BNC.shape[-1])
        states = [self.normal(*z_QC.shape)]
        for s in range(self.schedule.steps):
            step_Q = torch.full((len(z_QC),), s)
            states.append(sample(self.transition(states[-1], z_QC, step_Q), self.normal(*z_QC.shape)))
        return torch.stack(states, dim=1).view(*z_BNC.shape[:-1], self.schedule.steps + 1, -1)

    def rollout(self):
        images, tokens, _ = self.shape
        order_BN = torch.rand(images, tokens, generator=self.generator).argsort(dim=1)
        predicted_at_BN = torch.empty_like(order_BN).scatter_(
            1, order_BN, (torch.arange(tokens) * self.ar_steps // tokens).expand(images, tokens)
        )
        full = {k: self.chains(self.z_KBNC[k]) for k in range(self.ar_steps)}
        chain = torch.stack([full[k] for k in range(self.ar_steps)])
        b_B1, n_1N = torch.arange(images)[:, None], torch.arange(tokens)
        chain_BNTC = chain[predicted_at_BN, b_B1, n_1N]
        stitched_BNC = self.z_KBNC[predicted_at_BN, b_B1, n_1N]
        extra = [self.chains(stitched_BNC) for _ in range(self.extra)]
        return Trajectory(
            prompt_ids=torch.zeros(images, 1, dtype=torch.int64),
            tokens=chain_BNTC[:, :, -1],
            predicted_at=predicted_at_BN,
            chain=chain_BNTC,
            stitched=stitched_BNC[:, None],
            full_chains=full,
            full_latents={k: c[:, :, -1] for k, c in full.items()},
            extra_chains=torch.stack(extra, dim=1) if extra else None,
        )

    def forward(self, z_KBNC, ar_step: int, queries: Queries) -> Gaussian:
        return self.transition(queries.x, z_KBNC[ar_step, queries.image, queries.token], queries.step)


@pytest.fixture(scope="session")
def toy():
    return Toy


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
