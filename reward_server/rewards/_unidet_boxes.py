"""What a two-stage detector does with boxes: anchors, regression, suppression of duplicates, pooling of regions.

In plain PyTorch, since torchvision's compiled operators are absent beside a CPU build of torch. They compute what
detectron2 (0.6) and torchvision's ``nms`` and ``roi_align(aligned=True, sampling_ratio=0)`` do. Boxes are float32
(x0, y0, x1, y1) in pixels of the network's input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MAX_LOG_SCALE = math.log(1000 / 16)
"""At most so much larger is a box made, as a logarithm"""
_SHIFTED_UP_TO = {"cpu": 4_000}
_SHIFTED_UP_TO_ELSEWHERE = 100_000


def grid_anchors(
    sizes: Sequence[float], ratios: Sequence[float], stride: int, height: int, width: int, device: torch.device
) -> torch.Tensor:
    """Anchors [H * W * len(sizes) * len(ratios), 4] around the corners of the cells of an H x W feature map.

    Args:
        sizes: square roots of the anchors' areas.
        ratios: of height to width.
        stride: pixels between cells.
    """
    cells = []
    for size in sizes:
        for ratio in ratios:
            w = math.sqrt(size**2 / ratio)
            h = ratio * w
            cells.append((-w / 2, -h / 2, w / 2, h / 2))
    cells_A4 = torch.tensor(cells, device=device)
    y_H = torch.arange(height, dtype=torch.float32, device=device) * stride
    x_W = torch.arange(width, dtype=torch.float32, device=device) * stride
    y_HW, x_HW = torch.meshgrid(y_H, x_W, indexing="ij")
    corners = torch.stack((x_HW, y_HW, x_HW, y_HW), dim=-1).reshape(-1, 1, 4)
    return (corners + cells_A4).reshape(-1, 4)


def regress(deltas_N4: torch.Tensor, boxes_N4: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """The boxes moved by (dx, dy), in units of their sides, and scaled by exp(dw), exp(dh); each delta over its weight.

    Leading dimensions are free.
    """
    dx, dy, dw, dh = (delta / w for delta, w in zip(deltas_N4.float().unbind(-1), weights, strict=True))
    size = boxes_N4[..., 2:] - boxes_N4[..., :2]
    centre = boxes_N4[..., :2] + 0.5 * size
    moved = torch.stack((dx, dy), dim=-1) * size + centre
    scaled = torch.stack((dw, dh), dim=-1).clamp(max=MAX_LOG_SCALE).exp() * size
    return torch.cat((moved - 0.5 * scaled, moved + 0.5 * scaled), dim=-1)


def clip(boxes_N4: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The boxes' parts inside an image of ``size`` (height, width); what is no number becomes 0."""
    height, width = size
    boxes_N4 = boxes_N4.nan_to_num(nan=0.0)
    x, y = boxes_N4[:, 0::2].clamp(0, width), boxes_N4[:, 1::2].clamp(0, height)
    return torch.stack((x[:, 0], y[:, 0], x[:, 1], y[:, 1]), dim=-1)


def areas(boxes_N4: torch.Tensor) -> torch.Tensor:
    """Areas [N] in square pixels."""
    return (boxes_N4[:, 2] - boxes_N4[:, 0]) * (boxes_N4[:, 3] - boxes_N4[:, 1])


def not_empty(boxes_N4: torch.Tensor) -> torch.Tensor:
    """Which boxes [N] have an area."""
    return (boxes_N4[:, 2] > boxes_N4[:, 0]) & (boxes_N4[:, 3] > boxes_N4[:, 1])


def suppress(boxes_N4: torch.Tensor, scores_N: torch.Tensor, groups_N: torch.Tensor, max_iou: float) -> torch.Tensor:
    """Indices [K], best first, of the boxes that no better kept box of their group overlaps by more than the IoU."""
    limit = _SHIFTED_UP_TO.get(boxes_N4.device.type, _SHIFTED_UP_TO_ELSEWHERE)
    if 0 < boxes_N4.numel() <= limit:
        # torchvision tells groups apart by moving them far apart, and so rounds boxes by up to 1/64 of a pixel: where
        # an overlap is next to max_iou, this decides
        boxes_N4 = boxes_N4 + (groups_N.to(boxes_N4) * (boxes_N4.max() + 1))[:, None]
    order = scores_N.argsort(descending=True, stable=True)
    keep = torch.zeros_like(scores_N, dtype=torch.bool)
    for group in torch.unique(groups_N):
        members = order[groups_N[order] == group]
        keep[members[_survivors(boxes_N4[members], max_iou)]] = True
    return order[keep[order]]


def _survivors(boxes_N4: torch.Tensor, max_iou: float) -> torch.Tensor:
    """Which boxes [N], sorted best first, greedy suppression keeps.

    Greedy suppression is the one solution of ``keep[j] = no kept i < j overlaps j``. Repeating that rule settles at
    least one more box each time, and all of them after as many steps as the longest chain of overlaps: few.
    """
    low = torch.maximum(boxes_N4[:, None, :2], boxes_N4[None, :, :2])
    high = torch.minimum(boxes_N4[:, None, 2:], boxes_N4[None, :, 2:])
    both = (high - low).clamp(min=0).prod(dim=-1)
    area = areas(boxes_N4)
    overlaps = (both / (area[:, None] + area[None] - both) > max_iou).triu(1)
    keep = torch.ones_like(area, dtype=torch.bool)
    while True:
        settled = ~(overlaps & keep[:, None]).any(dim=0)
        if torch.equal(settled, keep):
            return keep
        keep = settled


def pool(features_CHW: torch.Tensor, boxes_N4: torch.Tensor, scale: float, bins: int) -> torch.Tensor:
    """RoIAlign (arXiv 1703.06870): each box of a feature map as [N, C, bins, bins], float32.

    A bin is the mean over a grid of bilinear samples, as dense as the map's pixels. Both factors of a sample's weight
    depend on one coordinate each, so that a bin is rows @ map @ columns.

    Args:
        scale: pixels of the map per pixel of the boxes.
    """
    height, width = features_CHW.shape[1:]
    edges = boxes_N4 * scale - 0.5  # a pixel's value is at its middle
    rows = _samples(edges[:, 1], edges[:, 3], height, bins)
    columns = _samples(edges[:, 0], edges[:, 2], width, bins)
    features_CHW = features_CHW.float()
    pooled = [
        torch.einsum("nph,chw,nqw->ncpq", rows[some], features_CHW, columns[some])
        for some in torch.arange(len(boxes_N4), device=boxes_N4.device).tensor_split(len(boxes_N4) // 256 + 1)
    ]  # in parts, since between the two products there are N * C * bins * W numbers
    return torch.cat(pooled)


def _samples(start_N: torch.Tensor, end_N: torch.Tensor, size: int, bins: int) -> torch.Tensor:
    """Weights [N, bins, size] of ``size`` pixels in each bin of the intervals."""
    bin_N = (end_N - start_N) / bins
    count_N = bin_N.ceil()
    dense = max(1, int(count_N.max())) if len(count_N) else 1
    index_S = torch.arange(dense, device=start_N.device)
    step = (index_S + 0.5) * bin_N[:, None] / count_N.clamp(min=1)[:, None]  # [N, S]
    first = start_N[:, None] + torch.arange(bins, device=start_N.device) * bin_N[:, None]  # [N, bins]
    at = first[:, :, None] + step[:, None]
    counts = (index_S < count_N[:, None])[:, None] & (at >= -1) & (at <= size)
    at = at.clamp(0, size - 1)  # a sample beyond the edge is the edge's
    low = at.floor()
    part = at - low
    weight = counts / count_N.clamp(min=1)[:, None, None]
    out = torch.zeros(len(start_N), bins, size, device=start_N.device)
    out.scatter_add_(2, low.long(), (1 - part) * weight)
    out.scatter_add_(2, (low.long() + 1).clamp(max=size - 1), part * weight)
    return out
