"""Elastic capacity: memory lent to the pool and returned to prefills (rules E1 to E5).

For any number of layers (of all ranks: a rank's layers are layers of their own), blocks, jobs
and claims.  Each layer has one stretch of physical memory that is mapped either as the tail of
the layer's KV, the lent blocks, or as activations, and each mapping needs its access set before
it can be touched.  A change of side is a run of single steps over the layers in any order,
`unmap`, `map` and set access, each of which the driver may refuse, which is to `turn_back`: undoing
is the same steps the other way.

`mode` is what the engine is about:

    home → lending → lent → draining → returning → home
             ↓                            ↓
          unlending → home            unreturning → lent

Mapping needs no leave, only memory that is not mapped otherwise; unmapping is what the mode
decides.  `misused` records a call that a driver rejects, such as an unmap of what is not mapped.
`intact` is what unmapping destroys: the content of the lent blocks.  That the null block, where
dummy writes go, lies in the base is an axiom here: an engine's set-up makes it so, no step does.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.claims import CLAIM
from kvclaims.spec.language import (
    NAT,
    Action,
    Guard,
    Machine,
    Property,
    Sort,
    Symbol,
    Term,
    Update,
    Var,
    becomes,
    both,
    count,
    either,
    eq,
    every,
    ite,
    new,
    one_of,
    some,
    total,
    value,
)
from kvclaims.spec.pool import BLOCK, covers, null
from kvclaims.spec.progress import Fair, Helpful, Ranking, Response, Steps
from kvclaims.spec.written import JOB

LAYER: Final = Sort("Layer")
MODE: Final = Sort(
    "Mode", ("home", "lending", "lent", "draining", "returning", "unlending", "unreturning")
)

lent: Final = Symbol("lent", (BLOCK,), rigid=True, meaning="the block lies in the lent part")
mode: Final = Symbol("mode", (), MODE, meaning="what the engine is about")
kv_mapped: Final = Symbol("kv_mapped", (LAYER,), meaning="the memory is mapped as lent blocks")
kv_access: Final = Symbol("kv_access", (LAYER,), meaning="and may be touched there")
act_mapped: Final = Symbol("act_mapped", (LAYER,), meaning="it is mapped as activations")
act_access: Final = Symbol("act_access", (LAYER,), meaning="and may be touched there")
misused: Final = Symbol("misused", (), meaning="the driver was called in a way it rejects")
needed: Final = Symbol("needed", (), meaning="a prefill waits for the reserve")
prefill: Final = Symbol("prefill", (), meaning="a prefill step runs")
free: Final = Symbol("free", (BLOCK,), meaning="the block may be handed out")
held: Final = Symbol("held", (BLOCK,), meaning="a request holds the block")
hashed: Final = Symbol("hashed", (BLOCK,), meaning="a lookup finds the block")
intact: Final = Symbol("intact", (BLOCK,), meaning="the block contains what was written last")
touches: Final = Symbol("touches", (JOB, BLOCK), meaning="a job in flight may touch the block")
promised: Final = Symbol("promised", (CLAIM,), NAT, meaning="blocks accepted for a hard claim")

x: Final = Var("x", LAYER)
b: Final = Var("b", BLOCK)
j: Final = Var("j", JOB)
c: Final = Var("c", CLAIM)
n: Final = Var("n", NAT)
_x: Final = Var("y", LAYER)
_b: Final = Var("a", BLOCK)
_j: Final = Var("i", JOB)
_c: Final = Var("d", CLAIM)

base: Final = count(_b, ~lent(_b) & ~null(_b))
"""The blocks that are always there."""

all_promised: Final = total(_c, promised(_c))


def is_in(*names: str) -> Term:
    return one_of(mode(), *(value(MODE, name) for name in names))


def _goes(name: str) -> Update:
    return becomes(mode(), value(MODE, name))


def kv_side(layer: Term) -> Term:
    return both(kv_mapped(layer), kv_access(layer), ~act_mapped(layer))


def act_side(layer: Term) -> Term:
    return both(act_mapped(layer), act_access(layer), ~kv_mapped(layer))


def known(block: Term) -> Term:
    """The pool may hand the block out, or a request or a lookup refers to it."""
    return either(free(block), held(block), hashed(block))


def _misuse(wrong: Term) -> Update:
    return becomes(misused(), misused() | wrong)


ACTIONS: Final = (
    # the two directions
    Action(
        "lend",
        (),
        (
            Guard(("E4",), is_in("home"), "nothing is lent, nothing is under way"),
            Guard(("E1",), ~prefill(), "no prefill step runs"),
            Guard(("E1",), ~needed(), "no prefill needs the reserve"),
        ),
        (_goes("lending"),),
        "the engine begins to lend the reserve to the pool",
    ),
    Action(
        "give_back",
        (),
        (Guard(("E4", "E1", "E5"), is_in("lent"), "the reserve is lent"),),
        (_goes("draining"), becomes(free(_b), free(_b) & ~lent(_b), over=(_b,))),
        "the return begins with a fence: no lent block is handed out any more",
    ),
    Action(
        "drain",
        (b,),
        (Guard(("E3",), lent(b), "the block is a lent one"),),
        (becomes(held(b), False), becomes(hashed(b), False)),
        "who holds the block has finished, or moved, or lost it; what it kept is dropped",
    ),
    Action(
        "withdraw",
        (),
        (
            Guard(("E4", "E1"), is_in("draining"), "the ids are fenced"),
            Guard(
                ("E4",),
                ~some(_b, lent(_b) & (held(_b) | hashed(_b))),
                "the lent blocks are drained",
            ),
            Guard(
                ("E4",),
                ~some(_b, lent(_b) & some(_j, touches(_j, _b))),
                "no job in flight touches a lent block",
            ),
        ),
        (_goes("returning"),),
        "the lent blocks are out of use; their memory may be taken away",
    ),
    Action(
        "turn_back",
        (),
        (),
        (
            becomes(
                mode(),
                ite(
                    is_in("lending"),
                    value(MODE, "unlending"),
                    ite(is_in("returning"), value(MODE, "unreturning"), mode()),
                ),
            ),
        ),
        "a step was refused, or the engine thinks better of it: what was done is undone",
    ),
    Action(
        "arrive_lent",
        (),
        (
            Guard(("E4",), is_in("lending", "unreturning"), "the engine is on its way there"),
            Guard(("E5",), every(_x, kv_side(_x)), "every layer is on the side of the KV"),
        ),
        (_goes("lent"),),
        "the reserve is lent, or lent again",
    ),
    Action(
        "arrive_home",
        (),
        (
            Guard(("E4",), is_in("returning", "unlending"), "the engine is on its way there"),
            Guard(("E5",), every(_x, act_side(_x)), "every layer is on the side of activations"),
        ),
        (_goes("home"),),
        "the reserve is back with the activations",
    ),
    # single layers
    Action(
        "unmap_kv",
        (x,),
        (
            Guard(
                ("E4", "E5", "E2"),
                is_in("returning", "unlending"),
                "the lent blocks are out of use",
            ),
            Guard(("E5",), kv_mapped(x), "they are mapped in this layer"),
        ),
        (
            becomes(kv_mapped(x), False),
            becomes(kv_access(x), False),
            becomes(intact(_b), intact(_b) & ~lent(_b), over=(_b,)),
            _misuse(~kv_mapped(x)),
        ),
        "the memory of a layer is no longer mapped as lent blocks",
    ),
    Action(
        "map_kv",
        (x,),
        (
            Guard(("E4", "E5"), ~act_mapped(x), "the memory is not mapped as activations"),
            Guard(("E5", "E2", "E4"), ~kv_mapped(x), "it is not mapped as lent blocks yet"),
        ),
        (becomes(kv_mapped(x), True), becomes(kv_access(x), False), _misuse(kv_mapped(x))),
        "the memory of a layer is mapped as lent blocks",
    ),
    Action(
        "open_kv",
        (x,),
        (Guard(("E5",), kv_mapped(x), "it is mapped as lent blocks"),),
        (becomes(kv_access(x), True), _misuse(~kv_mapped(x))),
        "access to the lent blocks of a layer is set",
    ),
    Action(
        "unmap_act",
        (x,),
        (
            Guard(("E5", "E1"), is_in("lending", "unreturning"), "the activations are out of use"),
            Guard(("E5",), act_mapped(x), "they are mapped in this layer"),
        ),
        (
            becomes(act_mapped(x), False),
            becomes(act_access(x), False),
            _misuse(~act_mapped(x)),
        ),
        "the memory of a layer is no longer mapped as activations",
    ),
    Action(
        "map_act",
        (x,),
        (
            Guard(("E4", "E2", "E5"), ~kv_mapped(x), "the memory is not mapped as lent blocks"),
            Guard(("E5", "E1"), ~act_mapped(x), "it is not mapped as activations yet"),
        ),
        (becomes(act_mapped(x), True), becomes(act_access(x), False), _misuse(act_mapped(x))),
        "the memory of a layer is mapped as activations",
    ),
    Action(
        "open_act",
        (x,),
        (Guard(("E5",), act_mapped(x), "it is mapped as activations"),),
        (becomes(act_access(x), True), _misuse(~act_mapped(x))),
        "access to the activations of a layer is set",
    ),
    # prefills
    Action("need", (), (), (becomes(needed(), True),), "a prefill comes to need the reserve"),
    Action(
        "start_prefill",
        (),
        (Guard(("E1",), is_in("home"), "the reserve is with the activations"),),
        (becomes(prefill(), True), becomes(needed(), False)),
        "a prefill step starts",
    ),
    Action("end_prefill", (), (), (becomes(prefill(), False),), "the prefill step ends"),
    # blocks and claims
    Action(
        "list",
        (b,),
        (
            Guard(("E2", "E4"), is_in("lent"), "the reserve is lent"),
            Guard(("E1",), ~needed(), "no prefill needs the reserve"),
        ),
        (becomes(free(b), free(b) | (lent(b) & ~held(b))),),
        "a lent block is added to those that may be handed out",
    ),
    Action(
        "take",
        (b,),
        (Guard(("E2", "E3", "E4"), free(b), "the block may be handed out"),),
        (
            becomes(free(b), False),
            becomes(held(b), True),
            becomes(hashed(b), False),
            becomes(intact(b), False),
        ),
        "a request takes the block",
    ),
    Action(
        "keep",
        (b,),
        (Guard(("E2", "E4"), held(b), "a request holds the block"),),
        (becomes(hashed(b), True), becomes(intact(b), True)),
        "what a request has written becomes visible",
    ),
    Action(
        "leave",
        (b,),
        (Guard(("E1",), held(b), "a request holds the block"),),
        (becomes(held(b), False), becomes(free(b), ~lent(b) | is_in("lent"))),
        "the request lets go of the block; behind a fence it is not handed out again",
    ),
    Action(
        "touch",
        (j, b),
        (Guard(("E4",), held(b), "a request holds the block"),),
        (becomes(touches(j, b), True),),
        "a job leaves that reads or writes the block",
    ),
    Action("done", (j, b), (), (becomes(touches(j, b), False),), "the job is done with the block"),
    Action(
        "accept",
        (c, n),
        (
            Guard(
                ("E3",),
                (all_promised + n) <= base,
                "the base alone has room for it beside the other hard claims",
            ),
        ),
        (becomes(promised(c), promised(c) + n),),
        "a hard claim is accepted for n blocks",
    ),
    Action(
        "cover",
        (c, b),
        (Guard(("E3",), ~lent(b), "the block lies in the base"),),
        (becomes(covers(c, b), True),),
        "the hard claim covers a block",
    ),
    Action(
        "end",
        (c,),
        (),
        (becomes(promised(c), 0), becomes(covers(c, _b), False, over=(_b,))),
        "the claim ends",
    ),
)

_all_kv: Final = every(_x, kv_side(_x))
_all_act: Final = every(_x, act_side(_x))


def _turns(*moves: tuple[str, tuple[str, ...]]) -> Term:
    return either(
        eq(new(mode()), mode()),
        *(is_in(before) & new(is_in(*afters)) for before, afters in moves),
    )


PROPERTIES: Final = (
    Property(
        "E1",
        "a prefill step has its memory",
        prefill() >> every(x, act_mapped(x) & act_access(x)),
        "While a prefill step runs the reserve is mapped as activations in every layer.",
    ),
    Property(
        "E1",
        "nothing is lent to those who need it back",
        needed()
        >> both(
            is_in("home") >> ~new(is_in("lending")),
            every(b, (lent(b) & new(free(b))) >> (free(b) | held(b))),
        ),
        "While a prefill needs the reserve the engine does not begin to lend, and adds no block "
        "to what it lends.",
    ),
    Property(
        "E2",
        "an unmapped block is not in the pool",
        every(b, (lent(b) & known(b)) >> _all_kv),
        "A block that may be handed out, is held or is found is mapped in every layer.",
    ),
    Property(
        "E3",
        "hard claims are for the base",
        all_promised <= base,
        "What hard claims were accepted for fits the blocks that are always there.",
    ),
    Property(
        "E3",
        "hard claims lie in the base",
        every(c, every(b, covers(c, b) >> ~lent(b))),
        "No hard claim covers a lent block.",
    ),
    Property(
        "E3",
        "a return harms no hard claim",
        every(c, ~covers(c, b)),
        "A block that is emptied for a return is no hard claim's.",
        on="drain",
    ),
    Property(
        "E3",
        "what a hard claim covers stays",
        every(
            c,
            every(
                b,
                both(covers(c, b), hashed(b))
                >> (new(hashed(b) & intact(b)) | (free(b) & new(held(b)))),
            ),
        ),
        "No step of a return takes content that a hard claim covers; only a request that is handed "
        "the block may, which is for the pool to prevent.",
    ),
    Property(
        "E4",
        "one side at a time",
        every(x, ~(kv_mapped(x) & act_mapped(x))),
        "The memory of a layer is not mapped as blocks and as activations at once.",
    ),
    Property(
        "E4",
        "no memory is taken from a job in flight",
        every(j, every(b, (touches(j, b) & lent(b)) >> _all_kv)),
        "While a job may touch a lent block the block stays mapped in every layer.",
    ),
    Property(
        "E4",
        "a hash does not outlive its content",
        every(b, hashed(b) >> intact(b)),
        "Memory that comes back is garbage: no block is found under what it once contained.",
    ),
    Property(
        "E4",
        "fenced, drained, waited for, unmapped",
        _turns(
            ("home", ("lending",)),
            ("lending", ("lent", "unlending")),
            ("unlending", ("home",)),
            ("lent", ("draining",)),
            ("draining", ("returning",)),
            ("returning", ("home", "unreturning")),
            ("unreturning", ("lent",)),
        ),
        "Lending and returning go through their stages in order; turning back leads to where it "
        "began.",
    ),
    Property(
        "E5",
        "at rest all layers agree",
        both(is_in("home") >> _all_act, is_in("lent", "draining") >> _all_kv),
        "When nothing is under way all layers of all ranks are mapped and open on the same side.",
    ),
    Property(
        "E5",
        "lent twice is lent once",
        both(
            (is_in("home") & new(is_in("home"))) >> every(x, both(act_side(x), new(act_side(x)))),
            *(
                (is_in(rest) & new(is_in(rest))) >> every(x, both(kv_side(x), new(kv_side(x))))
                for rest in ("lent", "draining")
            ),
        ),
        "Where the reserve is lent already, or home already, nothing that leaves it so changes a "
        "layer: to lend or to return it again has no further effect.",
    ),
    Property(
        "E5",
        "the driver is called rightly",
        ~misused(),
        "Nothing is unmapped or opened that is not mapped, nor mapped twice.",
    ),
    Property(
        "E4",
        "fenced means not handed out",
        every(b, (lent(b) & ~is_in("lent")) >> ~free(b)),
        "Outside the time of lending no lent block is handed out.",
    ),
    Property(
        "E4",
        "drained means out of use",
        every(
            b,
            (lent(b) & ~is_in("lent", "draining"))
            >> both(~held(b), ~hashed(b), every(j, ~touches(j, b))),
        ),
        "Outside the time of lending and draining nobody uses a lent block.",
        goal=False,
    ),
    Property(
        "E1",
        "prefills run at home",
        prefill() >> is_in("home"),
        "Nothing is lent while a prefill step runs.",
        goal=False,
    ),
    Property(
        "E3",
        "promises are not negative",
        every(c, promised(c) >= 0),
        "What a claim was accepted for stays at or above zero.",
        goal=False,
    ),
)

ELASTIC: Final = Machine(
    name="elastic",
    meaning="memory lent and returned, layer by layer",
    symbols=(
        null,
        lent,
        mode,
        kv_mapped,
        kv_access,
        act_mapped,
        act_access,
        misused,
        needed,
        prefill,
        free,
        held,
        hashed,
        intact,
        touches,
        promised,
        covers,
    ),
    axioms=(every(b, null(b) >> ~lent(b)),),
    init=(
        becomes(mode(), value(MODE, "home")),
        becomes(kv_mapped(x), False, over=(x,)),
        becomes(kv_access(x), False, over=(x,)),
        becomes(act_mapped(x), True, over=(x,)),
        becomes(act_access(x), True, over=(x,)),
        becomes(misused(), False),
        becomes(needed(), False),
        becomes(prefill(), False),
        becomes(free(b), ~lent(b) & ~null(b), over=(b,)),
        becomes(held(b), False, over=(b,)),
        becomes(hashed(b), False, over=(b,)),
        becomes(intact(b), False, over=(b,)),
        becomes(touches(j, b), False, over=(j, b)),
        becomes(promised(c), 0, over=(c,)),
        becomes(covers(c, b), False, over=(c, b)),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
)

# --- progress ----------------------------------------------------------------------------

DRAIN: Final = Fair("lent blocks are drained", ("drain",), by=("b",))
DONE: Final = Fair("jobs in flight end", ("done",), by=("j", "b"))
WITHDRAW: Final = Fair("what is out of use is withdrawn", ("withdraw",))
TO_ACT: Final = Fair(
    "each layer goes over to activations", ("unmap_kv", "map_act", "open_act"), by=("x",)
)
TO_KV: Final = Fair("each layer goes over to the KV", ("unmap_act", "map_kv", "open_kv"), by=("x",))
ARRIVE_HOME: Final = Fair("a return that is complete is noticed", ("arrive_home",))
ARRIVE_LENT: Final = Fair("an undone return that is complete is noticed", ("arrive_lent",))
BACK_TO_KV: Final = Steps("layers mapped as lent blocks again", ("map_kv",))
BACK_TO_ACT: Final = Steps("layers mapped as activations again", ("map_act",))

_lent_held: Final = some(_b, lent(_b) & held(_b))
_lent_found: Final = some(_b, lent(_b) & hashed(_b))
_lent_touched: Final = some(_b, lent(_b) & some(_j, touches(_j, _b)))
_drain: Final = is_in("draining")
_return: Final = is_in("returning")
_undo: Final = is_in("unreturning")


def _by_stage(held: Term | int, found: Term | int, touched: Term | int, rest: Term | int) -> Term:
    """What counts while lent blocks are held, then while they are found, then touched, then."""
    later = ite(_lent_found, found, ite(_lent_touched, touched, rest))
    return ite(_lent_held, held, later)


_STAGE: Final = _by_stage(4, 3, 2, 1)
_IN_USE: Final = _by_stage(
    count(_b, lent(_b) & held(_b)),
    count(_b, lent(_b) & hashed(_b)),
    total(_b, count(_j, lent(_b) & touches(_j, _b))),
    0,
)
_TO_HOME: Final = total(
    _x, ite(kv_mapped(_x), 3, ite(act_mapped(_x), ite(act_access(_x), 0, 1), 2))
)
_TO_LENT: Final = total(_x, ite(act_mapped(_x), 3, ite(kv_mapped(_x), ite(kv_access(_x), 0, 1), 2)))

RESPONSES: Final = (
    Response(
        "V4",
        "a return completes",
        (),
        _drain | _return,
        is_in("home") | _undo,
        (DRAIN, DONE, WITHDRAW, TO_ACT, ARRIVE_HOME),
        "A return that has begun ends with the reserve at home, or is turned back because a step "
        "was refused.",
        unless="the engine itself maps layers as lent blocks again for ever while it returns them.",
        ceasing=(BACK_TO_KV,),
        ranking=Ranking(
            _drain | _return,
            (
                ite(_drain, _STAGE, 0),
                ite(_drain, _IN_USE, _TO_HOME),
            ),
            (
                Helpful(DRAIN, both(_drain, lent(b), held(b)), (b,)),
                Helpful(DRAIN, both(_drain, ~_lent_held, lent(b), hashed(b)), (b,)),
                Helpful(
                    DONE,
                    both(_drain, ~_lent_held, ~_lent_found, lent(b), touches(j, b)),
                    (j, b),
                ),
                Helpful(WITHDRAW, both(_drain, ~_lent_held, ~_lent_found, ~_lent_touched)),
                Helpful(TO_ACT, _return & ~act_side(x), (x,)),
                Helpful(ARRIVE_HOME, _return & _all_act),
            ),
        ),
    ),
    Response(
        "V4",
        "a return that was turned back is undone",
        (),
        _undo,
        is_in("lent"),
        (TO_KV, ARRIVE_LENT),
        "Where a step of a return was refused, what was done is undone to the end.",
        unless="the engine itself maps layers as activations again for ever while it undoes that.",
        ceasing=(BACK_TO_ACT,),
        ranking=Ranking(
            _undo,
            (_TO_LENT,),
            (
                Helpful(TO_KV, _undo & ~kv_side(x), (x,)),
                Helpful(ARRIVE_LENT, _undo & _all_kv),
            ),
        ),
    ),
)
