"""Paired differences: their intervals are those of scipy's paired test; slopes."""

import pytest
from hypothesis import given, strategies as st
from scipy import stats

from hardmix.errors import InputError
from hardmix.sweep import pairs
from hardmix.sweep.claims import sign_of
from hardmix.sweep.pairs import slope, student_interval

NUMBERS = st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 3))


@given(st.lists(NUMBERS, min_size=2, max_size=12))
def test_an_interval_is_that_of_scipys_paired_test(differences):
    found = student_interval(differences)
    if len(set(differences)) == 1:
        assert [found.low, found.high] == pytest.approx([differences[0]] * 2)
        return
    expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-8)
    if abs(stats.ttest_1samp(differences, 0).pvalue - 0.05) > 1e-6:
        assert (found.sign != 0) == (stats.ttest_1samp(differences, 0).pvalue < 0.05)


def test_a_single_difference_has_no_interval_and_no_verdict():
    found = student_interval([0.5])
    assert (found.low, found.high, found.sign) == (None, None, None)
    assert found.text(2) == "+0.50 (one pair)"


def test_pairs_see_a_gain_that_the_spread_of_seeds_hides():
    """Seeds differ by ten points, every pair by about one: only differences by seed show it."""
    theirs = {1: 40.0, 2: 50.0, 3: 60.0, 4: 45.0}
    ours = {seed: value + 1 + 0.1 * (seed % 2) for seed, value in theirs.items()}
    sign, words = sign_of(ours, theirs)
    assert sign == 1
    assert words == "+1.05 [+0.96, +1.14], 4 pairs"
    apart = {seed + 10: value for seed, value in ours.items()}
    sign, words = sign_of(apart, theirs)
    assert sign == 0
    assert words.endswith("no pairs")


@given(
    a=NUMBERS,
    b=NUMBERS,
    x=st.lists(st.integers(-50, 50), min_size=2, max_size=9, unique=True),
)
def test_a_slope_is_that_of_the_line(a, b, x):
    assert slope(x, [a * each + b for each in x]) == pytest.approx(a, abs=1e-6)


def test_a_sweep_without_scipy_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(pairs, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'hardmix\[analysis\]'"):
        pairs.check_scipy()
