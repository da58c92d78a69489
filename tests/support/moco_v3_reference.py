"""MoCo v3's published rule, slow and in float64 (Chen et al. 2021; facebookresearch/moco-v3)."""

import math

import torch
from torch.nn.functional import normalize


def symmetric_loss(first_query, second_query, first_key, second_key, temperature):
    """Return 2 tau times the sum of both directions, each a mean of -log softmax over all keys."""
    total = 0.0
    for queries, keys in ((first_query, second_key), (second_query, first_key)):
        terms = []
        for row, query in enumerate(queries):
            logits = torch.stack([query @ key / temperature for key in keys])
            terms.append(logits.logsumexp(dim=0) - logits[row])
        total = total + 2 * temperature * sum(terms) / len(terms)
    return total


def momentum(base, progress):
    """Return the momentum at a fraction of training: half a cosine from `base` to 1."""
    return 1 - 0.5 * (1 + math.cos(math.pi * progress)) * (1 - base)


def head(rows, weights, ends_with_norm):
    """Return layers without biases, with batch norm (scale 1, shift 0) and ReLU between them."""
    for place, weight in enumerate(weights):
        rows = rows @ weight.T
        last = place + 1 == len(weights)
        if not last or ends_with_norm:
            rows = (rows - rows.mean(dim=0)) / (rows.var(dim=0, unbiased=False) + 1e-5).sqrt()
        rows = rows if last else rows.clamp(min=0)
    return rows


def queries(features, projector, predictor, vit):
    """Return queries of unit length from features, by the two heads' weights."""
    projections = head(features, projector, ends_with_norm=True)
    return normalize(head(projections, predictor, ends_with_norm=vit), dim=1)
