"""`BlockRemoved` is told while a second copy of the content is still found (B8).

Two blocks hold the same content.  Evicting one of them tells routers that the hash is gone;
a lookup still finds the other.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.block_pool import BlockPool  # noqa: E402

SIZE = 16
hasher = setup.block_hasher(SIZE)
pool = BlockPool(
    num_gpu_blocks=4, enable_caching=True, hash_block_size=SIZE, enable_kv_cache_events=True
)
blocks = pool.get_new_blocks(2)
for name, block in zip("ab", blocks, strict=True):
    request = setup.make_request(name, tuple(range(SIZE)), 1, hasher)
    pool.cache_full_blocks(
        request=request,
        blocks=[block],
        num_cached_blocks=0,
        num_full_blocks=1,
        block_size=SIZE,
        kv_cache_group_id=0,
    )
pool.evict_blocks({blocks[0].block_id})
told = [type(event).__name__ for event in pool.take_events()]
found = pool.get_cached_block(request.block_hashes[0], [0])
print(f"events: {told}")
print(f"lookup finds: {[b.block_id for b in found or []]}")
print("BROKEN B8" if told[-1] == "BlockRemoved" and found else "not shown")
