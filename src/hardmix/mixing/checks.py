"""What the method refuses, in words: argument, value, limit, reason, way out.

Kept beside the paper's files, so that those hold the paper only.
"""

import difflib
import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hardmix.errors import InputError

if TYPE_CHECKING:
    from hardmix.mixing.plans import MixPlan

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


def check_mask(mask: Tensor | None, batch: int, num_negatives: int, name: str = "exclude") -> None:
    """Refuse a mask that does not name each query's negatives."""
    if mask is None:
        return
    if tuple(mask.shape) != (batch, num_negatives) or mask.dtype != torch.bool:
        raise InputError(
            f"{name} has shape {tuple(mask.shape)} and dtype {mask.dtype}: it must be a bool"
            f" mask of shape ({batch}, {num_negatives}), one value for each query and negative."
        )


def check_whole(**numbers: int) -> None:
    """Refuse counts that are not whole numbers."""
    for name, value in numbers.items():
        try:
            operator.index(value)
        except TypeError:
            raise InputError(
                f"{name}={value!r} is a {type(value).__name__}: it counts something and must be a"
                " whole number, an int."
            ) from None


def check_counts(num_hardest: int, num_pairs: int = 0, num_with_query: int = 0) -> None:
    """Refuse N, s, s' that no plan can be made of."""
    check_whole(num_hardest=num_hardest, num_pairs=num_pairs, num_with_query=num_with_query)
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


def check_temperature(temperature: float, name: str = "temperature") -> None:
    """Refuse a temperature that divides by zero or turns the loss around."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(
            f"{name}={temperature} must be a finite number above 0: logits are divided by it;"
            " the paper's loss uses 0.2."
        )


def check_not_transformed() -> None:
    """Refuse torch.func: the loss and the ranking of negatives look at numbers on their way."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise InputError(
            "torch.func (grad, vmap, jacrev, jvp ...) cannot transform this function: it makes its"
            " gradient by itself and ranks negatives by their values. Use loss.backward() or"
            " torch.autograd.grad; the losses of single queries are contrast(...).per_query."
        )


def check_once_differentiated() -> None:
    """Refuse second derivatives, in a backward pass: what it returns is not a function of query."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise InputError(
            "create_graph=True: the loss has first derivatives only, so gradients of its gradients"
            " (gradient penalties, Hessians) would be wrong; call backward or torch.autograd.grad"
            " without create_graph."
        )


def check_choice(name: str, value: str, choices: Iterable[str], more: str = "") -> None:
    """Refuse a name that is not on the menu; the nearest are listed first."""
    known = list(choices)
    if value not in known:
        nearest = difflib.get_close_matches(value, known, n=len(known), cutoff=0.0)
        raise InputError(f"{name}={value!r} is unknown: choose one of {', '.join(nearest)}{more}.")


def check_top(top: int) -> None:
    """Refuse to look at no ranks."""
    check_whole(top=top)
    if top < 1:
        raise InputError(f"top={top} is below 1: it counts the highest negatives looked at.")


def check_labels(name: str, values: Tensor, number: int | None = None, of: str = "queries") -> None:
    """Refuse labels and ids that are not one whole number for each image."""
    wrong = values.ndim != 1 or (number is not None and len(values) != number)
    if wrong or values.is_floating_point():
        each = "each" if number is None else f"each of the {number}"
        raise InputError(
            f"{name} have shape {tuple(values.shape)} and dtype {values.dtype}: one whole"
            f" number for {each} {of} is needed."
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


def wants_check(check: bool | None, vectors: Tensor) -> bool:
    """Whether to look at every vector: on a CPU unless told otherwise; a GPU must be waited for."""
    if torch.compiler.is_compiling():
        return False
    return vectors.device.type == "cpu" if check is None else check


def check_directions(name: str, value: Tensor) -> None:
    """Refuse vectors that point nowhere."""
    check_finite(**{name: value})
    zero = (value.detach() == 0).all(dim=1)
    if bool(zero.any()):
        raise InputError(
            f"{name}[{int(zero.nonzero()[0])}] has length 0: it has no direction to compare; the"
            " encoder's output is dead (all zero)."
        )


def check_plan(plan: "MixPlan", batch: int) -> None:
    """Refuse a plan whose parts do not fit together or belong to another batch."""
    shapes = {name: tuple(part.shape) for name, part in plan._asdict().items() if part is not None}
    if len(set(shapes.values())) != 1 or plan.base.ndim != 2 or len(plan.base) != batch:
        raise InputError(
            f"plan has parts of shapes {shapes}: all must be (batch, S) with the batch of {batch}"
            " queries."
        )
    for name in ("base", "partner"):
        if (dtype := getattr(plan, name).dtype) != torch.int64:
            raise InputError(f"plan.{name} has dtype {dtype}: row numbers are torch.int64.")


def check_plan_rows(plan: "MixPlan", num_negatives: int) -> None:
    """Refuse a plan that names rows the negatives do not have."""
    for name, rows, lowest in [("base", plan.base, -1), ("partner", plan.partner, -2)]:
        if rows.numel() == 0:
            continue
        low, high = int(rows.min()), int(rows.max())
        if low < lowest or high >= num_negatives:
            raise InputError(
                f"plan.{name} holds {low if low < lowest else high}: rows go from {lowest} to"
                f" {num_negatives - 1}, as there are {num_negatives} negatives."
            )
