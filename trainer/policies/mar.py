"""LTH14's MAR (Li et al., arXiv 2406.11838; code and weights MIT) as a policy: ImageNet classes at 256 px.

A prompt is the name of a class ("goldfish") or its index ("1"). The unconditional half of guidance is the learnt null
class. Files: see :mod:`trainer.policies.mar_files`; model: :mod:`trainer.policies.mar_parts`. Shapes: see
:mod:`trainer.algorithm.types`; N = 256 tokens of C = 16 channels. Sampling temperature is 1.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.policies.base import Policy
from trainer.policies.kl16 import KL16
from trainer.policies.mar_files import (
    folder_of,
    mar_config,
    model_file,
    read_kl16,
    read_state,
    vae_file,
    write_official,
)
from trainer.policies.mar_parts import Mar, MarConfig, known_index, load_strictly, mar_schedule
from trainer.policies.masked import HeadPrecision, MaskedPolicy, checked

GuidanceSchedule = Literal["linear", "constant"]
DECODED_AT_ONCE = 8
"""images that the autoencoder decodes together, which bounds its activations"""


@cache
def imagenet_classes() -> tuple[str, ...]:
    """The 1000 names of ImageNet-1k in the order of their indices, as torchvision has them; all are different."""
    return tuple((Path(__file__).parent / "imagenet_classes.txt").read_text(encoding="utf-8").splitlines())


def class_index(prompt: str, classes: int) -> int:
    """The class that a prompt names: by index, or by name if there are 1000 of them.

    Case matters only where names differ by it ("Cardigan", the dog, and "cardigan"). Raises ValueError, with the
    closest names, for a prompt that is neither.
    """
    text = prompt.strip()
    if text.isdecimal():
        if int(text) < classes:
            return int(text)
        raise ValueError(f"there is no class {text}: MAR's classes are 0..{classes - 1}")
    names = imagenet_classes() if classes == len(imagenet_classes()) else ()
    if text in names:
        return names.index(text)
    lower = [name.lower() for name in names]
    if lower.count(text.lower()) == 1:
        return lower.index(text.lower())
    if not names:
        raise ValueError(f"this MAR has {classes} classes without names; prompts are 0..{classes - 1}, not {prompt!r}")
    close = difflib.get_close_matches(text.lower(), lower, n=5, cutoff=0.6)
    near = dict.fromkeys(name for match in close for name in names if name.lower() == match)
    hint = f"; the closest: {', '.join(near)}" if near else ""
    raise ValueError(f"MAR draws ImageNet's classes, by name or index 0..{classes - 1}; {prompt!r} is none{hint}")


class MarPolicy(MaskedPolicy):
    """See the module's docstring.

    ``guidance_schedule``: the scale at an AR step is 1 + (guidance - 1) (share of tokens that are known after it)
    (``linear``; the official evaluation's), or ``guidance`` (``constant``). ``base``: the file or hub id that
    ``vae`` came from.
    """

    def __init__(
        self,
        mar: Mar,
        vae: KL16,
        *,
        ar_steps: int = 64,
        diffusion_steps: int = 100,
        guidance: float = 2.9,
        guidance_schedule: GuidanceSchedule = "linear",
        base: str = "",
    ) -> None:
        super().__init__()
        config = mar.config
        self.tokens, self.channels = config.grid**2, config.channels
        if not 1 <= ar_steps <= self.tokens:
            raise ValueError(f"ar_steps must lie in 1..{self.tokens} for this MAR, not {ar_steps}")
        if guidance_schedule not in ("linear", "constant"):
            raise ValueError(f"guidance_schedule is linear or constant, not {guidance_schedule!r}")
        if vae.config.channels != config.channels:
            raise ValueError(f"MAR has {config.channels} channels a token, the autoencoder {vae.config.channels}")
        self.mar, self.vae, self.base = mar, vae.requires_grad_(False), base
        self.ar_steps, self.guidance, self.guidance_schedule = ar_steps, guidance, guidance_schedule
        self.schedule = mar_schedule(diffusion_steps)

    # ---- the model -------------------------------------------------------------------------------------------

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """(B, 1) int64: the class of each prompt."""
        classes = self.mar.config.classes
        return torch.tensor([class_index(prompt, classes) for prompt in prompts], dtype=torch.int64).reshape(-1, 1)

    def context(self, prompt_ids: Tensor, guided: bool) -> Tensor:
        """(H * B, D): the class embeddings, then the null class once per image."""
        classes_BD: Tensor = self.mar.class_emb(prompt_ids[:, 0])
        if self.halves(guided) == 1:
            return classes_BD
        return torch.cat([classes_BD, self.mar.fake_latent.expand_as(classes_BD)])

    def conditions(self, context: Tensor, tokens_BNC: Tensor, known_BN: Tensor, guided: bool) -> Tensor:
        """z (H, B, N, D): masked tokens are not in the encoder's input at all."""
        B, H = len(tokens_BNC), len(context) // len(tokens_BNC)
        index = known_index(known_BN).repeat(H, 1)
        z = self.mar.decode(self.mar.encode(tokens_BNC.repeat(H, 1, 1), index, context), index)
        return z.reshape(H, B, *z.shape[1:])

    def head_condition(self, z: Tensor) -> Tensor:
        """(..., D) -> (..., W)."""
        return self.mar.head.condition(z)

    def head_output(self, x_QC: Tensor, time_Q: Tensor, condition_QW: Tensor) -> Tensor:
        """(Q, 2C): epsilon and range."""
        out: Tensor = self.mar.head(x_QC, time_Q, condition_QW)
        return out

    def guidance_at(self, ar_step: int) -> float:
        """The guidance scale of an AR step."""
        if self.guidance_schedule == "constant":
            return self.guidance
        # As in the official code, one token counts as masked after the last step, too.
        masked = max(1, self.tokens - sum(self.tokens_per_step()[: ar_step + 1]))
        return 1 + (self.guidance - 1) * (self.tokens - masked) / self.tokens

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> NDArray[np.uint8]:
        """(B, N, C) latents -> (B, height, width, 3) uint8 images."""
        grid = (self.mar.config.grid, self.mar.config.grid)
        pixels = torch.cat([self.vae.decode_tokens(part, grid) for part in torch.split(tokens, DECODED_AT_ONCE)])
        images = ((pixels.float() + 1) * 127.5).clamp(0, 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        out: NDArray[np.uint8] = images.cpu().numpy()
        return out

    # ---- parameters and files --------------------------------------------------------------------------------

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """The diffusion head's parameters."""
        return self.mar.diffloss.parameters()

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """The transformer's and the class embeddings; the null class too, if guidance is used."""
        for name, parameter in self.mar.named_parameters():
            if not name.startswith("diffloss.") and (name != "fake_latent" or self.guidance != 1.0):
                yield parameter

    def saved_module(self) -> nn.Module:
        """The transformer with its head."""
        return self.mar

    def save(self, path: Path, note: dict[str, str] | None = None) -> None:
        """Write the transformer and head under the official names, their sizes, where the autoencoder comes from, and
        ``note``. Equal weights give an equal file: there is one metadata entry, as safetensors does not order them."""
        about = {"config": asdict(self.mar.config), "base": self.base, "note": note or {}}
        temporary = path.with_suffix(".partial")
        state = {name: value.cpu().contiguous() for name, value in self.mar.state_dict().items()}
        save_file(state, temporary, {"mar": json.dumps(about)})
        temporary.replace(path)

    def export(self, folder: Path) -> None:
        """Write ``checkpoint-last.pth`` and ``kl16.ckpt``, which the official code reads; :meth:`load`, too.

        Raises ValueError if the folder is there and not empty.
        """
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty")
        write_official(self.mar, self.vae, folder)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        ar_steps: int = 64,
        diffusion_steps: int = 100,
        guidance: float = 2.9,
        guidance_schedule: GuidanceSchedule = "linear",
        size: Literal["base", "large", "huge"] | None = None,
        vae: str | Path | None = None,
        activation_checkpointing: bool = False,
        head_precision: HeadPrecision = "float32",
    ) -> MarPolicy:
        """Read ``source``: an official checkpoint or a file of :meth:`save`, a folder that the official download made,
        or a hub id (from the local cache).

        ``size``: base, large or huge, where a folder has several. ``vae``: where the autoencoder is, if not by the
        weights. ``activation_checkpointing``: recompute blocks in the backward pass. ``head_precision``:
        :attr:`MaskedPolicy.head_precision`. Raises FileNotFoundError saying how to get what is missing, or ValueError
        for weights or settings that do not fit.
        """
        found = folder_of(str(source))
        path = model_file(found, size) if found.is_dir() else found
        state, about = read_state(path)
        config = MarConfig(**about["config"]) if "config" in about else mar_config(state, str(path))
        with torch.device("meta"):
            mar = Mar(config)
        copies = {key: value.to(torch.float32, copy=True) for key, value in state.items()}  # the file may be mapped
        load_strictly(mar, copies, str(path), assign=True)
        mar.activation_checkpointing = activation_checkpointing
        base = str(vae or about.get("base", source))
        vae_path = vae_file(folder_of(base))
        policy = cls(
            mar,
            read_kl16(vae_path),
            ar_steps=ar_steps,
            diffusion_steps=diffusion_steps,
            guidance=guidance,
            guidance_schedule=guidance_schedule,
            base=str(vae_path.resolve()) if Path(base).exists() else base,
        )
        policy.head_precision = checked(head_precision)
        return policy.eval()


_: type[Policy] = MarPolicy  # the type checker compares the two
