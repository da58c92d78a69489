"""The menu: every choice a user has by name. Imports no torch, so that `--help` is quick.

The tables that carry the choices out stand beside the functions; a test holds both equal.
"""

from typing import Literal

StrategyName = Literal[
    "mochi",
    "ranked-by-key",
    "mixed-with-key",
    "beta-weighted",
    "one-minus-beta-weighted",
    "log-beta-weighted",
    "softmax-sampled",
    "fixed-percentage",
]
"""How synthetic points are planned: Sec. 4 ("mochi") and the variants of App. B.2."""

RealNegatives = Literal["keep", "drop_hardest", "drop_all"]
"""What becomes of the real negatives beside the synthetic ones. The paper keeps them; its row
"(all queue)" is never defined, and "drop_all" is our most plausible reading of it."""

QueueStart = Literal["random", "empty"]
"""What an unfilled slot is: a random negative, as in official MoCo, or none."""
