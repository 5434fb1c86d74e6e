"""Harmon text-to-image (Wu et al., arXiv 2503.21979) as a policy. Code and weights are under the S-Lab License 1.0,
which allows no commercial use.

Official checkpoints: ``wusize/Harmon-0_5B`` (Qwen2.5-0.5B and MAR-B) and ``wusize/Harmon-1_5B`` (Qwen2.5-1.5B and
MAR-H). MAR's encoder reads the known tokens, a language model that has read the prompt reads what comes out,
MAR's decoder makes z of both; the head predicts epsilon and the range of its variance. MAR is trained, the rest is
frozen (:mod:`trainer.policies.harmon_model`). Shapes: see :mod:`trainer.algorithm.types`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.policies.base import Policy
from trainer.policies.harmon_model import (
    FrozenParts,
    HarmonConfig,
    PromptEncoder,
    TextContext,
    read_config,
    read_tensors,
    read_weights,
    without_output_layer,
)
from trainer.policies.hub import snapshot
from trainer.policies.mar_parts import Mar, known_index, load_strictly, mar_schedule
from trainer.policies.masked import HeadPrecision, MaskedPolicy, checked

LICENCE = "S-Lab License 1.0: no commercial use"
STRIDE = 16
DECODED_AT_ONCE = 4
"""Images that go through the autoencoder together: bounds its memory."""
NOT_READ = ("class_emb.",)
"""Of MAR, but not used to make an image from text."""
log = logging.getLogger(__name__)


class HarmonPolicy(MaskedPolicy):
    """See the module's docstring.

    ``frozen`` is no submodule: optimizers, wrappers, checkpoints and the reference model see what is trained alone.
    It follows MAR from device to device. Raises ValueError for settings that do not fit.
    """

    frozen: FrozenParts

    def __init__(
        self,
        config: HarmonConfig,
        prompts: PromptEncoder | None = None,
        *,
        ar_steps: int = 64,
        diffusion_steps: int = 25,
        guidance: float = 3.0,
        image_size: int = 512,
    ) -> None:
        super().__init__()
        if image_size < STRIDE or image_size % STRIDE:
            raise ValueError(f"policy.options.image_size must be a multiple of {STRIDE}, not {image_size}")
        side = image_size // STRIDE
        self.config, self.prompts, self.grid = config, prompts, (side, side)
        self.tokens, self.channels = side * side, config.mar.channels
        self.ar_steps, self.guidance = ar_steps, guidance
        self.tokens_per_step()  # raises if ar_steps does not fit
        with torch.device("cpu"):  # tables, even where the modules are built without weights
            self.schedule = mar_schedule(diffusion_steps)
        self.mar = Mar(config.mar)
        object.__setattr__(self, "frozen", FrozenParts(config))
        self.origin: dict[str, Any] = {}

    # ---- the text --------------------------------------------------------------------------------------------

    def _encoder(self) -> PromptEncoder:
        if self.prompts is None:
            raise ValueError("this policy was built without a tokenizer; HarmonPolicy.load reads one")
        return self.prompts

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """(B, L) int64 ids of the prompts in their template; see :class:`PromptEncoder`."""
        return self._encoder()(prompts)

    def context(self, prompt_ids: Tensor, guided: bool) -> TextContext:
        """The language model's keys and values of the prompts and, with guidance, of the null prompt; no gradient."""
        self._follow(prompt_ids.device)
        ids = self._encoder().with_null(prompt_ids) if self.halves(guided) == 2 else prompt_ids
        return self.frozen.llm.prefill(ids)

    # ---- the backbone ----------------------------------------------------------------------------------------

    def conditions(self, context: TextContext, tokens_BNC: Tensor, known_BN: Tensor, guided: bool) -> Tensor:
        """z (H, B, N, D). MAR's encoder reads no text, so it runs once for both guidance halves."""
        H = self.halves(guided)
        index_BM = known_index(known_BN)
        buffer = self.mar.fake_latent.expand(len(index_BM), -1)
        encoded = self.mar.encode(tokens_BNC, index_BM, buffer, self.grid)  # (B, P + M, D)
        added = self.frozen.read_image(encoded, context, self.config.mar.buffer)
        encoded = encoded.repeat(H, 1, 1) + added.to(encoded.dtype)
        z = self.mar.decode(encoded, index_BM.repeat(H, 1), self.grid)
        return z.reshape(H, len(index_BM), *z.shape[1:])

    def _follow(self, device: torch.device) -> None:
        if next(self.frozen.parameters()).device != device:
            self.frozen.to(device)

    # ---- the head --------------------------------------------------------------------------------------------

    def head_condition(self, z: Tensor) -> Tensor:
        """(..., D) -> (..., W): what all diffusion steps of a token share."""
        return self.mar.head.condition(z)

    def head_output(self, x_QC: Tensor, time_Q: Tensor, condition_QW: Tensor) -> Tensor:
        """(Q, 2C): epsilon and the range of the variance."""
        output: Tensor = self.mar.head(x_QC, time_Q, condition_QW)
        return output

    # ---- images ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> NDArray[np.uint8]:
        """(B, N, C) latents -> (B, height, width, 3) uint8 images, rounded down as by the official scripts."""
        self._follow(tokens.device)
        parts = []
        for start in range(0, len(tokens), DECODED_AT_ONCE):
            part = tokens[start : start + DECODED_AT_ONCE]
            pixels = self.frozen.vae.decode_tokens(part, self.grid).float() * 127.5 + 128
            parts.append(pixels.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu())
        images: NDArray[np.uint8] = torch.cat(parts).numpy()
        return images

    # ---- parameters and files --------------------------------------------------------------------------------

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Of the diffusion head."""
        return self.mar.diffloss.parameters()

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """MAR's, without the head and the class embedding."""
        for name, parameter in self.mar.named_parameters():
            if not name.startswith(("diffloss.", *NOT_READ)):
                yield parameter

    def save(self, path: Path, note: dict[str, str] | None = None) -> None:
        """Write MAR under its official names, the configuration, and where the frozen parts come from.

        Equal weights give an equal file: there is one metadata entry, because safetensors does not order them.
        """
        temporary = path.with_suffix(".partial")
        metadata = {"harmon": json.dumps({**self.origin, "note": note or {}})}
        save_file({k: v.cpu().contiguous() for k, v in self.state_dict().items()}, temporary, metadata)
        temporary.replace(path)

    def export(self, folder: Path) -> None:
        """Write the official layout: the base checkpoint's files, with this policy's MAR in its weights.

        Raises FileNotFoundError or ValueError if the base cannot be read any more.
        """
        base = checkpoint_folder(self.origin["base"])
        folder.mkdir(parents=True, exist_ok=True)
        for file in base.iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin") and ".index." not in file.name:
                shutil.copyfile(file, folder / file.name)
        state = read_weights(base) | {k: v.cpu() for k, v in self.state_dict().items()}
        save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        ar_steps: int = 64,
        diffusion_steps: int = 25,
        guidance: float = 3.0,
        base: str | None = None,
        image_size: int = 512,
        prompt_tokens: int = 128,
        frozen_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
        head_precision: HeadPrecision = "float32",
        activation_checkpointing: bool = False,
    ) -> HarmonPolicy:
        """Read ``source``: a checkpoint's folder, its hub id (from the local cache), or a file of :meth:`save`.

        ``base``: the checkpoint of the frozen parts, in place of the one that a saved file names. ``image_size``: side
        in pixels; position embeddings are interpolated from those of 256 px. ``prompt_tokens``: the most that a prompt
        may take, template included. ``frozen_dtype``: of language model, projections and autoencoder; MAR is
        float32. ``head_precision``: :attr:`MaskedPolicy.head_precision`.
        ``activation_checkpointing``: recompute the blocks' activations, MAR's and the language model's, in the
        backward pass. Logs a warning that tells the licence. Raises FileNotFoundError with the command that helps,
        or ValueError for what does not fit.
        """
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(frozen_dtype)
        if dtype is None:
            raise ValueError(f"policy.options.frozen_dtype must be bfloat16, float16 or float32, not {frozen_dtype!r}")
        trained, named = _read_saved(Path(source)) if Path(source).is_file() else (None, str(source))
        base = base or named
        folder = checkpoint_folder(base)
        content = read_config(folder)
        config = HarmonConfig.from_json(content, str(folder / "config.json"))
        with torch.device("meta"):
            policy = cls(
                config,
                PromptEncoder(folder, prompt_tokens),
                ar_steps=ar_steps,
                diffusion_steps=diffusion_steps,
                guidance=guidance,
                image_size=image_size,
            )
        policy.head_precision = checked(head_precision)
        policy.origin = {"config": content, "base": str(folder.resolve()) if Path(base).is_dir() else base}
        state = without_output_layer(read_weights(folder), bool(policy.frozen.llm.config.tie_word_embeddings))
        rest = {k: v.to(dtype) for k, v in state.items() if not k.startswith("mar.")}
        load_strictly(policy.frozen, rest, str(folder), assign=True)
        mar = {k: v for k, v in state.items() if k.startswith("mar.")} if trained is None else trained
        copies = {k: v.to(torch.float32, copy=True) for k, v in mar.items()}  # the file may be mapped
        load_strictly(policy, copies, str(source), assign=True)
        policy.frozen.llm.renew_buffers()
        policy.frozen.requires_grad_(False).eval()
        policy.frozen.llm.activation_checkpointing = activation_checkpointing
        policy.mar.activation_checkpointing = activation_checkpointing
        log.warning("Harmon's code and weights (%s) are under the %s", base, LICENCE)
        return policy.eval()


def checkpoint_folder(source: str) -> Path:
    """The folder of a checkpoint: ``source`` itself, or the local cache's snapshot of that hub id.

    Raises FileNotFoundError if there is neither, saying which command gets it under which licence.
    """
    path = Path(source)
    if path.is_dir():
        return path
    wanted = f"no checkpoint of Harmon at {source}: a folder, a hub id or a run's file expected"
    return snapshot(source, wanted, LICENCE)


def _read_saved(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file of :meth:`HarmonPolicy.save`, and the source of its frozen parts."""
    try:
        with safe_open(path, framework="pt") as file:
            about = (file.metadata() or {}).get("harmon")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if about is None:
        raise ValueError(f"{path} is not a checkpoint of the harmon policy; for official weights name their folder")
    return read_tensors(path), str(json.loads(about)["base"])


_: type[Policy] = HarmonPolicy  # the type checker compares the two
