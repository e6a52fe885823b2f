"""Ranks that share the data, or the probes, have the numbers of one process."""

from __future__ import annotations

import data_tasks
import pytest
import torch

import curvescope as cs
from curvescope.distributed.division import cut_batches, cuts, share

DIFFERENT = (
    "CurvescopeError the ranks do not have the same model: parameters, buffers, or other numbers differ "
    "(load the same on every rank, and change it in the same way on every rank)"
)
COUPLED = (
    "CurvescopeError rank 1: the outputs of a sequence of Capacity depend on the other "
    "sequences in its batch, and a "
    "batch was split over ranks (as many batches as ranks, or a multiple, so that none is cut)"
)
PIECES = f"""\
products_in_pieces_are_kept same
a_gradient_holds_a_layer_at_a_time same
contents_of_pieces same
pieces_of_models_that_differ {DIFFERENT}
"""
TWO = f"""\
one_rank same
products_of_shares same
the_loss same
exact_diagonals same
shares_of_ones_own same
products_of_all_data same
algorithms same
script_of_the_page same
a_share_that_counts_nowhere same
sequences_that_know_of_each_other same
shares_of_such_sequences {COUPLED}
other_vectors CurvescopeError the ranks do not request the same product: vectors differ (every rank takes \
the same steps, with the same seeds)
other_products refused
an_error_on_one_rank CurvescopeError rank 1: MemoryError: no room for a batch
a_model_that_one_rank_changes {DIFFERENT}
a_change_inside_frozen {DIFFERENT}
models_that_differ {DIFFERENT}
draws_without_numbers UsageError a Monte-Carlo Fisher draws targets by the number of a sequence among all \
data, and these batches are not numbered (distributed.numbered(batches), or distributed.share(batches))
{PIECES}"""
FOUR = f"""\
products_of_shares same
the_loss same
a_rank_without_data same
{PIECES}"""


@pytest.mark.parametrize(("ranks", "expected"), [(2, TWO), (4, FOUR)])
def test_ranks_have_the_numbers_of_one_process_and_raise_the_same(ranks, expected, ranks_done):
    said = [(ranks_done / f"said-{ranks}-{rank}").read_text() for rank in range(ranks)]
    assert said == [expected] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("within", [True, False])
def test_shares_are_the_data_in_their_order(ranks, within):
    batches = data_tasks.data()
    shares = [cut_batches(batches, own) for own in cuts(batches, ranks, within=within)]
    there = [one for one in shares if not one.share.empty]
    found = torch.cat([batch.inputs.flatten() for one in there for batch in one])
    assert torch.equal(found, torch.cat([batch.inputs.flatten() for batch in batches]))
    firsts, total = 0, batches.num_sequences
    for one in there:
        assert one.share[:2] == (firsts, total)
        firsts += one.num_sequences
    assert firsts == total


def test_shares_are_about_equal():
    batches = cs.Batches.from_tensors(torch.zeros(64, 8).long(), torch.zeros(64, 8).long(), batch_size=24)
    assert [cut_batches(batches, own).num_sequences for own in cuts(batches, 4)] == [16] * 4


def test_a_share_is_not_shared_again():
    batches = data_tasks.data()
    part = cut_batches(batches, cuts(batches, 2)[0])
    with pytest.raises(cs.UsageError, match="got a share"):
        share(part)
