"""The bound on rows that must travel holds for every layout of tiny packs, and says what must be said of large ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.exchange_bound import PackRows, least_remote_rows
from megacp.core.ops.mask import Metadata, allowed
from tests.reference.packs import metadata, random_batch

SLACK = 0.03


def rows_of(pack: Metadata) -> PackRows:
    sees = allowed(pack, pack)
    return PackRows(pack.document, sees.sum(1), sees[:, pack.branch == 0].sum(1))


def least_by_trying(pack: Metadata, ranks: int, slack: float) -> int | None:
    """The fewest remote rows among all layouts with equal tokens and nearly equal area; None when there is no such."""
    sees = allowed(pack, pack)
    tokens, most = len(pack) // ranks, sees.sum() / ranks * (1 + slack)
    price = {}
    for part in itertools.combinations(range(len(pack)), tokens):
        mine = list(part)
        if sees[mine].sum() <= most:
            needed = sees[mine].any(0)
            price[frozenset(part)] = int(needed.sum() - needed[mine].sum())

    def best(left: frozenset[int]) -> int | None:
        if not left:
            return 0
        first = min(left)
        found = []
        for others in itertools.combinations(sorted(left - {first}), tokens - 1):
            part = frozenset((first, *others))
            if part in price and (rest := best(left - part)) is not None:
                found.append(price[part] + rest)
        return min(found, default=None)

    return best(frozenset(range(len(pack))))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([(2, 4), (2, 5), (3, 3), (4, 2)]),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([SLACK, 0.2, 0.6]),
    st.integers(0, 10_000),
)
@example((2, 5), 1, False, True, False, SLACK, 0)
def test_no_layout_of_a_tiny_pack_needs_fewer_rows_than_the_bound(
    shape: tuple[int, int], documents: int, branches: bool, images: bool, padding: bool, slack: float, seed: int
) -> None:
    ranks, tokens = shape
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, ranks * tokens, documents=documents, branches=branches, images=images, padding=padding)
    pack = metadata(batch)
    least = least_by_trying(pack, ranks, slack)
    if least is not None:
        assert least_remote_rows(rows_of(pack), ranks, slack) <= least


def documents(*lengths: int, image: bool = True) -> Metadata:
    """Documents that are one image each, or one text each."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    nothing = np.zeros_like(document)
    return Metadata(document, nothing, document + 1 if image else nothing, np.arange(len(document)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_an_image_that_fills_the_pack_is_needed_whole_by_every_rank(ranks: int) -> None:
    """The bound is what every layout needs here, so a weaker one shows."""
    assert least_remote_rows(rows_of(documents(64)), ranks, SLACK) == (ranks - 1) * 64


def test_documents_that_fit_on_ranks_need_no_row() -> None:
    assert least_remote_rows(rows_of(documents(16, 16, 16, 16)), 4, SLACK) == 0


def test_a_document_needs_as_many_ranks_as_its_area_and_the_tokens_beside_it_ask_for() -> None:
    """32 rows of area 32 are 16/17 of all area and half of the tokens: both ranks must hold some of them."""
    pack = documents(32, *[2] * 16)
    assert least_remote_rows(rows_of(pack), 2, SLACK) == 32 == least_by_hand(pack)


def least_by_hand(pack: Metadata) -> int:
    """Each rank takes 16 of the image's rows and 8 of the pairs: it needs the other 16 of the image."""
    sees = allowed(pack, pack)
    parts = [np.r_[0:16, 32:48], np.r_[16:32, 48:64]]
    return int(sum(sees[part].any(0).sum() - sees[part].any(0)[part].sum() for part in parts))


def test_lighter_rows_that_must_fill_the_ranks_count() -> None:
    """A text of 24 among pairs: its area alone would fit on one of two ranks with a slack of 0.6, not with 8 pairs."""
    pack = documents(24, *[2] * 12, image=False)
    tight, wide = (least_remote_rows(rows_of(pack), 2, slack) for slack in (SLACK, 0.9))
    assert tight > wide == 0


def test_documents_together_need_more_ranks_than_each_alone() -> None:
    """Two images of area 400 under a limit of 445: the 12 lightest rows, of area 12, can stand beside one of them only,
    so one image is on two ranks: at least 19 of its 20 keys travel.
    """
    pack = documents(20, 20, *[1] * 12, *[11] * 4)
    assert least_remote_rows(rows_of(pack), 3, SLACK) == 19
    without_one = documents(20, *[4] * 5, *[1] * 12, *[11] * 4)
    assert least_remote_rows(rows_of(without_one), 3, 0.5) == 0
