"""Who holds what was loaded waits for ever behind a request that was looked at before it (B11).

The pool has 10 blocks.  The connector does not know yet what it has for the first request, so it
is put aside without a block.  The second loads one block of its eight, and the load is there.  It
comes after the first, whose load of three blocks has no room beside the seven that are kept for
the second; the scheduler stops there, and nobody runs.  Mended in vLLM 0.31.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402

BLOCKS, SIZE, STEPS = 10, 4, 200
scheduler = setup.make_scheduler(Scheduler, BLOCKS, SIZE, connector=1)
connector = scheduler.connector
connector.block_size = SIZE
connector.slow.add("first")
for name, start, length, offered in (("first", 0, 3, 3), ("holds", 100, 8, 1)):
    connector.offers[name] = offered
    prompt = tuple(range(start, start + length * SIZE))
    scheduler.add_request(setup.make_request(name, prompt, 1, setup.block_hasher(SIZE)))
scheduler.schedule()
loading = sorted(connector.loading)
connector.loading.clear()
came = KVConnectorOutput(finished_recving=set(loading))
nothing = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=came)
scheduler.update_from_output(SchedulerOutput.make_empty(), nothing)
outputs = [scheduler.schedule() for _ in range(STEPS)]
waits = not connector.loading and not any(output.num_scheduled_tokens for output in outputs)
free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
print(
    f"the load of {' and '.join(loading)} ended; {STEPS} steps with {free} of {BLOCKS} blocks free"
)
print("BROKEN B11" if waits and loading == ["holds"] else "not shown")
