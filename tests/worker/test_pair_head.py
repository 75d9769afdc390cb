"""The bfloat16 head: sums in float32, whatever the number of rows, also where the vocabulary is no multiple of 16."""

import pytest
import torch

from worker.pair_head import PairHead
from worker.vector_ops import HAS_PAIRS

pytestmark = pytest.mark.skipif(not HAS_PAIRS, reason="this processor has no bfloat16 product")


def noise(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("vocab", "hidden"), [(16, 32), (49, 64), (1000, 96)])
def test_logits_are_sums_in_float32(vocab, hidden):
    weight, x = noise(vocab, hidden, 1).bfloat16(), noise(5, hidden, 2)
    found = PairHead(weight)(x)
    expected = x.bfloat16().double() @ weight.double().T
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    for row in range(5):
        assert torch.equal(PairHead(weight)(x[row : row + 1])[0], found[row])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((15, 32), torch.bfloat16), ((32, 48), torch.bfloat16), ((32, 32), torch.float32)]
)
def test_a_weight_without_a_kernel_is_known(shape, dtype):
    assert not PairHead.takes(torch.zeros(shape, dtype=dtype))
    assert PairHead.takes(torch.zeros(16, 32, dtype=torch.bfloat16))
