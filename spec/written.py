"""Written KV: what a hash may promise, and who may still touch a block (rules B4, B5, L7).

`kvclaims.spec.pool` says who refers to a block and when it is handed out.  This machine says
what is *in* the block and what is in flight towards it, for any number of blocks, contents,
jobs and claims.  A job is anything that runs beside the scheduler: a step of the model, a copy,
a transfer to or from another tier.

Allocated, hashed and written are three different things:

- `reuse` hands a block out; from then on its old content is gone and it is blank.
- `register` gives a block a hash at allocation, as engines do.  The hash is provisional: no
  lookup finds it, because nothing was written yet.  A job may `follow` it, which is to wait for
  the write; its read may `start` only after the write has landed.
- `dispatch` sends a job off that will write the block, `land` is the moment the KV is all
  there.  Only then may `publish` make the hash visible.

A block in which a write is under way counts as blank until the write lands; a block that is
filled over several steps is one whose last write has not landed.  A job that was declared soft
goes on reading a block that the engine has let go of until it is told; what it reads after that
is thrown away.  All others are waited for.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.claims import CLAIM
from kvclaims.spec.language import (
    Action,
    Guard,
    Machine,
    Property,
    Sort,
    Symbol,
    Term,
    Var,
    becomes,
    both,
    eq,
    every,
    new,
    some,
)
from kvclaims.spec.pool import BLOCK, KEY, covers

JOB: Final = Sort("Job")

soft: Final = Symbol("soft", (JOB,), rigid=True, meaning="the job stops reading when it is told")
content: Final = Symbol("content", (BLOCK, KEY), meaning="the block is full of this, and written")
registered: Final = Symbol("registered", (BLOCK, KEY), meaning="the hash was given at allocation")
visible: Final = Symbol("visible", (BLOCK, KEY), meaning="a lookup of the hash finds the block")
writes: Final = Symbol("writes", (JOB, BLOCK, KEY), meaning="the job will write this content")
waits: Final = Symbol("waits", (JOB, BLOCK, KEY), meaning="the job will read it once written")
reads: Final = Symbol("reads", (JOB, BLOCK, KEY), meaning="the job is reading this content")
told: Final = Symbol("told", (JOB, BLOCK), meaning="the job was told to stop reading the block")
materialized: Final = Symbol("materialized", (CLAIM,), meaning="the claim is called materialized")

b: Final = Var("b", BLOCK)
k: Final = Var("k", KEY)
j: Final = Var("j", JOB)
c: Final = Var("c", CLAIM)
_k: Final = Var("m", KEY)
_j: Final = Var("i", JOB)
_b: Final = Var("a", BLOCK)
_c: Final = Var("d", CLAIM)


def written(block: Term) -> Term:
    """The block is full of some content, all of it there."""
    return some(_k, content(block, _k))


def being_written(block: Term) -> Term:
    return some(_j, some(_k, writes(_j, block, _k)))


def awaited(block: Term) -> Term:
    return some(_j, some(_k, waits(_j, block, _k)))


def being_read(block: Term) -> Term:
    """Some job reads the block and was not told to stop."""
    return some(_j, some(_k, reads(_j, block, _k)) & ~told(_j, block))


_NO_OLD_READ: Final = Guard(
    ("B5",), ~some(_k, reads(j, b, _k)), "an earlier read of the block by this job is over"
)

ACTIONS: Final = (
    Action(
        "reuse",
        (b,),
        (
            Guard(("B4",), ~some(_k, visible(b, _k)), "no lookup finds the block"),
            Guard(("B5",), ~being_written(b), "no write to the block is in flight"),
            Guard(("B5", "B4"), ~awaited(b), "no job waits to read the block"),
            Guard(("B5",), ~being_read(b), "every reader is done or was told"),
            Guard(
                ("L7",),
                ~some(_c, covers(_c, b) & materialized(_c)),
                "no materialized claim covers the block",
            ),
        ),
        (
            becomes(content(b, _k), False, over=(_k,)),
            becomes(registered(b, _k), False, over=(_k,)),
        ),
        "the block is handed out anew; what it contained is gone",
    ),
    Action(
        "register",
        (b, k),
        (),
        (becomes(registered(b, k), True),),
        "the block gets a provisional hash, for content that is yet to be written",
    ),
    Action(
        "withdraw",
        (b, k),
        (),
        (
            becomes(registered(b, k), False),
            becomes(waits(_j, b, k), False, over=(_j,)),
        ),
        "the request is preempted or aborted: who waited for its write must look elsewhere",
    ),
    Action(
        "dispatch",
        (j, b, k),
        (
            Guard(("B5",), ~written(b), "the block is blank"),
            Guard(("B5",), ~being_written(b), "no other write to the block is in flight"),
        ),
        (becomes(writes(j, b, k), True),),
        "a job leaves that will write the block; nothing can call it back",
    ),
    Action(
        "land",
        (j, b, k),
        (Guard(("B4", "B5"), writes(j, b, k), "the job writes this content"),),
        (
            becomes(writes(j, b, k), False),
            becomes(content(b, _k), eq(_k, k), over=(_k,)),
        ),
        "the write is complete, whoever has lost interest in it",
    ),
    Action(
        "fail",
        (j, b, k),
        (),
        (becomes(writes(j, b, k), False),),
        "the write fails; the block stays blank",
    ),
    Action(
        "publish",
        (b, k),
        (Guard(("B4",), content(b, k), "the KV is written, all of it"),),
        (becomes(visible(b, k), True),),
        "lookups find the block from now on",
    ),
    Action(
        "evict",
        (b, k),
        (),
        (becomes(visible(b, k), False),),
        "lookups find the block no more; its content stays until it is reused",
    ),
    Action(
        "hit",
        (j, b, k),
        (
            Guard(("B4", "B5"), visible(b, k), "a lookup of the hash finds the block"),
            _NO_OLD_READ,
        ),
        (becomes(reads(j, b, k), True), becomes(told(j, b), False)),
        "a job reads the block that a lookup found",
    ),
    Action(
        "follow",
        (j, b, k),
        (Guard(("B4",), registered(b, k), "the content is yet to be written there"),),
        (becomes(waits(j, b, k), True),),
        "a job is planned on a provisional hash and waits for the write",
    ),
    Action(
        "start",
        (j, b, k),
        (
            Guard(
                ("B4", "B5"),
                waits(j, b, k) & content(b, k),
                "the write that the job waited for has landed",
            ),
            _NO_OLD_READ,
        ),
        (
            becomes(waits(j, b, k), False),
            becomes(reads(j, b, k), True),
            becomes(told(j, b), False),
        ),
        "the follower's read begins, ordered after the write",
    ),
    Action(
        "tell",
        (j, b),
        (Guard(("B5",), soft(j), "the job is a soft reader"),),
        (becomes(told(j, b), True),),
        "a soft reader is told that the block will be reused",
    ),
    Action(
        "deliver",
        (j, b, k),
        (
            Guard(
                ("B5",),
                reads(j, b, k) & ~told(j, b),
                "the job has read the block and was not told to stop",
            ),
        ),
        (becomes(reads(j, b, k), False),),
        "the read is complete and its result is used",
    ),
    Action(
        "stop",
        (j, b, k),
        (),
        (becomes(reads(j, b, k), False), becomes(waits(j, b, k), False)),
        "the job ends without a result: it was told, or failed, or lost its request",
    ),
    Action(
        "cover",
        (c, b),
        (
            Guard(
                ("L7",),
                materialized(c) >> written(b),
                "the block is written, or the claim is not called materialized yet",
            ),
        ),
        (becomes(covers(c, b), True),),
        "the claim speaks of a block, allocated or hashed or written",
    ),
    Action(
        "uncover",
        (c, b),
        (),
        (becomes(covers(c, b), False),),
        "the claim speaks of the block no more: it lost it, or found another copy",
    ),
    Action(
        "materialize",
        (c,),
        (
            Guard(
                ("L7",),
                every(_b, covers(c, _b) >> written(_b)),
                "every covered block is written",
            ),
        ),
        (becomes(materialized(c), True),),
        "the claim is called materialized",
    ),
    Action(
        "end",
        (c,),
        (),
        (becomes(materialized(c), False), becomes(covers(c, _b), False, over=(_b,))),
        "the claim ends",
    ),
)

PROPERTIES: Final = (
    Property(
        "B4",
        "a visible hash is written",
        every(b, every(k, visible(b, k) >> content(b, k))),
        "A block that a lookup finds contains what the hash names, all of it.",
    ),
    Property(
        "B4",
        "a hit finds what it asked for",
        content(b, k),
        "A job that was sent to a block by a lookup finds the content there.",
        on="hit",
    ),
    Property(
        "B4",
        "a follower reads after the write",
        content(b, k),
        "A job planned on a provisional hash reads no earlier than the write has landed.",
        on="start",
    ),
    Property(
        "B4",
        "a provisional hash names its write",
        every(b, every(k, every(j, waits(j, b, k) >> registered(b, k)))),
        "A job waits only for content that is still to be written to the block, or was.",
    ),
    Property(
        "B4",
        "a reused block has no provisional hash",
        every(k, ~new(registered(b, k))),
        "A hash that was given to a block for one use does not count in the next.",
        on="reuse",
    ),
    Property(
        "B5",
        "a new reader was not told yet",
        every(
            b,
            every(k, every(j, (~reads(j, b, k) & new(reads(j, b, k))) >> ~new(told(j, b)))),
        ),
        "That a job was told to stop an earlier read does not count for the next.",
    ),
    Property(
        "B5",
        "a reader keeps its content",
        every(
            b,
            every(k, every(j, (reads(j, b, k) & ~told(j, b)) >> content(b, k))),
        ),
        "What a job is reading stays in the block until the job is done or told to stop.",
    ),
    Property(
        "B5",
        "nothing in flight at reuse",
        both(~being_written(b), ~awaited(b), ~being_read(b)),
        "A block is reused when no job will write it, read it, or still reads it untold.",
        on="reuse",
    ),
    Property(
        "B5",
        "what is delivered was read in peace",
        content(b, k),
        "The result of a read that is used was read from the content that was asked for.",
        on="deliver",
    ),
    Property(
        "B5",
        "only soft readers are told",
        every(b, every(j, told(j, b) >> soft(j))),
        "A reader that cannot be stopped is waited for; telling it is not enough.",
    ),
    Property(
        "B5",
        "one writer",
        every(
            b,
            every(
                j,
                every(
                    _j,
                    every(
                        k,
                        every(
                            _k,
                            (writes(j, b, k) & writes(_j, b, _k)) >> both(eq(j, _j), eq(k, _k)),
                        ),
                    ),
                ),
            ),
        ),
        "No two writes to a block are in flight at once.",
    ),
    Property(
        "L7",
        "materialized means written",
        every(c, every(b, (materialized(c) & covers(c, b)) >> written(b))),
        "Every block of a materialized claim is written, not merely allocated or hashed.",
    ),
    Property(
        "B5",
        "writes go to blank blocks",
        every(b, every(k, every(j, writes(j, b, k) >> ~written(b)))),
        "While a write is in flight the block has no content.",
        goal=False,
    ),
    Property(
        "B4",
        "one content a block",
        every(b, every(k, every(_k, (content(b, k) & content(b, _k)) >> eq(k, _k)))),
        "A block contains one thing at most.",
        goal=False,
    ),
)

WRITTEN: Final = Machine(
    name="written",
    meaning="written KV, and readers and writers in flight",
    symbols=(
        soft,
        content,
        registered,
        visible,
        writes,
        waits,
        reads,
        told,
        covers,
        materialized,
    ),
    init=(
        becomes(content(b, k), False, over=(b, k)),
        becomes(registered(b, k), False, over=(b, k)),
        becomes(visible(b, k), False, over=(b, k)),
        becomes(writes(j, b, k), False, over=(j, b, k)),
        becomes(waits(j, b, k), False, over=(j, b, k)),
        becomes(reads(j, b, k), False, over=(j, b, k)),
        becomes(told(j, b), False, over=(j, b)),
        becomes(covers(c, b), False, over=(c, b)),
        becomes(materialized(c), False, over=(c,)),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
)
