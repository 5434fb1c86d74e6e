"""Make a small HPSv2 checkpoint by the package's own classes, and CLIP's tokenizer from the vocabulary of its package.

Run by ``test_environments_side_by_side.py`` with the Python of the environment ``hpsv2_package``: python FILE FOLDER.
Random weights of a fixed seed in the official layout: they show that two programs agree, not that either has taste.
"""

import gzip
import json
import sys
from pathlib import Path

import torch

from reward_server.rewards.hpsv2_package import import_package, vocabulary

CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 224, "layers": 2, "width": 64, "head_width": 32, "patch_size": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
MERGES = 49152 - 256 - 2  # of the file's lines, those that CLIP uses


def main(folder: Path) -> None:
    open_clip = import_package()
    torch.manual_seed(0)
    state = {name: value.half() for name, value in open_clip.CLIP(**CONFIG).state_dict().items()}
    torch.save({"epoch": 1, "state_dict": state}, folder / "HPS_v2.1_compressed.pt")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": CONFIG}))

    with gzip.open(vocabulary()) as file:
        merges = file.read().decode().split("\n")[1 : MERGES + 1]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    ends = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    tokens = {ends.get(token, token): i for token, i in open_clip.tokenizer._tokenizer.encoder.items()}
    (folder / "vocab.json").write_text(json.dumps(tokens), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
