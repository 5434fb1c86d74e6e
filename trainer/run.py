"""Train: ``python trainer/run.py --config configs/train/small.yaml``. ``--help`` lists every setting.

Reads the settings, builds the parts, calls the loop, writes the report. Without ``--reward-url`` it starts a reward
server for itself. ``accelerate launch trainer/run.py ...`` runs it in several processes.
"""

from __future__ import annotations

import copy
import logging
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

if __name__ == "__main__":  # run as a script: make `trainer` the package, not this folder a source of modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from reward_server import options
from trainer.config import ALIASES, ENV_PREFIX, Config


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status: 0, 2 after a user's mistake, 130 after a second Ctrl-C."""
    config = options.load(
        Config, argv, prog="trainer/run.py", description=str(Config.__doc__), env_prefix=ENV_PREFIX, aliases=ALIASES
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # Imported here, so that --help and a wrong setting are answered at once.
    from reward_server.embedded import EmbeddedServerError
    from trainer.checkpoints import CheckpointError
    from trainer.launch import UserError
    from trainer.rewards import RewardError

    try:
        with stop_requests() as stop:
            run(config, stop)
    except (UserError, CheckpointError, RewardError, EmbeddedServerError) as error:
        print(f"trainer/run.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trainer/run.py: stopped at once; --resume auto goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Whether the user asked to stop: the first Ctrl-C (or SIGTERM) asks, the second interrupts."""
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        print("\nstopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(config: Config, stop: Callable[[], bool]) -> None:
    """Build the parts, train, and write the report. Raises the errors that :func:`main` shows."""
    from accelerate.utils import broadcast_object_list

    from trainer import launch
    from trainer.report import choose_folder

    resume = config.checkpoint.resume
    root: list[Any] = [config.report.run_dir]
    accelerator = launch.build_accelerator(config, root[0])
    if accelerator.is_main_process:
        root = [choose_folder(config.report.run_dir, resume != "none")]
    broadcast_object_list(root)
    accelerator.project_configuration.set_directories(str(root[0]))
    try:
        with launch.reward_client(config, accelerator) as client:
            _run(config, stop, accelerator, client, root[0])
    finally:
        accelerator.end_training()


def _run(config: Config, stop: Callable[[], bool], accelerator: Any, client: Any, root: Path) -> None:
    from trainer import checkpoints, launch, loop
    from trainer.prompts import PromptSampler
    from trainer.report import RunFolder, sha256, spread, versions
    from trainer.rollout import Sampler, build_objective

    try:
        config.check_processes(accelerator.num_processes)
        policy, weights = launch.load_policy(config)
        config.check_model(policy.ar_steps, policy.schedule.steps)
    except ValueError as error:
        raise launch.UserError(str(error)) from error
    prompts = launch.read_prompts(config.prompts.train, config.prompts.text_key)
    heldout = launch.read_prompts(config.prompts.heldout, config.prompts.text_key)
    revisions = client.check()

    module = cast(Any, policy).to(accelerator.device)
    parameters = launch.freeze(policy, config.algorithm.head)
    reference = None
    if config.algorithm.kl_beta > 0:
        reference = copy.deepcopy(module).requires_grad_(False)
    optimizer, scheduler = launch.build_optimizer(config, parameters)
    model, optimizer = accelerator.prepare(module, optimizer)

    manifest = {
        "settings": config.model_dump(mode="json"),
        "versions": versions(),
        "rewards": revisions,
        "base_checkpoint": sha256(weights),
    }
    sampler = Sampler(
        config=config,
        objective=build_objective(config.algorithm),
        policy=policy,
        prompts=PromptSampler(prompts, config.train.prompts_per_step, config.train.seed),
        client=client,
        accelerator=accelerator,
    )
    state = loop.Run(
        config=config,
        accelerator=accelerator,
        sampler=sampler,
        policy=policy,
        model=model,
        reference=reference,
        parameters=parameters,
        optimizer=optimizer,
        scheduler=scheduler,
        heldout=[heldout[i] for i in spread(len(heldout), config.evaluate.prompts)],
        checkpoints=root / "checkpoints",
        manifest=manifest,
        stop=stop,
        folder=RunFolder(root) if accelerator.is_main_process else None,
    )
    restore(state, checkpoints.find(config.checkpoint.resume, state.checkpoints))
    if state.folder is not None:
        (root / "config.yaml").write_text(options.dump(config))
        state.folder.write_json("versions.json", {k: v for k, v in manifest.items() if k != "settings"})
        print(f"run folder {root}; {accelerator.num_processes} process(es) on {accelerator.device}", file=sys.stderr)
    accelerator.init_trackers("tensorboard")
    loop.train(state)
    if state.folder is not None:
        summary = state.folder.finish(config.report.sheet_prompts, {k: manifest[k] for k in ("rewards", "versions")})
        print(headline(summary, root))


def restore(state: Any, checkpoint: Path | None) -> None:
    """Go on from a checkpoint, if there is one: states in place, pending rollouts, and logs cut back to its step."""
    from accelerate.utils import broadcast_object_list

    from trainer import checkpoints, loop

    evaluated: list[int | None] = [None]
    if checkpoint is not None:
        loaded = checkpoints.load(
            checkpoint,
            accelerator=state.accelerator,
            policy=state.policy,
            training=loop.training_states(state),
        )
        state.step = loaded.step
        state.pending = deque(state.sampler.restore(pending) for pending in loaded.pending)
        state.saved_at = state.step if checkpoint.parent == state.checkpoints else None
    if state.folder is not None:
        start = state.step if checkpoint is not None else -1
        state.folder.truncate(start)
        checkpoints.sweep(state.checkpoints, start)
        evaluated = [line["step"] for line in state.folder.evaluations.read()[-1:]] or [None]
        if checkpoint is not None:
            print(f"resuming after step {state.step} from {checkpoint}", file=sys.stderr)
    broadcast_object_list(evaluated)
    state.evaluated_at = evaluated[0]


def headline(summary: dict[str, Any], root: Path) -> str:
    """The end of the run in three lines."""
    from trainer.evaluate import TOTAL, Interval

    lines = [f"{summary['steps']} steps, {summary['seconds_waiting_for_rewards']:.1f} s waiting for rewards"]
    if TOTAL in summary["heldout"]:
        before, after, change = (Interval(**summary["heldout"][TOTAL][k]) for k in ("before", "after", "difference"))
        lines.append(f"held-out reward {before.text()} -> {after.text()}; paired difference {change.text()} (95 %)")
    lines.append(f"report: {root / 'report.md'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
