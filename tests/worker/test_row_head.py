"""The head: sums in float32, whatever the number of rows, also where the vocabulary is no multiple of 16."""

import pytest
import torch

from worker.row_head import RowHead
from worker.vector_ops import HAS_PAIRS, HAS_WIDE

pytestmark = pytest.mark.skipif(not (HAS_PAIRS and HAS_WIDE), reason="this processor has none of the kernels")
TYPES = [torch.bfloat16, torch.float32]


def noise(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("vocab", "hidden"), [(16, 32), (49, 64), (1000, 96)])
def test_logits_are_sums_in_float32(vocab, hidden, dtype):
    weight, x = noise(vocab, hidden, 1).to(dtype), noise(5, hidden, 2)
    found = RowHead(weight)(x)
    expected = x.to(dtype).double() @ weight.double().T
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    for row in range(5):
        assert torch.equal(RowHead(weight)(x[row : row + 1])[0], found[row])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((15, 32), torch.bfloat16), ((32, 48), torch.float32), ((32, 32), torch.float16)]
)
def test_a_weight_without_a_kernel_is_known(shape, dtype):
    assert not RowHead.takes(torch.zeros(shape, dtype=dtype))
    assert all(RowHead.takes(torch.zeros(16, 32, dtype=taken)) for taken in TYPES)
