"""A request whose load fails as a whole keeps its own blocks from itself, and waits for ever (B11).

The pool has 6 blocks, the prompt needs 4, and a connector has 3 of them.  Nothing of the load
comes, so the request starts over; it still counts among those for whom blocks are kept free.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402

SIZE, STEPS = 4, 200
scheduler = setup.make_scheduler(Scheduler, 6, SIZE, connector=1)
scheduler.connector.block_size = SIZE
scheduler.connector.offers["loads"] = 3
scheduler.add_request(setup.make_request("loads", tuple(range(15)), 1, setup.block_hasher(SIZE)))
scheduler.schedule()
transfer = scheduler.connector.loading.pop("loads")
spoiled = {transfer.table[place] for place in range(transfer.blocks)}
nothing = ModelRunnerOutput(
    req_ids=[],
    req_id_to_index={},
    kv_connector_output=KVConnectorOutput(finished_recving={"loads"}, invalid_block_ids=spoiled),
)
scheduler.update_from_output(SchedulerOutput.make_empty(), nothing)
outputs = [scheduler.schedule() for _ in range(STEPS)]
waits = not scheduler.connector.loading and not any(o.num_scheduled_tokens for o in outputs)
free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
done = "neither loaded nor computed" if waits else "going on"
print(f"{STEPS} steps with {free} of 6 blocks free: the request is {done}")
print("BROKEN B11" if waits else "not shown")
