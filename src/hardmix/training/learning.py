"""Signs in the metrics that a run goes wrong: a collapse, a loss at chance, too many points."""

import math
from typing import Any

from hardmix.runtime.console import warn
from hardmix.settings.config import PretrainConfig

COLLAPSED = 0.05
"""Spread of the keys (1 for a uniform sphere) below which all images look the same."""
TOO_MUCH_MASS = 0.8
"""Share of the softmax that points may hold without a warning."""
NEAR = 0.95
"""Share of the chance level above which a loss counts as being at chance."""
FALL = 0.02
"""Share of the chance level by which a loss must have fallen to count as falling."""
GUESSING = 0.02
"""Proxy accuracy below which it counts as guessing, or four times chance if that is more."""
PATIENCE = 300
"""Steps with a full queue before a judgement."""


class LearningWatch:
    """Sees every line of metrics.jsonl and warns, of most things once."""

    def __init__(self, config: PretrainConfig) -> None:
        self._config = config
        self._losses: list[tuple[int, float]] = []
        self._warned: set[str] = set()

    def see(self, line: dict[str, Any]) -> None:
        """Look at a line; warn about a collapse each time, about other things once."""
        if line.get("spread", 1.0) < COLLAPSED and line["epoch"] > 0:
            warn(
                f"step {line['step']}: the keys have collapsed (spread {line['spread']:.3f}; 1 is"
                " uniform): lower optimizer.lr, or raise model.key_momentum."
            )
        if line.get("synthetic_mass", 0.0) > TOO_MUCH_MASS:
            self._warn_once(
                "mass",
                f"step {line['step']}: synthetic points hold {line['synthetic_mass']:.0%} of the"
                " softmax, so that real negatives hardly count: lower mix.num_pairs and"
                " mix.num_with_query, or raise train.temperature.",
            )
        if "proxy_accuracy" not in line or line.get("queue_filled", 1.0) < 1:
            return  # random keys in the queue are easy to tell apart
        self._losses.append((line["step"], line["loss"]))
        if self._learns_nothing(line):
            self._warn_once("chance", self._advice(line))

    def _warn_once(self, subject: str, message: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            warn(message)

    def _learns_nothing(self, line: dict[str, Any]) -> bool:
        """Return whether the loss is at chance, has not fallen, and the task is not solved."""
        chance = math.log(1 + self._config.train.queue_size)
        guess = max(GUESSING, 4 / (1 + self._config.train.queue_size))
        first, steps = self._losses[0][0], len(self._losses)
        if line["step"] - first < PATIENCE or steps < 4 or line["proxy_accuracy"] > guess:
            return False
        half = [loss for _, loss in self._losses[: steps // 2]]
        late = [loss for _, loss in self._losses[steps // 2 :]]
        before, now = sum(half) / len(half), sum(late) / len(late)
        return now > NEAR * chance and now > before - FALL * chance

    def _advice(self, line: dict[str, Any]) -> str:
        chance = math.log(1 + self._config.train.queue_size)
        return (
            f"step {line['step']}: nothing is learnt so far: the loss ({line['loss']:.2f}) is at"
            f" the level of guessing ({chance:.2f}) and does not fall, and the proxy accuracy is"
            f" {line['proxy_accuracy']:.1%}. Stop the run (Ctrl-C) and start another with"
            " a smaller train.queue_size, a lower optimizer.lr, a lower data.colour_strength, a"
            " higher data.min_scale, or model.init (docs/own-images.md)."
        )
