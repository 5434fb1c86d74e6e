"""UniDet's network (arXiv 2102.13086): a cascade R-CNN on a feature pyramid of a ResNet or ResNeSt.

As detectron2 builds it from UniDet's ``Unified_learned_OCIM_{R50,RS200}_6x+2x.yaml``, for inference, and under
detectron2's names of parameters. Sizes are read off the checkpoint's shapes; what shapes do not tell is constant here:

- levels p3..p7 (strides 8..128), p6 and p7 made from p5; nine anchors a cell;
- 1000 proposals of each level before suppression (IoU 0.7), 1000 in all after it;
- regions of 7 x 7 from p3..p5, of the level that fits their area; three stages, each on the boxes of the one before;
- a sigmoid for every class, the mean over the stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from reward_server.rewards import _unidet_boxes as boxes

LEVELS = (3, 4, 5)
"""Of the backbone and the regions; the pyramid has two more"""
STRIDES = (8, 16, 32, 64, 128)
ANCHOR_SIZES = tuple(tuple(base * 2 ** (part / 3) for part in range(3)) for base in (32, 64, 128, 256, 512))
ANCHOR_RATIOS = (0.5, 1.0, 2.0)
PROPOSALS, PROPOSAL_IOU = 1000, 0.7
BINS, CANONICAL_SIZE, CANONICAL_LEVEL = 7, 224, 4
STAGE_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
RADIX = 2
"""Of ResNeSt's split attention"""

State: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a UniDet."""

    split: bool
    """Whether the backbone is a ResNeSt"""
    stem: int
    """Channels after the first convolution"""
    blocks: tuple[int, int, int, int]
    """Number of each stage"""
    inner: int
    """Channels inside the blocks of the first stage; each next stage has twice as many"""
    outer: int
    """Channels after the first stage, likewise"""
    pyramid: int
    pyramid_norm: bool
    convolutions: int
    """Of a stage's head, each with normalisation"""
    layers: int
    """Fully connected ones of a stage's head"""
    hidden: int
    """Their width"""
    classes: int

    @classmethod
    def of(cls, state: State) -> Sizes:
        """Those of a checkpoint's tensors.

        Raises:
            KeyError: it is no UniDet; the argument is the name that it lacks.
        """
        body, head = "backbone.bottom_up.", "roi_heads.box_head.0."
        split = f"{body}stem.conv1_1.weight" in state
        stages = [{key.split(".")[3] for key in state if key.startswith(f"{body}res{i}.")} for i in (2, 3, 4, 5)]
        first, second, third, fourth = map(len, stages)
        return cls(
            split=split,
            stem=state[f"{body}stem.conv1_1.weight" if split else f"{body}stem.conv1.weight"].shape[0],
            blocks=(first, second, third, fourth),
            inner=state[f"{body}res2.0.conv1.weight"].shape[0],
            outer=state[f"{body}res2.0.conv3.weight"].shape[0],
            pyramid=state["backbone.fpn_output3.weight"].shape[0],
            pyramid_norm="backbone.fpn_output3.norm.weight" in state,
            convolutions=sum(f"{head}conv{i}.weight" in state for i in range(1, 10)),
            layers=sum(f"{head}fc{i}.weight" in state for i in range(1, 10)),
            hidden=state[f"{head}fc1.weight"].shape[0],
            classes=state["roi_heads.box_predictor.0.cls_score.weight"].shape[0] - 1,
        )


class Norm(nn.Module):
    """Batch normalisation by stored statistics, be it called frozen or synchronised in training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        mean, var = self.get_buffer("running_mean"), self.get_buffer("running_var")
        return functional.batch_norm(x_NCHW, mean, var, self.get_buffer("weight"), self.get_buffer("bias"), eps=1e-5)


class Convolution(nn.Conv2d):
    """A convolution, padded so as to keep the size at stride 1, and its normalisation instead of a bias."""

    def __init__(self, inside: int, outside: int, kernel: int, stride: int = 1, *, norm: bool = True) -> None:
        super().__init__(inside, outside, kernel, stride, kernel // 2, bias=not norm)
        self.norm = Norm(outside) if norm else nn.Identity()

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.norm(super().forward(x_NCHW))
        return normalised


class SplitAttention(nn.Module):
    """ResNeSt's 3 x 3 convolution (arXiv 2004.08955): two groups, summed by weights that the image's mean gives."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        between = max(channels * RADIX // 4, 32)
        self.conv = nn.Conv2d(channels, channels * RADIX, 3, padding=1, groups=RADIX, bias=False)
        self.bn0 = Norm(channels * RADIX)
        self.fc1 = nn.Conv2d(channels, between, 1)
        self.bn1 = Norm(between)
        self.fc2 = nn.Conv2d(between, channels * RADIX, 1)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        groups_NRCHW = self.bn0(self.conv(x_NCHW)).relu().unflatten(1, (RADIX, -1))
        mean_NC11 = groups_NRCHW.sum(dim=1).mean(dim=(2, 3), keepdim=True)
        attention = self.fc2(self.bn1(self.fc1(mean_NC11)).relu()).unflatten(1, (RADIX, -1)).softmax(dim=1)
        weighted: torch.Tensor = (attention * groups_NRCHW).sum(dim=1)
        return weighted


class Block(nn.Module):
    """A bottleneck. ResNet halves the size in the first convolution and ResNeSt by mean pooling after the second."""

    def __init__(self, inside: int, inner: int, outside: int, stride: int, *, split: bool) -> None:
        super().__init__()
        self.conv1 = Convolution(inside, inner, 1, 1 if split else stride)
        self.conv2 = SplitAttention(inner) if split else Convolution(inner, inner, 3)
        self.conv3 = Convolution(inner, outside, 1)
        self.shortcut = Convolution(inside, outside, 1, 1 if split else stride) if inside != outside else nn.Identity()
        self._split, self._pooled = split, stride if split else 1

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        out = self.conv2(self.conv1(x_NCHW).relu())
        if not self._split:
            out = out.relu()  # split attention has had it inside
        if self._pooled > 1:
            out = functional.avg_pool2d(out, 3, self._pooled, padding=1)
            x_NCHW = functional.avg_pool2d(x_NCHW, self._pooled, ceil_mode=True, count_include_pad=False)
        added: torch.Tensor = self.conv3(out) + self.shortcut(x_NCHW)
        return added.relu()


class Stem(nn.Module):
    """The first convolution, or ResNeSt's three, and a pooling: a quarter of the size."""

    def __init__(self, channels: int, *, split: bool) -> None:
        super().__init__()
        self._names = ("conv1_1", "conv1_2", "conv1_3") if split else ("conv1",)
        if split:
            self.conv1_1 = Convolution(3, channels, 3, 2)
            self.conv1_2 = Convolution(channels, channels, 3)
            self.conv1_3 = Convolution(channels, channels * 2, 3)
        else:
            self.conv1 = Convolution(3, channels, 7, 2)

    def forward(self, x_N3HW: torch.Tensor) -> torch.Tensor:
        for name in self._names:
            x_N3HW = self.get_submodule(name)(x_N3HW).relu()
        return functional.max_pool2d(x_N3HW, 3, 2, padding=1)


class BottomUp(nn.Module):
    """ResNet or ResNeSt: maps of strides 8, 16 and 32."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.stem = Stem(sizes.stem, split=sizes.split)
        inside = sizes.stem * 2 if sizes.split else sizes.stem
        for stage, count in enumerate(sizes.blocks):
            inner, outside = sizes.inner << stage, sizes.outer << stage
            strides = [2 if stage and not index else 1 for index in range(count)]
            blocks = [
                Block(outside if index else inside, inner, outside, stride, split=sizes.split)
                for index, stride in enumerate(strides)
            ]
            self.add_module(f"res{stage + 2}", nn.Sequential(*blocks))
            inside = outside

    def forward(self, x_N3HW: torch.Tensor) -> list[torch.Tensor]:
        x, maps = self.stem(x_N3HW), []
        for stage in (2, *LEVELS):
            x = self.get_submodule(f"res{stage}")(x)
            maps.append(x)
        return maps[1:]


class Top(nn.Module):
    """Levels 6 and 7."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.p6 = nn.Conv2d(channels, channels, 3, 2, 1)
        self.p7 = nn.Conv2d(channels, channels, 3, 2, 1)

    def forward(self, p5: torch.Tensor) -> list[torch.Tensor]:
        p6 = self.p6(p5)
        return [p6, self.p7(p6.relu())]


class Pyramid(nn.Module):
    """The feature pyramid (arXiv 1612.03144): maps of STRIDES for images whose sides are multiples of 32."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bottom_up = BottomUp(sizes)
        for level in LEVELS:
            inside = sizes.outer << (level - 2)
            self.add_module(f"fpn_lateral{level}", Convolution(inside, sizes.pyramid, 1, norm=sizes.pyramid_norm))
            out = Convolution(sizes.pyramid, sizes.pyramid, 3, norm=sizes.pyramid_norm)
            self.add_module(f"fpn_output{level}", out)
        self.top_block = Top(sizes.pyramid)

    def forward(self, x_N3HW: torch.Tensor) -> list[torch.Tensor]:
        maps: list[torch.Tensor] = []
        above: torch.Tensor | None = None
        for level, features in reversed(list(zip(LEVELS, self.bottom_up(x_N3HW), strict=True))):
            merged = self.get_submodule(f"fpn_lateral{level}")(features)
            if above is not None:
                merged = merged + functional.interpolate(above, scale_factor=2.0, mode="nearest")
            maps.insert(0, self.get_submodule(f"fpn_output{level}")(merged))
            above = merged
        return maps + list(self.top_block(maps[-1]))


class ProposalHead(nn.Module):
    """Whether there is an object at each anchor, and where."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        anchors = len(ANCHOR_SIZES[0]) * len(ANCHOR_RATIOS)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.objectness_logits = nn.Conv2d(channels, anchors, 1)
        self.anchor_deltas = nn.Conv2d(channels, anchors * 4, 1)

    def forward(self, x_NCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, H * W * anchors] and deltas [N, H * W * anchors, 4]."""
        x_NCHW = self.conv(x_NCHW).relu()
        deltas = self.anchor_deltas(x_NCHW).unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)
        return self.objectness_logits(x_NCHW).permute(0, 2, 3, 1).flatten(1), deltas


class Proposals(nn.Module):
    """The region proposal network (arXiv 1506.01497)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.rpn_head = ProposalHead(channels)

    def forward(self, maps: list[torch.Tensor], size: tuple[int, int]) -> list[torch.Tensor]:
        """Boxes [K, 4] of each image, K at most PROPOSALS, inside ``size`` (height, width)."""
        found = []
        for features, stride, sizes in zip(maps, STRIDES, ANCHOR_SIZES, strict=True):
            logits, deltas = self.rpn_head(features)
            height, width = features.shape[2:]
            anchors = boxes.grid_anchors(sizes, ANCHOR_RATIOS, stride, height, width, features.device)
            top, index = logits.float().topk(min(PROPOSALS, logits.shape[1]), dim=1)
            chosen = deltas.gather(1, index[..., None].expand(-1, -1, 4))
            found.append((top, boxes.regress(chosen, anchors[index], (1.0, 1.0, 1.0, 1.0))))
        levels = torch.cat([torch.full_like(top[0], i, dtype=torch.long) for i, (top, _) in enumerate(found)])
        scores_NK = torch.cat([top for top, _ in found], dim=1)
        boxes_NK4 = torch.cat([part for _, part in found], dim=1)
        return [self._keep(*one, levels, size) for one in zip(boxes_NK4, scores_NK, strict=True)]

    @staticmethod
    def _keep(
        boxes_K4: torch.Tensor, scores_K: torch.Tensor, levels_K: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        finite = boxes_K4.isfinite().all(dim=1) & scores_K.isfinite()
        boxes_K4 = boxes.clip(boxes_K4, size)
        there = finite & boxes.not_empty(boxes_K4)
        boxes_K4, scores_K, levels_K = boxes_K4[there], scores_K[there], levels_K[there]
        return boxes_K4[boxes.suppress(boxes_K4, scores_K, levels_K, PROPOSAL_IOU)[:PROPOSALS]]


class RegionHead(nn.Module):
    """Convolutions and layers of one stage: regions [K, C, 7, 7] to vectors [K, hidden]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.pyramid * BINS * BINS
        for index in range(sizes.convolutions):
            self.add_module(f"conv{index + 1}", Convolution(sizes.pyramid, sizes.pyramid, 3))
        for index in range(sizes.layers):
            self.add_module(f"fc{index + 1}", nn.Linear(width, sizes.hidden))
            width = sizes.hidden

    def forward(self, x_KCHW: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x_KCHW = layer(x_KCHW.flatten(1) if isinstance(layer, nn.Linear) else x_KCHW).relu()
        return x_KCHW


class Predictor(nn.Module):
    """Logits of the classes and of the background, and the box, which all classes share."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(hidden, classes + 1)
        self.bbox_pred = nn.Linear(hidden, 4)

    def forward(self, x_KD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cls_score(x_KD), self.bbox_pred(x_KD)


class RegionHeads(nn.Module):
    """The cascade (arXiv 1712.00726)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.box_head = nn.ModuleList([RegionHead(sizes) for _ in STAGE_WEIGHTS])
        self.box_predictor = nn.ModuleList([Predictor(sizes.hidden, sizes.classes) for _ in STAGE_WEIGHTS])

    def forward(
        self, maps: list[torch.Tensor], boxes_K4: torch.Tensor, size: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Boxes [K, 4] and probabilities of the classes [K, classes] of one image, whose maps are [C, H, W]."""
        probabilities = []
        for head, predictor, weights in zip(self.box_head, self.box_predictor, STAGE_WEIGHTS, strict=True):
            boxes_K4 = boxes.clip(boxes_K4, size)
            logits, deltas = predictor(head(_regions(maps, boxes_K4)))
            probabilities.append(logits.float().sigmoid()[:, :-1])
            boxes_K4 = boxes.regress(deltas, boxes_K4, weights)
        return boxes_K4, torch.stack(probabilities).mean(dim=0)


def _regions(maps: list[torch.Tensor], boxes_K4: torch.Tensor) -> torch.Tensor:
    """Regions [K, C, 7, 7], each of the level on which its box is about CANONICAL_SIZE / 16 cells wide."""
    side = boxes.areas(boxes_K4).sqrt()
    level = (CANONICAL_LEVEL + (side / CANONICAL_SIZE + 1e-8).log2()).floor().clamp(LEVELS[0], LEVELS[-1])
    out = torch.empty(len(boxes_K4), maps[0].shape[0], BINS, BINS, device=boxes_K4.device)
    for number, features, stride in zip(LEVELS, maps, STRIDES, strict=False):
        here = level == number
        out[here] = boxes.pool(features, boxes_K4[here], 1 / stride, BINS)
    return out


class UniDet(nn.Module):
    """The whole network."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.backbone = Pyramid(sizes)
        self.proposal_generator = Proposals(sizes.pyramid)
        self.roi_heads = RegionHeads(sizes)

    def forward(self, x_N3HW: torch.Tensor, size: tuple[int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Boxes [K, 4], not clipped, and probabilities [K, classes] of each image; K at most PROPOSALS.

        Args:
            x_N3HW: normalised images, zero where they are padded to multiples of 32.
            size: (height, width) without the padding, the same of all.
        """
        maps = self.backbone(x_N3HW)
        proposals = self.proposal_generator(maps, size)
        return [self.roi_heads([m[row] for m in maps], own, size) for row, own in enumerate(proposals)]
