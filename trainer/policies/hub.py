"""Checkpoints of the Hugging Face hub, from the local cache: training never downloads."""

from __future__ import annotations

import re
from pathlib import Path


def snapshot(source: str, wanted: str, licence: str, otherwise: str = "") -> Path:
    """The local cache's snapshot of the hub id ``source``.

    ``wanted``: what was looked for, for an error about what is no hub id. ``otherwise``: another way to the weights.
    Raises FileNotFoundError if there is none, saying which command gets it under which licence.
    """
    if Path(source).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source):
        raise FileNotFoundError(wanted + otherwise)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"there is no folder {source}, and the local cache has no such hub id; if it is one, get it ({licence}) "
            f"with: hf download {source}{otherwise}"
        ) from error
