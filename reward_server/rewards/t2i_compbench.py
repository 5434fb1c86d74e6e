"""T2I-CompBench (arXiv 2307.06350, github.com/Karine-Huang/T2I-CompBench): attributes, relations and numbers, 0..1.

The option ``category`` chooses the metric:

- ``attribute`` (colour, shape, texture): BLIP-VQA; the product of the probabilities that the answer to each of at most
  eight noun phrases, asked as questions, is "yes".
- ``spatial_2d``, ``spatial_3d``: a quarter of each object's confidence and half of how far the relation holds, in 3-D
  by a depth map (DPT), too.
- ``numeracy``: of each class's share, half for being there and half for the exact number.

What a prompt claims is read by rules that cover the benchmark's simple forms (by spaCy's model where it is installed,
for noun phrases), or given in the metadata: ``phrases``, a list; ``objects``, a pair, and ``relation``; ``counts``,
numbers by singular noun. A prompt that no rule reads is refused with a reason.

Objects are detected by UniDet (722 classes), as in the benchmark: an object that it does not find, or has no class for,
counts as absent. Or they come from the metadata (``detections``: a list of ``{"name", "score", "box": [x0, y0, x1,
y1]}``, pixels of the image). Or from Mask2Former, which knows COCO's 80 classes: a departure, so numbers are not the
benchmark's, and prompts with other objects are refused. See ``_unidet``, ``_compbench_rules`` and ``_compbench_vqa``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch

from reward_server.contract import Image
from reward_server.rewards import (
    _compbench_depth,
    _compbench_prompts,
    _compbench_rules,
    _compbench_vqa,
    _detector,
    _unidet,
)
from reward_server.rewards._compbench_prompts import Relation
from reward_server.rewards._compbench_rules import RELATIONS_2D, RELATIONS_3D, Depth, Found
from reward_server.rewards._geneval_rules import CLASSES
from reward_server.rewards._options import dtype_name, torch_dtype
from reward_server.rewards.base import RewardLoadError, Score, Scored
from reward_server.weights import Source

MAX_PHRASES = 8
MIN_SCORE = 0.5
"""Of a detected object"""
EXAMPLES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "attribute": ("a blue bench and a green cake", {}),
    "spatial_2d": ("a dog on the left of a chair", {}),
    "spatial_3d": ("a dog in front of a chair", {}),
    "numeracy": ("two dogs and a chair", {}),
}
_COCO = {"television": "tv", "sofa": "couch", "phone": "cell phone", "table": "dining table"}
"""The benchmark's words for objects that COCO calls otherwise"""

Claim = list[str] | Relation | dict[str, int]
VQA, TOKENIZER = "Salesforce/blip-vqa-capfilt-large", "google-bert/bert-base-uncased"
UNIDET, DEPTH = "unidet", "Intel/dpt-hybrid-midas"
MASK2FORMER = {"mask2former": "facebook/mask2former-swin-small-coco-instance"}


class Model:
    """The ``t2i_compbench`` reward."""

    name = "t2i_compbench"
    description = "T2I-CompBench: attribute binding, 2-D or 3-D relation, or numeracy, 0..1"
    needs: tuple[str, ...] = ()
    revision = ""
    example = EXAMPLES["attribute"]

    @staticmethod
    def sources(
        category: str = "attribute",
        vqa: str = VQA,
        tokenizer: str = TOKENIZER,
        detector: str = UNIDET,
        unidet: str = "",
        depth: str = DEPTH,
        **_: object,
    ) -> tuple[Source, ...]:
        """The weights of the category's networks.

        Raises:
            RewardLoadError: there is no such category, or its UniDet is not on the hub and ``unidet`` is empty.
        """
        if category not in EXAMPLES:
            raise RewardLoadError(f"category of t2i_compbench is {category!r}; it can be {', '.join(EXAMPLES)}")
        if category == "attribute":
            return _compbench_vqa.sources(vqa, tokenizer)
        detectors: tuple[Source, ...] = ()
        if detector == UNIDET:
            detectors = (_unidet.source(unidet, category),)
        elif detector:
            detectors = (_detector.source(MASK2FORMER.get(detector, detector)),)
        return (*detectors, _compbench_depth.source(depth)) if category == "spatial_3d" else detectors

    def setup(
        self,
        device: str,
        *,
        category: str = "attribute",
        vqa: str = VQA,
        tokenizer: str = TOKENIZER,
        detector: str = UNIDET,
        unidet: str = "",
        depth: str = DEPTH,
        dtype: str = "auto",
    ) -> None:
        """Load the networks of the category.

        Args:
            category: ``attribute``, ``spatial_2d``, ``spatial_3d`` or ``numeracy``.
            vqa: BLIP's ``model_base_vqa_capfilt_large.pth``, or hub id or folder of a BLIP for questions.
            tokenizer: hub id or folder with bert-base-uncased's ``vocab.txt``.
            detector: ``unidet``; ``mask2former``, or another Mask2Former (see ``weights`` of ``geneval``); empty:
                objects are in the metadata, always.
            unidet: UniDet's ``Unified_learned_OCIM_RS200_6x+2x.pth``, the benchmark's for ``spatial_2d`` and by default
                the hub's; or ``Unified_learned_OCIM_R50_6x+2x.pth``, the benchmark's for the others, to be given.
            depth: hub id or folder of a DPT for depth.
            dtype: of the networks; ``auto`` is float32 on every device. The benchmark detects under float16
                autocast, as ``float16`` does on a GPU.

        Raises:
            RewardLoadError: an option is wrong, or files are missing, damaged or another model's.
        """
        self.sources(category, detector="")
        self._category, self.example = category, EXAMPLES[category]
        target, chosen = torch.device(device), torch_dtype(dtype, device)
        self.provenance = {"category": category, "dtype": dtype_name(chosen)}
        digests: dict[str, str] = {}
        self._detector: _detector.Detector | None = None
        self._unidet: _unidet.Detector | None = None
        if category == "attribute":
            self._vqa = _compbench_vqa.VisualQuestions(vqa, tokenizer, target, chosen, reward=self.name)
            self._find_phrases, self.provenance["phrases"] = _compbench_prompts.phrase_finder()
            digests["weights"] = self._vqa.sha256
            self.provenance["preprocessing"] = self._vqa.preprocessing
        elif detector == UNIDET:
            self._unidet = _unidet.Detector(unidet, category, target, chosen, reward=self.name)
            digests["weights"] = self._unidet.sha256
            self.provenance |= {"detector": self._unidet.network, "preprocessing": _unidet.PREPROCESSING}
        elif detector:
            name = MASK2FORMER.get(detector, detector)
            self._detector, digests["weights"] = _detector.load(name, tuple(CLASSES), target, chosen, reward=self.name)
            self.provenance["preprocessing"] = _detector.PREPROCESSING
        if category == "spatial_3d":
            self._depth = _compbench_depth.DepthEstimator(depth, target, chosen, reward=self.name)
            digests["depth"] = self._depth.sha256
        self.provenance |= {name: f"sha256:{digest}" for name, digest in digests.items()}
        combined = hashlib.sha256("\n".join(digests.values()).encode()).hexdigest() if digests else "no-weights"
        self.revision = f"{combined[:12]}-{category}"

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Scores of uint8 RGB images [H, W, 3] against their prompts or metadata, in the same order."""
        scores: list[Scored] = [None] * len(images)
        claims: dict[int, Claim] = {}
        given: dict[int, list[Found]] = {}
        for index, (image, prompt, entry) in enumerate(zip(images, prompts, metadata, strict=True)):
            try:
                claims[index] = self._claim(prompt, entry)
                if self._category != "attribute" and "detections" in entry:
                    given[index] = _given(entry["detections"], image)
                elif self._category != "attribute" and self._unidet is None:
                    claims[index] = self._in_coco(claims[index])
            except ValueError as error:
                scores[index] = Score(None, reason=str(error))
                claims.pop(index, None)
        if self._category == "attribute":
            self._score_attributes(images, claims, scores)
        else:
            self._score_objects(images, claims, given, scores)
        return scores

    def _claim(self, prompt: str, entry: Mapping[str, Any]) -> Claim:
        """What is to be verified, from the metadata or else the prompt.

        Raises:
            ValueError: neither says, or the metadata is wrong.
        """
        if self._category == "attribute":
            phrases = entry["phrases"] if "phrases" in entry else self._find_phrases(prompt)
            if not _is_texts(phrases):
                raise ValueError(f"no noun phrases in {prompt[:80]!r}: give them in the metadata, phrases: [text, ...]")
            return list(phrases)
        if self._category == "numeracy":
            counts = entry["counts"] if "counts" in entry else _compbench_prompts.counts(prompt)
            if not isinstance(counts, Mapping) or not counts or not all(_is_count(n) for n in counts.values()):
                raise ValueError(f"no numbers in {prompt[:80]!r}: give them in the metadata, counts: {{noun: number}}")
            return {str(noun): number for noun, number in counts.items()}
        relations = RELATIONS_2D if self._category == "spatial_2d" else RELATIONS_3D
        if "relation" not in entry and "objects" not in entry:
            if claim := _compbench_prompts.relation(prompt, relations):
                return claim
            raise ValueError(f"no relation in {prompt[:80]!r}: give objects: [a, b] and relation in the metadata")
        objects, relation = entry.get("objects"), entry.get("relation")
        if not _is_texts(objects) or len(objects) != 2 or relation not in relations:
            raise ValueError(f"metadata needs objects: [a, b] and relation: one of {', '.join(relations)}")
        return Relation(objects[0], str(relation), objects[1])

    def _in_coco(self, claim: Claim) -> Claim:
        """The claim in the detector's words.

        Raises:
            ValueError: it does not know an object, or there is no detector.
        """
        if self._detector is None:
            raise ValueError("metadata lacks detections, and this reward was set up without a detector")
        if isinstance(claim, Relation):
            return Relation(_coco_name(claim.first), claim.name, _coco_name(claim.second))
        assert isinstance(claim, dict)
        return {_coco_name(noun): number for noun, number in claim.items()}

    def _score_attributes(self, images: Sequence[Image], claims: Mapping[int, Any], scores: list[Scored]) -> None:
        phrases: dict[int, list[str]] = {index: claim[:MAX_PHRASES] for index, claim in claims.items()}
        answers = self._vqa.yes([images[index] for index in phrases], list(phrases.values()))
        for (index, asked), answer in zip(phrases.items(), answers, strict=True):
            value = math.prod(yes for yes, _ in answer)
            details = {f"phrase.{i}": yes for i, (yes, _) in enumerate(answer)}
            truncated = float(len(claims[index]) > len(asked) or any(cut for _, cut in answer))
            scores[index] = Score(value, {"raw": value, **details, "truncated": truncated})

    def _score_objects(
        self,
        images: Sequence[Image],
        claims: Mapping[int, Claim],
        given: Mapping[int, list[Found]],
        scores: list[Scored],
    ) -> None:
        found = dict(given)
        asked = [index for index in claims if index not in given]
        if asked and self._unidet is not None:
            found |= dict(zip(asked, self._unidet.detect([images[index] for index in asked]), strict=True))
        elif asked and self._detector is not None:
            detections = self._detector.detect([images[index] for index in asked], MIN_SCORE)
            for index, group in zip(asked, detections, strict=True):
                shape = images[index].shape
                found[index] = [Found(CLASSES[d.label], d.score, _in_frame(d.box, shape)) for d in group]
        depths: dict[int, Depth] = {}
        if self._category == "spatial_3d" and claims:
            depths = dict(zip(claims, self._depth.maps([images[index] for index in claims]), strict=True))
        for index, claim in claims.items():
            if isinstance(claim, dict):
                parts = _compbench_rules.numeracy(found[index], claim)
            elif isinstance(claim, Relation) and index in depths:
                parts = _compbench_rules.spatial_3d(found[index], claim.first, claim.second, claim.name, depths[index])
            else:
                assert isinstance(claim, Relation)
                parts = _compbench_rules.spatial_2d(found[index], claim.first, claim.second, claim.name)
            scores[index] = Score(parts["raw"], parts)


def _is_texts(value: object) -> TypeGuard[Sequence[str]]:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(text, str) and text for text in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _coco_name(noun: str) -> str:
    name = _compbench_rules.counted_as(noun)
    name = _COCO.get(name, name)
    if name not in CLASSES:
        raise ValueError(f"the detector does not know {noun!r}, but COCO's 80 classes: give detections in the metadata")
    return name


def _in_frame(box: Sequence[float], shape: Sequence[int]) -> _compbench_rules.Box:
    """A box of an image of ``shape`` (height, width, ...) in the size that the benchmark looks at."""
    height, width = _compbench_rules.frame(shape[0], shape[1])
    x, y = width / shape[1], height / shape[0]
    return (box[0] * x, box[1] * y, box[2] * x, box[3] * y)


def _given(detections: object, image: Image) -> list[Found]:
    """The metadata's detections, surest first.

    Raises:
        ValueError: they are malformed.
    """
    wrong = "detections in the metadata are not a list of {name, score, box: [x0, y0, x1, y1]}"
    if not isinstance(detections, list | tuple):
        raise ValueError(wrong)
    found = []
    for entry in detections:
        try:
            x0, y0, x1, y1 = map(float, entry["box"])
            found.append(Found(str(entry["name"]), float(entry["score"]), _in_frame((x0, y0, x1, y1), image.shape)))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{wrong}: {entry!r}"[:300]) from None
        if not (x0 < x1 and y0 < y1 and math.isfinite(x0 + y0 + x1 + y1) and 0 <= found[-1].score <= 1):
            raise ValueError(f"a box in the metadata's detections is empty, or a score not in 0..1: {entry!r}"[:300])
    return sorted(found, key=lambda object_: -object_.score)
