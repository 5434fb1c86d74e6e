"""BLIP-VQA: how probable "yes" is, against "no", as the answer to a phrase asked of an image (BLIP, arXiv 2201.12086).

As T2I-CompBench's ``BLIPvqa_eval`` has it: the image resized to a square by Pillow's bicubic filter, the question
("a blue bench?") lower-cased and without punctuation, at most 35 tokens of which [ENC] is the first, and the first
token that the answer decoder gives after [DEC]. The benchmark rounds each probability to four decimals; this does not.

Two layouts are read: the file that the benchmark loads (``model_base_vqa_capfilt_large.pth``, 480 pixels), and the
hub's ``Salesforce/blip-vqa-capfilt-large``, which is the same training with its position embeddings resampled to 384
pixels, so that its numbers are near the benchmark's but not equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import nn
from transformers import BertTokenizer, BlipConfig, BlipForQuestionAnswering

from reward_server import weights
from reward_server.contract import Image
from reward_server.rewards import _clip, _hub
from reward_server.rewards.base import RewardLoadError

CHECKPOINT = "https://storage.googleapis.com/sfr-vision-language-research/BLIP/models/model_base_vqa_capfilt_large.pth"
CONTEXT = 35
"""Tokens of a question, the first and last of which are marks"""
MAX_WORDS = 50
HEAD_WIDTH = 64
BATCH = 64
"""Questions that go through the network together"""
_PUNCTUATION = re.compile(r"[.!\"()*#:;~]")
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_VISION_NAMES = (
    ("visual_encoder.", "vision_model."),
    ("cls_token", "embeddings.class_embedding"),
    ("pos_embed", "embeddings.position_embedding"),
    ("patch_embed.proj.", "embeddings.patch_embedding."),
    ("blocks.", "encoder.layers."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".attn.qkv.", ".self_attn.qkv."),
    (".attn.proj.", ".self_attn.projection."),
    ("vision_model.norm.", "vision_model.post_layernorm."),
)


def sources(name: str, tokenizer: str) -> tuple[weights.Source, weights.Source]:
    """The network (a local ``.pth`` file, or a hub id or folder) and the vocabulary."""
    path = Path(name).expanduser()
    if path.suffix == ".pth":
        network = weights.Source(str(path.resolve().parent), (path.name,), "BSD-3-Clause")
    else:
        network = weights.Source(name, ("config.json", "model.safetensors|pytorch_model.bin"), "BSD-3-Clause")
    return network, weights.Source(tokenizer, ("vocab.txt",), "Apache-2.0")


class VisualQuestions:
    """A loaded BLIP-VQA; call :meth:`yes`."""

    def __init__(self, name: str, tokenizer: str, device: torch.device, dtype: torch.dtype, *, reward: str) -> None:
        """Load it.

        Raises:
            RewardLoadError: files are missing or damaged, or are another model's.
        """
        network, vocabulary = sources(name, tokenizer)
        folder = weights.locate(network, reward=reward)
        path = weights.find(folder, network.files[-1])
        if path.suffix == ".pth":
            state = _read_official(path)
            config = _config_of(state, path)
            state = weights.rename(state, _hub_name)
        else:
            state = weights.read_state_dict(path)
            config = BlipConfig.from_json_file(folder / "config.json")
        vision, text = _parts(config)
        vision.layer_norm_eps = 1e-6  # BLIP's; the hub's config.json says otherwise
        model = _hub.build(BlipForQuestionAnswering, config, state, path, unused=("position_ids",))
        module: nn.Module = model
        module.to(device=device, dtype=dtype)
        self._model: Any = model
        self._device, self._dtype, self._side = device, dtype, int(vision.image_size)
        words = weights.find(weights.locate(vocabulary, reward=reward), "vocab.txt")
        self._tokenizer = BertTokenizer(vocab={w: i for i, w in enumerate(words.read_text("utf-8").splitlines())})
        if len(self._tokenizer) + 2 != text.vocab_size:
            raise RewardLoadError(f"{words} has {len(self._tokenizer)} tokens, but the model {text.vocab_size} - 2")
        self._dec, self._enc = len(self._tokenizer), len(self._tokenizer) + 1
        answers: Any = self._tokenizer.convert_tokens_to_ids(["yes", "no"])
        self._yes, self._no = answers
        self.sha256 = weights.sha256(path)
        self.preprocessing = f"blip-vqa-pil-bicubic-{self._side}x{self._side}/1"

    @torch.inference_mode()
    def yes(self, images: Sequence[Image], phrases: Sequence[Sequence[str]]) -> list[list[tuple[float, bool]]]:
        """For every phrase about every image: the probability of "yes" (0..1), and whether the phrase was cut."""
        wanted = [i for i, group in enumerate(phrases) if group]
        if not wanted:
            return [[] for _ in images]
        seen = self._model.vision_model(pixel_values=self._pixels([images[i] for i in wanted])).last_hidden_state
        rows = [(row, phrase) for row, i in enumerate(wanted) for phrase in phrases[i]]
        ids, cut = self._tokens([phrase for _, phrase in rows])
        answers = [0.0] * len(rows)
        for batch in _equally_long(ids):
            images_seen = seen[[rows[index][0] for index in batch]]
            for index, answer in zip(batch, self._ask(images_seen, [ids[index] for index in batch]), strict=True):
                answers[index] = answer
        given = iter(zip(answers, cut, strict=True))
        return [[next(given) for _ in group] for group in phrases]

    def _tokens(self, phrases: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        """Ids of the questions, and which were cut."""
        texts = [question(phrase) for phrase in phrases]
        tokens: Any = self._tokenizer(texts, verbose=False)["input_ids"]
        cut = [len(row) > CONTEXT for row in tokens]
        rows = [[*row[: CONTEXT - 1], row[-1]] if too_long else row for row, too_long in zip(tokens, cut, strict=True)]
        return [[self._enc, *row[1:]] for row in rows], cut

    def _ask(self, seen: torch.Tensor, ids: Sequence[Sequence[int]]) -> list[float]:
        read = self._model.text_encoder(
            input_ids=torch.tensor(ids, device=self._device), encoder_hidden_states=seen, is_decoder=False
        ).last_hidden_state
        start = torch.full((len(ids), 1), self._dec, device=self._device)
        logits = self._model.text_decoder(input_ids=start, encoder_hidden_states=read).logits[:, 0].float()
        # p(yes) / (p(yes) + p(no)): all other words cancel
        answers: list[float] = (logits[:, self._yes] - logits[:, self._no]).sigmoid().tolist()
        return answers

    def _pixels(self, images: Sequence[Image]) -> torch.Tensor:
        size = (self._side, self._side)
        resized = [np.asarray(PIL.Image.fromarray(i).resize(size, PIL.Image.Resampling.BICUBIC)) for i in images]
        pixels = _clip.to_device(torch.from_numpy(np.stack(resized)), self._device).permute(0, 3, 1, 2).float() / 255
        return _clip.normalised(pixels, _MEAN, _STD).to(self._dtype)


def _equally_long(ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices of questions of equally many tokens, at most BATCH at a time.

    So none is padded: transformers (5.24) drops the mask of BLIP's cross-attention, and the decoder would read padding.
    """
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(ids):
        groups.setdefault(len(row), []).append(index)
    for group in groups.values():
        for start in range(0, len(group), BATCH):
            yield group[start : start + BATCH]


def question(phrase: str) -> str:
    """The question about a noun phrase, as BLIP's training had questions."""
    text = _PUNCTUATION.sub("", f"{phrase}?".lower()).rstrip(" ")
    return " ".join(text.split(" ")[:MAX_WORDS])


def _read_official(path: Path) -> dict[str, torch.Tensor]:
    """The tensors under ``model`` of BLIP's training checkpoint."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged, or code where data was expected
        raise RewardLoadError(f"{path} is not read: {' '.join(str(error).split())[:300]}") from error
    state = content.get("model") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise RewardLoadError(f"{path} does not hold a state dict under 'model', as BLIP's checkpoints do")
    return state


def _hub_name(key: str) -> str | None:
    if key.endswith(".position_ids"):
        return None
    if key.startswith("visual_encoder."):
        for old, new in _VISION_NAMES:
            key = key.replace(old, new)
    return key


def _config_of(state: Mapping[str, torch.Tensor], path: Path) -> BlipConfig:
    """The sizes of BLIP's checkpoint, read off the shapes."""
    try:
        patch = state["visual_encoder.patch_embed.proj.weight"].shape[-1]
        positions, width = state["visual_encoder.pos_embed"].shape[1:]
        vision = {
            "hidden_size": width,
            "intermediate_size": state["visual_encoder.blocks.0.mlp.fc1.weight"].shape[0],
            "num_hidden_layers": len({key.split(".")[2] for key in state if key.startswith("visual_encoder.blocks.")}),
            "num_attention_heads": width // HEAD_WIDTH,
            "image_size": round((positions - 1) ** 0.5) * patch,
            "patch_size": patch,
        }
        words, hidden = state["text_encoder.embeddings.word_embeddings.weight"].shape
        text = {
            "vocab_size": words,
            "hidden_size": hidden,
            "encoder_hidden_size": width,
            "intermediate_size": state["text_encoder.encoder.layer.0.intermediate.dense.weight"].shape[0],
            "num_hidden_layers": len({k.split(".")[3] for k in state if k.startswith("text_encoder.encoder.layer.")}),
            "num_attention_heads": hidden // HEAD_WIDTH,
            "max_position_embeddings": state["text_encoder.embeddings.position_embeddings.weight"].shape[0],
        }
    except KeyError as error:
        raise RewardLoadError(f"{path} is no BLIP for visual questions: it lacks {error}") from None
    return BlipConfig(vision_config=vision, text_config=text)


def _parts(config: BlipConfig) -> tuple[Any, Any]:
    return config.vision_config, config.text_config
