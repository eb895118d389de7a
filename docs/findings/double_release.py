"""A block freed twice is handed out while somebody uses it (B2, B5).

`free_blocks` asserts nothing: the second release drives the reference count to −1, and a hit then
brings it to 0 while the block is out of the free queue.  The block's next holder sees it reused.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.block_pool import BlockPool  # noqa: E402

pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
(block,) = pool.get_new_blocks(1)
pool.free_blocks([block])
pool.free_blocks([block])
print(f"released twice: ref {block.ref_cnt}, queue of {pool.get_num_free_blocks()} blocks")
pool.touch([block])
print(f"hit by request A: ref {block.ref_cnt}, still queued: {block.next_free_block is not None}")
handed = pool.get_new_blocks(3)
print(f"request B is given blocks {[b.block_id for b in handed]}; A holds block {block.block_id}")
print("BROKEN B2 B5" if block in handed else "not shown")
