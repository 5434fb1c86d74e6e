"""Score a policy on held-out prompts, with confidence intervals: ``python trainer/evaluate.py --checkpoint PATH``.

Every prompt gets the same seeds whatever the policy, so that two evaluations are compared pair by pair. Images of
one prompt are not independent of each other, hence intervals resample *prompts* (a cluster bootstrap).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: make `trainer` the package, not this folder a source of modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray

from reward_server import options
from trainer.algorithm.seeds import derive_seed
from trainer.config import ENV_PREFIX, Command, UserError
from trainer.policies.base import Policy
from trainer.prompts import Prompt
from trainer.rewards import RewardClient, RewardError, RewardScores
from trainer.together import wait_for_scores

RESAMPLES = 10_000
TOTAL = "reward"
"""Name of the weighted sum of all rewards."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Interval:
    """A mean over prompts with its 95 % interval; None without prompts, an interval also without a second one."""

    mean: float | None
    low: float | None
    high: float | None
    prompts: int

    def text(self) -> str:
        if self.mean is None:
            return "no scores"
        if self.low is None:
            return f"{self.mean:.4f}"
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bootstrap(values_P: Floats) -> Interval:
    """Mean of one value per prompt, and the 2.5 and 97.5 percentiles of the means of resampled prompts (seeded)."""
    count = len(values_P)
    if count < 2:
        return Interval(float(values_P[0]) if count else None, None, None, count)
    drawn = np.random.default_rng(0).integers(0, count, size=(RESAMPLES, count))
    low, high = np.percentile(values_P[drawn].mean(axis=1), [2.5, 97.5])
    return Interval(float(values_P.mean()), float(low), float(high), count)


@dataclass(frozen=True)
class Evaluation:
    """Scores of P prompts with M images each, by name: rewards, sub-scores (``shapes.strict``), and ``reward``."""

    prompts: list[str]
    scores: dict[str, Floats]
    """(P, M); only where valid does a number mean anything"""
    valid: dict[str, Flags]
    """(P, M): False where a score is missing"""
    images: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 0, 1, 1, 3), np.uint8))
    """(P', M, H, W, 3): of the prompts that were to be shown"""
    reason: str | None = None
    """why the first image without a score has none; not kept in files"""

    @property
    def images_per_prompt(self) -> int:
        return int(self.scores[TOTAL].shape[1])

    def prompt_means(self, name: str) -> tuple[Floats, Flags]:
        """(P,) mean over each prompt's valid images, and whether it has any."""
        valid = self.valid[name]
        count = valid.sum(axis=1)
        means = np.where(valid, self.scores[name], 0.0).sum(axis=1) / np.maximum(count, 1)
        return means, count > 0

    def interval(self, name: str) -> Interval:
        means, valid = self.prompt_means(name)
        return bootstrap(means[valid])

    def missing(self, name: str) -> int:
        return int((~self.valid[name]).sum())

    def to_json(self) -> dict[str, Any]:
        """Everything but the images; a missing score is null."""
        scores = {
            name: [[v if ok else None for v, ok in zip(*row, strict=True)] for row in _rows(values, self.valid[name])]
            for name, values in self.scores.items()
        }
        intervals = {name: self.interval(name).to_json() for name in self.scores}
        missing = {name: self.missing(name) for name in self.scores}
        return {"intervals": intervals, "missing": missing, "prompts": self.prompts, "scores": scores}

    @staticmethod
    def from_json(line: Mapping[str, Any]) -> Evaluation:
        """The inverse of :meth:`to_json`, without images."""
        arrays = {name: np.array(rows, dtype=float) for name, rows in line["scores"].items()}  # null becomes NaN
        valid = {name: ~np.isnan(array) for name, array in arrays.items()}
        scores = {name: np.where(valid[name], array, 0.0) for name, array in arrays.items()}
        return Evaluation(line["prompts"], scores, valid)


def difference(before: Evaluation, after: Evaluation, name: str) -> Interval:
    """Mean of after - before over the prompts that have a score in both, paired by prompt.

    Raises ValueError if the evaluations are not of the same prompts.
    """
    if before.prompts != after.prompts:
        raise ValueError("only evaluations of the same prompts can be compared pair by pair")
    (old, old_valid), (new, new_valid) = before.prompt_means(name), after.prompt_means(name)
    both = old_valid & new_valid
    return bootstrap(new[both] - old[both])


def share(count: int, accelerator: Accelerator) -> range:
    """The contiguous part of ``count`` items that this process works on."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    return range(count * rank // processes, count * (rank + 1) // processes)


def evaluate(
    policy: Policy,
    client: RewardClient,
    prompts: Sequence[Prompt],
    *,
    images_per_prompt: int,
    weights: Mapping[str, float],
    accelerator: Accelerator,
    batch: int,
    shown: Sequence[int] = (),
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Generate and score; every process calls it with the same arguments and gets the same answer.

    ``batch``: images sampled at once; a request holds about as many, but all of a prompt: a relative reward compares
    those with one another. ``shown``: indices of the prompts whose images are wanted. Raises RewardError on
    all processes if one of them cannot get its scores or no image has one, and Stopped if ``stop`` says so meanwhile.
    """
    pairs = [(p, m) for p in share(len(prompts), accelerator) for m in range(images_per_prompt)]
    parts: list[dict[str, Any]] = []
    most = -(-len(prompts) // accelerator.num_processes) * images_per_prompt
    request = max(1, batch // images_per_prompt) * images_per_prompt
    for start in range(0, most, request):  # as often on every process, for they wait together
        chunk = pairs[start : start + request]
        texts = [prompts[p].text for p, _ in chunk]
        job: Future[RewardScores] | None = None
        if chunk:
            seeds = [derive_seed("evaluate", p, m) for p, m in chunk]
            pieces = [slice(i, i + batch) for i in range(0, len(chunk), batch)]
            with accelerator.autocast():
                drawn = [policy.decode(policy.rollout(texts[piece], seeds[piece]).tokens) for piece in pieces]
            images = np.concatenate(drawn)
            job = client.submit(images, texts, [prompts[p].metadata for p, _ in chunk])
        wait_for_scores(accelerator, job, stop)
        error = None if job is None else job.exception()
        if error is not None and not isinstance(error, RewardError):
            raise error
        failures = [text for text in gather_object([error and str(error)]) if text is not None]
        if failures:  # known to all processes, so that none waits for another
            raise error or RewardError(failures[0])
        if job is not None:
            scores, valid = columns(job.result(), weights)
            kept = [(pair, images[i]) for i, pair in enumerate(chunk) if pair[0] in shown]
            reason = job.result().reason
            parts.append({"pairs": chunk, "scores": scores, "valid": valid, "images": kept, "reason": reason})
    gathered: list[dict[str, Any]] = gather_object(parts)
    shape = (len(prompts), images_per_prompt)
    result = Evaluation([p.text for p in prompts], {}, {})
    pictures: dict[tuple[int, int], NDArray[np.uint8]] = {}
    for part in gathered:
        rows, cols = np.array(part["pairs"]).T
        pictures.update(part["images"])
        for name, values in part["scores"].items():
            result.scores.setdefault(name, np.zeros(shape))[rows, cols] = values
            result.valid.setdefault(name, np.zeros(shape, bool))[rows, cols] = part["valid"][name]
    reason = next((part["reason"] for part in gathered if part["reason"] is not None), None)
    if not result.valid[TOTAL].any():
        raise RewardError(f"none of the {result.valid[TOTAL].size} held-out images got a score: {reason}")
    if not shown:
        return replace(result, reason=reason)
    images = np.stack([np.stack([pictures[p, m] for m in range(images_per_prompt)]) for p in shown])
    return replace(result, images=images, reason=reason)


def columns(answer: RewardScores, weights: Mapping[str, float]) -> tuple[dict[str, Floats], dict[str, Flags]]:
    """(B,) numbers and validity by name: rewards, sub-scores as ``reward.sub``, and the weighted sum as ``reward``.

    The sum is missing where any of its rewards is.
    """
    scores: dict[str, Floats] = {}
    valid: dict[str, Flags] = {}
    for name in weights:
        scores[name], valid[name] = answer.scores[name], answer.valid[name]
        for detail, values in answer.details[name].items():
            scores[f"{name}.{detail}"] = np.where(np.isnan(values), 0.0, values)
            valid[f"{name}.{detail}"] = valid[name] & ~np.isnan(values)
    everything = np.logical_and.reduce([valid[name] for name in weights])
    total = sum(weight * np.where(everything, scores[name], 0.0) for name, weight in weights.items())
    return {TOTAL: np.asarray(total), **scores}, {TOTAL: everything, **valid}


def _rows(values: Floats, valid: Flags) -> list[tuple[list[float], list[bool]]]:
    return list(zip(values.tolist(), valid.tolist(), strict=True))


def spread(total: int, count: int) -> list[int]:
    """At most ``count`` of ``total`` indices, evenly spaced: files of prompts are often sorted by kind."""
    count = min(count, total)
    return [i * total // count for i in range(count)]


ALIASES = {
    "checkpoint": "policy.checkpoint",
    "reward": "reward.names",
    "rewards": "reward.names",
    "reward-url": "reward.url",
    "seeds": "evaluate.seeds",
}


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status: 0, or 2 after a user's mistake."""
    prog = "trainer/evaluate.py"
    command = options.load(
        Command, argv, prog=prog, description=str(Command.__doc__), env_prefix=ENV_PREFIX, aliases=ALIASES
    )
    from trainer.parts import SHOWN_ERRORS

    try:
        report = run(command)
    except (UserError, *SHOWN_ERRORS) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    if command.output is not None:
        command.output.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    return 0


def run(command: Command) -> dict[str, Any]:
    """Evaluate the checkpoint, and the baseline if there is one; print a table and return everything."""
    from trainer import families, parts

    if command.evaluate.prompts == 0:
        raise UserError("evaluate.prompts is 0: there is nothing to evaluate")
    prompts = parts.read_prompts(command.prompts.heldout, command.prompts.text_key)
    prompts = [prompts[i] for i in spread(len(prompts), command.evaluate.prompts)]
    for given in filter(None, (command.policy.checkpoint, command.baseline)):
        families.policy_source(given, command.policy.name)  # before the server is waited for
    if command.output is not None and not command.output.parent.is_dir():
        raise UserError(f"output: there is no folder {command.output.parent}")
    accelerator = parts.build_accelerator(command)
    results: list[Evaluation] = []
    report: dict[str, Any] = {}
    with parts.reward_client(command, accelerator) as client:
        report["rewards"] = client.check()
        report["provenance"] = client.provenance
        command = parts.with_served_names(command, client)
        parts.check_relative(command, client, accelerator)
        for name, path in (("checkpoint", command.policy.checkpoint), ("baseline", command.baseline)):
            if name == "baseline" and path is None:
                continue
            policy, weights = families.load_policy(command, path)
            parts.check_prompts(policy, prompts, command.prompts.heldout)
            families.as_module(policy).to(accelerator.device)
            families.prepare_prompts(policy, [prompt.text for prompt in prompts])
            result = evaluate(
                policy,
                client,
                prompts,
                images_per_prompt=command.evaluate.seeds,
                weights=command.reward.names,
                accelerator=accelerator,
                batch=command.train.rollout_batch,
            )
            results.append(result)
            report[name] = {"path": weights, "sha256": families.fingerprint(weights), **result.to_json()}
    differences = {name: difference(results[1], results[0], name) for name in results[0].scores if len(results) == 2}
    report["differences"] = {name: interval.to_json() for name, interval in differences.items()}
    if accelerator.is_main_process:
        print(f"{len(prompts)} prompts, {command.evaluate.seeds} images each; mean [95 % interval]")
        for name in results[0].scores:
            change = f"   change {differences[name].text()}" if differences else ""
            failed = results[0].missing(name) if name in command.reward.names else 0  # sub-scores need not apply
            missing = f"   {failed} missing" if failed else ""
            print(f"{name:24s} {results[0].interval(name).text()}{change}{missing}")
    return report


if __name__ == "__main__":
    sys.exit(main())
