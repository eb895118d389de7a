"""A request larger than the pool is neither rejected nor served: it waits for ever (B11).

The pool has 4 blocks, the prompt needs 6.  Nothing else runs, so nothing can ever make room.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

SIZE, STEPS = 16, 200
scheduler = setup.make_scheduler(Scheduler, 4, SIZE)
request = setup.make_request("large", tuple(range(6 * SIZE - 1)), 1, setup.block_hasher(SIZE))
scheduler.add_request(request)
scheduled = sum(scheduler.schedule().total_num_scheduled_tokens for _ in range(STEPS))
print(f"{STEPS} steps: {scheduled} tokens scheduled, the request is {request.status.name}")
print("BROKEN B11" if not scheduled and request.request_id in scheduler.requests else "not shown")
