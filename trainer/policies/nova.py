"""NOVA text-to-image (Deng et al., arXiv 2412.14169; code and weights Apache-2.0) as a policy.

Official checkpoints: ``BAAI/nova-d48w1024-sd512`` (512 px, DDPM, the one that MAR-GRPO was published with) and
``BAAI/nova-d48w768-sdxl1024``, ``-d48w1024-sdxl1024``, ``-d48w1536-sdxl1024`` (1024 px, flow matching). Their
folder's parts are read by :mod:`trainer.policies.nova_model` (what is trained) and
:mod:`trainer.policies.nova_parts` (what is not). Shapes: see :mod:`trainer.algorithm.types`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.algorithm.schedule import tokens_per_ar_step
from trainer.algorithm.transitions import Schedule
from trainer.policies.hub import snapshot
from trainer.policies.mar_parts import load_strictly
from trainer.policies.masked import HeadPrecision, MaskedPolicy, checked
from trainer.policies.nova_model import NovaConfig, NovaTransformer
from trainer.policies.nova_parts import WEIGHTS, ImageDecoder, PromptEncoder, read_json, read_schedule, read_weights

LICENCE = "Apache-2.0"
HEAD = "image_decoder."
NOT_READ = ("video_encoder.patch_embed.", "video_encoder.mixer.")
"""What no single image depends on: the frames before the first."""


@dataclass(frozen=True)
class Context:
    """What the image encoder reads of the prompts: computed once for each distinct prompt."""

    rows: Tensor
    """(U, M, D)"""
    row: Tensor
    """(H, B): of each image's conditional half, then of its unconditional half"""


class NovaPolicy(MaskedPolicy):
    """See the module's docstring. K counts the AR steps that predict a token: 63 of the schedule's 64."""

    head_precision: HeadPrecision = "autocast"

    def __init__(
        self,
        transformer: NovaTransformer,
        prompts: PromptEncoder,
        images: ImageDecoder,
        schedule: Schedule,
        *,
        ar_steps: int,
        guidance: float,
        base: str,
    ) -> None:
        super().__init__()
        config = transformer.config
        self.transformer, self.prompts, self.images = transformer, prompts, images
        self.schedule, self.guidance, self.base = schedule, guidance, base
        self.tokens, self.channels = config.tokens, config.channels
        if ar_steps > config.tokens:
            raise ValueError(f"{ar_steps} AR steps cannot predict {config.tokens} tokens; use at most {config.tokens}")
        self.counts = tokens_per_ar_step(config.tokens, ar_steps, rounding="round")
        self.ar_steps = len(self.counts)

    # ---- the text --------------------------------------------------------------------------------------------

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Every text can be read; what is behind the 256th token is cut off, as the official pipeline does."""

    def prepare_prompts(self, prompts: Sequence[str]) -> None:
        """Embed all prompts at once, so that the text encoder need not be read again during training."""
        distinct = [*dict.fromkeys(prompts), ""]
        self.prompts.embed(self.encode_prompts(distinct).to(self.device))

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """(B, L) int64 token ids, -1 behind a prompt's end."""
        return self.prompts.tokenize(prompts)

    def _text(self, prompt_ids: Tensor) -> Tensor:
        """(U, L, E): the encoder's states of a prompt's tokens, a learnt constant behind them."""
        embed = self.transformer.text_embed
        text_ULE = embed.weight[: prompt_ids.shape[1]].repeat(len(prompt_ids), 1, 1)
        for row, states in zip(text_ULE, self.prompts.embed(prompt_ids), strict=True):
            row[: len(states)] = states.to(row)
        return text_ULE

    # ---- the backbone ----------------------------------------------------------------------------------------

    def context(self, prompt_ids: Tensor, guided: bool) -> Context:
        """One pass of the video encoder over the distinct prompts (images of a group share theirs, all images the
        empty prompt of the unconditional half)."""
        halves = self.halves(guided)
        ids = prompt_ids
        if halves == 2:
            null = self.encode_prompts([""]).to(prompt_ids.device)
            ids = torch.cat([prompt_ids, null.expand_as(prompt_ids)])
        distinct, row = torch.unique(ids, dim=0, return_inverse=True)
        return Context(self.transformer.context(self._text(distinct)), row.reshape(halves, -1))

    def conditions(self, context: Context, tokens_BNC: Tensor, known_BN: Tensor, guided: bool) -> Tensor:
        """z (H, B, N, D)."""
        H, B = context.row.shape
        z = self.transformer.condition(context.rows[context.row.flatten()], tokens_BNC, known_BN)
        return z.reshape(H, B, *z.shape[1:])

    # ---- the head --------------------------------------------------------------------------------------------

    def head_condition(self, z: Tensor) -> Tensor:
        """(..., D) -> (..., W): what all diffusion steps of a token share."""
        return self.transformer.image_decoder.condition(z)

    def head_output(self, x_QC: Tensor, time_Q: Tensor, condition_QW: Tensor) -> Tensor:
        """(Q, C): epsilon (DDPM) or velocity (flow matching)."""
        out: Tensor = self.transformer.image_decoder(x_QC, time_Q, condition_QW)
        return out

    def tokens_per_step(self) -> list[int]:
        """Rounded to the nearest, without the steps that predict nothing."""
        return self.counts

    # ---- images ----------------------------------------------------------------------------------------------

    def decode(self, tokens: Tensor) -> NDArray[np.uint8]:
        """(B, N, C) latents -> (B, height, width, 3) uint8 images."""
        config = self.transformer.config
        (height, width), p = config.image_base_size, config.patch
        cells = tokens.reshape(len(tokens), height, width, p, p, config.image_dim).permute(0, 5, 1, 3, 2, 4)
        images: NDArray[np.uint8] = self.images(cells.reshape(len(tokens), -1, height * p, width * p)).numpy()
        return images

    # ---- parameters and files --------------------------------------------------------------------------------

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Of the diffusion head."""
        return self.transformer.image_decoder.parameters()

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """All but the head and what no single image depends on."""
        for name, parameter in self.transformer.named_parameters():
            if not name.startswith((HEAD, *NOT_READ)):
                yield parameter

    def saved_module(self) -> nn.Module:
        """The transformer with its head."""
        return self.transformer

    def save(self, path: Path, note: dict[str, str] | None = None) -> None:
        """Write the transformer, its configuration, and the name of the pipeline that the frozen parts come from.

        Equal weights give an equal file: there is one metadata entry, because safetensors does not order them.
        """
        config = {k: v for k, v in asdict(self.transformer.config).items() if v is not None}
        metadata = {"nova": json.dumps({"config": config, "base": self.base, "note": note or {}})}
        temporary = path.with_suffix(".partial")
        save_file({k: v.cpu().contiguous() for k, v in self.transformer.state_dict().items()}, temporary, metadata)
        temporary.replace(path)

    def export(self, folder: Path) -> None:
        """Write a pipeline in the official layout: the transformer's weights, and copies of the other parts' files.

        Raises ValueError if the folder is there and not empty.
        """
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty")
        source = pipeline_folder(self.base)
        weights = shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json")

        def left_out(at: str, names: list[str]) -> set[str]:  # code and settings beside the weights go along
            return weights(at, names) if Path(at) == source / "transformer" else set()

        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=left_out)
        state = {name: value.cpu().contiguous() for name, value in self.transformer.state_dict().items()}
        save_file(state, folder / "transformer" / f"{WEIGHTS}.safetensors", {"format": "pt"})

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        ar_steps: int = 64,
        diffusion_steps: int = 25,
        guidance: float = 5.0,
        base: str | None = None,
        text_encoder: Literal["unload", "keep"] = "unload",
        frozen_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
        activation_checkpointing: bool = False,
        flow_noise: float = 0.7,
        head_precision: HeadPrecision = "autocast",
    ) -> NovaPolicy:
        """Read ``source``: a pipeline's folder, its hub id (from the local cache), or a file of :meth:`save`.

        ``base``: the pipeline of the frozen parts, in place of the one that a saved file names. ``text_encoder``:
        :class:`PromptEncoder`. ``frozen_dtype``: of text encoder and VAE. ``activation_checkpointing``: recompute the
        blocks in the backward pass. ``flow_noise``: the SDE's noise level (flow matching only).
        ``head_precision``: :attr:`MaskedPolicy.head_precision`.
        Raises FileNotFoundError with the command that helps, or ValueError for weights that do not fit.
        """
        if Path(source).is_file():
            state, about = _read_saved(Path(source))
            config, base = about["config"], base or str(about["base"])
            try:
                folder = pipeline_folder(base)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{source} holds the transformer alone, and the pipeline that it names for the rest is not there: "
                    f"{error}; or set policy.options.base"
                ) from error
        else:
            base = base or str(source)
            folder = pipeline_folder(base)
            state = read_weights(pipeline_folder(str(source)) / "transformer")
            config = read_json(folder / "transformer" / "config.json")
        sizes = NovaConfig.read(config)
        with torch.device("meta"):
            transformer = NovaTransformer(sizes)
        load_strictly(transformer, state, str(source), assign=True)
        for encoder in (transformer.video_encoder, transformer.image_encoder):
            encoder.checkpointing = activation_checkpointing
        dtype: torch.dtype = getattr(torch, frozen_dtype)
        prompts = PromptEncoder(folder, sizes.text_token_len, sizes.text_token_dim, dtype, text_encoder)
        schedule = read_schedule(folder, diffusion_steps, flow_noise)
        policy = cls(
            transformer,
            prompts,
            ImageDecoder(folder, dtype),
            schedule,
            ar_steps=ar_steps,
            guidance=guidance,
            base=base,
        )
        policy.head_precision = checked(head_precision)
        return policy.eval()


def pipeline_folder(source: str) -> Path:
    """The folder of a pipeline: ``source`` itself, or the local cache's snapshot of that hub id.

    Raises FileNotFoundError if there is neither, saying which command gets it under which licence.
    """
    path = Path(source)
    if (path / "model_index.json").is_file():
        return path
    wanted = f"no NOVA pipeline at {source}: a folder with model_index.json or a hub id expected"
    return snapshot(source, wanted, LICENCE)


def _read_saved(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = (file.metadata() or {}).get("nova")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if about is None:
        raise ValueError(f"{path} is not a checkpoint of the nova policy; for official weights name their folder")
    return load_file(path), json.loads(about)
