"""Train: ``python trainer/run.py --config configs/train/small.yaml``. ``--help`` lists every setting.

Without ``--reward-url`` it starts a reward server for itself. ``accelerate launch trainer/run.py ...`` runs it in
several processes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

if __name__ == "__main__":  # run as a script: make `trainer` the package, not this folder a source of modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from reward_server import options
from trainer.config import ALIASES, ENV_PREFIX, Command, Config, UserError

PROG = "trainer/run.py"
DRY_RUN = "--dry-run"


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status: 0, 2 after a user's mistake, 130 after a second Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    only_estimate = DRY_RUN in arguments
    config = options.load(
        Config,
        [argument for argument in arguments if argument != DRY_RUN],
        prog=PROG,
        description=f"{Config.__doc__} {DRY_RUN}: say what the run would take, without a GPU and without weights.",
        env_prefix=ENV_PREFIX,
        aliases=ALIASES,
        env_siblings=[Command],
    )
    logging.basicConfig(level=logging.WARNING if is_main() else logging.ERROR, format="%(message)s")
    # Loads torch; here, so that --help and a wrong setting are answered at once.
    from trainer.launch import launch
    from trainer.parts import SHOWN_ERRORS

    try:
        if only_estimate:
            from trainer.dry_run import dry_run

            print(dry_run(config))
            return 0
        with stop_requests() as stop:
            launch(config, stop)
    except (UserError, *SHOWN_ERRORS) as error:
        if is_main():  # all processes make the same mistake
            print(f"{PROG}: error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        if is_main():
            print(f"{PROG}: stopped at once; --resume auto goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def is_main() -> bool:
    """Whether this is the process that talks to the user: the first of this machine, if a launcher started several."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Whether the user asked to stop: the first Ctrl-C (or SIGTERM) asks, the second interrupts."""
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        if is_main():
            when = "after this step, or now if it waits for scores, with a checkpoint"
            print(f"\nstopping {when}; once more to stop at once", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
