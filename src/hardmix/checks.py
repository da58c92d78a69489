"""What the method refuses, in words: argument, value, limit, reason, way out.

Kept beside the paper's files, so that those hold the paper only.
"""

import math

import torch
from torch import Tensor

from hardmix.errors import InputError

UNIT_TOLERANCE = 1e-3
"""How far from 1 a vector's length may be; ten times this for half-precision vectors."""


def check_similarity(similarity: Tensor) -> None:
    """Refuse similarities that cannot be ranked."""
    if similarity.ndim != 2 or not similarity.is_floating_point():
        raise InputError(
            f"similarity has shape {tuple(similarity.shape)} and dtype {similarity.dtype}:"
            " it must be a (batch, K) floating-point tensor of query-negative dot products."
        )
    if similarity.dtype in (torch.float16, torch.bfloat16):
        raise InputError(
            f"similarity has dtype {similarity.dtype}: half precision cannot rank negatives"
            " (bfloat16 steps by 0.004 near 1); compute it in float32, also inside autocast."
        )


def check_exclude(exclude: Tensor | None, batch: int, num_negatives: int) -> None:
    """Refuse a mask that does not name each query's negatives."""
    if exclude is None:
        return
    if tuple(exclude.shape) != (batch, num_negatives) or exclude.dtype != torch.bool:
        raise InputError(
            f"exclude has shape {tuple(exclude.shape)} and dtype {exclude.dtype}: it must be a bool"
            f" mask of shape ({batch}, {num_negatives}), true where a negative takes no part."
        )


def check_counts(num_hardest: int, num_pairs: int = 0, num_with_query: int = 0) -> None:
    """Refuse N, s, s' that no plan can be made of."""
    for name, value in [("num_pairs", num_pairs), ("num_with_query", num_with_query)]:
        if value < 0:
            raise InputError(f"{name}={value} is below 0: it counts synthetic points; 0 is none.")
    if num_hardest < 1:
        raise InputError(
            f"num_hardest={num_hardest} is below 1: it counts the negatives that may be mixed;"
            " for plain MoCo set num_pairs and num_with_query to 0 instead."
        )
    if num_pairs > 0 and num_hardest < 2:
        raise InputError(
            f"num_pairs={num_pairs} with num_hardest={num_hardest}: a pair needs two different"
            " negatives; set num_hardest to 2 or more, or num_pairs to 0."
        )


def check_num_hardest(num_hardest: int, num_negatives: int) -> None:
    """Refuse to rank more negatives than there are."""
    if num_hardest > num_negatives:
        raise InputError(
            f"num_hardest={num_hardest} exceeds the {num_negatives} negatives given: MoCHi ranks"
            " only these; lower num_hardest or enlarge the queue."
        )


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that divides by zero or turns the loss around."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(
            f"temperature={temperature} must be a finite number above 0: Eq. 1 divides by it;"
            " the paper uses 0.2."
        )


def check_shapes(query: Tensor, key: Tensor, negatives: Tensor) -> None:
    """Refuse vectors that cannot be compared with each other."""
    for name, value in [("query", query), ("key", key), ("negatives", negatives)]:
        if value.ndim != 2 or not value.is_floating_point():
            raise InputError(
                f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}: it must be a"
                " two-dimensional floating-point tensor with one embedding a row."
            )
        if value.device != query.device:
            raise InputError(
                f"{name} is on {value.device}, query on {query.device}: move it there."
            )
        if value.numel() == 0:
            raise InputError(f"{name} has shape {tuple(value.shape)}: it holds no embedding.")
    if key.shape != query.shape:
        raise InputError(
            f"key has shape {tuple(key.shape)}, query {tuple(query.shape)}: each query has one key."
        )
    if negatives.shape[1] != query.shape[1]:
        raise InputError(
            f"negatives have {negatives.shape[1]} dimensions, query {query.shape[1]}: both come"
            " from the same kind of encoder and must agree."
        )


def check_unit_length(**vectors: Tensor) -> None:
    """Refuse NaN and vectors that were not normalised: the closed form relies on unit length."""
    for name, value in vectors.items():
        half = value.dtype in (torch.float16, torch.bfloat16)
        length = torch.linalg.vector_norm(
            value.detach(), dim=1, dtype=value.float().dtype if half else None
        )
        worst = float((length - 1).abs().max())
        if not math.isfinite(worst):
            check_finite(**{name: value})
        if worst > UNIT_TOLERANCE * (10 if half else 1):
            row = int((length - 1).abs().argmax())
            raise InputError(
                f"{name}[{row}] has length {float(length[row]):.4g}, not 1: pass"
                f" torch.nn.functional.normalize({name}, dim=1), or use MochiLoss, which normalises"
                " by itself."
            )


def check_finite(**vectors: Tensor) -> None:
    """Refuse NaN and infinity, naming the row."""
    for name, value in vectors.items():
        broken = ~value.detach().isfinite().flatten(1).all(dim=1)
        if bool(broken.any()):
            rows = broken.nonzero().flatten().tolist()
            raise InputError(
                f"{name} holds NaN or infinity in {len(rows)} of {len(value)} rows, first in"
                f" {name}[{rows[0]}]: the encoder has diverged (learning rate?) or its input is"
                " broken; nothing can be contrasted with it."
            )


def check_plan(base: Tensor, partner: Tensor, share: Tensor, batch: int) -> None:
    """Refuse a plan whose parts do not fit together or belong to another batch."""
    shapes = [tuple(base.shape), tuple(partner.shape), tuple(share.shape)]
    if len(set(shapes)) != 1 or base.ndim != 2 or len(base) != batch:
        raise InputError(
            f"plan has base, partner, share of shapes {shapes}: all three must be (batch, S) with"
            f" the batch of {batch} queries."
        )
    for name, value in [("base", base), ("partner", partner)]:
        if value.dtype != torch.int64:
            raise InputError(f"plan.{name} has dtype {value.dtype}: row numbers are torch.int64.")


def check_plan_rows(base: Tensor, partner: Tensor, num_negatives: int) -> None:
    """Refuse a plan that names rows the negatives do not have."""
    for name, value, lowest in [("base", base, -1), ("partner", partner, -2)]:
        if value.numel() == 0:
            continue
        low, high = int(value.min()), int(value.max())
        if low < lowest or high >= num_negatives:
            raise InputError(
                f"plan.{name} holds {low if low < lowest else high}: rows go from {lowest} to"
                f" {num_negatives - 1}, as there are {num_negatives} negatives."
            )
