"""Checks of arguments. Each error names the argument, its value, the limit and the way out.

Kept apart from the files that implement the paper.
"""

import math
import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hardmix.errors import InputError

if TYPE_CHECKING:
    from hardmix.mixing.plans import MixPlan

UNIT_TOLERANCE = 1e-3
"""Largest deviation of a vector's length from 1; ten times this for half-precision vectors."""


def check_similarity(similarity: Tensor, name: str = "similarity") -> None:
    """Refuse similarities that cannot be ranked."""
    if similarity.ndim != 2 or not similarity.is_floating_point():
        raise InputError(
            f"{name} has shape {tuple(similarity.shape)} and dtype {similarity.dtype}:"
            " it must be a (batch, K) floating-point tensor of query-negative dot products."
        )
    if similarity.dtype in (torch.float16, torch.bfloat16):
        raise InputError(
            f"{name} has dtype {similarity.dtype}: half precision cannot rank negatives"
            " (bfloat16 steps by 0.004 near 1); compute it in float32, also inside autocast."
        )


def check_mask(mask: Tensor | None, batch: int, num_negatives: int, name: str = "exclude") -> None:
    """Refuse a mask that is not a bool tensor of shape (batch, num_negatives)."""
    if mask is None:
        return
    if tuple(mask.shape) != (batch, num_negatives) or mask.dtype != torch.bool:
        raise InputError(
            f"{name} has shape {tuple(mask.shape)} and dtype {mask.dtype}: it must be a bool"
            f" mask of shape ({batch}, {num_negatives}), one value for each query and negative."
        )


def check_whole(**numbers: int) -> None:
    """Refuse counts that are not integers."""
    for name, value in numbers.items():
        try:
            operator.index(value)
        except TypeError:
            raise InputError(
                f"{name}={value!r} has type {type(value).__name__}: it is a count and must be a"
                " whole number (int)."
            ) from None


def check_counts(num_hardest: int, num_pairs: int = 0, num_with_query: int = 0) -> None:
    """Refuse values of N, s and s' from which no plan can be made."""
    check_whole(num_hardest=num_hardest, num_pairs=num_pairs, num_with_query=num_with_query)
    for name, value in [("num_pairs", num_pairs), ("num_with_query", num_with_query)]:
        if value < 0:
            raise InputError(
                f"{name}={value} is below 0: it is a number of synthetic points; use 0 for none."
            )
    if num_hardest < 1:
        raise InputError(
            f"num_hardest={num_hardest} is below 1: it is the number of negatives to mix;"
            " for plain MoCo set num_pairs and num_with_query to 0 instead."
        )
    if num_pairs > 0 and num_hardest < 2:
        raise InputError(
            f"num_pairs={num_pairs} with num_hardest={num_hardest}: a pair needs two different"
            " negatives; set num_hardest to 2 or more, or num_pairs to 0."
        )


def check_num_hardest(num_hardest: int, num_negatives: int) -> None:
    """Refuse to select more negatives than there are."""
    if num_hardest > num_negatives:
        raise InputError(
            f"num_hardest={num_hardest} exceeds the {num_negatives} negatives given:"
            " lower num_hardest or enlarge the queue."
        )


def check_temperature(temperature: float | Tensor, name: str = "temperature") -> None:
    """Refuse a temperature that is not positive and finite; one on a GPU is not looked at."""
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1 or not temperature.is_floating_point():
            raise InputError(
                f"{name} has shape {tuple(temperature.shape)} and dtype {temperature.dtype}: it"
                " must be one floating-point number; for CLIP's logit_scale pass"
                " (-logit_scale).exp()."
            )
        if torch.compiler.is_compiling() or temperature.device.type != "cpu":
            return
        temperature = as_number(temperature)
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(
            f"{name}={temperature} must be a finite number above 0: logits are divided by it;"
            " the paper's loss uses 0.2."
        )


def as_number(temperature: float | Tensor) -> float:
    """Return a temperature's value; waits for a GPU that has it."""
    return float(temperature.detach() if isinstance(temperature, Tensor) else temperature)


def check_not_transformed() -> None:
    """Refuse torch.func transforms: the loss and the ranking depend on concrete values."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise InputError(
            "torch.func (grad, vmap, jacrev, jvp ...) cannot transform this function: it computes"
            " its own gradient and ranks negatives by their values. Use loss.backward() or"
            " torch.autograd.grad; contrast(...).per_query has the loss of each query."
        )


def check_top(top: int | None) -> None:
    """Refuse a number of ranks below 1; None is the default number."""
    if top is None:
        return
    check_whole(top=top)
    if top < 1:
        raise InputError(f"top={top} is below 1: it is the number of highest-ranked negatives.")


def check_labels(name: str, values: Tensor, number: int | None = None, of: str = "queries") -> None:
    """Refuse labels and ids that are not one integer per image."""
    if not isinstance(values, Tensor):
        raise InputError(
            f"{name} is of type {type(values).__name__}: it must be a tensor with one whole number"
            f" for each of the {of}."
        )
    wrong = values.ndim != 1 or (number is not None and len(values) != number)
    if wrong or values.is_floating_point():
        which = "each" if number is None else f"each of the {number}"
        raise InputError(
            f"{name} have shape {tuple(values.shape)} and dtype {values.dtype}: they must hold one"
            f" whole number for {which} {of}."
        )


def check_own(own: Tensor | None, query: Tensor, name: str = "own_negatives") -> None:
    """Refuse negatives of each query's own that do not belong to these queries."""
    if own is None:
        return
    batch, dim = query.shape[0], query.shape[-1]
    fits = own.ndim == 3 and own.shape[0] == batch and own.shape[2] == dim and own.shape[1] > 0
    if not fits or not own.is_floating_point() or own.device != query.device:
        raise InputError(
            f"{name} has shape {tuple(own.shape)} and dtype {own.dtype} and is on {own.device}: it"
            f" must be a floating-point tensor of shape ({batch}, M, {dim}) on {query.device}, with"
            " one or more negatives of each query's own"
            + (
                ", or two-dimensional, for negatives that all share."
                if name == "negatives"
                else "."
            )
        )


def check_shapes(query: Tensor, key: Tensor, negatives: Tensor, may_be_empty: bool = False) -> None:
    """Refuse vectors that cannot be compared with each other.

    may_be_empty: there may be no shared negatives.
    """
    for name, value in [("query", query), ("key", key), ("negatives", negatives)]:
        if value.ndim != 2 or not value.is_floating_point():
            raise InputError(
                f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}: it must be a"
                " two-dimensional floating-point tensor with one embedding per row."
            )
        if value.device != query.device:
            raise InputError(
                f"{name} is on {value.device}, query on {query.device}: move them to one device."
            )
        if value.numel() == 0 and not (may_be_empty and name == "negatives"):
            raise InputError(f"{name} has shape {tuple(value.shape)}: it has no embeddings.")
    if key.shape != query.shape:
        raise InputError(
            f"key has shape {tuple(key.shape)}, query {tuple(query.shape)}: they must be equal."
        )
    if negatives.shape[1] != query.shape[1]:
        raise InputError(
            f"negatives have {negatives.shape[1]} dimensions, query {query.shape[1]}: the"
            " two must be equal."
        )


def check_unit_length(**vectors: Tensor) -> None:
    """Refuse NaN and vectors that are not normalised: the closed form requires unit length."""
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
                " its inputs."
            )


def check_finite(**vectors: Tensor) -> None:
    """Refuse NaN and infinity; the error names the first such row."""
    for name, value in vectors.items():
        broken = ~value.detach().isfinite().flatten(1).all(dim=1)
        if bool(broken.any()):
            rows = broken.nonzero().flatten().tolist()
            raise InputError(
                f"{name} holds NaN or infinity in {len(rows)} of {len(value)} rows, first in"
                f" {name}[{rows[0]}]: the encoder has diverged (lower the learning rate?) or its"
                " input is NaN or infinite."
            )


def wants_check(check: bool | None, vectors: Tensor) -> bool:
    """Return whether to check the vectors' values; None: on a CPU only, so as not to wait."""
    if torch.compiler.is_compiling():
        return False
    return vectors.device.type == "cpu" if check is None else check


def check_directions(name: str, value: Tensor) -> None:
    """Refuse vectors that are zero, NaN or infinite."""
    check_finite(**{name: value})
    zero = (value.detach() == 0).all(dim=1)
    if bool(zero.any()):
        raise InputError(
            f"{name}[{int(zero.nonzero()[0])}] has length 0 and cannot be normalised: the"
            " encoder's output is all zero."
        )


def check_plan(plan: "MixPlan", batch: int, dim: int | None = None) -> None:
    """Refuse a plan whose parts do not fit together or belong to another batch."""
    shapes = {
        name: tuple(part.shape)
        for name, part in plan._asdict().items()
        if part is not None and name != "vectors"
    }
    if len(set(shapes.values())) != 1 or plan.base.ndim != 2 or len(plan.base) != batch:
        raise InputError(
            f"plan has parts of shapes {shapes}: all must have the same shape"
            f" (batch, S), with a batch of {batch} queries."
        )
    for name in ("base", "partner"):
        if (dtype := getattr(plan, name).dtype) != torch.int64:
            raise InputError(f"plan.{name} has dtype {dtype}: row indices must be torch.int64.")
    if plan.vectors is None:
        return
    shape = tuple(plan.vectors.shape)
    if len(shape) != 3 or shape[0] != batch or (dim is not None and shape[2] != dim):
        dimensions = "" if dim is None else f" of {dim} dimensions"
        raise InputError(
            f"plan.vectors has shape {shape}: it must be (batch, V, dim), with a batch of {batch}"
            f" queries{dimensions}."
        )


def check_plan_rows(plan: "MixPlan", num_negatives: int) -> None:
    """Refuse a plan with row indices that are out of range."""
    vectors = 0 if plan.vectors is None else plan.vectors.shape[1]
    for name, rows, lowest in [("base", plan.base, -1), ("partner", plan.partner, -2 - vectors)]:
        if rows.numel() == 0:
            continue
        low, high = int(rows.min()), int(rows.max())
        if low < lowest or high >= num_negatives:
            raise InputError(
                f"plan.{name} holds {low if low < lowest else high}: the valid range is {lowest} to"
                f" {num_negatives - 1} for {num_negatives} negatives."
            )
