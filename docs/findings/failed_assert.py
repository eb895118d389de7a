"""A failed assertion in `get_new_blocks` loses the blocks that were popped already (B9, B1).

The blocks leave the free queue before the assertion on the reference count of each one; what was
popped is in no queue and held by nobody afterwards.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.block_pool import BlockPool  # noqa: E402

pool = BlockPool(num_gpu_blocks=6, enable_caching=True, hash_block_size=16)
pool.blocks[2].ref_cnt = 1  # what a double release leaves behind, by hand
before = pool.get_num_free_blocks()
try:
    pool.get_new_blocks(3)
except AssertionError:
    print("get_new_blocks(3) raised AssertionError")
lost = [b.block_id for b in pool.blocks[1:] if b.ref_cnt == 0 and b.next_free_block is None]
print(f"free before {before}, after {pool.get_num_free_blocks()}")
print(f"blocks {lost} have no holder and are in no queue")
print("BROKEN B9 B1" if lost or pool.get_num_free_blocks() != before else "not shown")
