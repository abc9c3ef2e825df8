"""The random numbers of augmentation, computed one by one."""

import hashlib


def plain_uniform(seed: int, epoch: int, index: int, counter: int, occurrence: int = 0) -> float:
    """SplitMix64's output function over sample and occurrence, then over the counter, in integers
    of any size.
    """

    def scramble(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    digest = hashlib.blake2b(repr((seed, "augment", epoch)).encode(), digest_size=8).digest()
    key = (int.from_bytes(digest, "little") + 2**63) % 2**64
    state = scramble(index ^ key)
    if occurrence:
        state = scramble(state ^ scramble(occurrence))
    return (scramble((state + counter * 0x9E3779B97F4A7C15) % 2**64) >> 40) / 2**24
