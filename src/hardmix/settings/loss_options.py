"""The settings of the loss: MoCHi's points, and the family around it. Imports no torch."""

from dataclasses import dataclass

from hardmix.errors import InputError
from hardmix.settings.bounds import check_above, check_at_least, check_between
from hardmix.settings.facts import setting
from hardmix.settings.named_choices import (
    RealNegatives,
    RunDenominator,
    RunFilter,
    RunWeights,
    StrategyName,
)


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """MoCHi (N, s, s') and its variants (Sec. 4, App. B.2)."""

    num_hardest: int = 1024
    """N: how many of a query's hardest negatives may be mixed."""
    num_pairs: int = 1024
    """s: synthetic points per query that mix two hard negatives."""
    num_with_query: int = 128
    """s': synthetic points per query that mix a hard negative with the query."""
    warm_up_epochs: float = setting(10, name="epochs without mixing")
    """Epochs of training before mixing begins (Sec. 5)."""
    warm_up_steps: int | None = setting(None, name="steps without mixing")
    """Steps of training before mixing begins; overrides mix.warm_up_epochs."""
    strategy: StrategyName = setting("mochi", label="{}", name="mixing strategy")
    """How synthetic points are made: the paper's method, one of its variants (App. B.2), or a
    later paper's: SynCo, MixCSE, or feature transformations (Zhu et al. 2021)."""
    real_negatives: RealNegatives = setting("keep", label="real negatives {}")
    """Real negatives in the loss: keep all, drop the N hardest, or drop all."""
    through_query: bool = setting(False, name="gradient through the query")
    """Let the gradient flow through the query inside the points mixed with it; off in the
    paper."""
    sampling_temperature: float = setting(0.2, label="tau' = {}")
    """tau', for mix.strategy softmax-sampled."""
    percentage: float = 50.0
    """X at the start of training, in percent, for mix.strategy fixed-percentage."""
    percentage_end: float | None = None
    """X at the end of training, in percent, with a linear change in between. Unset: X stays
    constant."""
    num_extrapolated: int = setting(256, label="{} extrapolated", later=True)
    """Points beyond a hard negative, seen from the query, for mix.strategy synco. SynCo's other
    two counts of 256 are mix.num_pairs and mix.num_with_query."""
    num_noisy: int = setting(64, label="{} noisy", later=True)
    """Points of a hard negative with noise, for mix.strategy synco."""
    num_perturbed: int = setting(64, label="{} perturbed", later=True)
    """Points moved a little towards the query, for mix.strategy synco."""
    num_adversarial: int = setting(64, label="{} adversarial", later=True)
    """Points moved a little along the signs of the query, for mix.strategy synco."""

    def __post_init__(self) -> None:
        check_at_least(self, "mix", num_hardest=1, num_pairs=0, num_with_query=0)
        check_at_least(self, "mix", warm_up_epochs=0, warm_up_steps=0)
        check_at_least(self, "mix", num_extrapolated=0, num_noisy=0)
        check_at_least(self, "mix", num_perturbed=0, num_adversarial=0)
        check_above(self, "mix", sampling_temperature=0)
        check_between(self, "mix", 0.0, 100.0, "percentage", "percentage_end")
        if self.num_pairs > 0 and self.num_hardest < 2:
            raise InputError(
                f"mix.num_pairs={self.num_pairs} with mix.num_hardest={self.num_hardest}: a pair"
                " needs two different negatives; raise mix.num_hardest or set mix.num_pairs to 0."
            )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The family around Eq. 1: weights, denominators and filters of later papers."""

    weights: RunWeights = setting("none", name="weights of the negatives", later=True)
    """Weights of the real negatives: HCL (Robinson et al. 2021), hardness weighting (LLaVE), or a
    ring of percentiles (Wu et al. 2021)."""
    denominator: RunDenominator = setting("infonce", later=True)
    """Eq. 1, or without the positive (decoupled; decoupled-weighted is DCLW), without the expected
    false negatives (debiased), HCL as its authors train it, or with the hardness of a second
    temperature."""
    filter: RunFilter = setting("none", name="filter of false negatives", later=True)
    """Leave out negatives above the positive's similarity minus loss.margin, above loss.share of
    it, or of the query's own cluster of images."""
    beta: float = setting(1.0, label="beta = {}", later=True)
    """How much HCL's weights prefer hard negatives."""
    tau_plus: float = setting(0.1, label="tau+ = {}", later=True)
    """Expected fraction of false negatives, for loss.denominator debiased and hcl."""
    alpha: float = setting(9.0, label="alpha = {}", later=True)
    """Strength of loss.weights hardness."""
    ring_low: float = setting(90.0, label="ring from {} %", later=True)
    """Lowest percentile of loss.weights ring."""
    ring_high: float = setting(99.0, label="ring to {} %", later=True)
    """Highest percentile of loss.weights ring."""
    factor: float = setting(10.0, label="second temperature x {}", later=True)
    """Second temperature over the first, for loss.denominator dual-temperature."""
    sigma: float = setting(0.5, label="sigma = {}", later=True)
    """Width of the positives' weights, for loss.denominator decoupled-weighted (DCLW)."""
    margin: float = setting(0.0, label="margin {}", later=True)
    """Margin of loss.filter above-positive."""
    share: float = setting(0.95, label="share {}", later=True)
    """Share of the positive's similarity, for loss.filter share-of-positive."""
    jigsaw: float = setting(0.0, label="jigsaw x {}", name="weight of the jigsaw", later=True)
    """Weight of InfoMin's jigsaw, for MoCo and MoCHi: nine shuffled tiles of an image are another
    query for its key. 0.5 as published; 0: none."""
    clusters: int = setting(100, label="{} clusters", later=True)
    """Clusters of all images, made before each epoch but the first, for loss.filter
    same-cluster."""

    def __post_init__(self) -> None:
        check_at_least(self, "loss", beta=0, alpha=0, clusters=2)
        check_above(self, "loss", factor=0, share=0, sigma=0)
        check_between(self, "loss", 0.0, 0.999, "tau_plus")
        check_between(self, "loss", 0.0, 1.0, "jigsaw")
        check_between(self, "loss", -2.0, 2.0, "margin")
        check_between(self, "loss", 0.0, 100.0, "ring_low", "ring_high")
        if self.ring_low >= self.ring_high:
            raise InputError(
                f"loss.ring_low={self.ring_low} is not below loss.ring_high={self.ring_high}: they"
                " are the percentiles between which negatives count."
            )
        if self.weights == "hcl" and self.denominator == "hcl":
            raise InputError(
                "loss.weights=hcl with loss.denominator=hcl would weigh twice: choose"
                " loss.denominator=debiased for constant weights, or loss.weights=none."
            )
