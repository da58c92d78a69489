"""Folders of made-up runs, for which it is known what they say to each of the claims."""

import json
from pathlib import Path

import pytest

from hardmix.runs.folder import Run
from hardmix.settings.saved import to_json
from hardmix.sweep import claims as claims_module
from hardmix.sweep.claims import (
    CLAIMS,
    JUDGED,
    MOCHI,
    MOCO,
    ON_IMAGENET1K,
    Claim,
    judge,
    write_claims,
)
from hardmix.sweep.grids import GRIDS
from hardmix.sweep.measures import PROTOCOLS
from hardmix.sweep.planning import SweepOptions, config_of, run_name

pytestmark = pytest.mark.slow

ROWS = {row.label: row for grid in JUDGED if grid not in ON_IMAGENET1K for row in GRIDS[grid].rows}
SEEDS = 3
LUCK = 0.2
"""Differences of two rows deviate by so much over seeds; with three their half-interval is 0.50."""


def options(out: Path, **others) -> SweepOptions:
    return SweepOptions(
        **{"grid": "table1", "out": out, "scale": "shapes", "seeds": SEEDS} | others
    )


def write_row(
    out: Path,
    label: str,
    linear: float,
    *,
    seeds: int = SEEDS,
    uniformity: float = -1.0,
    alignment: float = 0.5,
    **curves,
) -> None:
    """Runs around `linear` with a deviation near 1; curves hold the first and the last epoch."""
    for seed in range(seeds):
        config = config_of(ROWS[label], options(out), seed)
        run = Run(out / "runs" / run_name(config))
        run.results.mkdir(parents=True)
        run.config_file.write_bytes(to_json(config))
        run.encoder_file.write_bytes(b"")
        lines = [
            {"step": 10 * (epoch + 1), "epoch": epoch, "loss": 1.0}
            | {name: pair[epoch > 0] for name, pair in curves.items() if name != "probability"}
            for epoch in range(config.train.epochs)
        ]
        run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        hardness = [
            {"step": 1, "epoch": epoch, "matching_probability": list(values)}
            for epoch, values in enumerate(curves.get("probability", ()))
        ]
        text = "".join(json.dumps(line) + "\n" for line in hardness)
        (run.path / "hardness.jsonl").write_text(text)
        # Runs of one seed share most of their luck, but not all of it.
        luck = (seed - 1) * (1 + LUCK * (label != MOCO))
        result = {"top1": (linear + luck) / 100, "data": config.data.name}
        text = json.dumps(result | PROTOCOLS["linear-cached"])
        (run.results / "linear-cached.json").write_text(text)
        uniform = uniformity + 0.01 * seed * (1 + (label != MOCO))
        space = {"alignment": alignment + 0.01 * seed, "uniformity": uniform}
        (run.results / "embedding.json").write_text(json.dumps(space))


@pytest.fixture(autouse=True)
def few_grids(request, monkeypatch) -> None:
    """Looking through all of them for every test would take a minute."""
    if "out_of_all_grids" not in request.node.name:
        wanted = (
            ("table1-supp", "variants") if "claim_10" in request.node.name else ("table1-supp",)
        )
        monkeypatch.setattr(claims_module, "JUDGED", wanted)


def judged(out: Path, number: int, **others) -> Claim:
    return judge(options(out, **others))[number - 1]


def test_an_empty_folder_judges_nothing_out_of_all_grids(tmp_path):
    claims = judge(options(tmp_path))
    assert [claim.number for claim in claims] == list(range(1, len(CLAIMS) + 1))
    assert len(claims) > 30
    assert {claim.verdict for claim in claims} == {"cannot be judged"}
    assert all(claim.evidence for claim in claims)


@pytest.mark.parametrize(
    ("late", "verdict"), [((0.9, 0.05, 0.03, 0.02), "seen"), ((0.25,) * 4, "not seen")]
)
def test_claim_1_asks_whether_fewer_negatives_hold_half_of_the_probability(tmp_path, late, verdict):
    write_row(tmp_path, MOCO, 50, probability=[(0.3, 0.3, 0.2, 0.2), late])
    claim = judged(tmp_path, 1)
    assert claim.verdict == verdict
    assert f"50.0% to {1 / 4 if verdict == 'seen' else 1 / 2:.1%}" in claim.evidence


@pytest.mark.parametrize(
    ("mixed", "real", "verdict"),
    [(0.2, 0.5, "seen"), (0.2, 0.3, "seen in part"), (0.5, 0.5, "not seen")],
)
def test_claim_2_compares_the_proxy_task_with_and_without_synthetic_points(
    tmp_path, mixed, real, verdict
):
    write_row(tmp_path, MOCO, 50, proxy_accuracy=(0.1, 0.5))
    write_row(tmp_path, MOCHI, 50, proxy_accuracy=(0.1, real), proxy_accuracy_mixed=(0.1, mixed))
    assert judged(tmp_path, 2).verdict == verdict


@pytest.mark.parametrize(("last", "verdict"), [(0.2, "seen"), (0.05, "not seen")])
def test_claim_3_asks_for_more_false_negatives_at_the_end_of_every_run(tmp_path, last, verdict):
    write_row(tmp_path, MOCO, 50, false_negatives_top=(0.1, 0.2))
    write_row(tmp_path, MOCHI, 50, false_negatives_top=(0.1, last))
    claim = judged(tmp_path, 3)
    assert claim.verdict == verdict
    assert "10.00 ± 0.00 % in the first epoch" in claim.evidence
    assert "6 runs" in claim.evidence


@pytest.mark.parametrize(("both", "verdict"), [(0.01, "seen"), (0.11, "not seen")])
def test_claim_4_counts_points_with_two_false_parents(tmp_path, both, verdict):
    write_row(tmp_path, MOCHI, 50, synthetic_both_false=(0, both), synthetic_one_false=(0, 0.08))
    claim = judged(tmp_path, 4)
    assert claim.verdict == verdict
    assert "at least one 8.00" in claim.evidence


@pytest.mark.parametrize(
    ("mochi", "verdict"), [(53, "seen"), (50.6, "seen"), (50.4, "not seen"), (40, "not seen")]
)
def test_claim_5_counts_a_gain_whose_paired_interval_excludes_0(tmp_path, mochi, verdict):
    """Differences deviate by 0.2, t is 4.303 for three pairs: the limit is 0.50.

    The rows themselves deviate by 1: without pairs 0.6 would be far within the noise.
    """
    write_row(tmp_path, MOCO, 50)
    write_row(tmp_path, MOCHI, mochi)
    claim = judged(tmp_path, 5)
    assert claim.verdict == verdict
    low, high = mochi - 50 - 0.4968, mochi - 50 + 0.4968
    assert f"{mochi - 50:+.2f} [{low:+.2f}, {high:+.2f}], 3 pairs" in claim.evidence


def test_one_seed_judges_no_accuracy(tmp_path):
    write_row(tmp_path, MOCO, 50)
    write_row(tmp_path, MOCHI, 90, seeds=1)
    claim = judged(tmp_path, 5)
    assert claim.verdict == "cannot be judged"
    assert "one seed" in claim.evidence


@pytest.mark.parametrize(
    ("large", "small", "verdict"),
    [(55, 50, "seen"), (55, 55, "seen in part"), (50, 50, "not seen")],
)
def test_claim_6_asks_for_most_settings_and_not_for_the_smallest_n(tmp_path, large, small, verdict):
    write_row(tmp_path, MOCO, 50)
    for label in (MOCHI, "MoCHi (1024, 256, 512)", "MoCHi (512, 512, 0)"):
        write_row(tmp_path, label, large)
    assert judged(tmp_path, 6).verdict == "cannot be judged", "without a small N"
    write_row(tmp_path, "MoCHi (64, 64, 0)", small)
    assert judged(tmp_path, 6).verdict == verdict


@pytest.mark.parametrize(("small", "verdict"), [(50, "seen"), (60, "seen"), (40, "not seen")])
def test_claim_7_sets_mochi_with_a_small_queue_against_the_large_one(tmp_path, small, verdict):
    write_row(tmp_path, MOCO, 50)
    write_row(tmp_path, f"{MOCHI}, K = 4096", small)
    assert judged(tmp_path, 7).verdict == verdict
    write_row(tmp_path, f"{MOCO}, K = 4096", 70)
    claim = judged(tmp_path, 7)
    assert claim.verdict == verdict
    words = "of MoCo-v2 50.00 ± 1.00: +20.00 [+19.50, +20.50], 3 pairs"
    assert claim.evidence.endswith(words), "the queue alone"


@pytest.mark.parametrize(
    ("moco", "mochi", "verdict"),
    [(60, 70, "seen"), (60, 60, "not seen"), (60, 50, "not seen"), (50, 70, "seen in part")],
)
def test_claim_8_asks_for_a_higher_bound_than_moco_v2_has(tmp_path, moco, mochi, verdict):
    write_row(tmp_path, MOCO, 50)
    write_row(tmp_path, MOCHI, 50)
    write_row(tmp_path, f"{MOCO}, oracle", moco)
    write_row(tmp_path, f"{MOCHI}, oracle", mochi)
    assert judged(tmp_path, 8).verdict == verdict


@pytest.mark.parametrize(
    ("mochi", "verdict"), [(-1.5, "seen"), (-1.0, "not seen"), (0, "not seen")]
)
def test_claim_9_takes_less_of_the_loss_as_more_uniform(tmp_path, mochi, verdict):
    write_row(tmp_path, MOCO, 50, uniformity=-1.0)
    write_row(tmp_path, MOCHI, 50, uniformity=mochi)
    assert judged(tmp_path, 9).verdict == verdict


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [(20, 20, "seen"), (20, 50, "seen in part"), (50, 60, "not seen")],
)
def test_claim_10_asks_every_temperature_of_the_sampling(tmp_path, first, second, verdict):
    write_row(tmp_path, MOCHI, 50)
    write_row(tmp_path, f"{MOCHI}, softmax-sampled, tau' = 0.05", first)
    write_row(tmp_path, f"{MOCHI}, softmax-sampled, tau' = 1.0", second)
    assert judged(tmp_path, 10).verdict == verdict


def verdict_of(out: Path, words: str) -> Claim:
    (claim,) = (each for each in judge(options(out)) if words in each.claim)
    return claim


@pytest.mark.parametrize(
    ("early", "late", "verdict"), [(51, 53, "seen"), (53, 53, "not seen"), (53, 51, "not seen")]
)
def test_the_gain_grows_if_it_is_larger_after_200_epochs_than_after_100(
    tmp_path, early, late, verdict
):
    for label, linear in ((MOCO, 50), (MOCHI, late)):
        write_row(tmp_path, label, linear)
    assert verdict_of(tmp_path, "gain grows").verdict == "cannot be judged"
    for label, linear in ((f"{MOCO}, 100 epochs", 50), (f"{MOCHI}, 100 epochs", early)):
        write_row(tmp_path, label, linear)
    assert verdict_of(tmp_path, "gain grows").verdict == verdict
    assert verdict_of(tmp_path, "after 100 epochs, too").verdict == "seen"


@pytest.mark.parametrize(("pairs", "verdict"), [(0.51, "seen"), (0.4, "not seen")])
def test_with_pairs_alone_the_proxy_task_ends_like_the_baselines(tmp_path, pairs, verdict):
    write_row(tmp_path, MOCO, 50, proxy_accuracy=(0.1, 0.5))
    write_row(tmp_path, "MoCHi (1024, 1024, 0)", 50, proxy_accuracy_mixed=(0.1, pairs))
    assert verdict_of(tmp_path, "s' = 0").verdict == verdict


@pytest.mark.parametrize(
    ("pairs", "query", "verdict"), [(0.2, 0.9, "seen"), (0.7, 0.3, "not seen")]
)
def test_the_hardest_point_of_each_kind_is_compared_with_the_hardest_negative(
    tmp_path, pairs, query, verdict
):
    write_row(tmp_path, MOCHI, 50, pairs_harder=(0.5, pairs), with_query_harder=(0.5, query))
    claims = [verdict_of(tmp_path, "max l(h) <"), verdict_of(tmp_path, "max l(h') >")]
    assert [claim.verdict for claim in claims] == [verdict] * 2
    assert f"max l(h) > max l(n) for {100 * pairs:.2f}" in claims[0].evidence


def test_false_negatives_at_the_end_and_classes_with_the_oracle(tmp_path):
    write_row(tmp_path, MOCO, 50, false_negatives_top=(0.1, 0.2), alignment=0.6)
    write_row(tmp_path, MOCHI, 50, false_negatives_top=(0.1, 0.18), alignment=0.6)
    write_row(tmp_path, f"{MOCO}, oracle", 50, false_negatives_top=(0.1, 0.3), alignment=0.4)
    assert verdict_of(tmp_path, "fewer false negatives").verdict == "seen"
    claim = verdict_of(tmp_path, "oracle brings")
    assert claim.verdict == "seen"
    assert "30.00 ± 0.00 %, MoCo-v2 20.00" in claim.evidence


@pytest.mark.parametrize(
    ("uniformity", "verdict"), [(-0.2, "seen"), (-3.0, "seen in part"), (None, "cannot be judged")]
)
def test_supervised_features_are_close_within_a_class_and_spread_little(
    tmp_path, uniformity, verdict
):
    write_row(tmp_path, MOCO, 50, alignment=0.6)
    write_row(tmp_path, MOCHI, 50, alignment=0.6)
    if uniformity is not None:
        write_row(tmp_path, "supervised", 80, alignment=0.2, uniformity=uniformity)
    assert verdict_of(tmp_path, "high alignment").verdict == verdict


def write_detectors(out: Path, grid: str, label: str, values: list[float]) -> None:
    """Write a row of Table 2 or 3: one run with as many fine-tunings on VOC as values."""
    row = next(row for row in GRIDS[grid].rows if row.label == label)
    chosen = options(out, grid=grid, seeds=1, voc_root=out, coco_root=out)
    config = config_of(row, chosen, 0)
    run = Run(out / "runs" / run_name(config))
    run.results.mkdir(parents=True)
    run.config_file.write_bytes(to_json(config))
    run.encoder_file.write_bytes(b"")
    metric = "VOC07 11-point"
    text = {
        "trials": [{"scores": {metric: {"ap": ap / 100}}} for ap in values],
        "metrics": {metric: {"ap": {"mean": sum(values) / len(values) / 100}}},
    }
    (run.results / "detection-voc-short.json").write_text(json.dumps(text))


def test_transfer_is_judged_by_the_fine_tunings_of_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(claims_module, "JUDGED", ("table2", "table3"))
    for label, voc in {
        "MoCo-v2": [50.0, 50.1, 49.9],
        "MoCHi (256, 512, 0)": [51.0, 51.1, 50.9],
        "MoCHi (128, 1024, 512)": [52.0, 52.1, 51.9],
        "MoCHi (512, 1024, 512)": [50.0, 50.2, 49.8],
        "MoCo-v2, 100 epochs": [48.0, 48.1, 47.9],
        "MoCHi (256, 512, 0), 100 epochs": [48.0, 48.1, 47.9],
        "MoCHi (256, 512, 256), 100 epochs": [49.0, 49.2, 48.8],
        "MoCo-v2, 800 epochs": [52.0, 52.1, 51.9],
    }.items():
        write_detectors(tmp_path, "table2", label, voc)
    chosen = options(tmp_path, seeds=1, voc_root=tmp_path, coco_root=tmp_path)
    found = judge(chosen)

    def claim_of(words: str) -> Claim:
        return next(claim for claim in found if words in claim.claim)

    verdicts = {
        words: claim_of(words).verdict
        for words in (
            *("VOC than MoCo-v2", "after only 100 epochs", "help shorter training"),
            *("matches MoCo-v2 after 800", "COCO after 200 epochs"),
        )
    }
    assert verdicts == {
        "VOC than MoCo-v2": "seen",  # two of three, and none is worse
        "after only 100 epochs": "seen in part",  # one of two
        "help shorter training": "seen",
        "matches MoCo-v2 after 800": "seen",
        "COCO after 200 epochs": "cannot be judged",
    }
    words = "voc AP of MoCHi (256, 512, 0) 51.00 ± 0.10, of MoCo-v2 50.00 ± 0.10"
    assert words in claim_of("VOC than MoCo-v2").evidence


def test_the_page_and_the_data_hold_them_all(tmp_path):
    write_row(tmp_path, MOCO, 50)
    write_row(tmp_path, MOCHI, 53)
    chosen = options(tmp_path)
    page, data = write_claims(chosen, judge(chosen))
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(CLAIMS)
    assert "| seen | linear of MoCHi (1024, 1024, 128) 53.00 ± 1.20" in page.read_text()
    found = json.loads(data.read_text())
    assert [each["verdict"] for each in found].count("seen") == 1
    assert found[4]["place"] == "Table 1"
