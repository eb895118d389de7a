"""A hit in a sliding window is told as stored with blocks that are not resident (B8).

A request may ask to be told of its hits as if they were stored anew.  Of a window only the last
blocks are hit; the event tells of all blocks before them too, which are gone by then.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

SIZE, WINDOW = 4, 8
scheduler = setup.make_scheduler(Scheduler, 7, SIZE, windows=(WINDOW,))
scheduler.use_v2_model_runner = False
scheduler.max_num_scheduled_tokens = 2 * SIZE
manager = scheduler.kv_cache_manager
manager.enable_kv_cache_events = manager.block_pool.enable_kv_cache_events = True
hasher, told = setup.block_hasher(SIZE), set()


def fold() -> None:
    """What a router believes in."""
    for event in manager.take_events():
        change = told.update if type(event).__name__ == "BlockStored" else told.difference_update
        change(event.block_hashes)


def serve(name: str, tokens: range, mode: str) -> None:
    """Compute a prompt to its end."""
    request = setup.make_request(name, tuple(tokens), 1, hasher)
    request.kv_cache_report_mode = mode
    scheduler.add_request(request)
    while scheduler.requests:
        output = scheduler.schedule()
        fold()
        result = ModelRunnerOutput(
            req_ids=[name],
            req_id_to_index={name: 0},
            sampled_token_ids=[[] if request.is_prefill_chunk else [99]],
        )
        scheduler.update_from_output(output, result)


serve("first", range(24), "incremental")
serve("between", range(100, 112), "incremental")
serve("again", range(24), "full")
fold()
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash  # noqa: E402

table = manager.block_pool.cached_block_hash_to_block
resident = {maybe_convert_block_hash(key[:-4]) for key in getattr(table, "_cache", table)}
gone = len(told - resident)
print(f"{len(resident)} blocks are resident, {gone} more are told as stored")
print("BROKEN B8" if gone else "not shown")
