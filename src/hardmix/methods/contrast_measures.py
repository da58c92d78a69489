"""Fig. 2's measures of a step, for every method that contrasts queries with negatives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.methods.base import StepOutcome
from hardmix.mixing.diagnostics import (
    edges,
    false_negatives_top,
    false_parents,
    harder_points,
    matching_probability,
    negative_mass,
    proxy_of_edges,
    similarity_histogram,
)
from hardmix.mixing.infonce import Contrast
from hardmix.mixing.plans import MixPlan
from hardmix.mixing.queue import equal_and_known
from hardmix.runtime.device import read_together
from hardmix.runtime.distributed import gather, world_size
from hardmix.settings.config import PretrainConfig


@dataclass
class ContrastOutcome(StepOutcome):
    """Results of a part of a batch, described after the queue is updated."""

    contrast: Contrast
    plan: MixPlan | None
    key: Float[Tensor, "batch dim"]
    exclude: Tensor | None
    labels: Tensor
    """Labels of the queries."""
    queue_labels: Tensor
    """Labels of the negatives: a copy, as those of the oldest keys are overwritten later."""
    own: Bool[Tensor, "batch K"] | None = None
    """Columns that are not negatives but the query's own image, if there are any."""

    @torch.no_grad()
    def kept(self) -> Tensor:
        """Return the similarity of each query's key, hardest negative and hardest point."""
        return edges(self.measured, self.exclude)

    @classmethod
    def summary(cls, kept: Tensor) -> dict[str, Tensor]:
        """Return Fig. 2b: the share of all queries that find their key."""
        accuracy = proxy_of_edges(kept)
        return {"proxy_accuracy": accuracy.real, "proxy_accuracy_mixed": accuracy.mixed}

    @torch.no_grad()
    def ranks(self) -> Tensor:
        """Return Fig. 2a for this part: the mean matching probability of its queries, by rank."""
        return matching_probability(self.measured, self.exclude)

    @property
    def measured(self) -> Contrast:
        """The contrast, in which a query's own image is its easiest negative."""
        if self.own is None:
            return self.contrast
        return self.contrast._replace(real=self.contrast.real.masked_fill(self.own, -1.0))


@torch.no_grad()
def describe_contrast(outcomes: Sequence[StepOutcome], config: PretrainConfig) -> dict[str, float]:
    """Return Fig. 2's measures for the last part of a step; the proxy task is of all steps."""
    parts = cast("Sequence[ContrastOutcome]", outcomes)
    last = parts[-1]
    outcome, plan = last.measured, last.plan
    keys = gather(torch.cat([part.key for part in parts]))
    false = equal_and_known(last.labels, last.queue_labels)
    false = false if last.own is None else false & ~last.own
    mass = negative_mass(last.contrast)
    described = {
        "positive_similarity": outcome.positive.mean(),
        "hardest_similarity": outcome.real.amax(dim=1).mean(),
        "spread": keys.std(dim=0).mean() * math.sqrt(config.model.dim),
        "labelled": (gather(last.labels) >= 0).all(),
        "effective_negatives": mass.effective,
        **{f"gradient_top_{number}": share for number, share in mass.top.items()},
    }
    by_labels = {"false_negatives_top": false_negatives_top(outcome.real, false)}
    by_kind: dict[str, Tensor] = {}
    anywhere: dict[str, Tensor] = {}
    if plan is not None:
        parents = false_parents(plan, false)
        by_labels["synthetic_one_false"] = parents.pairs_at_least_one
        by_labels["synthetic_both_false"] = parents.pairs_both
        by_labels["synthetic_query_false"] = parents.with_query
        described["synthetic_mass"] = mass.points
        harder = harder_points(outcome, plan, last.exclude)
        described["pairs_harder"] = harder.pairs
        described["with_query_harder"] = harder.with_query
        by_kind = {f"synthetic_mass_{kind}": share for kind, share in mass.kinds.items()}
        highest = gather(torch.stack(list(by_kind.values()))[None]).amax(dim=0)
        anywhere = {
            f"{name} on any rank": share for name, share in zip(by_kind, highest, strict=True)
        }
    numbers = read_together(described | by_labels | by_kind | anywhere | last.measures)
    omitted = {name for name in by_kind if not numbers.pop(f"{name} on any rank")}
    omitted |= set() if numbers.pop("labelled") else by_labels.keys()
    return {name: value for name, value in numbers.items() if name not in omitted}


@torch.no_grad()
def hardness_of(outcomes: Sequence[StepOutcome], config: PretrainConfig) -> dict[str, list[Any]]:
    """Return Fig. 2a for a step, and histograms of similarities."""
    last = cast("ContrastOutcome", outcomes[-1])
    outcome, exclude = last.measured, last.exclude
    probability = matching_probability(outcome, exclude)
    real = outcome.real if exclude is None else outcome.real.masked_fill(exclude, -torch.inf)
    hardest = real.topk(min(config.mix.num_hardest, real.shape[1]), dim=1).values
    histograms = {"positive": outcome.positive, "hardest": hardest}
    if last.plan is not None:
        pair = last.plan.partner >= 0
        histograms["pairs"] = outcome.synthetic[pair]
        histograms["with_query"] = outcome.synthetic[~pair]
    counts = {name: similarity_histogram(values) for name, values in histograms.items()}
    if world_size() > 1:
        probability = gather(probability[None]).mean(dim=0)
        counts = {
            name: gather(torch.tensor([values])).sum(dim=0).tolist()
            for name, values in counts.items()
        }
    return {
        "matching_probability": [float(f"{value:.5g}") for value in probability.tolist()],
        **counts,
    }
