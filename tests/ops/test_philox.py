import pytest
import torch

from parallel_ops._internal.philox import keep_mask, kept_scale, philox4x32, threshold

ONES = 0xFFFFFFFF


# Random123, examples/kat_vectors, "philox4x32 10".
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter, key, words):
    got = philox4x32(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(w.item() for w in got) == words


def test_mask_takes_key_and_counter_from_seed_and_index():
    seed, offset = 0x299F31D0_A4093822, 4 * 0x05A308D3_243F6A88 + 3
    key = (torch.tensor(seed & ONES), torch.tensor(seed >> 32))
    counters = torch.tensor([offset >> 2, (offset >> 2) + 1])
    zero = torch.zeros_like(counters)
    words = torch.stack(philox4x32((counters & ONES, counters >> 32, zero, zero), key), dim=-1).flatten()[3:7]
    p = words.median().item() / 2**32
    assert torch.equal(keep_mask(torch.Size([2, 2]), p, torch.tensor([seed]), offset).flatten(), words >= threshold(p))


def test_ends_of_the_range():
    shape, seed = torch.Size([1000]), torch.tensor([1])
    assert keep_mask(shape, 0.0, seed, 0).all() and kept_scale(0.0) == 1.0
    assert not keep_mask(shape, 1.0, seed, 0).any() and kept_scale(1.0) == 0.0
