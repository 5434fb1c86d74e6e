"""GenEval (arXiv 2310.11513, github.com/djghosh13/geneval): are the objects, counts, colours, positions as asked for?

Mask2Former (Swin-S, COCO instances) finds objects, CLIP ViT-L/14 names their colours, and the clauses of the prompt's
metadata are checked. Metadata is a line of GenEval's ``evaluation_metadata.jsonl``: ``tag``, ``include`` and, where
there are any, ``exclude``; the prompt itself is not read. Thresholds are GenEval's: an object's score is above 0.3 (0.9
if ``tag`` is ``counting``), at most 16 objects a class, no further suppression of overlaps, position 0.1.

``score="strict"`` is 1 if every clause holds, else 0 (the benchmark's number, with ``counting=">="``);
``score="dense"`` is the graded reward of the flow_grpo family's server (with ``counting="=="``), of which
``_geneval_rules`` tells the details, at most 1, negative when there are more than twice too many objects. Details have
both, and every clause. A clause about a class, colour or relation that GenEval does not know is refused, not failed.

That server hands RGB pixels to a detector that expects BGR, so that it looks at images with red and blue exchanged;
this reward looks at the images as they are, as the benchmark does.

The benchmark's detector is a file of mmdet, not on the Hugging Face hub: set ``weights`` to it. It is read by
transformers' Mask2Former; mmdet itself is not needed. ``weights=facebook/mask2former-swin-small-coco-instance`` (the
same network in Meta's training) works as well, but its numbers are not the benchmark's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reward_server.contract import Image
from reward_server.rewards import _detector, _geneval_rules
from reward_server.rewards._detector import Detection
from reward_server.rewards._geneval_colour import ColourClassifier
from reward_server.rewards._geneval_colour import source as clip_source
from reward_server.rewards._geneval_rules import CLASSES, Counting, Spec
from reward_server.rewards._options import dtype_name, torch_dtype
from reward_server.rewards.base import RewardLoadError, Score, Scored
from reward_server.weights import Source

CHECKPOINT = (
    "https://download.openmmlab.com/mmdetection/v2.0/mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco/"
    "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756-743b7d99.pth"
)
_VARIANTS = {">=": "at-least", "==": "exactly"}


class Model:
    """The ``geneval`` reward."""

    name = "geneval"
    description = "GenEval: objects, counts, colours and positions as the metadata asks; strict 0/1, or dense up to 1"
    needs: tuple[str, ...] = ("tag", "include")
    revision = ""
    example = (
        "a photo of a red apple",
        {"tag": "colors", "include": [{"class": "apple", "count": 1, "color": "red"}]},
    )

    @staticmethod
    def sources(weights: str = "", clip: str = "openai/clip-vit-large-patch14", **_: object) -> tuple[Source, Source]:
        """The detector's weights and CLIP's.

        Raises:
            RewardLoadError: the detector is not chosen.
        """
        if not weights:
            raise RewardLoadError(
                f"geneval's detector is not on the Hugging Face hub: download {CHECKPOINT} and set the option weights "
                "to that file; or set it to facebook/mask2former-swin-small-coco-instance, another training of the "
                "same network, whose numbers are not the benchmark's"
            )
        return _detector.source(weights), clip_source(clip)

    def setup(
        self,
        device: str,
        *,
        weights: str = "",
        clip: str = "openai/clip-vit-large-patch14",
        score: str = "strict",
        counting: str = ">=",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        max_objects: int = 16,
        position_threshold: float = 0.1,
        dtype: str = "auto",
    ) -> None:
        """Load the detector and CLIP.

        Args:
            weights: mmdet's ``.pth`` file; or hub id or folder of a Mask2Former with a Swin backbone, in the hub's
                layout.
            clip: hub id or folder of the CLIP that names colours.
            score: ``strict`` or ``dense``.
            counting: ``>=`` (the benchmark) or ``==`` (the reinforcement learning server).
            threshold: smallest score of an object, 0..1; ``counting_threshold`` if the tag is ``counting``.
            max_objects: of one class, the surest ones.
            position_threshold: an offset counts beyond this part of two objects' summed sizes.
            dtype: of both networks; ``auto`` is float32, as the benchmark has it, on every device.

        Raises:
            RewardLoadError: an option is wrong, or files are missing, damaged or another model's.
        """
        if score not in ("strict", "dense"):
            raise RewardLoadError(f"score of geneval is {score!r}; it can be strict or dense")
        if counting not in _VARIANTS:
            raise RewardLoadError(f"counting of geneval is {counting!r}; it can be >= or ==")
        self.sources(weights, clip)
        self._score = score
        self._counting: Counting = "==" if counting == "==" else ">="
        self._threshold, self._counting_threshold = threshold, counting_threshold
        self._max_objects, self._position_threshold = max_objects, position_threshold
        torch_device, chosen = torch.device(device), torch_dtype(dtype, device)
        self._detector, detector_sha = _detector.load(weights, tuple(CLASSES), torch_device, chosen, reward=self.name)
        self._colours = ColourClassifier(clip, torch_device, chosen, reward=self.name)
        both = hashlib.sha256(f"{detector_sha}\n{self._colours.sha256}\n".encode()).hexdigest()
        self.revision = f"{both[:12]}-{score}-{_VARIANTS[counting]}"
        self.provenance = {
            "weights": f"sha256:{detector_sha}",
            "clip": f"sha256:{self._colours.sha256}",
            "preprocessing": _detector.PREPROCESSING,
            "thresholds": f"{threshold:g}, counting {counting_threshold:g}, position {position_threshold:g}, "
            f"max objects {max_objects}",
            "dtype": dtype_name(chosen),
        }

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Verdicts on uint8 RGB images [H, W, 3] against their metadata, in the same order."""
        scores: list[Scored] = [None] * len(images)
        specs: dict[int, Spec] = {}
        for index, entry in enumerate(metadata):
            try:
                specs[index] = _geneval_rules.parse(entry)
            except ValueError as error:
                scores[index] = Score(None, reason=f"metadata: {error}")
        found = self._find([images[index] for index in specs], list(specs.values()))
        colours = self._name_colours([images[index] for index in specs], list(specs.values()), found)
        for index, objects, named in zip(specs, found, colours, strict=True):
            boxes = {name: [detection.box for detection in group] for name, group in objects.items()}
            verdict = _geneval_rules.judge(specs[index], boxes, named, self._counting, self._position_threshold)
            strict = float(verdict.strict)
            value = strict if self._score == "strict" else verdict.dense
            details = {"raw": value, "strict": strict, "dense": verdict.dense, **verdict.clauses}
            scores[index] = Score(value, details)
        return scores

    def _find(self, images: Sequence[Image], specs: Sequence[Spec]) -> list[dict[str, list[Detection]]]:
        """The objects of each class on each image, surest first, that the thresholds let through."""
        detections = self._detector.detect(images, min(self._threshold, self._counting_threshold))
        found: list[dict[str, list[Detection]]] = []
        for spec, all_objects in zip(specs, detections, strict=True):
            threshold = self._counting_threshold if spec.tag == "counting" else self._threshold
            groups: dict[str, list[Detection]] = {}
            for detection in all_objects:
                if detection.score > threshold:
                    groups.setdefault(CLASSES[detection.label], []).append(detection)
            found.append({name: group[: self._max_objects] for name, group in groups.items()})
        return found

    def _name_colours(
        self, images: Sequence[Image], specs: Sequence[Spec], found: Sequence[Mapping[str, list[Detection]]]
    ) -> list[dict[int, list[str]]]:
        """By image and number of the clause: the colours that :func:`judge` will ask for, all named in one call."""
        wanted: list[tuple[int, int]] = []  # image, clause
        objects: list[tuple[Image, Detection, str]] = []
        for image_index, (image, spec, groups) in enumerate(zip(images, specs, found, strict=True)):
            for clause_index, clause in enumerate(spec.include):
                group = groups.get(clause.name, [])
                number = _geneval_rules.looked_at(clause, len(group), self._counting)
                if clause.colour and number is not None:
                    wanted += [(image_index, clause_index)] * number
                    objects += [(image, detection, clause.name) for detection in group[:number]]
        colours: list[dict[int, list[str]]] = [{} for _ in images]
        for (image_index, clause_index), colour in zip(wanted, self._colours.classify(objects), strict=True):
            colours[image_index].setdefault(clause_index, []).append(colour)
        return colours
