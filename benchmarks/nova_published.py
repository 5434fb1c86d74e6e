"""The published NOVA trainer's own step, driven without its launcher: the other side of ``nova_step.py``.

Nothing of the published code is here: its functions are imported from the clone that the caller names, and its
``compute_loss`` (rollout, masks, losses, backward) runs as it is on an object that has the attributes it reads. What it
imports and the step does not use (reward models, deepspeed, trl) is stood in for; printing and the debugging images
that it writes each step are switched off. What is changed, because it otherwise could not run or be compared here:

- the consistency map's hard-coded 64 x 64 becomes the tiny model's size;
- which AR and diffusion steps are trained is given, not drawn;
- the scheduler is diffusers' DDPMScheduler, which the trainer imports: the clone's own returns no x_0 and the
  rollout asserts that there is one.

:class:`Published` also takes *corrections*, for comparing gradients: see :data:`CORRECTIONS`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import re
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import PIL.Image
import torch
import transformers.utils
from torch import Tensor, nn

CORRECTIONS = {
    "token masks": "uncertainty and consistency per token of 2 x 2 latent pixels, not per pixel; no random extra pixel",
    "context": "the backbone's context as in sampling: not with the unfinished image as a second frame",
    "tokens": "the start and mask tokens keep their gradient",
}
STOOD_IN = (
    "trl",
    "deepspeed",
    "datasets",
    "torchvision",
    "wandb",
    "utils",
    "imageio",
    "flash_attn",
    "einops",
    "harmon",
)
OLD_TRANSFORMERS = ("is_apex_available", "is_wandb_available", "is_sagemaker_mp_enabled")
STOOD_IN_MODULE = "open_r1.trainer.grpo_trainer_harmon_v1_2"
PROMPT = "a red cube left of a blue ball"


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules made of empty classes, for imports that the step does not use."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in STOOD_IN and name != STOOD_IN_MODULE:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "deepspeed":
            module.zero = None  # type: ignore[attr-defined]


def import_published(clone: Path) -> tuple[types.ModuleType, types.ModuleType]:
    """The trainer's module and that of the transformer, from a clone of the MAR-GRPO repository."""
    source = clone / "src" / "grpo" / "src"
    sys.dont_write_bytecode = True  # nothing is left in the clone
    sys.path.insert(0, str(source))
    sys.meta_path.insert(0, StandIn())
    devices = ("mlu", "mps", "musa", "neuroncore", "npu", "xla", "xpu")
    for name in (*(f"is_torch_{device}_available" for device in devices), *OLD_TRANSFORMERS):
        for module in (transformers, transformers.utils):
            with contextlib.suppress(AttributeError, ImportError):
                getattr(module, name)
                continue
            setattr(module, name, lambda *_: False)
    trainer = importlib.import_module("open_r1.trainer.grpo_trainer_nova_v1_2")
    return trainer, importlib.import_module("diffnext.models.transformers.transformer_nova")


class View:
    """A module with some of its functions replaced, for the one module that is given it."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Map(torch.Tensor):
    """A per-pixel map whose ``view`` keeps the model's own height and width."""

    def view(self, batch: int, *_: int) -> Tensor:  # type: ignore[override]
        side = self.shape[-1]
        return self.as_subclass(torch.Tensor).reshape(batch, 1, side, side)


class Vae(nn.Module):
    """Decoding costs both sides the same, so it is left out of both."""

    def unscale_(self, x: Tensor) -> Tensor:
        return x

    def decode(self, x: Tensor) -> Any:
        return types.SimpleNamespace(sample=x.flatten(2, 3)[:, :3] if x.dim() == 5 else x[:, :3])


class TextEncoder(nn.Module):
    """The text encoder's output, looked up: (L, width) features of the prompt and of the null prompt."""

    device = torch.device("cpu")

    def __init__(self, features: dict[str, Tensor]) -> None:
        super().__init__()
        self.features = features
        self.model = types.SimpleNamespace(
            embed_tokens=types.SimpleNamespace(weight=next(iter(features.values())), padding_idx=0)
        )

    def tokenize(self, prompt: str, padding: str = "", max_length: int = 0, truncation: bool = True) -> Any:
        index = list(self.features).index(prompt)
        return types.SimpleNamespace(input_ids=[index] * (max_length if padding else len(self.features[prompt])))

    def forward(self, ids: Tensor) -> Any:
        rows = list(self.features.values())
        width = rows[0].shape[-1]
        hidden = torch.zeros(*ids.shape, width)
        for i, index in enumerate(ids[:, 0].tolist()):
            hidden[i, : len(rows[index])] = rows[index]
        return types.SimpleNamespace(last_hidden_state=hidden)


class Published:
    """One step of the published trainer.

    ``sizes``: the transformer's configuration, whose ``arch`` is registered if the clone does not know it (heads 64
    wide); ``scheduler``: that of the DDPM scheduler; ``features``: what the text encoder gives for the prompt and for
    the empty one; ``rewards``: (G,) scores of the group's images; ``ar_steps``, ``diffusion_steps``: those to train,
    the latter the same for every AR step.
    """

    def __init__(
        self,
        clone: Path,
        sizes: dict[str, Any],
        scheduler: dict[str, Any],
        features: dict[str, Tensor],
        *,
        rewards: Sequence[float],
        ar_steps: Sequence[int],
        diffusion_steps: Sequence[int],
        top_percent: float = 0.3,
        beta: float = 0.01,
    ) -> None:
        import diffusers

        self.trainer, nova = import_published(clone)
        kinds = (nova.VIDEO_ENCODERS, nova.IMAGE_ENCODERS, nova.IMAGE_DECODERS)
        for registry, name in zip(kinds, sizes["arch"], strict=True):
            depth, width = map(int, re.findall(r"\d+", name))
            heads = {} if name.startswith("mlp") else {"num_heads": width // 64}
            known = next(iter(registry.registry.values()))
            registry.register(name, known.func, depth=depth, embed_dim=width, **heads)
        self.model = nova.NOVATransformer3DModel(**sizes)
        self.reference = nova.NOVATransformer3DModel(**sizes)
        self.reference.eval().requires_grad_(False)
        self.model.image_decoder.requires_grad_(False)
        text, schedule = TextEncoder(features), diffusers.DDPMScheduler(**scheduler)
        self.pipeline = self.trainer.NOVAPipeline(self.model, schedule, Vae(), text, text.tokenize)
        self.reference.sample_scheduler = schedule
        self.rewards, self.ar_steps, self.diffusion_steps = rewards, list(ar_steps), list(diffusion_steps)
        self.top_percent, self.beta = top_percent, beta
        self.record: Any = None
        """What the last rollout returned"""

    def step(self, between: Callable[[], None], corrections: Collection[str] = (), reuse: bool = False) -> None:
        """Rollout and losses with gradients; ``between`` is called between the two. ``reuse``: the last rollout."""
        generate = self.trainer.generate_image_with_logp

        def rollout(*arguments: Any, **options: Any) -> Any:
            if not reuse:
                self.record = generate(*arguments, **options)
            between()
            record = self.record
            if "token masks" in corrections:
                images, logs, prompt, z, extra = record
                uncertain = self._token_uncertainty(extra["latents_seed"])
                record = images, logs, prompt, z, {**extra, "latents_seed": uncertain}
            return record

        replaced: dict[str, Any] = {
            "generate_image_with_logp": rollout,
            "unwrap_model_for_generation": lambda model, _: contextlib.nullcontext(model),
            "random": types.SimpleNamespace(sample=lambda *_, **__: self.ar_steps),
            "dist": types.SimpleNamespace(get_rank=lambda: 0, barrier=lambda: None),
            "os": View(self.trainer.os, makedirs=lambda *_, **__: None),
            "Image": types.SimpleNamespace(fromarray=lambda *_: types.SimpleNamespace(save=lambda *_: None)),
            "F": View(self.trainer.F, cosine_similarity=self._similarity("token masks" in corrections)),
            "torch": View(torch, randperm=lambda *_, **__: self._steps(), rand=torch.rand),
        }
        if "token masks" in corrections:  # the random pixel falls on the most uncertain one
            replaced["torch"].rand = lambda *_, **__: self._uncertain.flatten(1)
        if "context" in corrections:
            replaced["single_forward_without_head"] = self._conditions("tokens" in corrections)
        with (
            mock.patch.dict(self.trainer.__dict__, replaced),
            mock.patch.object(PIL.Image.Image, "save"),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(action="ignore"),
        ):
            self._compute_loss()
        torch.set_grad_enabled(True)

    def _steps(self) -> Tensor:
        rest = [t for t in range(25) if t not in self.diffusion_steps]
        return torch.tensor(self.diffusion_steps + rest)

    def _compute_loss(self) -> None:
        cls = self.trainer.NOVAT2IR1Trainer_v1
        group = len(self.rewards)
        accelerator = types.SimpleNamespace(
            device=torch.device("cpu"),
            backward=lambda loss, **options: loss.backward(**options),
            gather_for_metrics=lambda x: x,
            wait_for_everyone=lambda: None,
        )
        off = dict.fromkeys(
            ("semantic_cot", "select_mask_steps", "normalize_multi_rewards", "all_diff_timesteps", "critic_for_kl"),
            False,
        )
        off |= dict.fromkeys(("wokl", "update_ref", "mask_pos_neg"), False)
        scores = list(self.rewards)

        def reward(prompts: Any, images: Any, **_: Any) -> list[float]:
            return scores

        tokens = int(np.prod(self.model.config.image_base_size))
        lengths = np.round(np.cos(0.5 * np.pi * np.arange(65) / 64) * tokens).astype("int64")
        me = types.SimpleNamespace(
            **off,
            accelerator=accelerator,
            args=types.SimpleNamespace(device="cpu", n_gpu=0, gradient_accumulation_steps=1),
            num_generations=1,
            new_generations_image=group,
            state=types.SimpleNamespace(global_step=1),
            process_class=self.pipeline,
            vae=self.pipeline.vae,
            scheduler=self.pipeline.scheduler,
            ref_model=self.reference,
            use_critic_token=True,
            top_mask_percent=self.top_percent,
            use_latent_sim_coef=True,
            latent_sim_thresh=0.0,
            beta=self.beta,
            num_preds=lengths[:-1] - lengths[1:],
            reward_funcs=[reward],
            reward_funcs_name=["stub"],
            reward_processing_classes=[None],
            _metrics=defaultdict(list),
        )
        me.loss_backward = types.MethodType(cls.loss_backward, me)
        cls.compute_loss(me, self.model, [{"prompt": PROMPT, "raw_prompt": PROMPT}])

    def tensors(self) -> dict[str, Tensor]:
        """The last rollout: chains of all tokens at all K AR steps, when each token was kept, the extra chains."""
        _, logs, _, _, extra = self.record
        patchify = self.model.image_encoder.patch_embed.patchify

        def chains(before_TBCHW: Tensor, after_TBCHW: Tensor) -> Tensor:
            states = torch.cat([before_TBCHW[:1], after_TBCHW])
            return patchify(states.flatten(0, 1)).unflatten(0, states.shape[:2]).permute(1, 2, 0, 3).clone()

        log = logs[0]
        steps = [chains(before, after) for before, after in zip(log["xs_next"], log["xs"], strict=True)]
        batch, tokens = steps[0].shape[:2]
        predicted_at = torch.full((batch, tokens), -1)
        for k, ids in enumerate(log["pred_ids"]):
            predicted_at.scatter_(1, ids[:batch, :, 0], k)
        extras = [chains(before, after) for before, after in zip(extra["xs_next"], extra["xs"], strict=True)]
        found = {"chains": torch.stack(steps), "predicted_at": predicted_at, "extra": torch.stack(extras, dim=1)}
        return {name: value.contiguous() for name, value in found.items()}

    # ---- corrections -----------------------------------------------------------------------------------------

    def _token_uncertainty(self, latents: list[Tensor]) -> list[Tensor]:
        """Two maps whose standard deviation is the token's uncertainty at each of its pixels."""
        pixels_B1HW = torch.stack(latents).std(dim=0, unbiased=False).mean(dim=1, keepdim=True)
        tokens_B1hw = torch.nn.functional.avg_pool2d(pixels_B1HW, 2)
        # no two tokens alike, so that a token's four pixels are chosen together
        self._uncertain = tokens_B1hw.repeat_interleave(2, -1).repeat_interleave(2, -2).clone()
        return [self._uncertain, -self._uncertain]

    def _similarity(self, by_token: bool) -> Callable[..., Tensor]:
        def similarity(a_BCHW: Tensor, b_BCHW: Tensor, dim: int) -> Tensor:
            if not by_token:
                return torch.nn.functional.cosine_similarity(a_BCHW, b_BCHW, dim=dim).as_subclass(Map)
            side = a_BCHW.shape[-1]
            a, b = (torch.nn.functional.unfold(x, 2, stride=2) for x in (a_BCHW, b_BCHW))
            tokens = torch.nn.functional.cosine_similarity(a, b, dim=1).reshape(-1, side // 2, side // 2)
            return tokens.repeat_interleave(2, -1).repeat_interleave(2, -2).as_subclass(Map)

        return similarity

    def _conditions(self, with_tokens: bool) -> Callable[[Any, dict[str, Any]], Tensor]:
        """The condition of every token, with the context that sampling makes."""

        def forward(model: Any, inputs: dict[str, Any]) -> Tensor:
            embed = model.mask_embed
            bos, mask = (t if with_tokens else t.detach() for t in (embed.bos_token, embed.mask_token))
            x_BCHW, known_BM1 = inputs["x"], inputs["prev_ids"]
            batch, places = len(x_BCHW), (x_BCHW.shape[-1] // 4) ** 2
            model.video_pos_embed.time_embed = None  # cached in sampling, as a tensor that allows no gradient
            frame = model.video_pos_embed.get_time_embed(1)[0] + bos.expand(batch, places, -1)
            context = model.video_encoder(model.video_pos_embed(frame), model.text_embed(inputs["prompt"]))
            z = model.image_encoder.patch_embed(x_BCHW)
            unknown = z.new_ones(*z.shape[:2], 1).scatter_(1, known_BM1, 0)
            return model.image_encoder(z * (1 - unknown) + mask * unknown, context, known_BM1)

        return forward
