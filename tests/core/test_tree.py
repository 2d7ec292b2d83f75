"""Trees: what stacking, selecting, averaging and counting come to, with hand-derived numbers."""

import hashlib
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from halfmoon.core import rng, tree

KEYS = st.text("abcxyz_0", min_size=1, max_size=4)
LEAVES = st.integers(-9, 9).map(lambda value: torch.tensor([float(value), 1.0]))
TREES = st.recursive(
    st.dictionaries(KEYS, LEAVES, min_size=1, max_size=3),
    lambda node: st.dictionaries(KEYS, LEAVES | node, min_size=1, max_size=3),
    max_leaves=8,
)


@given(TREES)
def test_unflatten_undoes_flatten(one):
    flat = tree.flatten(one)
    repeated = tree.unflatten(flat)
    assert [id(leaf) for leaf in tree.leaves(repeated)] == [id(leaf) for leaf in tree.leaves(one)]
    assert list(tree.flatten(repeated)) == list(flat)
    assert len(flat) == len(list(tree.leaves(one)))


@given(TREES, st.integers(1, 3))
def test_index_undoes_stack(one, count):
    trees = [tree.map(lambda leaf, k=k: leaf + k, one) for k in range(count)]
    stacked = tree.stack(trees)
    for k, each in enumerate(trees):
        for a, b in zip(tree.leaves(tree.index(stacked, k)), tree.leaves(each), strict=True):
            assert torch.equal(a, b)


def test_flatten_names_paths():
    """Parts of a path are joined by a stroke, in the order of insertion; an empty dict leaves no trace."""
    one = torch.ones(1)
    assert list(tree.flatten({"b": {"y": one, "x": one}, "a": one, "e": {}})) == ["b/y", "b/x", "a"]


def test_map_uses_names_and_refuses_trees_with_missing_ones():
    one = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    other = {"b": torch.tensor(20.0), "a": torch.tensor(10.0)}
    made = tree.map(torch.add, one, other)
    assert (float(made["a"]), float(made["b"])) == (11.0, 22.0)
    with pytest.raises(KeyError):
        tree.map(torch.add, one, {"a": torch.ones(())})


def test_norm_size_and_bytes():
    """1 + 4 + 9 = 14. Two float32 and one float32 are 12 bytes; a counter of int64 adds 8."""
    one = {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(3.0)}}
    assert float(tree.squared_norm(one)) == 14
    with_counter = {**one, "n": torch.tensor(1)}
    assert tree.numel(with_counter) == 4
    assert tree.nbytes(with_counter) == 20


def test_weighted_mean_by_hand():
    """(1 * 1 + 3 * 5) / (1 + 3) = 4 and (1 * 2 + 3 * 6) / 4 = 5; counters are taken from the first."""
    stacked = tree.stack(
        [{"p": torch.tensor([1.0, 2.0]), "n": torch.tensor(7)}, {"p": torch.tensor([5.0, 6.0]), "n": torch.tensor(8)}]
    )
    mean = tree.weighted_mean(stacked, torch.tensor([1.0, 3.0]))
    assert mean["p"].tolist() == [4.0, 5.0]
    assert int(mean["n"]) == 7


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(1, 50))
def test_weighted_mean_knows_proportions_only(weights, factor):
    """Weights times a number give the same mean up to rounding; equal trees are their mean; it lies within."""
    values = torch.arange(len(weights) * 3, dtype=torch.float64).reshape(-1, 3)
    w = torch.tensor(weights, dtype=torch.float64)
    mean = tree.weighted_mean({"v": values}, w)["v"]
    expected = [math.fsum(w_ * float(v) for w_, v in zip(weights, c, strict=True)) / sum(weights) for c in values.T]
    assert mean.tolist() == pytest.approx(expected, rel=1e-12)
    assert tree.weighted_mean({"v": values}, w * factor)["v"].tolist() == pytest.approx(mean.tolist(), rel=1e-12)


def test_weighted_mean_is_precise_and_does_not_modify_uploads():
    """float32 uploads with float64 weights stay float32, and are not written into."""
    stacked = {"v": torch.tensor([[1.0], [2.0]])}
    mean = tree.weighted_mean(stacked, torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert mean["v"].dtype == torch.float32
    assert stacked["v"].tolist() == [[1.0], [2.0]]


def test_select_takes_one_tree_whole():
    """`new` where the condition holds, `old` elsewhere, also for counters and against a NaN on the other side."""
    new = {"a": torch.tensor(1.0), "n": torch.tensor(1)}
    old = {"a": torch.tensor(math.nan), "n": torch.tensor(2)}
    assert [float(leaf) for leaf in tree.leaves(tree.select(torch.tensor(True), new, old))] == [1.0, 1.0]
    assert [float(leaf) for leaf in tree.leaves(tree.select(torch.tensor(False), old, new))] == [1.0, 1.0]


def test_to_casts_floats_only():
    made = tree.to({"a": torch.ones(2), "n": torch.tensor(3), "m": torch.tensor(True)}, dtype=torch.float64)
    assert [leaf.dtype for leaf in tree.leaves(made)] == [torch.float64, torch.int64, torch.bool]


def test_channels_last_and_back():
    """Four dimensions are laid out anew, values and other leaves stay; `contiguous` undoes it."""
    one = {"w": torch.randn(4, 3, 2, 2), "b": torch.randn(4)}
    laid = tree.channels_last(one)
    assert laid["w"].stride() == (12, 1, 6, 3)
    back = tree.contiguous(laid)
    assert back["w"].stride() == one["w"].stride()
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(back), strict=True))


def test_named_generators_are_independent():
    """A generator depends on the seed and on every part of its path: its type, its place and its value."""
    paths = [(0,), (1,), (0, 1), (0, "1"), (0, 1, 2), (0, 12), (0, "1", "2"), (0, "12"), (0, 2, 1)]
    assert len({rng.derive_seed(*path) for path in paths}) == len(paths)
    draws = [tuple(torch.rand(4, generator=rng.generator(*path)).tolist()) for path in [*paths, paths[0]]]
    assert len(set(draws)) == len(paths)


def test_named_generators_do_not_depend_on_the_process():
    """The number is a hash of the path and no process's own: BLAKE2b of repr((7, 'visit', 3)), top bit dropped."""
    digest = hashlib.blake2b(b"(7, 'visit', 3)", digest_size=8).digest()
    assert rng.derive_seed(7, "visit", 3) == int.from_bytes(digest, "big") // 2
    assert 0 <= rng.derive_seed(-5, "negative") < 2**63
