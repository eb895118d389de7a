"""A prompt that is loaded as a whole reads a token before the window that is kept of it (B4).

The window is 8 tokens.  All 63 tokens of the prompt are loaded, of which the last 8 less one are
kept for the token after them.  But vLLM computes the last one again, and that one's window begins a
token earlier: in a block that was never loaded.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402

SIZE, WINDOW, LENGTH = 4, 8, 63
scheduler = setup.make_scheduler(Scheduler, 20, SIZE, windows=(WINDOW,), connector=1)
scheduler.connector.block_size = 1  # it loads tokens
scheduler.connector.offers["loads"] = LENGTH
scheduler.add_request(
    setup.make_request("loads", tuple(range(LENGTH)), 1, setup.block_hasher(SIZE))
)
scheduler.schedule()
scheduler.connector.loading.clear()
came = KVConnectorOutput(finished_recving={"loads"})
nothing = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=came)
scheduler.update_from_output(SchedulerOutput.make_empty(), nothing)
computed = scheduler.schedule().num_scheduled_tokens["loads"]
start = LENGTH - computed
(table,) = scheduler.kv_cache_manager.get_block_ids("loads")
reads = range(start - WINDOW + 1, start)
missing = [position for position in reads if not table[position // SIZE]]
print(f"token {start} is computed, and reads tokens {reads.start} to {reads.stop - 1}")
print(f"no block has tokens {missing}")
print("BROKEN B4" if missing else "not shown")
