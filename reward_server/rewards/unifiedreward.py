"""The ``unifiedreward`` reward: CodeGoat24/UnifiedReward behind an OpenAI-compatible server.

The ``judge`` with the templates of the model's own repository (github.com/CodeGoat24/UnifiedReward, arXiv 2503.05236),
word for word, since the model was trained on them:

- ``unifiedreward`` (7b, 7b-v1.5, qwen-*): elements, then "Final Score: x", 1 to 5
- ``unifiedreward_short`` (flow_grpo's for the same models, without the elements): "Final Score: x"
- ``unifiedreward_axes`` (2.0-*): Alignment, Coherence and Style, each 1 to 5; the score is their mean

The prompt stands in square brackets, as in training; brackets and white space in it are changed so that it cannot leave
them (:func:`reward_server.rewards._judge_template.quoted`). The ratings are decimals, so they are read from text.
The repository's scripts send JPEG and the image as it is; the RL code PNG and ``resize: 512``; here: PNG, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from reward_server.rewards import judge
from reward_server.rewards._judge_template import Template


class Model(judge.Model):
    """``judge`` with another template and the field's scalings: ``raw`` (1 to 5), ``raw/5``, ``(raw-1)/4``."""

    name = "unifiedreward"
    description = "UnifiedReward behind an OpenAI-compatible server, by its own prompt: 1 to 5"
    default_template = "unifiedreward"
    scalings: ClassVar[Mapping[str, Callable[[Template, float], float]]] = {
        "raw": lambda template, value: value,
        "raw/5": lambda template, value: value / 5,
        "(raw-1)/4": lambda template, value: (value - 1) / 4,
    }
