"""Cases that several tests of the loss share."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from hardmix import KEY, QUERY, MixPlan, materialize
from hardmix.losses import DENOMINATORS, Embeddings, Logits, logits
from hardmix.mixing.family import loss_of_queries
from hardmix.mixing.infonce import Contrast, outcome_of
from hardmix.strategies import Candidates
from reference import unit


@contextmanager
def device_path(one_piece: bool) -> Iterator[None]:
    """Let a CPU compute as a GPU would within the context, or as it usually does."""
    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("hardmix.mixing.") and hasattr(module, "in_one_piece")
    ]
    patches = [patch.object(each, "in_one_piece", lambda _: one_piece) for each in users]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


@st.composite
def any_plan(draw):
    """Return any plan, also such as no strategy makes: mixed kinds, missing points, factors."""
    batch, dim = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    width, points = draw(st.integers(1, 25)), draw(st.integers(0, 12))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    base = torch.randint(-1, width, (batch, points))
    number = draw(st.integers(0, 3))
    vectors = torch.randn(batch, number, dim, dtype=torch.float64) if number else None
    partner = torch.randint(-2 - number, width, (batch, points))
    if draw(st.booleans()):
        half = points // 2
        partner[:, :half] = partner[:, :half].clamp(min=0)
        partner[:, half:] = QUERY if draw(st.booleans()) else KEY
    share = torch.rand(batch, points, dtype=torch.float64) * 0.98 + 0.01
    if draw(st.booleans()):
        share = share - 0.5  # away from the partner
    factor = torch.rand(batch, points, dtype=torch.float64) + 0.1
    scale, weight = (factor if draw(st.booleans()) else None for _ in range(2))
    plan = MixPlan(base, partner, share, scale, weight, vectors)
    exclude = torch.rand(batch, width) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    vectors = unit(batch, dim), unit(batch, dim), unit(width, dim)
    return *vectors, plan, exclude if draw(st.booleans()) else None


def candidates(query, key, negatives, own=None, **options) -> Candidates:
    """Return the candidates of a strategy. Dividing by this temperature changes no bits."""
    temperature = options.pop("temperature", 0.25)
    embeddings = Embeddings(query, key, negatives, own)
    real = logits(query, key, negatives, temperature=temperature, own=own).real
    return Candidates(
        logits=real.detach(), temperature=temperature, embeddings=embeddings, **options
    )


def family(query, key, negatives, plan=None, *, temperature, own=None, **options) -> Contrast:
    """Return the loss of any member of the family, made from its pieces, and the pieces."""
    exclude, log_weights = options.pop("exclude", None), options.pop("log_weights", None)
    denominator = options.pop("denominator", "infonce")
    if isinstance(denominator, str):
        denominator = DENOMINATORS[denominator]()
    made = logits(query, key, negatives, plan, temperature=temperature, own=own)
    per_query = loss_of_queries(denominator, made, exclude, log_weights, **options)
    return outcome_of(per_query, made, exclude, log_weights, denominator.powers)


def by_plain_pytorch(
    query, key, negatives, plan, temperature, exclude=None, through_query=False
) -> torch.Tensor:
    """Return Eq. 1 of each query with every vector made, differentiable any number of times."""
    constants = [key.detach(), negatives.detach()]
    points = materialize(plan, query if through_query else query.detach(), *constants)
    real, synthetic = query @ negatives.T, torch.einsum("bd,bsd->bs", query, points)
    if exclude is not None:
        real = real.masked_fill(exclude, -torch.inf)
    synthetic = synthetic.masked_fill(plan.base < 0, -torch.inf)
    every = torch.cat([(query * key).sum(dim=1, keepdim=True), real, synthetic], dim=1)
    return -(every / temperature).log_softmax(dim=1)[:, 0]


def logits_with(similarity, positive, temperature=0.25) -> Logits:
    """Return logits with these similarities, and no vectors behind them."""
    real, nothing = similarity / temperature, similarity.new_empty(len(similarity), 0)
    embeddings = Embeddings(nothing, nothing, similarity.new_empty(similarity.shape[1], 0))
    return Logits(positive / temperature, real, real[:, :0], temperature, nothing, embeddings)
