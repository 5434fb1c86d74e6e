"""What a NOVA pipeline has beside its transformer: the diffusion schedule, the text encoder and the VAE, read from
the folders of the official layout (``scheduler/``, ``text_encoder/``, ``tokenizer/``, ``vae/``).

The text encoder and the VAE are never trained: they live outside the policy's modules, so that optimizers, wrappers,
checkpoints and the reference model do not see them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.algorithm.transitions import DDPM, FlowSDE, Prediction, Variance, spaced_timesteps

NO_TOKEN = -1
"""Behind the end of a prompt in ``prompt_ids``."""
TEXT_BATCH, VAE_BATCH = 32, 4
"""Prompts and images that go through the frozen parts at once: bounds their memory."""
TEXT_KEPT = 4096
WEIGHTS = "diffusion_pytorch_model"
"""The name of a part's weights file, less its ending."""


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError if the file is missing or no JSON object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}; a pipeline's folder in the official layout has it") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


@contextmanager
def part_of(folder: Path) -> Iterator[None]:
    """Raises ValueError naming the folder for whatever a library makes of a damaged or missing file in it."""
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception as error:  # tokenizers raises no narrower one
        told = " ".join(str(error).split())
        raise ValueError(f"{folder} cannot be read: {told}") from error


def read_schedule(folder: Path, steps: int, flow_noise: float) -> DDPM | FlowSDE:
    """The diffusion of a pipeline for T = ``steps``, from its scheduler's class and settings.

    DDPM takes the next sampled timestep as the previous one of the training scale. The official class computes it as
    t - train_steps // T, which is the same where T divides the training steps (25 of 1000). A flow-matching scheduler
    becomes Flow-GRPO's SDE of noise level ``flow_noise`` (0: its own Euler steps, which have no density).
    Raises ValueError for what is not known here.
    """
    path = folder / "scheduler" / "scheduler_config.json"
    config, parts = read_json(path), read_json(folder / "model_index.json")
    library, name = parts.get("scheduler") or (None, None)
    name = str(name or config.get("_class_name") or config.get("_sample_class_name"))
    total = int(config.get("num_train_timesteps", 1000))
    try:
        if name.startswith("FlowMatch"):
            return FlowSDE(_flow_sigmas(config, total, steps), flow_noise, time_scale=float(total))
        if name.startswith("DDPM"):
            # NOVA's own class does not read it; that of diffusers clips unless told not to
            if library == "diffusers" and config.get("clip_sample", True):
                raise ValueError("clip_sample: a step with a clipped prediction is not supported")
            return _ddpm(config, total, steps)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error
    raise ValueError(f"{path}: DDPM or flow matching expected, not {name}")


def _flow_sigmas(config: dict[str, Any], total: int, steps: int) -> Tensor:
    """(T+1,): evenly spaced between the shifted ends, then shifted again, as the official class does."""
    if config.get("use_dynamic_shifting"):
        raise ValueError("use_dynamic_shifting is not supported")
    shift = float(config.get("shift", 1.0))

    def shifted(sigma: Tensor) -> Tensor:
        return shift * sigma / (1 + (shift - 1) * sigma)

    # in float32, as the scheduler computes them: the head's time is a thousand times as sensitive to rounding
    first, last = (float(shifted(torch.tensor(t / total))) * total for t in (total, 1))
    even = torch.linspace(first, last, steps, dtype=torch.float64).float() / total
    return torch.cat([shifted(even), torch.zeros(1)])


def _ddpm(config: dict[str, Any], total: int, steps: int) -> DDPM:
    predictions: dict[str, Prediction] = {"epsilon": "epsilon", "sample": "sample", "v_prediction": "v"}
    variances: dict[str, Variance] = {
        "fixed_small": "fixed_small",
        "fixed_small_log": "fixed_small",
        "fixed_large": "fixed_large",
    }
    first, last = float(config.get("beta_start", 1e-4)), float(config.get("beta_end", 0.02))
    kind = config.get("beta_schedule", "linear")
    # in float32, as the scheduler computes them
    if config.get("trained_betas") is not None:
        betas = torch.tensor(config["trained_betas"], dtype=torch.float32)
    elif kind == "linear":
        betas = torch.linspace(first, last, total)
    elif kind == "scaled_linear":
        betas = torch.linspace(first**0.5, last**0.5, total) ** 2
    elif kind == "squaredcos_cap_v2":
        abar = torch.cos((torch.arange(total + 1, dtype=torch.float64) / total + 0.008) / 1.008 * torch.pi / 2) ** 2
        betas = (1 - abar[1:] / abar[:-1]).clamp(max=0.999).float()
    else:
        raise ValueError(f"beta_schedule {kind!r} is not known")
    if config.get("rescale_betas_zero_snr"):
        raise ValueError("rescale_betas_zero_snr: at a signal of 0 the first transition is not defined")
    prediction, variance = config.get("prediction_type", "epsilon"), config.get("variance_type", "fixed_small")
    if prediction not in predictions or variance not in variances:
        raise ValueError(f"prediction_type {prediction!r} with variance_type {variance!r} is not known for this head")
    spacing = config.get("timestep_spacing", "leading")
    offset = int(config.get("steps_offset", 0)) if spacing == "leading" else 0
    timesteps = [t + offset for t in spaced_timesteps(total, steps, spacing)]
    return DDPM((1 - betas).cumprod(0), timesteps, predictions[prediction], variances[variance])


class PromptEncoder:
    """Prompts to the last hidden states of Phi, embedded once per distinct prompt and kept on the CPU.

    A prompt's embedding holds its own tokens alone (2560 numbers a token, 5 kB in bf16). ``unload``: the encoder
    (5 GB in bf16) leaves memory after each use and is read again for prompts that are not known; every embedding is
    kept. ``keep``: the encoder stays, and no more than :data:`TEXT_KEPT` embeddings do.
    """

    def __init__(
        self, folder: Path, length: int, width: int, dtype: torch.dtype, when_done: Literal["unload", "keep"]
    ) -> None:
        self.folder, self.length, self.width, self.dtype, self.when_done = folder, length, width, dtype, when_done
        tokenizers = import_module("transformers").AutoTokenizer
        with part_of(folder / "tokenizer"):
            self.tokenizer = tokenizers.from_pretrained(folder / "tokenizer", local_files_only=True)
        self.encoder: Any = None
        self.known: dict[tuple[int, ...], Tensor] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> PromptEncoder:
        return self  # the reference model reads the same prompts

    def tokenize(self, prompts: Sequence[str]) -> Tensor:
        """(B, L) int64, cut at L tokens, :data:`NO_TOKEN` behind the end. The empty prompt may have no token at all."""
        ids = torch.full((len(prompts), self.length), NO_TOKEN, dtype=torch.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            tokens = self.tokenizer(prompt, max_length=self.length, truncation=True).input_ids
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return ids

    def embed(self, prompt_ids: Tensor) -> list[Tensor]:
        """Of each row, (tokens of the prompt, E) on the CPU."""
        if self.when_done == "keep" and len(self.known) > TEXT_KEPT:
            self.known.clear()
        keys = [tuple(i for i in row if i != NO_TOKEN) for row in prompt_ids.tolist()]
        new = [key for key in dict.fromkeys(keys) if key and key not in self.known]
        for start in range(0, len(new), TEXT_BATCH):
            self._encode(new[start : start + TEXT_BATCH], prompt_ids.device)
        if new and self.when_done == "unload":
            self.encoder = None
        return [self.known[key] if key else torch.empty(0, self.width) for key in keys]

    @torch.no_grad()
    def _encode(self, keys: Sequence[tuple[int, ...]], device: torch.device) -> None:
        if self.encoder is None:
            self.encoder = _load_phi(self.folder / "text_encoder", self.dtype)
        self.encoder.to(device)
        # attention is causal: what pads a shorter prompt cannot reach it
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(key) for key in keys], batch_first=True).to(device)
        with torch.autocast(device.type, enabled=False):
            states = self.encoder(input_ids=ids, use_cache=False).last_hidden_state.cpu()
        self.known |= {key: state[: len(key)].clone() for key, state in zip(keys, states, strict=True)}


def _load_phi(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' Phi from the weights of NOVA's own wrapper, whose language-model head is left out."""
    transformers = import_module("transformers")
    state = {name.removeprefix("model."): value for name, value in read_weights(folder, dtype).items()}
    state = {name: value for name, value in state.items() if not name.startswith("lm_head.")}
    config = transformers.PhiConfig.from_dict(read_json(folder / "config.json"))
    with part_of(folder):
        model, report = transformers.PhiModel.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    _check_keys(folder, report["missing_keys"], report["unexpected_keys"])
    return model.eval().requires_grad_(False)


class ImageDecoder:
    """The VAE: latents to pixels."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        kind = import_module("diffusers").AutoencoderKL
        pickled = not any((folder / "vae").glob("*.safetensors"))  # diffusers opens them with weights_only
        with part_of(folder / "vae"):
            self.vae, report = kind.from_pretrained(
                folder / "vae",
                torch_dtype=dtype,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=not pickled,
            )
        _check_keys(folder / "vae", report["missing_keys"], report["unexpected_keys"])
        self.vae.eval().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, object]) -> ImageDecoder:
        return self

    @torch.no_grad()
    def __call__(self, latents_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) latents -> (B, height, width, 3) uint8 on the CPU: x * 127.5 + 127.5, rounded down."""
        config = self.vae.config
        self.vae.to(latents_BCHW.device)
        images = []
        with torch.autocast(latents_BCHW.device.type, enabled=False):
            for start in range(0, len(latents_BCHW), VAE_BATCH):
                latents = latents_BCHW[start : start + VAE_BATCH].float()
                unscaled = latents / config.scaling_factor + (config.shift_factor or 0.0)
                pixels = self.vae.decode(unscaled.to(self.vae.dtype)).sample.float()
                images.append((pixels * 127.5 + 127.5).clamp(0, 255).byte().permute(0, 2, 3, 1).cpu())
        return torch.cat(images)


def _check_keys(folder: Path, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    if missing or unexpected:
        parts = {"missing": sorted(missing), "not known here": sorted(unexpected)}
        told = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)
        raise ValueError(f"the weights in {folder} are not those of its config.json: {told}")


def read_weights(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state dict of a part: its one weights file, or all shards; safetensors before pickles, which are opened
    with ``weights_only``. Raises FileNotFoundError if there is none."""
    stems = (WEIGHTS, "model", "pytorch_model")
    for suffix in ("safetensors", "bin"):
        for stem in stems:
            whole = folder / f"{stem}.{suffix}"
            files = [whole] if whole.is_file() else sorted(folder.glob(f"{stem}-*-of-*.{suffix}"))
            if files:
                states = [_read_file(file) for file in files]
                return {name: value.to(dtype) for state in states for name, value in state.items()}
    raise FileNotFoundError(f"no weights in {folder}; expected {stems[0]}.safetensors")


def _read_file(path: Path) -> dict[str, Tensor]:
    with part_of(path):
        if path.suffix == ".safetensors":
            return load_file(path)
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state
