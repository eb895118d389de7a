"""A block is found as more tokens than the recurrent state in it stands for (B4).

A block has 8 tokens, a hash 2, and the runner keeps a state from inside of the last chunk of a
prompt, so that the chunk need not end there.  The first request leaves the state behind its first
2 tokens.  The second goes on from it, in a block of its own, and runs past the end of that block in
one chunk: the block still holds the state behind 2 tokens, and is found as the first 8.  A third
reads it.
"""

from kvclaims.bridge.vllm.engine import IN_PROCESS
from kvclaims.checker.layouts import LayoutPool, layouts_of
from kvclaims.spec.operations import parse

REQUESTS = (("first", [["A", 1, 1]]), ("second", [["A", 18, 1]]), ("third", [["A", 4, 1]]))
layouts = layouts_of(IN_PROCESS)
assert layouts is not None
run = layouts.open(LayoutPool(12, 2, layout="states inside"))
found: list[tuple[str, str]] = []
for name, content in REQUESTS:
    found += run.do(parse({"op": "submit", "request": name, "content": content}))
    found += run.do(parse({"op": "drain"}))
read = [message for rule, message in found if rule == "B4" and message.startswith("request third ")]
print(read[0] if read else "what the third request reads is the state of its own tokens")
print("BROKEN B4" if read else "not shown")
