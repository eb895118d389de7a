"""A partial key comes back after its block was promoted to a full one (B3, B8).

The entry for the first 4 tokens of a block gives way to the one for all 8.  Registering the
first 4 again, as a late call does, makes the block reachable under both, and no event tells so
in the end: the secondary key is a second name of a block that has moved on.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.block_pool import BlockPool  # noqa: E402

FINE, SIZE = 4, 8
hasher = setup.block_hasher(FINE)
pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=FINE)
request = setup.make_request("a", tuple(range(SIZE)), 1, hasher)
(block,) = pool.get_new_blocks(1)


def lookup(tokens: int) -> str:
    """The blocks found for a prefix of that many tokens."""
    found = pool.get_cached_block(request.block_hashes[tokens // FINE - 1], [0])
    return str([b.block_id for b in found or []])


def partial() -> None:
    pool.cache_partial_block(request, block, FINE, kv_cache_group_id=0, block_size=SIZE)


partial()
print(f"partial(4): lookup(4) {lookup(4)}, lookup(8) {lookup(8)}")
pool.cache_full_blocks(request, [block], 0, 1, SIZE, 0)
print(f"full(8):    lookup(4) {lookup(4)}, lookup(8) {lookup(8)}")
gone = lookup(4) == "[]"
partial()
print(f"partial(4): lookup(4) {lookup(4)}, lookup(8) {lookup(8)}")
print("BROKEN B3 B8" if gone and lookup(4) != "[]" else "not shown")
