"""Who holds what was loaded waits for ever behind a request that does not fit without it (B11).

The pool has 7 blocks, the window is 6 tokens.  Loads into a window take few blocks, so two requests
load at once.  Nothing comes for the first, so that it has to be computed whole; the other's load is
there.  It waits with its blocks behind the first, which waits for them, and nobody runs.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402

BLOCKS, SIZE, WINDOW, STEPS = 7, 4, 6, 200
scheduler = setup.make_scheduler(Scheduler, BLOCKS, SIZE, windows=(WINDOW,), connector=1)
connector = scheduler.connector
connector.block_size = 1  # it loads tokens
for name, start, length, loads in (("first", 0, 22, 21), ("holds", 100, 16, 7)):
    connector.offers[name] = loads
    prompt = tuple(range(start, start + length))
    scheduler.add_request(setup.make_request(name, prompt, 2, setup.block_hasher(SIZE)))
scheduler.schedule()
loading = sorted(connector.loading)
connector.loading.clear()
connector.offers.clear()
came = KVConnectorOutput(finished_recving={"first", "holds"}, failed_recving={"first"})
nothing = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=came)
scheduler.update_from_output(SchedulerOutput.make_empty(), nothing)
outputs = [scheduler.schedule() for _ in range(STEPS)]
waits = not any(output.num_scheduled_tokens for output in outputs)
free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
print(f"loads of {' and '.join(loading)} ended; {STEPS} steps with {free} of {BLOCKS} blocks free")
print("BROKEN B11" if waits and len(loading) > 1 else "not shown")
