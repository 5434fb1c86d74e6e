"""The trainer: MAR-GRPO for masked autoregressive image models with a diffusion head."""
