"""Bad input is refused, and the message names the argument, its value and the limit."""

import math

import numpy as np
import pytest
import torch

from hardmix import (
    Contrast,
    InputError,
    MemoryQueue,
    MixPlan,
    MochiLoss,
    alignment,
    contrast,
    false_negatives_top,
    false_parents,
    hardest_negatives,
    matching_probability,
    materialize,
    plan_mochi,
    proxy_accuracy,
    uniformity,
)
from hardmix.losses import Embeddings
from hardmix.mixing.plans import mix
from hardmix.strategies import (
    STRATEGIES,
    VECTOR,
    Candidates,
    dropped_negatives,
    plan_beta_weighted,
    plan_fixed_percentage,
    plan_softmax_sampled,
)
from reference import unit

pytestmark = pytest.mark.usefixtures("unchecked_types")

BATCH, K, DIM = 3, 8, 4
COUNTS = {"num_hardest": 4, "num_pairs": 3, "num_with_query": 2}
NOT_POSITIVE = [0.0, -0.2, math.nan, math.inf]
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
EVERY_VECTOR = pytest.mark.parametrize("name", ["query", "key", "negatives"])
BOTH_LOSSES = pytest.mark.parametrize("loss", ["contrast", "MochiLoss"])


def refused(call, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


@pytest.fixture
def vectors() -> dict[str, torch.Tensor]:
    shapes = {"query": (BATCH, DIM), "key": (BATCH, DIM), "negatives": (K, DIM)}
    return {name: unit(*shape, dtype=torch.float32) for name, shape in shapes.items()}


@pytest.fixture
def similarity(vectors) -> torch.Tensor:
    return vectors["query"] @ vectors["negatives"].T


@pytest.fixture
def plan(similarity) -> MixPlan:
    return plan_mochi(similarity, **COUNTS)


@pytest.fixture
def outcome(vectors) -> Contrast:
    return contrast(**vectors, temperature=0.2)


def candidates(similarity, vectors=None, **options) -> Candidates:
    embeddings = None if vectors is None else Embeddings(**vectors)
    return Candidates(logits=similarity, embeddings=embeddings, **COUNTS | options)


def evaluate(loss: str, vectors, **options):
    if loss == "contrast":
        return contrast(**vectors, temperature=0.2, **options)
    return MochiLoss(**COUNTS)(**vectors, **options)


def test_an_input_error_is_a_value_error():
    assert issubclass(InputError, ValueError)


# Counts and temperatures


BAD_COUNTS = [
    ({"num_hardest": 0}, ["num_hardest=0", "below 1"]),
    ({"num_hardest": -3}, ["num_hardest=-3", "below 1"]),
    ({"num_pairs": -1}, ["num_pairs=-1", "below 0"]),
    ({"num_with_query": -1}, ["num_with_query=-1", "below 0"]),
    ({"num_hardest": 1}, ["num_pairs=3", "num_hardest=1", "2 or more"]),
]
TOO_MANY = ({"num_hardest": K + 1}, ["num_hardest=9", "8 negatives"])


@pytest.mark.parametrize("value", [16.0, 16.5, "16", None])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_are_not_whole_numbers_are_refused(name, value, similarity):
    parts = [f"{name}={value!r}", type(value).__name__, "whole number"]
    refused(lambda: MochiLoss(**COUNTS | {name: value}), *parts)
    refused(lambda: plan_mochi(similarity, **COUNTS | {name: value}), *parts)


def test_sizes_that_are_not_whole_numbers_are_refused(outcome):
    refused(lambda: MemoryQueue(16.0, DIM), "size=16.0", "float", "whole number")
    refused(lambda: MemoryQueue(K, "4"), "dim='4'", "str", "whole number")
    refused(lambda: matching_probability(outcome, top=2.0), "top=2.0", "whole number")


def test_numpys_whole_numbers_are_taken(vectors):
    counts = {name: np.int64(value) for name, value in COUNTS.items()}
    assert MochiLoss(**counts)(**vectors).isfinite()


@EVERY_STRATEGY
@pytest.mark.parametrize(("change", "parts"), [*BAD_COUNTS, TOO_MANY])
def test_counts_out_of_range_are_refused_with_every_strategy(strategy, change, parts, vectors):
    refused(lambda: MochiLoss(**COUNTS | change, strategy=strategy)(**vectors), *parts)


@pytest.mark.parametrize(("change", "parts"), BAD_COUNTS)
def test_no_strategy_is_shown_counts_out_of_range(change, parts, similarity, vectors):
    refused(lambda: candidates(similarity, vectors, **change), *parts)


@pytest.mark.parametrize(("change", "parts"), BAD_COUNTS)
def test_counts_out_of_range_are_refused_when_the_loss_is_made(change, parts):
    refused(lambda: MochiLoss(**(COUNTS | change)), *parts)


def test_more_hardest_negatives_than_there_are_is_refused(vectors, similarity):
    change, parts = TOO_MANY
    loss = MochiLoss(**(COUNTS | change))
    refused(lambda: loss(**vectors), *parts)
    refused(lambda: loss(vectors["query"], vectors["key"], MemoryQueue(K, DIM)), *parts)
    refused(lambda: hardest_negatives(similarity, K + 1), *parts)
    dropping = MochiLoss(**(COUNTS | change), real_negatives="drop_hardest")
    refused(lambda: dropping(**vectors), *parts)


@pytest.mark.parametrize("number", [0, -2])
def test_fewer_than_one_hardest_negative_is_refused(number, similarity):
    parts = [f"num_hardest={number}", "below 1"]
    refused(lambda: hardest_negatives(similarity, number), *parts)
    refused(
        lambda: dropped_negatives(candidates(similarity, num_hardest=number), "drop_hardest"),
        *parts,
    )


def test_a_negative_number_of_points_is_refused(similarity):
    hardest = hardest_negatives(similarity, 4)
    refused(lambda: mix(hardest, -1, 0, similarity), "num_pairs=-1", "below 0")
    refused(lambda: mix(hardest, 0, -1, similarity), "num_with_query=-1", "below 0")


def test_a_negative_number_of_ranks_is_refused(outcome):
    false = torch.zeros(BATCH, K, dtype=torch.bool)
    refused(lambda: false_negatives_top(outcome.real, false, top=-1), "top=-1", "1")
    refused(lambda: matching_probability(outcome, top=-1), "top=-1")


@pytest.mark.parametrize("temperature", NOT_POSITIVE)
def test_a_temperature_that_is_not_above_nought_is_refused(temperature, vectors):
    parts = [f"temperature={temperature}", "finite number above 0"]
    refused(lambda: contrast(**vectors, temperature=temperature), *parts)
    refused(lambda: MochiLoss(temperature=temperature), *parts)
    learnt = torch.tensor(temperature, dtype=torch.float64)
    refused(lambda: MochiLoss(**COUNTS, temperature=lambda: learnt)(**vectors), *parts)


@pytest.mark.parametrize("temperature", [0.0, math.nan])
def test_a_sampling_temperature_is_refused_by_its_own_name(temperature, similarity):
    refused(
        lambda: plan_softmax_sampled(candidates(similarity), sampling_temperature=temperature),
        f"sampling_temperature={temperature}",
        "finite number above 0",
    )


@pytest.mark.parametrize("percentage", [-0.5, 100.5, math.nan])
def test_a_percentage_out_of_range_is_refused(percentage, similarity, vectors):
    refused(
        lambda: plan_fixed_percentage(candidates(similarity, vectors), percentage=percentage),
        f"percentage={percentage}",
        "between 0 and 100",
    )


# Names


def test_an_unknown_strategy_is_answered_with_the_known_ones_nearest_first():
    refused(lambda: MochiLoss(strategy="mochy"), "'mochy'", "choose one of mochi,", *STRATEGIES)
    refused(lambda: MochiLoss(strategy="softmax"), "'softmax'", "choose one of softmax-sampled,")


def test_an_unknown_fate_of_the_real_negatives_is_refused(similarity):
    parts = ["real_negatives='drop'", "keep", "drop_hardest", "drop_all"]
    refused(lambda: dropped_negatives(candidates(similarity), "drop"), *parts)
    refused(lambda: MochiLoss(real_negatives="drop"), *parts)


def test_an_unknown_weighing_is_refused(similarity):
    refused(
        lambda: plan_beta_weighted(candidates(similarity), weighing="alpha"),
        "weighing='alpha'",
        "one-minus-beta",
        "log-beta",
    )


def test_an_unknown_start_is_refused():
    refused(lambda: MemoryQueue(K, DIM, start="full"), "start='full'", "random", "empty")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ranked-by-key", 'rank_by="key"'),
        ("fixed-percentage", "'fixed-percentage'"),
        ("synco", "'synco'"),
    ],
)
def test_strategies_that_need_embeddings_say_so(name, part, similarity):
    choice = STRATEGIES[name]
    without = candidates(similarity, rank_by=choice.rank_by)
    refused(lambda: choice.strategy(without), "embeddings=None", part, "Embeddings(")


# Vectors


@BOTH_LOSSES
@EVERY_VECTOR
@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        pytest.param(lambda x: x[0], ["shape (4,)", "two-dimensional"], id="one row"),
        pytest.param(lambda x: x[None], ["shape (1, ", "two-dimensional"], id="three axes"),
        pytest.param(lambda x: x.long(), ["dtype torch.int64", "floating-point"], id="integers"),
        pytest.param(lambda x: x[:0], ["shape (0, 4)", "no embedding"], id="no rows"),
    ],
)
def test_vectors_of_a_wrong_form_are_refused(loss, name, spoil, parts, vectors):
    vectors[name] = spoil(vectors[name])
    refused(lambda: evaluate(loss, vectors), f"{name} has", *parts)


@BOTH_LOSSES
def test_vectors_that_do_not_fit_each_other_are_refused(loss, vectors):
    fewer = vectors | {"key": vectors["key"][:2]}
    refused(lambda: evaluate(loss, fewer), "key has shape (2, 4)", "query (3, 4)")
    wider = vectors | {"negatives": unit(K, DIM + 1, dtype=torch.float32)}
    refused(lambda: evaluate(loss, wider), "negatives have 5 dimensions", "query 4")
    elsewhere = vectors | {"key": vectors["key"].to("meta")}
    refused(lambda: evaluate(loss, elsewhere), "key is on meta", "query on cpu")


@EVERY_VECTOR
@pytest.mark.parametrize("length", [0.0, 0.99, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vector_that_is_not_of_unit_length_is_refused(name, length, dtype, vectors):
    vectors = {of: value.to(dtype) for of, value in vectors.items()}
    vectors[name][1] *= length
    refused(
        lambda: contrast(**vectors, temperature=0.2),
        f"{name}[1] has length {length:.4g}, not 1",
        f"normalize({name}, dim=1)",
    )


@BOTH_LOSSES
@EVERY_VECTOR
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_vector_with_nan_or_infinity_is_refused(loss, name, value, vectors):
    vectors[name][2, 1] = value
    refused(
        lambda: evaluate(loss, vectors),
        f"{name} holds NaN or infinity in 1 of {len(vectors[name])} rows",
        f"first in {name}[2]",
    )


@EVERY_VECTOR
def test_a_vector_without_a_direction_is_refused(name, vectors):
    vectors[name][2] = 0.0
    refused(lambda: evaluate("MochiLoss", vectors), f"{name}[2]", "length 0")


@EVERY_VECTOR
@pytest.mark.parametrize("length", [1e-30, 1e-15, 3e-14, 1e-12, 1e30])
def test_an_extreme_length_is_refused_or_makes_no_difference(name, length, vectors):
    loss = MochiLoss(num_pairs=0, num_with_query=0)
    expected = loss(**vectors)
    vectors[name] *= length
    try:
        torch.testing.assert_close(loss(**vectors), expected)
    except InputError as error:
        assert name in str(error)  # noqa: PT017


def test_a_batch_of_one_has_no_negatives_of_its_own(vectors):
    query, key = vectors["query"], vectors["key"]
    loss = MochiLoss(**COUNTS)
    refused(lambda: loss.in_batch(query[:1], key[:1]), "query has 1 row", "2 or more")
    refused(lambda: loss.in_batch(query, key[:2]), "key has shape (2, 4)", "query (3, 4)")
    refused(lambda: loss.in_batch(query * math.nan, key), "query holds NaN", "3 of 3 rows")


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
}


@BOTH_LOSSES
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func_are_refused_in_words(loss, transform, vectors):
    def of_query(query: torch.Tensor) -> torch.Tensor:
        outcome = evaluate(loss, vectors | {"query": query})
        return outcome.loss if isinstance(outcome, Contrast) else outcome

    parts = ["torch.func", "cannot transform", "torch.autograd.grad"]
    refused(lambda: transform(of_query, vectors["query"]), *parts)


def test_ranking_under_vmap_is_refused_in_words(similarity):
    ranked = torch.func.vmap(lambda rows: hardest_negatives(rows, 4).positions)
    refused(lambda: ranked(torch.stack([similarity, similarity])), "torch.func", "vmap")


# Similarities and masks


BAD_SIMILARITY = [
    pytest.param(lambda x: x[0], ["shape (8,)", "(batch, K)"], id="one row"),
    pytest.param(lambda x: x.long(), ["dtype torch.int64", "floating-point"], id="integers"),
    pytest.param(lambda x: x.half(), ["dtype torch.float16", "float32"], id="half"),
    pytest.param(lambda x: x.bfloat16(), ["dtype torch.bfloat16", "float32"], id="bfloat16"),
]


@pytest.mark.parametrize(("spoil", "parts"), BAD_SIMILARITY)
def test_no_strategy_is_shown_similarities_that_cannot_be_ranked(spoil, parts, similarity, vectors):
    refused(lambda: candidates(spoil(similarity), vectors), "logits has", *parts)


@pytest.mark.parametrize(("spoil", "parts"), BAD_SIMILARITY)
def test_similarities_that_cannot_be_ranked_are_refused_everywhere_else(spoil, parts, similarity):
    bad, false = spoil(similarity), torch.zeros(BATCH, K, dtype=torch.bool)
    parts = ["similarity has", *parts]
    refused(lambda: hardest_negatives(bad, 4), *parts)
    refused(lambda: plan_mochi(bad, **COUNTS), *parts)
    refused(lambda: false_negatives_top(bad, false), *parts)


def test_similarities_of_other_vectors_are_refused(vectors, similarity):
    for other in (similarity[:, :5], similarity[:2]):
        parts = [f"logits has shape {tuple(other.shape)}", "(3, 8)"]
        refused(lambda other=other: candidates(other, vectors), *parts)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_similarities_with_nan_are_refused(number, similarity):
    similarity[1, 3] = math.nan
    refused(lambda: hardest_negatives(similarity, number), "similarity holds NaN")
    counts = {"num_hardest": 4, "num_pairs": number, "num_with_query": number}
    refused(lambda: plan_mochi(similarity, **counts), "similarity holds NaN")


def test_nan_is_refused_also_where_another_query_has_a_tie():
    similarity = torch.tensor([[math.nan, 1.0, 2.0, 3.0], [0.0, 2.0, 2.0, 3.0]])
    refused(lambda: hardest_negatives(similarity, 2), "similarity holds NaN")


BAD_MASK = [
    pytest.param(torch.zeros(BATCH, K), ["dtype torch.float32", "bool"], id="float"),
    pytest.param(torch.zeros(BATCH, K, dtype=torch.int64), ["torch.int64", "bool"], id="integer"),
    pytest.param(torch.zeros(BATCH, K - 1).bool(), ["shape (3, 7)", "(3, 8)"], id="narrow"),
    pytest.param(torch.zeros(1, K).bool(), ["shape (1, 8)", "(3, 8)"], id="one row for all"),
    pytest.param(torch.zeros(BATCH + 1, K).bool(), ["shape (4, 8)", "(3, 8)"], id="other batch"),
    pytest.param(torch.zeros(K).bool(), ["shape (8,)", "(3, 8)"], id="one axis"),
]


@EVERY_STRATEGY
@pytest.mark.parametrize(("mask", "parts"), BAD_MASK)
def test_a_mask_that_names_no_negatives_is_refused_with_every_strategy(
    strategy, mask, parts, similarity, vectors
):
    parts = ["exclude has", *parts]
    refused(lambda: MochiLoss(**COUNTS, strategy=strategy)(**vectors, exclude=mask), *parts)
    refused(lambda: candidates(similarity, vectors, exclude=mask), *parts)


@pytest.mark.parametrize(("mask", "parts"), BAD_MASK)
def test_a_mask_that_names_no_negatives_is_refused_everywhere_else(
    mask, parts, similarity, vectors, outcome
):
    parts = ["exclude has", *parts]
    for loss in ("contrast", "MochiLoss"):
        refused(lambda loss=loss: evaluate(loss, vectors, exclude=mask), *parts)
    refused(lambda: hardest_negatives(similarity, 4, mask), *parts)
    refused(lambda: plan_mochi(similarity, **COUNTS, exclude=mask), *parts)
    refused(lambda: matching_probability(outcome, mask), *parts)
    refused(lambda: proxy_accuracy(outcome, mask), *parts)


def test_a_mask_for_the_batch_has_a_column_for_each_sample(vectors):
    mask = torch.zeros(BATCH, K, dtype=torch.bool)
    loss = MochiLoss(**COUNTS)
    refused(
        lambda: loss.in_batch(vectors["query"], vectors["key"], mask),
        "exclude has shape (3, 8)",
        "(3, 3)",
    )


@pytest.mark.parametrize(
    ("mask", "parts"), [case for case in BAD_MASK if case.id in ("float", "other batch")]
)
def test_false_negatives_of_a_wrong_form_are_refused_by_their_own_name(
    mask, parts, similarity, plan
):
    refused(lambda: false_negatives_top(similarity, mask), "false_negative has", *parts)
    refused(lambda: false_parents(plan, mask), "false_negative has", parts[0])


# Plans


def test_a_plan_of_another_batch_is_refused(vectors, plan):
    shorter = vectors | {"query": vectors["query"][:2], "key": vectors["key"][:2]}
    single = vectors | {"query": vectors["query"][:1], "key": vectors["key"][:1]}
    refused(lambda: contrast(**shorter, plan=plan, temperature=0.2), "plan", "(3, 5)", "batch of 2")
    refused(lambda: contrast(**single, plan=plan, temperature=0.2), "plan", "(3, 5)", "batch of 1")
    refused(lambda: MochiLoss(strategy=lambda _: plan)(**shorter), "plan", "batch of 2")


def test_a_plan_of_another_batch_makes_no_vectors(vectors, plan):
    for batch in (2, 1):
        shorter = vectors | {of: vectors[of][:batch] for of in ("query", "key")}
        refused(lambda few=shorter: materialize(plan, **few), "plan", "(3, 5)", f"batch of {batch}")


@pytest.mark.parametrize(
    ("part", "value", "parts"),
    [
        ("base", K, ["plan.base holds 8", "-1 to 7", "8 negatives"]),
        ("base", -2, ["plan.base holds -2", "-1 to 7"]),
        ("partner", K + 4, ["plan.partner holds 12", "-2 to 7", "8 negatives"]),
        ("partner", -3, ["plan.partner holds -3", "-2 to 7"]),
    ],
)
@pytest.mark.parametrize("use", ["contrast", "materialize", "MochiLoss"])
def test_a_plan_that_names_rows_out_of_range_is_refused(use, part, value, parts, vectors, plan):
    rows = getattr(plan, part).clone()
    rows[1, 1] = value
    wrong = plan._replace(**{part: rows})
    calls = {
        "contrast": lambda: contrast(**vectors, plan=wrong, temperature=0.2),
        "materialize": lambda: materialize(wrong, **vectors),
        "MochiLoss": lambda: MochiLoss(strategy=lambda _: wrong)(**vectors),
    }
    refused(calls[use], *parts)


@pytest.mark.parametrize("part", ["base", "partner"])
def test_a_plans_rows_are_int64(part, vectors, plan):
    wrong = plan._replace(**{part: getattr(plan, part).int()})
    refused(
        lambda: contrast(**vectors, plan=wrong, temperature=0.2),
        f"plan.{part} has dtype torch.int32",
        "torch.int64",
    )


@pytest.mark.parametrize("part", ["base", "partner", "share", "scale", "weight"])
@pytest.mark.parametrize("cut", [(slice(None), slice(1)), (slice(2), slice(None))])
def test_a_plans_parts_have_one_shape(part, cut, vectors, plan):
    whole = plan._replace(scale=torch.ones_like(plan.share), weight=torch.ones_like(plan.share))
    wrong = whole._replace(**{part: getattr(whole, part)[cut]})
    refused(lambda: contrast(**vectors, plan=wrong, temperature=0.2), "plan", part, "(3, 5)")


@pytest.mark.parametrize("shape", [(BATCH, 2, DIM + 1), (BATCH + 1, 2, DIM), (BATCH, DIM)])
def test_a_plans_vectors_have_the_embeddings_dimensions(shape, vectors, plan):
    wrong = plan._replace(partner=torch.full_like(plan.partner, VECTOR), vectors=torch.randn(shape))
    parts = [f"plan.vectors has shape {shape}", "(batch, V, dim)", "batch of 3", "4 dimensions"]
    refused(lambda: contrast(**vectors, plan=wrong, temperature=0.2), *parts)
    refused(lambda: MochiLoss(**COUNTS, strategy=lambda _: wrong)(**vectors), *parts)


# The user's own parts of the loss


def test_unknown_options_of_a_call_are_answered_with_the_known_ones(vectors):
    loss, parts = MochiLoss(**COUNTS), ["option='mixed' is unknown", "choose one of mix,"]
    refused(lambda: loss(**vectors, mixed=False), *parts)
    refused(lambda: loss.contrast(**vectors, mixed=False), *parts)
    pair = vectors["query"], vectors["key"]
    refused(lambda: loss.in_batch(*pair, mixed=False), *parts)
    refused(lambda: loss.symmetric(*pair, mixed=False), *parts)


@pytest.mark.parametrize("name", ["strategy", "weights", "denominator", "filter_negatives"])
@pytest.mark.parametrize("value", [5, None, torch.ones(3)], ids=["5", "None", "tensor"])
def test_what_is_neither_a_name_nor_a_function_is_refused(name, value):
    refused(lambda: MochiLoss(**{name: value}), f"{name}=", "neither a name nor a function")


@pytest.mark.parametrize(
    ("returned", "part"), [(None, "NoneType"), ((1, 2), "tuple"), (torch.ones(3), "Tensor")]
)
def test_a_strategy_returns_a_plan(returned, part, vectors):
    loss = MochiLoss(**COUNTS, strategy=lambda _: returned)
    refused(lambda: loss(**vectors), f"the strategy returned {part}", "must return a MixPlan")


@pytest.mark.parametrize(
    ("formula", "part"),
    [
        (lambda masses: masses.negatives.mean(), "returned ()"),
        (lambda masses: masses.negatives[:2], "returned (2,)"),
        (lambda _: None, "returned NoneType"),
        (lambda _: 1.0, "returned float"),
    ],
    ids=["scalar", "fewer", "nothing", "number"],
)
def test_a_denominator_returns_one_loss_for_each_query(formula, part, vectors):
    loss = MochiLoss(**COUNTS, denominator=formula)
    refused(lambda: loss(**vectors), part, "the loss of each query", "shape (3,)")


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        (torch.zeros(BATCH), ["shape (3,)", "(3, 8)"]),
        (torch.zeros(BATCH, K, dtype=torch.long), ["torch.int64", "floating-point"]),
        (5, ["int", "floating-point"]),
    ],
    ids=["one axis", "integers", "number"],
)
def test_weights_return_one_log_for_each_negative(returned, parts, vectors):
    loss = MochiLoss(**COUNTS, weights=lambda *_: returned)
    refused(lambda: loss(**vectors), "the weights", *parts)


@pytest.mark.parametrize(
    ("returned", "part"),
    [(None, "NoneType"), (torch.zeros(BATCH, K), "torch.float32"), (torch.ones(3) > 0, "(3,)")],
    ids=["nothing", "floats", "one axis"],
)
def test_a_filter_returns_a_mask(returned, part, vectors):
    loss = MochiLoss(**COUNTS, filter_negatives=lambda _: returned)
    refused(lambda: loss(**vectors), "filter_negatives", part, "bool mask of shape (3, 8)")


# The queue


@pytest.mark.parametrize("value", [0, -1])
def test_a_queue_without_slots_or_dimensions_is_refused(value):
    refused(lambda: MemoryQueue(value, DIM), f"size={value}", "below 1")
    refused(lambda: MemoryQueue(K, value), f"dim={value}", "below 1")


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (torch.randn(DIM), ["shape (4,)", "(batch, 4)"]),
        (torch.randn(2, DIM + 1), ["shape (2, 5)", "(batch, 4)"]),
        (torch.ones(2, DIM, dtype=torch.int64), ["dtype torch.int64", "floating-point"]),
    ],
)
def test_keys_of_a_wrong_form_are_refused(keys, parts):
    refused(lambda: MemoryQueue(K, DIM).enqueue(keys), "keys have", *parts)


@pytest.mark.parametrize("shape", [(DIM,), (2, DIM, 1)])
def test_a_queue_cannot_be_filled_with_keys_of_a_wrong_form(shape):
    refused(lambda: MemoryQueue.prefilled(torch.randn(shape)), "keys have", f"shape {shape}")


def test_a_queue_cannot_be_filled_with_nan():
    keys = torch.full((K, DIM), math.nan)
    refused(lambda: MemoryQueue.prefilled(keys), "keys holds NaN", "8 of 8 rows", "keys[0]")


@pytest.mark.parametrize("name", ["labels", "ids"])
@pytest.mark.parametrize(
    ("values", "part"),
    [
        (torch.arange(3), "shape (3,)"),
        (torch.zeros(2, 1, dtype=torch.int64), "shape (2, 1)"),
        (torch.zeros(2), "dtype torch.float32"),
    ],
)
def test_labels_and_ids_are_one_whole_number_for_each_key(name, values, part):
    queue, keys = MemoryQueue(K, DIM), torch.randn(2, DIM)
    limit = "one whole number for each of the 2 keys"
    refused(lambda: queue.enqueue(keys, **{name: values}), f"{name} have", part, limit)
    refused(lambda: MemoryQueue.prefilled(keys, **{name: values}), f"{name} have", part, limit)


@pytest.mark.parametrize(
    ("values", "part"),
    [(torch.tensor([1.7]), "dtype torch.float32"), (torch.tensor([[1]]), "shape (1, 1)")],
)
def test_the_class_and_image_of_a_query_are_one_whole_number(values, part):
    queue = MemoryQueue(K, DIM)
    refused(lambda: queue.same_class(values), "labels have", part)
    refused(lambda: queue.same_image(values), "ids have", part)


# Features


@pytest.mark.parametrize(
    ("features", "parts"),
    [
        (torch.randn(6), ["features have shape (6,)", "two-dimensional"]),
        (torch.randn(6, 2, 2), ["features have shape (6, 2, 2)", "two-dimensional"]),
        (torch.ones(6, 2, dtype=torch.int64), ["dtype torch.int64", "floating-point"]),
        (torch.full((6, 2), math.nan), ["features holds NaN", "6 of 6 rows", "features[0]"]),
        (torch.full((6, 2), math.inf), ["features holds NaN or infinity", "6 of 6 rows"]),
        (torch.zeros(6, 2), ["features[0]", "length"]),
    ],
    ids=["one axis", "three axes", "integers", "NaN", "infinity", "zeros"],
)
def test_features_that_cannot_be_compared_are_refused(features, parts):
    labels = torch.zeros(6, dtype=torch.int64)
    refused(lambda: alignment(features, labels), *parts)
    refused(lambda: uniformity(features), *parts)


@pytest.mark.parametrize(
    ("labels", "part"),
    [
        (torch.zeros(5, dtype=torch.int64), "shape (5,)"),
        (torch.zeros(6, 1, dtype=torch.int64), "shape (6, 1)"),
        (torch.zeros(6), "dtype torch.float32"),
    ],
)
def test_labels_are_one_whole_number_for_each_feature(labels, part):
    limit = "one whole number for each of the 6 features"
    refused(lambda: alignment(torch.randn(6, 2), labels), "labels have", part, limit)


@pytest.mark.parametrize("number", [0, 1])
def test_uniformity_compares_two_images_or_more(number):
    refused(lambda: uniformity(torch.randn(number, 2)), f"features hold {number}", "two or more")


@pytest.mark.parametrize("t", [0.0, -2.0, math.nan, math.inf])
def test_uniformity_wants_a_t_above_nought(t):
    refused(lambda: uniformity(torch.randn(6, 2), t), f"t={t}", "finite number above 0")
