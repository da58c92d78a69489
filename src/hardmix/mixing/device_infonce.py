"""Eq. 1 and 2 where each launch costs: on GPUs, and as one graph in `torch.compile`.

The same equations as in `infonce`, in few operations. None makes the host wait, and none
adds floats in random order. Points are made as vectors, at most 1 GiB of them at once.
Axes: batch, K (negatives), S (synthetic points), dim.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from hardmix.mixing.checks import check_once_differentiated
from hardmix.mixing.plans import NO_POINT, QUERY, MixPlan
from hardmix.mixing.ranking import joined, row_chunks, rows_of
from hardmix.mixing.unit_length import row_products


class Wanted(NamedTuple):
    """Options of the computation."""

    temperature: float
    through_query: bool
    every_point: bool
    """Whether the plan is known to have no place where no point could be made."""
    query_gradient: bool
    negatives_gradient: bool


class _Part(NamedTuple):
    """Results for some of the queries."""

    per_query: Tensor
    positive: Tensor
    synthetic: Tensor
    to_key: Tensor
    direction: Tensor
    """d per_query / d query, times the temperature."""
    probability: Tensor
    """Eq. 2's, of the real negatives."""


class DeviceInfoNCE(torch.autograd.Function):
    """Eq. 1 forward, Eq. 2 backward; its second and third results are similarities."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        negatives: Tensor,
        real: Tensor,
        exclude: Tensor | None,
        wanted: Wanted,
        *plan: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of each query, q.k, q.h. `plan` is a MixPlan's parts, or nothing."""
        base = plan[0] if plan else None
        widest = max(real.shape[1], 0 if base is None else base.shape[1] * query.shape[1])
        parts = []
        for rows in row_chunks(len(query), widest, one_piece=True):
            some = [None if each is None else rows_of(each, rows) for each in (exclude, *plan)]
            vectors = rows_of(query, rows), rows_of(key, rows), negatives
            parts.append(_evaluate(*vectors, rows_of(real, rows), some[0], wanted, some[1:]))
        whole = _Part(*(joined(list(each)) for each in zip(*parts, strict=True)))
        ctx.temperature = wanted.temperature
        ctx.save_for_backward(query, whole.direction, whole.to_key, whole.probability)
        ctx.mark_non_differentiable(whole.positive, whole.synthetic)
        return whole.per_query, whole.positive, whole.synthetic

    @staticmethod
    def backward(ctx: Any, grad_per_query: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Eq. 2: scale what the forward pass has computed."""
        check_once_differentiated()
        query, direction, to_key, probability = ctx.saved_tensors
        needs_query, needs_key, needs_negatives = ctx.needs_input_grad[:3]
        with torch.autocast(query.device.type, enabled=False):
            step = grad_per_query.unsqueeze(1) / ctx.temperature
            grad_query = step * direction if needs_query else None
            grad_key = step * to_key * query if needs_key else None
            grad_negatives = (step * probability).T @ query if needs_negatives else None
        return grad_query, grad_key, grad_negatives, *(None for _ in ctx.needs_input_grad[3:])


def _evaluate(
    query: Tensor,
    key: Tensor,
    negatives: Tensor,
    real: Tensor,
    exclude: Tensor | None,
    wanted: Wanted,
    parts: list[Tensor | None],
) -> _Part:
    """Return all results for some of the queries."""
    positive = row_products(query, key)
    plan = MixPlan(*parts) if parts else None  # type: ignore[arg-type]
    points = None if plan is None else made_points(plan, query, key, negatives, wanted.every_point)
    synthetic = real[:, :0] if points is None else points.similarity
    widths = [real.shape[1], 1, synthetic.shape[1]]
    logits = torch.cat([real, positive, _logits(synthetic, plan)], dim=1).div_(wanted.temperature)
    if exclude is not None:
        logits[:, : widths[0]].masked_fill_(exclude, -torch.inf)
    if plan is not None and plan.weight is not None:
        logits[:, widths[0] + 1 :] += plan.weight.log()
    logits = logits.log_softmax(dim=1)
    per_query = -logits[:, widths[0]]
    of_real, of_key, of_points = logits.exp_().split(widths, dim=1)
    to_key = of_key - 1
    empty = real[:, :0]
    direction = empty
    if wanted.query_gradient:
        direction = torch.mm(of_real, negatives).addcmul_(to_key, key)
        if points is not None and plan is not None:
            weight, own = _weights(points, plan, of_points, wanted)
            pull = torch.baddbmm(direction.unsqueeze(1), weight.unsqueeze(1), points.vectors)
            direction = pull.squeeze(1) if own is None else pull.squeeze(1) - own * query
    return _Part(
        per_query,
        positive.squeeze(1),
        synthetic,
        to_key,
        direction,
        of_real if wanted.negatives_gradient else empty,
    )


class MadePoints(NamedTuple):
    """A plan's points as vectors."""

    similarity: Tensor
    """q.h; -inf where no point could be made."""
    vectors: Tensor
    """(batch, S, dim), before they are divided by their length."""
    length: Tensor


def made_points(
    plan: MixPlan, query: Tensor, key: Tensor, negatives: Tensor, every_point: bool
) -> MadePoints:
    """Eq. 3 and Sec. 4.2 as vectors: partners are rows of the negatives, the queries, the keys."""
    batch, number = plan.base.shape
    rows = torch.cat([negatives, query, key])
    # QUERY is -1 and KEY is -2: `batch` rows further down for each.
    above = torch.arange(len(negatives) - batch, len(negatives), device=rows.device).unsqueeze(1)
    own = torch.add(above, plan.partner, alpha=-batch)
    partner = torch.where(plan.partner < 0, own, plan.partner)
    base = plan.base if every_point else plan.base.clamp(min=0)
    parents = torch.stack([base, partner], dim=-1).view(-1)
    share = plan.share.to(query.dtype)
    shares = torch.stack([1 - share, share], dim=-1).view(-1)
    first = torch.arange(0, 2 * batch * number, 2, device=rows.device)
    vectors = embedding_bag(parents, rows, first, mode="sum", per_sample_weights=shares)
    vectors = vectors.view(batch, number, -1)
    # Opposite parents cancel out: a floor keeps their point and its gradient finite.
    floor = torch.finfo(query.dtype).eps ** 0.5
    length = torch.linalg.vector_norm(vectors, dim=-1).clamp_(min=floor)
    similarity = torch.bmm(vectors, query.unsqueeze(2)).squeeze(2).div_(length).clamp_(-1.0, 1.0)
    if not every_point:
        similarity = similarity.masked_fill_(plan.base == NO_POINT, -torch.inf)
    return MadePoints(similarity, vectors, length)


def _logits(similarity: Tensor, plan: MixPlan | None) -> Tensor:
    """The similarities after the plan's `scale`."""
    if plan is None or plan.scale is None:
        return similarity
    return (similarity * plan.scale).masked_fill_(plan.base == NO_POINT, -torch.inf)


def _weights(
    points: MadePoints, plan: MixPlan, probability: Tensor, wanted: Wanted
) -> tuple[Tensor, Tensor | None]:
    """Eq. 2's factors of the points' vectors, and of the query inside them: not its own gradient.

    The latter only where the gradient passes the query in a point: the chain rule's factor is
    d similarity / d (q.n), over its value with h' constant, and q.q is always 1.
    """
    weight = probability / points.length
    if plan.scale is not None:
        weight = weight * plan.scale
    if not wanted.through_query:
        return weight, None
    share = plan.share.to(weight.dtype)
    similarity = points.similarity.masked_fill(plan.base == NO_POINT, 0.0)
    with_query = plan.partner == QUERY
    turned = weight * (1 - share * similarity / points.length)
    own = torch.where(with_query, turned * share, 0.0).sum(dim=1, keepdim=True)
    return torch.where(with_query, turned, weight), own
