"""Write the lock file of each NAME.in beside it: every package that pip would install, with its version.

    python docker/requirements/lock.py docker/requirements/hpsv2.in ...      (`make locks` does all of them)

pip resolves with the settings of the machine (index, certificates, constraints), none of which get into the lock. Nor
do what depends on the machine: torch's build (``2.13.0+cpu`` is written ``2.13.0``) and the CUDA libraries that come
with one, so that the same lock installs on machines with and without a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

OF_THE_MACHINE = ("nvidia-", "cuda-", "triton")


def lock(requirements: Path) -> str:
    """The lock's text.

    Raises:
        subprocess.CalledProcessError: pip cannot resolve them; it has said why on stderr.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    report = subprocess.run([*command, "-r", str(requirements)], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in json.loads(report)["install"]}
    pins = [
        f"{name}=={metadata['version'].partition('+')[0]}"
        for name, metadata in sorted(found.items())
        if not name.startswith(OF_THE_MACHINE)
    ]
    return "\n".join([f"# Made from {requirements.name} by: make locks", *pins, ""])


def main() -> None:
    for argument in sys.argv[1:]:
        requirements = Path(argument)
        print(f"{requirements.with_suffix('.txt')}", flush=True)
        requirements.with_suffix(".txt").write_text(lock(requirements), encoding="utf-8")


if __name__ == "__main__":
    main()
