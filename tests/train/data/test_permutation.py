"""The order of the samples of an epoch."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops.train.data.permutation import Permutation


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_it_is_a_bijection(size, seed, epoch):
    found = Permutation(size, seed=seed, epoch=epoch)(np.arange(size))
    assert found.dtype == np.int64 and np.array_equal(np.sort(found), np.arange(size))


@given(st.integers(1, 2**62), st.data())
def test_it_holds_no_table(size, data):
    """Of any size, item by item; the same alone and among others."""
    items = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    order = Permutation(size, seed=1, epoch=2)
    found = order(np.array(items))
    assert len(set(found.tolist())) == len(items) and found.min() >= 0 and found.max() < size
    assert [int(order(np.array([item]))[0]) for item in items] == found.tolist()
    assert sum(np.asarray(value).nbytes for value in vars(order).values()) < 500


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_orders_of_a_few_are_as_likely(size):
    every = dict.fromkeys(itertools.permutations(range(size)), 0)
    draws = 12 * len(every)
    for seed in range(draws):
        every[tuple(Permutation(size, seed=seed, epoch=0)(np.arange(size)).tolist())] += 1
    assert chi_square(every.values(), 12) < limit(len(every) - 1)


@pytest.mark.parametrize("size", [8, 100, 5000])
def test_an_item_goes_anywhere(size):
    """Over seeds and over epochs, an eighth of the items to an eighth of the places."""
    cells = np.zeros((2, 8, 8))
    eighth = np.arange(size) * 8 // size
    draws = 8000 // size + 40
    for draw in range(draws):
        for kind, key in enumerate(({"seed": draw, "epoch": 3}, {"seed": 3, "epoch": draw})):
            np.add.at(cells[kind], (eighth, eighth[Permutation(size, **key)(np.arange(size))]), 1)
    parts = np.bincount(eighth)
    for found in cells:
        assert chi_square(found.ravel(), np.outer(parts, parts).ravel() * draws / size) < limit(49)


def test_neighbours_part():
    """The distance between where neighbours go is as likely to be any."""
    size = 10**12 + 7
    found = Permutation(size, seed=5, epoch=1)(np.arange(50000))
    steps = np.histogram(np.diff(found) % size, 100, (0, size))[0]
    assert chi_square(steps, 499.99) < limit(99)


def chi_square(found, expected):
    found, expected = np.fromiter(found, float), np.asarray(expected)
    return float(((found - expected) ** 2 / expected).sum())


def limit(freedom):
    """Five standard deviations of chi-square above its mean."""
    return freedom + 5 * np.sqrt(2 * freedom) + 1
