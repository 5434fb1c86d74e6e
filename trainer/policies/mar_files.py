"""Where the weights of LTH14's MAR lie, and how they are read without running what a pickle asks for.

The official repository (MIT) gives ``pretrained_models/mar/mar_base/checkpoint-last.pth`` (``mar_large``, ``mar_huge``)
and ``pretrained_models/vae/kl16.ckpt``. A conversion to safetensors, ``mar-base.safetensors`` and
``kl16.safetensors``, is on the hub as ``jadechoghari/mar``; its weights are reported to be the raw ones, not the
moving average that the published figures were measured with. Official files have both, and the average is read.
"""

from __future__ import annotations

import argparse
import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.policies.hub import snapshot
from trainer.policies.kl16 import KL16, KL16Config
from trainer.policies.mar_parts import MAR_SIZES, Mar, MarConfig, load_strictly

GET_OFFICIAL = (
    "the official weights (MIT) are fetched by `python util/download.py` in a clone of github.com/LTH14/mar, which "
    "makes the folder pretrained_models"
)
VAE_NAMES = ("kl16.ckpt", "kl16.safetensors")


def folder_of(source: str) -> Path:
    """``source`` itself if it exists, or the local cache's snapshot of that hub id.

    Raises FileNotFoundError if there is neither, saying which command gets it under which licence.
    """
    path = Path(source)
    if path.exists():
        return path
    wanted = f"no MAR weights at {source}: a file, a folder or a hub id expected"
    return snapshot(source, wanted, "read its licence first", f"; {GET_OFFICIAL}")


def model_file(folder: Path, size: str | None) -> Path:
    """The transformer's weights in a folder: of one run or of several sizes, of which ``size`` chooses.

    Raises FileNotFoundError if there are none, ValueError if there are several and none is chosen.
    """
    own = folder / "checkpoint-last.pth"
    if own.is_file():
        return own
    found = {
        name: path
        for name in MAR_SIZES
        for path in (
            folder / f"mar-{name}.safetensors",
            folder / f"mar_{name}" / own.name,
            folder / "mar" / f"mar_{name}" / own.name,
        )
        if path.is_file()
    }
    if size is not None and size not in MAR_SIZES:
        raise ValueError(f"size: there is no MAR {size!r}; there are {', '.join(MAR_SIZES)}")
    if not found or (size is not None and size not in found):
        raise FileNotFoundError(f"no MAR{'-' + size if size else ''} weights in {folder}; {GET_OFFICIAL}")
    if size is None and len(found) > 1:
        raise ValueError(f"{folder} holds MAR in the sizes {', '.join(found)}; choose one by the option size")
    return found[size] if size is not None else next(iter(found.values()))


def vae_file(source: Path) -> Path:
    """The autoencoder's weights: ``source`` itself, or those by a checkpoint or in its folder, where the official
    download places them.

    Raises FileNotFoundError if there are none.
    """
    if source.name in VAE_NAMES:
        return source
    folder = source if source.is_dir() else source.parent
    for place in (folder, folder / "vae", folder.parent / "vae", folder.parent.parent / "vae"):
        for name in VAE_NAMES:
            if (place / name).is_file():
                return place / name
    raise FileNotFoundError(
        f"no autoencoder ({' or '.join(VAE_NAMES)}) by {source}; say where it is by the option vae; {GET_OFFICIAL}"
    )


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint's weights, the moving average where there is one, and what a file of ours says of them: ``config``
    and, if saved during a run, ``base``. Nothing but tensors, plain containers and ``argparse.Namespace`` is unpickled.

    Raises ValueError if the file is not such a checkpoint.
    """
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                about: dict[str, Any] = json.loads((file.metadata() or {}).get("mar", "{}"))
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
        return state, about
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, struct.error, RuntimeError, EOFError, ValueError) as error:
        told = str(error).partition("\n")[0].partition(" Re-running")[0]  # torch goes on to advise reading it unsafely
        raise ValueError(f"{path} is not a checkpoint that can be read safely: {told}") from error
    for key in ("model_ema", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            return dict(content[key]), {"config": content["config"]} if "config" in content else {}
    raise ValueError(f"{path} is not a checkpoint of MAR: it has neither model_ema nor model")


def write_official(mar: Mar, vae: KL16, folder: Path) -> None:
    """Both checkpoints in the official form, in one folder. Official code passes over ``config``, which tells the
    number of attention heads where no published model has the width."""
    folder.mkdir(parents=True, exist_ok=True)
    state, vae_state = ({key: value.cpu() for key, value in m.state_dict().items()} for m in (mar, vae))
    torch.save({"model": state, "model_ema": state, "config": asdict(mar.config)}, folder / "checkpoint-last.pth")
    torch.save({"model": vae_state}, folder / "kl16.ckpt")


def mar_config(state: Mapping[str, Tensor], source: str) -> MarConfig:
    """The sizes of a state dict. The number of attention heads does not show in it: it is that of the published model
    of the same width. Raises ValueError if there is none, or if a key is missing."""
    try:
        width, channels = state["z_proj.weight"].shape
        N = state["diffusion_pos_embed_learned"].shape[1]
        published = next((c for c in MAR_SIZES.values() if c.width == width), None)
        if published is None:
            raise ValueError(f"{source}: no published MAR has the width {width}, so that its heads are not known")
        return replace(
            published,
            depth=_count(state, "encoder_blocks"),
            grid=round(N**0.5),
            channels=channels,
            buffer=state["encoder_pos_embed_learned"].shape[1] - N,
            classes=len(state["class_emb.weight"]),
            head_width=len(state["diffloss.net.input_proj.bias"]),
            head_depth=_count(state, "diffloss.net.res_blocks"),
        )
    except KeyError as error:
        raise ValueError(f"{source} is not a checkpoint of MAR: {error} is missing") from error


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    """How many modules a list of them has in a state dict."""
    return len({key[len(prefix) + 1 :].split(".")[0] for key in state if key.startswith(prefix + ".")})


def read_kl16(path: Path) -> KL16:
    """The autoencoder of a file, frozen. Raises ValueError if the file has none or its keys do not fit."""
    state, _ = read_state(path)
    try:
        config = KL16Config.of(state)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a KL-16 autoencoder: {error}") from error
    with torch.device("meta"):
        vae = KL16(config)
    load_strictly(vae, {key: value.float() for key, value in state.items()}, str(path), assign=True)
    return vae.requires_grad_(False).eval()
