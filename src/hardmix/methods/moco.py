"""What a step minimises: MoCo and MoCHi (Sec. 3.1, 4). supervised.py has the upper bound.

Both have the same verbs, which the loop in pretrain.py calls: `backward` computes gradients,
`remember` stores what the next step needs, `trunk` is what is kept, `describe` and `hardness` say
what happened. `spread` comes first where there are many processes: each then encodes its rows of
the batch, and gradients are averaged over all.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hardmix.data.batches import Batch
from hardmix.errors import InputError
from hardmix.methods.base import check_embeddings
from hardmix.mixing.diagnostics import (
    false_negatives_top,
    false_parents,
    matching_probability,
    proxy_accuracy,
    similarity_histogram,
)
from hardmix.mixing.infonce import Contrast
from hardmix.mixing.loss import MochiLoss
from hardmix.mixing.plans import MixPlan, RowsGenerator, Strategy
from hardmix.mixing.queue import MemoryQueue, equal_and_known
from hardmix.mixing.variants import STRATEGIES, plan_fixed_percentage, plan_softmax_sampled
from hardmix.models.encoders import QueryKeyPair, build_encoder, encode_keys
from hardmix.runtime.device import Compute
from hardmix.runtime.distributed import (
    averaged,
    broadcast,
    gather,
    mean_over_ranks,
    rank,
    unaveraged,
    world_size,
)
from hardmix.runtime.profile import timed
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import MixConfig, PretrainConfig, QueueStart
from hardmix.settings.schedules import decreasing, mixing_started


class Moment(NamedTuple):
    """Where in training a step is."""

    step: int
    epoch: int


class LastStep(NamedTuple):
    """What a step saw, to be described after the queue was written."""

    outcome: Contrast
    plan: MixPlan | None
    batch: Batch
    exclude: Tensor | None
    queue_labels: Tensor
    """A copy: those of the oldest keys are gone by then."""


class Contrastive(nn.Module):
    """MoCo or MoCHi: two encoders, a queue, and the loss between them."""

    def __init__(
        self,
        config: PretrainConfig,
        compute: Compute,
        channels: int,
        trunk: nn.Module | None,
        strategy: Strategy | None = None,
    ) -> None:
        super().__init__()
        self.config, self.compute, self.strategy = config, compute, strategy
        choose_strategy(config.mix, 0, config.train.epochs, strategy)
        train, model = config.train, config.model
        encoder = build_encoder(model, channels, trunk, image_size=config.data.image_size)
        self.pair = QueryKeyPair(encoder, model.key_momentum, model.key_bn_splits)
        start: QueueStart = "random" if train.queue_start == "random" else "empty"
        generator = torch.Generator().manual_seed(seed_of("queue", train.seed))
        self.memory = MemoryQueue(train.queue_size, model.dim, start=start, generator=generator)
        self.keys: list[Tensor] = []
        self.last: LastStep | None = None
        self._query: tuple[nn.Module] = (self.pair.query,)  # in a tuple: it is not saved twice

    @property
    def trunk(self) -> nn.Module:
        """The query encoder without its head: what target tasks use."""
        return self.pair.query.trunk

    def normalised(self) -> nn.Module:
        """What has running statistics: both encoders."""
        return self.pair

    def trained(self) -> list[nn.Parameter]:
        """Parameters the optimizer moves; the key encoder follows by momentum."""
        return list(self.pair.query.parameters())

    def spread(self) -> None:
        """Begin on all processes: rank 0's weights everywhere, gradients averaged from now on."""
        share_state(self)
        self._query = (averaged(self.pair.query, black_images(self.config, self.compute)),)

    def backward(self, batch: Batch, moment: Moment) -> Tensor:
        """One step's gradients, in official MoCo's order; returns this rank's loss."""
        with timed("key"):
            self.pair.update_key()
        keys, losses = [], []
        parts, last = self.config.train.accumulate, self.last
        for number, part in enumerate(parts_of(batch, parts)):
            with unaveraged(self._query[0], number + 1 < parts):
                with timed("query"), self.compute.autocast():
                    query = self._query[0](part.query)
                with timed("key"), self.compute.autocast():
                    key = encode_keys(
                        self.pair.key, part.key, self._shuffle(len(part.ids), moment, number)
                    )
                check_embeddings(query=query, key=key)
                with timed("loss"):
                    exclude = self._exclude(part)
                    outcome, plan = self._loss(moment).contrast(
                        query,
                        key,
                        self.memory,
                        exclude,
                        mix=self._mixes(moment),
                        generator=self._mixing(moment, number),
                    )
                with timed("backward"):
                    (outcome.loss / parts).backward()
            losses.append(outcome.loss.detach())
            keys.append(key)
            last = LastStep(outcome, plan, part, exclude, self.memory.labels.clone())
        self.keys, self.last = keys, last
        return torch.stack(losses).mean()

    def remember(self, batch: Batch) -> None:
        """Write this step's keys into the queue: after it was read, so no key meets itself.

        In the order of the global batch, so that the queue is the same on every rank.
        """
        parts = self.config.train.accumulate
        keys = gather_parts(torch.cat(self.keys), parts)
        self.memory.enqueue(keys, gather_parts(batch.labels, parts), gather_parts(batch.ids, parts))

    @torch.no_grad()
    def prefill(self, batch: Batch, moment: Moment) -> None:
        """Fill the queue before the first step."""
        with self.compute.autocast():
            shuffle = self._shuffle(len(batch.ids), moment, 0)
            self.keys = [encode_keys(self.pair.key, batch.key, shuffle)]
        self.remember(batch)

    @torch.no_grad()
    def describe(self) -> dict[str, float]:
        """Fig. 2's measures of the last step, by the names used everywhere; over all ranks."""
        assert self.last is not None
        outcome, plan, batch, exclude, queue_labels = self.last
        accuracy = proxy_accuracy(outcome, exclude)
        keys = gather(torch.cat(self.keys))
        spread = keys.std(dim=0).mean() * math.sqrt(self.config.model.dim)
        described = {
            "proxy_accuracy": accuracy.real,
            "proxy_accuracy_mixed": accuracy.mixed,
            "positive_similarity": outcome.positive.mean(),
            "hardest_similarity": outcome.real.amax(dim=1).mean(),
            "queue_filled": self.memory.filled / len(self.memory),
            "spread": spread,
        }
        if bool((gather(batch.labels) >= 0).all()):
            false = equal_and_known(batch.labels, queue_labels)
            described["false_negatives_top"] = false_negatives_top(outcome.real, false)
            if plan is not None:
                parents = false_parents(plan, false)
                described["synthetic_one_false"] = parents.pairs_at_least_one
                described["synthetic_both_false"] = parents.pairs_both
                described["synthetic_query_false"] = parents.with_query
        return mean_over_ranks({name: float(value) for name, value in described.items()})

    @torch.no_grad()
    def hardness(self) -> dict[str, list[float] | list[int]]:
        """Fig. 2a of the last step, and how similar positives, negatives and points are."""
        assert self.last is not None
        outcome, plan, _, exclude, _ = self.last
        temperature = self.config.train.temperature
        probability = matching_probability(outcome, temperature, exclude)
        real = outcome.real if exclude is None else outcome.real.masked_fill(exclude, -torch.inf)
        hardest = real.topk(min(self.config.mix.num_hardest, real.shape[1]), dim=1).values
        histograms = {"positive": outcome.positive, "hardest": hardest}
        if plan is not None:
            pair = plan.partner >= 0
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
            strategy=choose_strategy(mix, moment.epoch, self.config.train.epochs, self.strategy),
            real_negatives=mix.real_negatives,
            through_query=mix.through_query,
        )

    def _seed(self, purpose: str, moment: Moment, part: int) -> int:
        return seed_of(purpose, self.config.train.seed, moment.step, part, 0)

    def _mixing(self, moment: Moment, part: int) -> torch.Generator:
        """The same on every rank, which draws for all and keeps what its own queries get."""
        generator = RowsGenerator()
        generator.manual_seed(self._seed("mixing", moment, part))
        generator.part, generator.parts = rank(), world_size()
        return generator

    def _shuffle(self, number: int, moment: Moment, part: int) -> Tensor:
        """One order for the batch of all processes: the seed is the same on each."""
        everyone = number * world_size()
        generator = torch.Generator().manual_seed(self._seed("shuffle", moment, part))
        return torch.randperm(everyone, generator=generator)


def choose_strategy(
    mix: MixConfig, epoch: float, epochs: float, own: Strategy | None = None
) -> Strategy:
    """The strategy by name, with its own options and at its point of the curriculum."""
    if mix.strategy == "own":
        if own is None:
            raise InputError(
                "mix.strategy=own is a function that only its author has: give it again, as"
                " pretrain(..., strategy=...), or choose a strategy by name."
            )
        return own
    if mix.strategy == "softmax-sampled":
        return partial(plan_softmax_sampled, sampling_temperature=mix.sampling_temperature)
    if mix.strategy == "fixed-percentage":
        end = mix.percentage if mix.percentage_end is None else mix.percentage_end
        percentage = decreasing(epoch, epochs, mix.percentage, end)
        return partial(plan_fixed_percentage, percentage=percentage)
    return STRATEGIES[mix.strategy]


def gather_parts(rows: Tensor, parts: int) -> Tensor:
    """Every rank's rows in the order of the global batch, of which each rank has part by part."""
    return torch.cat([gather(part) for part in rows.chunk(parts)])


def share_state(module: nn.Module) -> None:
    """Rank 0's weights, statistics and queue on every rank."""
    for tensor in module.state_dict().values():
        broadcast(tensor)


def black_images(config: PretrainConfig, compute: Compute) -> Tensor:
    """Two images to try a network with."""
    size = config.data.image_size
    images = torch.zeros(2, config.data.channels, size, size, device=compute.device)
    return images.contiguous(memory_format=torch.channels_last)


def parts_of(batch: Batch, number: int) -> list[Batch]:
    """A batch in as many parts, whose gradients are added up."""
    return [Batch(*part) for part in zip(*(field.chunk(number) for field in batch), strict=True)]
