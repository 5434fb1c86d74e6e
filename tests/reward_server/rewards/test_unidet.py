"""UniDet held against its own code on detectron2, and as the detector of T2I-CompBench's metrics.

The networks are small and random: they prove that the official checkpoints' layout is computed alike, not that objects
are found.
"""

import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from reward_server.rewards import _unidet, _unidet_boxes
from reward_server.rewards._unidet_network import Sizes, UniDet
from reward_server.rewards.base import RewardLoadError
from reward_server.rewards.t2i_compbench import Model

FIXTURES = Path(__file__).parent / "fixtures"
CPU = torch.device("cpu")


def script(name):
    spec = importlib.util.spec_from_file_location(name, FIXTURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = script("make_unidet")
EXPECTED = json.loads((FIXTURES / "unidet" / "expected.json").read_text())
WHOLE = {
    "R50": Sizes(False, 64, (3, 4, 6, 3), 64, 256, 256, False, 0, 2, 1024, 722),
    "RS200": Sizes(True, 64, (3, 24, 36, 3), 64, 256, 256, True, 4, 1, 1024, 722),
}


def images(count=None):
    return [make.random_image(size, 300 + index) for index, size in enumerate(make.SIZES[:count])]


def state_of(kind):
    drawn = make.draw(EXPECTED["models"][kind]["shapes"], *make.KINDS[kind])
    return {key: torch.from_numpy(value) for key, value in drawn.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Path of a small model of each kind, stored as detectron2 of UniDet's time did."""
    folder = tmp_path_factory.mktemp("unidet")
    for kind in make.KINDS:
        old = {
            "pixel_mean": torch.zeros(3, 1, 1),
            "pixel_std": torch.ones(3, 1, 1),
            "proposal_generator.anchor_generator.cell_anchors.0": torch.zeros(9, 4),
            "backbone.bottom_up.res4.0.conv3.norm.num_batches_tracked": torch.tensor(7),
        }
        content = {"model": state_of(kind) | old, "iteration": 179999, "optimizer": {"lr": np.float64(0.1)}}
        torch.save(content, folder / f"{kind}.pth")
    return {kind: folder / f"{kind}.pth" for kind in make.KINDS}


@pytest.fixture(scope="module")
def detectors(checkpoints):
    return {
        kind: _unidet.Detector(str(path), "numeracy", CPU, torch.float32, reward="x")
        for kind, path in checkpoints.items()
    }


@pytest.mark.parametrize("kind", make.KINDS)
def test_objects_are_those_of_unidets_own_code(detectors, kind):
    """Boxes, scores and names, in order; neighbours in order whose scores are nearly equal may change places."""
    for found, expected in zip(detectors[kind].detect(images()), EXPECTED["models"][kind]["objects"], strict=True):
        assert len(found) == len(expected) > 5
        assert len({label for label, _, _ in expected}) > 2
        assert [o.score for o in found] == pytest.approx([score for _, score, _ in expected], abs=5e-5)
        left = list(found)
        for label, score, box in expected:
            same = [
                o
                for o in left
                if o.name == _unidet.names()[label]
                and o.score == pytest.approx(score, abs=5e-5)
                and o.box == pytest.approx(box, abs=2e-2)
            ]
            assert same, (label, score, box)
            left.remove(same[0])


@pytest.mark.parametrize("kind", make.KINDS)
def test_at_full_size_names_and_shapes_are_the_official_models(kind):
    with torch.device("meta"):
        model = UniDet(WHOLE[kind])
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    expected = EXPECTED["models"][kind]
    assert len(shapes) == expected["tensors"]
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == expected["parameters"]
    assert make.digest(shapes) == expected["digest"]
    assert Sizes.of(model.state_dict()) == WHOLE[kind]


def test_names_are_the_benchmarks():
    assert len(_unidet.names()) == 722
    assert hashlib.sha256("\n".join(_unidet.names()).encode()).hexdigest() == EXPECTED["names"]


def test_objects_do_not_depend_on_the_batch(detectors):
    first, second = images(2)
    together = detectors["RS200"].detect([second, first, second])
    for own, alone in zip(together, [second, first, second], strict=True):
        expected = detectors["RS200"].detect([alone])[0]
        assert [o.name for o in own] == [o.name for o in expected]
        assert [o.score for o in own] == pytest.approx([o.score for o in expected], abs=1e-5)


def test_suppression_is_greedy_and_by_group():
    generator = torch.Generator().manual_seed(0)
    for count in (2, 200, 1200):  # above 1000 boxes torchvision compares each group alone
        corners = torch.rand(count, 2, generator=generator) * 90
        boxes = torch.cat((corners, corners + 5 + 40 * torch.rand(count, 2, generator=generator)), dim=1)
        scores, groups = torch.rand(count, generator=generator), torch.randint(3, (count,), generator=generator)
        kept = _unidet_boxes.suppress(boxes, scores, groups, 0.5)
        members = [torch.where(groups == group)[0] for group in range(3)]
        greedy = torch.cat([own[make.greedy(boxes[own], scores[own], 0.5)] for own in members])
        assert sorted(kept.tolist()) == sorted(greedy.tolist())
        assert (scores[kept].diff() <= 0).all()
    assert _unidet_boxes.suppress(boxes[:0], scores[:0], groups[:0], 0.5).tolist() == []


def test_pooled_region_of_a_ramp_is_the_ramp():
    """Bilinear samples of a plane are the plane: each bin's value is that at its middle."""
    y, x = torch.meshgrid(torch.arange(20.0), torch.arange(30.0), indexing="ij")
    box = torch.tensor([[40.0, 24.0, 152.0, 136.0]])  # bins of two cells
    out = _unidet_boxes.pool(torch.stack((x, y)), box, 1 / 8, 7)
    assert out[0, 0, 3].tolist() == pytest.approx([5 + 2 * i + 0.5 for i in range(7)])
    assert out[0, 1, :, 3].tolist() == pytest.approx([3 + 2 * i + 0.5 for i in range(7)])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("missing", "1 missing: roi_heads.box_head.2.fc1.bias"),
        ("unexpected", "1 unexpected: backbone.gate"),
        ("shape", r"1 of another shape: proposal_generator.rpn_head.anchor_deltas.bias \[24\], not \[36\]"),
        ("classes", "has 80 classes, not the 722"),
        ("not UniDet", "is no UniDet of detectron2: it lacks 'backbone.bottom_up"),
        ("no model", "does not hold tensors under 'model'"),
        ("code", "is not read: it refers to the code pathlib"),
        ("damaged", "is not read"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, change, match):
    state = state_of("R50")
    content = {"model": state}
    if change == "missing":
        del state["roi_heads.box_head.2.fc1.bias"]
    elif change == "unexpected":
        state["backbone.gate"] = torch.zeros(1)
    elif change == "shape":
        state["proposal_generator.rpn_head.anchor_deltas.bias"] = torch.zeros(24)
    elif change == "classes":
        state["roi_heads.box_predictor.0.cls_score.weight"] = torch.zeros(81, 32)
    elif change == "not UniDet":
        content = {"model": {"weight": torch.zeros(1)}}
    elif change == "no model":
        content = state
    elif change == "code":
        content["where"] = Path("/")
    torch.save(content, tmp_path / "unidet.pth")
    if change == "damaged":
        (tmp_path / "unidet.pth").write_bytes(b"PK\x03\x04 not a file of torch")
    with pytest.raises(RewardLoadError, match=match):
        _unidet.Detector(str(tmp_path / "unidet.pth"), "numeracy", CPU, torch.float32, reward="x")


def test_a_checkpoint_of_numpy_arrays_is_read(tmp_path):
    state = {key: value.numpy() for key, value in state_of("R50").items()}
    torch.save({"model": state}, tmp_path / "unidet.pth")
    read = _unidet.read_checkpoint(tmp_path / "unidet.pth")
    assert all(torch.equal(read[key], torch.from_numpy(value)) for key, value in state.items())


def test_metrics_score_what_unidet_finds(checkpoints):
    model = Model()
    model.setup("cpu", category="numeracy", unidet=str(checkpoints["R50"]))
    image = images(1)[0]
    found = model._unidet.detect([image])[0]
    name = found[0].name
    detections = [  # the same objects by the metadata, whose boxes are in pixels of the image
        {"name": o.name, "score": o.score, "box": [edge * 64 / 479 for edge in o.box]} for o in found
    ]
    metadata = [{"counts": {name: 1}}, {"counts": {name: 1}, "detections": detections}, {"counts": {"no class": 1}}]
    own, given, none = model.score([image] * 3, [""] * 3, metadata)
    assert own.details == given.details
    assert own.details[f"count.{name}"] >= 1
    assert none.value == 0.0  # as in the benchmark: what UniDet has no class for is absent
    assert model.provenance["detector"] == "unidet-resnet50"
    assert model.provenance["preprocessing"] == "unidet-pil-bilinear-479-480-bgr-pad32/1"
    assert model.revision == f"{hashlib.sha256(model._unidet.sha256.encode()).hexdigest()[:12]}-numeracy"


def test_the_benchmarks_checkpoint_of_each_category_is_named():
    assert Model.sources(category="spatial_2d")[0].repo == "shikunl/prismer"
    for category in ("numeracy", "spatial_3d"):
        with pytest.raises(RewardLoadError, match=r"R50_6x\+2x.pth: download it from https://.* option unidet"):
            Model.sources(category=category)
        with pytest.raises(RewardLoadError, match="option unidet"):
            Model().setup("cpu", category=category)
    own = Model.sources(category="numeracy", unidet="/weights/a.pth")[0]
    assert (own.repo, own.files) == ("/weights", ("a.pth",))
