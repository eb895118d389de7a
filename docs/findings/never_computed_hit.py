"""Content that no step computed is served as a hit (B4, L7).

A hash is registered when a block is allocated.  With the priority policy a request that was
scheduled in this step can be preempted in the same step by one of higher priority: its new
blocks lose their holder before anything was written to them, and keep their hashes.
"""

from typing import Any

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

SIZE, CHUNK = 16, 32
scheduler = setup.make_scheduler(Scheduler, 9, SIZE)
scheduler.policy = SchedulingPolicy.PRIORITY
scheduler.waiting = create_request_queue(scheduler.policy)
if hasattr(scheduler, "skipped_waiting"):
    scheduler.skipped_waiting = create_request_queue(scheduler.policy)
scheduler.scheduler_config.long_prefill_token_threshold = CHUNK
scheduler.adaptive_long_prefill_threshold = False
hasher = setup.block_hasher(SIZE)
computed: dict[str, int] = {}


def add(name: str, tokens: int, new_tokens: int, priority: int) -> Any:
    start = 0 if name != "high" else 200
    request = setup.make_request(name, tuple(range(start, start + tokens)), new_tokens, hasher)
    request.priority = priority
    scheduler.add_request(request)
    return request


def step() -> None:
    """Schedule, and pretend to run what was scheduled."""
    output = scheduler.schedule()
    for name, count in output.num_scheduled_tokens.items():
        computed[name] = computed.get(name, 0) + count
    names = list(output.num_scheduled_tokens)
    print(f"scheduled {output.num_scheduled_tokens}, preempted {output.preempted_req_ids}")
    done = [
        scheduler.requests[n].num_computed_tokens >= scheduler.requests[n].num_tokens for n in names
    ]
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={n: i for i, n in enumerate(names)},
            sampled_token_ids=[[0] if d else [] for d in done],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )


low = add("low", 140, 1, priority=1)
scheduler.max_num_scheduled_tokens = CHUNK
step()
scheduler.max_num_scheduled_tokens = 2 * CHUNK
add("high", SIZE - 1, 20, priority=0)
for _ in range(3):
    step()
found = scheduler.kv_cache_manager.get_computed_blocks(low)[1]
print(f"computed for low: {computed['low']} tokens; a lookup of its prompt hits {found} tokens")
print("BROKEN B4 L7" if found > computed["low"] else "not shown")
