"""A private copy is made of a block that the same step is still to compute (B4).

Of a prompt of 12 tokens, 10 have been computed, and the recurrent state behind them is kept.  Two
longer prompts that begin with it come together, where a drafter has KV of its own.  The first finds
too little and computes from the start; its new blocks can be found at once, as one forward pass
writes before it reads.  The second finds them, goes on behind token 10, inside of one of them, and
gets a copy of that block to write into.  Copies are made before the forward pass: this one holds
whatever was in the block before, and is read as tokens 8 and 9.
"""

from kvclaims.bridge.vllm.engine import IN_PROCESS
from kvclaims.checker.layouts import LayoutPool, judge
from kvclaims.checker.supervise import Program
from kvclaims.spec.operations import parse

OPERATIONS = (
    {"op": "submit", "request": "before", "content": [["A", 6]]},
    {"op": "step"},
    {"op": "submit", "request": "first", "content": [["A", 12]]},
    {"op": "submit", "request": "second", "content": [["A", 8]]},
    {"op": "abort", "request": "before"},
    {"op": "step"},
)
POOL = LayoutPool(24, 2, layout="hits inside, drafter")

found = judge(IN_PROCESS, Program(POOL, tuple(map(parse, OPERATIONS))), lambda *_: None)
for violation in found:
    print(violation)
early = any(v.rule == "B4" and "which the same step is to compute" in v.message for v in found)
print("BROKEN B4" if early else "not shown")
