"""The head: sums in float32, whatever the number of rows, also where the vocabulary is no multiple of 16."""

import pytest
import torch

from worker.row_head import ByteTiles, RowHead, byte_tiles
from worker.vectors import HAS_PAIRS, HAS_WIDE

pytestmark = pytest.mark.skipif(not (HAS_PAIRS and HAS_WIDE), reason="this processor has none of the kernels")
TYPES = [torch.bfloat16, torch.float32]


def noise(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("vocab", "hidden"), [(16, 32), (49, 64), (1000, 96)])
def test_logits_are_sums_in_float32(vocab, hidden, dtype):
    weight, x = noise(vocab, hidden, 1).to(dtype), noise(5, hidden, 2)
    head = RowHead(weight, weight)
    found = head(x)
    assert not isinstance(head.weight, ByteTiles)
    expected = x.to(dtype).double() @ weight.double().T
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    for row in range(5):
        assert torch.equal(head(x[row : row + 1])[0], found[row])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((15, 32), torch.bfloat16), ((32, 48), torch.float32), ((32, 32), torch.float16)]
)
def test_a_weight_without_a_kernel_is_known(shape, dtype):
    assert not RowHead.takes(torch.zeros(shape, dtype=dtype))
    assert all(RowHead.takes(torch.zeros(16, 32, dtype=taken)) for taken in TYPES)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("vocab", "hidden"), [(16, 32), (49, 64), (1100, 96)])
def test_values_that_go_into_eight_bits_are_taken_from_there(vocab, hidden, dtype):
    scales = noise(vocab, hidden // 32, 1).abs().half()
    levels = torch.randint(-127, 128, (vocab, hidden // 32, 32), generator=torch.Generator().manual_seed(3))
    levels[..., 5] = 127
    levels[1] = 0
    weight = (levels * scales.float().unsqueeze(-1)).view(vocab, hidden)
    x = noise(11, hidden, 2)
    head = RowHead(weight, weight.to(dtype))
    assert isinstance(head.weight, ByteTiles)
    assert head.own_bytes == sum(part.nbytes for part in head.weight[:2])
    found = head(x)
    expected = x.double() @ weight.double().T
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    for row in range(11):
        assert torch.equal(head(x[row : row + 1])[0], found[row])
    weight[-2, 7] = weight[-2, 7].nextafter(torch.tensor(9.0))
    assert byte_tiles(weight) is None
