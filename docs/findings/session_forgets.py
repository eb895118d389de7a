"""A session that gives way while its answer is under way forgets all that it was given (B4).

Steps overlap.  The session's answer is being computed when another request needs a block: the
session is preempted, its answer still comes and ends its turn, and vLLM goes on from the tokens
that are computed now, which are none.
"""

from kvclaims.bridge.vllm import setup

setup.quieten(setup.ALONE)

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

SIZE = 4
scheduler = setup.make_scheduler(AsyncScheduler, 2, SIZE, asynchronous=True)
scheduler.use_v2_model_runner = False
hasher = setup.block_hasher(SIZE)
given, more = (11, 12, 13), (14, 15)
scheduler.add_request(setup.make_request("other", (21, 22, 23, 24), 3, hasher))
session = setup.make_request("session", given, 1, hasher, resumable=True)
scheduler.add_request(session)
first = scheduler.schedule()  # both compute their input
scheduler.schedule()  # the other one needs a second block
ids = list(first.num_scheduled_tokens)
print(f"under way: {', '.join(ids)}; the session is {session.status.name}")
scheduler.update_from_output(
    first,
    ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: i for i, name in enumerate(ids)},
        sampled_token_ids=[[31] for _ in ids],
    ),
)
scheduler.add_request(setup.make_request("session", more, 1, hasher, resumable=True))
known = list(session.all_token_ids)
print(f"it was given {[*given, *more]} and goes on from {known}")
print("BROKEN B4" if known[: len(given)] != list(given) else "not shown")
