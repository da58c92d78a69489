"""What a step minimises: MoCo and MoCHi (Sec. 3.1, 4), or cross-entropy for the upper bound.

Both have the same verbs, which the loop in pretrain.py calls: `backward` computes gradients,
`remember` stores what the next step needs, `trunk` is what is kept, `describe` and `hardness` say
what happened.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hardmix.config import MixConfig, PretrainConfig, QueueStart
from hardmix.contrast import Contrast
from hardmix.diagnostics import (
    false_negatives_top,
    false_parents,
    matching_probability,
    proxy_accuracy,
    similarity_histogram,
)
from hardmix.distributed import gather, rank, world_size
from hardmix.encoders import QueryKeyPair, build_encoder, encode_keys
from hardmix.loading import Batch
from hardmix.loss import MochiLoss
from hardmix.memory import MemoryQueue
from hardmix.mixing import MixPlan, Strategy
from hardmix.mixing_variants import STRATEGIES, plan_fixed_percentage, plan_softmax_sampled
from hardmix.precision import Compute
from hardmix.schedules import decreasing, mixing_started
from hardmix.stateless import seed_of


class Moment(NamedTuple):
    """Where in training a step is."""

    step: int
    epoch: int


class Contrastive(nn.Module):
    """MoCo or MoCHi: two encoders, a queue, and the loss between them."""

    def __init__(
        self, config: PretrainConfig, compute: Compute, channels: int, trunk: nn.Module | None
    ) -> None:
        super().__init__()
        self.config, self.compute = config, compute
        train, model = config.train, config.model
        encoder = build_encoder(model, channels, trunk, image_size=config.data.image_size)
        self.pair = QueryKeyPair(encoder, model.key_momentum, model.key_bn_splits)
        start: QueueStart = "random" if train.queue_start == "random" else "empty"
        generator = torch.Generator().manual_seed(seed_of("queue", train.seed))
        self.memory = MemoryQueue(train.queue_size, model.dim, start=start, generator=generator)
        self.keys: list[Tensor] = []
        self.last: tuple[Contrast, MixPlan | None, Batch] | None = None

    @property
    def trunk(self) -> nn.Module:
        """The query encoder without its head: what target tasks use."""
        return self.pair.query.trunk

    def trained(self) -> list[nn.Parameter]:
        """Parameters the optimizer moves; the key encoder follows by momentum."""
        return list(self.pair.query.parameters())

    def backward(self, batch: Batch, moment: Moment) -> Tensor:
        """One step's gradients, in official MoCo's order; returns the loss."""
        self.pair.update_key()
        self.keys, losses = [], []
        parts = self.config.train.accumulate
        for number, part in enumerate(_parts(batch, parts)):
            with self.compute.autocast():
                query = self.pair.query(part.query)
                key = encode_keys(
                    self.pair.key, part.key, self._shuffle(len(part.ids), moment, number)
                )
            outcome, plan = self._loss(moment).contrast(
                query,
                key,
                self.memory,
                self._exclude(part),
                mix=self._mixes(moment),
                generator=self._generator("mixing", moment, number, rank()),
            )
            (outcome.loss / parts).backward()
            losses.append(outcome.loss.detach())
            self.keys.append(key)
            self.last = outcome, plan, part
        return torch.stack(losses).mean()

    def remember(self, batch: Batch) -> None:
        """Write this step's keys into the queue: after it was read, so no key meets itself."""
        keys = gather(torch.cat(self.keys))
        self.memory.enqueue(keys, gather(batch.labels), gather(batch.ids))

    @torch.no_grad()
    def prefill(self, batch: Batch, moment: Moment) -> None:
        """Fill the queue before the first step."""
        with self.compute.autocast():
            shuffle = self._shuffle(len(batch.ids), moment, 0)
            self.keys = [encode_keys(self.pair.key, batch.key, shuffle)]
        self.remember(batch)

    @torch.no_grad()
    def describe(self) -> dict[str, float]:
        """Fig. 2's measures of the last step, by the names used everywhere."""
        assert self.last is not None
        outcome, plan, batch = self.last
        exclude = self._exclude(batch)
        accuracy = proxy_accuracy(outcome, exclude)
        spread = torch.cat(self.keys).std(dim=0).mean() * math.sqrt(self.config.model.dim)
        described = {
            "proxy_accuracy": accuracy.real,
            "proxy_accuracy_mixed": accuracy.mixed,
            "positive_similarity": outcome.positive.mean(),
            "hardest_similarity": outcome.real.amax(dim=1).mean(),
            "queue_filled": self.memory.filled / len(self.memory),
            "spread": spread,
        }
        if bool((batch.labels >= 0).all()):
            false = self.memory.same_class(batch.labels)
            described["false_negatives_top"] = false_negatives_top(outcome.real, false)
            if plan is not None:
                parents = false_parents(plan, false)
                described["synthetic_one_false"] = parents.pairs_at_least_one
                described["synthetic_both_false"] = parents.pairs_both
                described["synthetic_query_false"] = parents.with_query
        return {name: float(value) for name, value in described.items()}

    @torch.no_grad()
    def hardness(self) -> dict[str, list[float] | list[int]]:
        """Fig. 2a of the last step, and how similar positives, negatives and points are."""
        assert self.last is not None
        outcome, plan, batch = self.last
        exclude = self._exclude(batch)
        temperature = self.config.train.temperature
        probability = matching_probability(outcome, temperature, exclude)
        real = outcome.real if exclude is None else outcome.real.masked_fill(exclude, -torch.inf)
        hardest = real.topk(min(self.config.mix.num_hardest, real.shape[1]), dim=1).values
        histograms = {"positive": outcome.positive, "hardest": hardest}
        if plan is not None:
            pair = plan.partner >= 0
            histograms["pairs"] = outcome.synthetic[pair]
            histograms["with_query"] = outcome.synthetic[~pair]
        return {
            "matching_probability": [float(f"{value:.5g}") for value in probability.tolist()],
            **{name: similarity_histogram(values) for name, values in histograms.items()},
        }

    def _exclude(self, batch: Batch) -> Tensor | None:
        masks = []
        if self.config.oracle:
            masks.append(self.memory.same_class(batch.labels))
        if self.config.train.exclude_same_image:
            masks.append(self.memory.same_image(batch.ids))
        return torch.stack(masks).any(dim=0) if masks else None

    def _mixes(self, moment: Moment) -> bool:
        mix = self.config.mix
        if self.config.method != "mochi":
            return False
        if mix.warm_up_steps is not None:
            return mixing_started(moment.step, mix.warm_up_steps)
        return mixing_started(moment.epoch, mix.warm_up_epochs)

    def _loss(self, moment: Moment) -> MochiLoss:
        mix = self.config.mix
        return MochiLoss(
            mix.num_hardest,
            mix.num_pairs,
            mix.num_with_query,
            self.config.train.temperature,
            strategy=choose_strategy(mix, moment.epoch, self.config.train.epochs),
            real_negatives=mix.real_negatives,
            through_query=mix.through_query,
        )

    def _generator(
        self, purpose: str, moment: Moment, part: int, process: int = 0
    ) -> torch.Generator:
        seed = seed_of(purpose, self.config.train.seed, moment.step, part, process)
        return torch.Generator().manual_seed(seed)

    def _shuffle(self, number: int, moment: Moment, part: int) -> Tensor:
        """One order for the batch of all processes: the seed is the same on each."""
        everyone = number * world_size()
        return torch.randperm(everyone, generator=self._generator("shuffle", moment, part))


class Supervised(nn.Module):
    """Cross-entropy on the same trunk and data: the paper's upper bound (Table 1)."""

    def __init__(
        self,
        config: PretrainConfig,
        compute: Compute,
        channels: int,
        trunk: nn.Module | None,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.compute, self.accumulate = compute, config.train.accumulate
        encoder = build_encoder(config.model, channels, trunk, image_size=config.data.image_size)
        self.trunk = encoder.trunk
        self.classifier = nn.Linear(encoder.width, num_classes)
        self.accuracy = 0.0

    def trained(self) -> list[nn.Parameter]:
        """Everything."""
        return list(self.parameters())

    def backward(self, batch: Batch, moment: Moment) -> Tensor:  # noqa: ARG002
        """One step's gradients on the first view; returns the loss."""
        losses, right = [], []
        for part in _parts(batch, self.accumulate):
            with self.compute.autocast():
                logits = self.classifier(self.trunk(part.query)).float()
            loss = cross_entropy(logits, part.labels)
            (loss / self.accumulate).backward()
            losses.append(loss.detach())
            right.append((logits.argmax(dim=1) == part.labels).float().mean())
        self.accuracy = float(torch.stack(right).mean())
        return torch.stack(losses).mean()

    def remember(self, batch: Batch) -> None:
        """Nothing: there is no queue."""

    def describe(self) -> dict[str, float]:
        """Accuracy on the last batch."""
        return {"train_accuracy": self.accuracy}

    def hardness(self) -> None:
        """Nothing: there are no negatives."""


def choose_strategy(mix: MixConfig, epoch: float, epochs: float) -> Strategy:
    """The strategy by name, with its own options and at its point of the curriculum."""
    if mix.strategy == "softmax-sampled":
        return partial(plan_softmax_sampled, sampling_temperature=mix.sampling_temperature)
    if mix.strategy == "fixed-percentage":
        end = mix.percentage if mix.percentage_end is None else mix.percentage_end
        percentage = decreasing(epoch, epochs, mix.percentage, end)
        return partial(plan_fixed_percentage, percentage=percentage)
    return STRATEGIES[mix.strategy]


def _parts(batch: Batch, number: int) -> list[Batch]:
    return [Batch(*part) for part in zip(*(field.chunk(number) for field in batch), strict=True)]
