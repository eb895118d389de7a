"""The machines by name, and the finite instances that are explored and replayed.

An instance is small enough to be covered completely and large enough that every action fires
in one of its machine's instances.  Their counts of states and transitions stand, written by
hand, in `tests/unit/test_explore.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, get_type_hints

from kvclaims.checker.extent import judge, judge_numbers
from kvclaims.checker.finite import Instance
from kvclaims.checker.slices import SLICES
from kvclaims.spec.abstractions import POOL_CLAIMS, POOL_FEASIBLE
from kvclaims.spec.admission import ADMISSION
from kvclaims.spec.arbitration import ARBITRATION
from kvclaims.spec.blockclaims import BLOCKCLAIMS
from kvclaims.spec.claims import CLAIMS
from kvclaims.spec.elastic import ELASTIC
from kvclaims.spec.ends import ENDS
from kvclaims.spec.events import EVENTS
from kvclaims.spec.feasible import FEASIBLE
from kvclaims.spec.groups import GROUPS
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Machine
from kvclaims.spec.owners import OWNERS
from kvclaims.spec.pool import POOL
from kvclaims.spec.refinement import Refinement
from kvclaims.spec.tiers import TIERS
from kvclaims.spec.trace import TRACE
from kvclaims.spec.written import WRITTEN

MACHINES: Final[dict[str, Machine]] = {
    machine.name: machine
    for machine in (
        *(CLAIMS, POOL, ADMISSION, GROUPS, ARBITRATION, WRITTEN, OWNERS, TIERS, ELASTIC, TRACE),
        *(EVENTS, ENDS, BLOCKCLAIMS, FEASIBLE),
    )
}

RELEASED_ONLY: Final = (2,)
"""Of the three ways a claim may end in the pool one stands for all: they differ in name only."""


def claims(
    claims: int = 1, generations: int = 2, duration: int = 2, hard: tuple[int, ...] = ()
) -> Instance:
    """Claims do not interact in this machine: one covers it, two show that they do not.  Which
    are hard is free but for those that `hard` speaks of."""
    return Instance(
        CLAIMS,
        {"Claim": claims},
        numbers=range(duration + 1),
        rigid={"hard": {(i,): flag for i, flag in enumerate(hard)}},
        limits={"generation": generations, "left": duration},
    )


def pool(
    blocks: int = 2,
    hard: tuple[int, ...] = (1, 1),
    admit_reuse: tuple[int, ...] = (1,),
    keys: int = 1,
    ways: tuple[int, ...] = RELEASED_ONLY,
) -> Instance:
    """`blocks` usable blocks beside the null block; a claim for each entry of `hard`, a request
    for each entry of `admit_reuse`.  Needs range up to one block more than the pool has; `ways`
    are those in which a claim may end."""
    return Instance(
        POOL,
        {"Claim": len(hard), "Request": len(admit_reuse), "Block": blocks + 1, "Key": keys},
        numbers=range(blocks + 2),
        rigid={
            "null": {(i,): int(i == 0) for i in range(blocks + 1)},
            "hard": {(i,): flag for i, flag in enumerate(hard)},
            "admit_reuse": {(i,): flag for i, flag in enumerate(admit_reuse)},
        },
        choices={"how": ways},
    )


def blockclaims(
    sizes: tuple[int, ...] = (1, 2, 3), requests: int = 2, growth: int = 3, pool: int = 6
) -> Instance:
    """Size S of the common benchmark unless said otherwise."""
    return Instance(
        BLOCKCLAIMS,
        {"Claim": len(sizes), "Request": requests},
        rigid={
            "size": {(i,): size for i, size in enumerate(sizes)},
            "growth": {(): growth},
            "pool": {(): pool},
        },
    )


def admission(
    requests: int = 2,
    sizes: tuple[int, ...] = (1,),
    usable: int = 2,
    defer_limit: int = 1,
    needs: tuple[int, ...] = (0, 1, 2),
    growth: tuple[int, ...] = (0, 1),
) -> Instance:
    """The first request is ours.  A claim for each entry of `sizes`, in blocks; requests come
    with a need out of `needs`, and may grow by as much as `growth` says."""
    return Instance(
        ADMISSION,
        {"Request": requests, "Claim": len(sizes)},
        rigid={
            "ours": {(i,): int(i == 0) for i in range(requests)},
            "usable": {(): usable},
            "defer_limit": {(): defer_limit},
            "size": {(i,): size for i, size in enumerate(sizes)},
        },
        # No request ever needs more: the limit tells the engines so, and cuts nothing off.
        limits={"need": max(needs, default=0) + max(growth, default=0)},
        choices={"n": needs, "k": growth},
    )


def groups(
    blocks: int = 3,
    sizes: tuple[int, ...] = (2, 1),
    windows: tuple[int, ...] = (0, 1),
    tokens: int = 2,
    requests: int = 1,
    hard: tuple[int, ...] = (),
    prompts: int = 1,
    skipped: int = 0,
) -> Instance:
    """A group for each entry of `sizes`, in tokens a block; its window in tokens, 0 for full
    attention.  There are `prompts` that share nothing, the first of `tokens` and each other one
    token shorter, but never empty; they are given to the requests in turn.  A claim for each
    entry of `hard` speaks, of a prompt in turn, of the blocks of all groups that a hit of the
    whole prompt needs.  The first request has no use for the first `skipped` contents."""
    lengths = [max(1, tokens - p) for p in range(prompts)]
    keys = [
        (p, g, end)
        for p, length in enumerate(lengths)
        for g, size in enumerate(sizes)
        for end in range(size, length + 1, size)
    ]
    read = [not windows[g] or end + windows[g] > lengths[p] for p, g, end in keys]
    return Instance(
        GROUPS,
        {
            "Group": len(sizes),
            "Key": len(keys),
            "Block": blocks,
            "Request": requests,
            "Claim": len(hard),
        },
        numbers=range(max(tokens, len(keys)) + 1),
        rigid={
            "full": {(g,): int(not window) for g, window in enumerate(windows)},
            "size": {(g,): size for g, size in enumerate(sizes)},
            "window": {(g,): window for g, window in enumerate(windows)},
            "of": {
                (i, g): int(g == own)
                for i, (_, own, _) in enumerate(keys)
                for g in range(len(sizes))
            },
            "upto": {(i,): end for i, (_, _, end) in enumerate(keys)},
            "wants": {
                (r, i): int(p == r % prompts and not (r == 0 and i < skipped))
                for r in range(requests)
                for i, (p, _, _) in enumerate(keys)
            },
            "speaks": {
                (c, i): int(needed and keys[i][0] == c % prompts)
                for c in range(len(hard))
                for i, needed in enumerate(read)
            },
            "hard": {(c,): flag for c, flag in enumerate(hard)},
        },
    )


def arbitration(
    usable: int = 6,
    need: int = 3,
    holds: int = 0,
    covers: tuple[int, ...] = (1, 2),
    shared: int = 1,
    spare: tuple[int, ...] = (0, 1),
    loans: tuple[int, ...] = (1, 1),
) -> Instance:
    """A claim for each entry of `covers`: its blocks, of which the first `shared` are the same
    for all; `spare` of its reserve, and `loans` drawn by the request for contents that are the
    same for all.  The request holds the first `holds` blocks."""
    covered = {
        (c, block)
        for c, many in enumerate(covers)
        for block in [
            *range(min(shared, many)),
            *(shared + sum(covers[:c]) + i for i in range(many)),
        ]
    }
    blocks = max([holds - 1, *(block for _, block in covered)], default=-1) + 1
    drawn = [(c, x) for c, many in enumerate(loans) for x in range(many)]
    return Instance(
        ARBITRATION,
        {
            "Block": blocks,
            "Claim": len(covers),
            "Loan": len(drawn),
            "Content": max(loans, default=0),
        },
        rigid={
            "usable": {(): usable},
            "need": {(): need},
            "holds": {(block,): int(block < holds) for block in range(blocks)},
            "covered": {
                (c, block): int((c, block) in covered)
                for c in range(len(covers))
                for block in range(blocks)
            },
            "promised": {(c,): many for c, many in enumerate(spare)},
            "lent_by": {
                (i, c): int(c == own)
                for i, (own, _) in enumerate(drawn)
                for c in range(len(covers))
            },
            "pays_for": {
                (i, x): int(x == own)
                for i, (_, own) in enumerate(drawn)
                for x in range(max(loans, default=0))
            },
        },
    )


def feasible(usable: int = 3) -> Instance:
    """Needs range up to one block more than the pool has."""
    return Instance(FEASIBLE, {}, numbers=range(usable + 2), rigid={"usable": {(): usable}})


def written(
    blocks: int = 1, keys: int = 1, soft: tuple[int, ...] = (1, 0), claims: int = 1
) -> Instance:
    """A job for each entry of `soft`, which says whether it stops reading when it is told."""
    return Instance(
        WRITTEN,
        {"Block": blocks, "Key": keys, "Job": len(soft), "Claim": claims},
        rigid={"soft": {(i,): flag for i, flag in enumerate(soft)}},
    )


def owners(
    owners: int = 3,
    owned_by: tuple[int, ...] = (0,),
    hard: tuple[int, ...] = (1,),
    cap: int = 1,
    blocks: int = 1,
    versions: int = 2,
) -> Instance:
    """The last owner is the operator; claim i is hard if `hard[i]` and belongs to `owned_by[i]`.
    Quotas, grants and terms range up to `blocks`, versions of a claim up to `versions`."""
    return Instance(
        OWNERS,
        {"Owner": owners, "Claim": len(owned_by)},
        numbers=range(blocks + 1),
        limits={"version": versions},
        rigid={
            "operator": {(i,): int(i == owners - 1) for i in range(owners)},
            "owns": {
                (i, claim): int(i == owner)
                for i in range(owners)
                for claim, owner in enumerate(owned_by)
            },
            "hard": {(i,): flag for i, flag in enumerate(hard)},
            "cap": {(): cap},
        },
    )


def tiers(claims: int = 1, tiers: int = 2) -> Instance:
    return Instance(TIERS, {"Claim": claims, "Tier": tiers})


def elastic(
    layers: int = 3, lent: tuple[int, ...] = (1,), jobs: int = 1, claims: int = 0
) -> Instance:
    """Beside the null block, one for each entry of `lent`, which says where it lies."""
    blocks = (0, *lent)
    return Instance(
        ELASTIC,
        {"Layer": layers, "Block": len(blocks), "Job": jobs, "Claim": claims},
        numbers=range(2),
        rigid={
            "lent": {(i,): flag for i, flag in enumerate(blocks)},
            "null": {(i,): int(i == 0) for i in range(len(blocks))},
        },
    )


def trace(
    facts: int = 1, events: int = 3, foreign: int = 0, meetings: int = 2, clock: int = 0
) -> Instance:
    """`events` lines of this run and `foreign` ones of another; the folder meets each line at
    most `meetings` times; the clock shows 0 to `clock`."""
    lines = events + foreign
    return Instance(
        TRACE,
        {"Fact": facts, "Event": lines},
        numbers=range(clock + 1),
        limits={"times": meetings},
        rigid={"foreign": {(i,): int(i >= events) for i in range(lines)}},
    )


def events(tiers: tuple[int, ...] = (0, 0), keys: int = 1) -> Instance:
    """A block for each entry of `tiers`, which says in which tier it lies."""
    many = max(tiers, default=-1) + 1
    return Instance(
        EVENTS,
        {"Block": len(tiers), "Key": keys, "Tier": many},
        rigid={
            "lies": {(t, i): int(t == own) for t in range(many) for i, own in enumerate(tiers)},
        },
    )


def ends(
    requests: int = 1,
    blocks: int = 1,
    jobs: int = 1,
    depth: int = 1,
    ways: tuple[int, ...] = (0, 1, 2, 3),
) -> Instance:
    """`jobs` steps may be in flight at once, each for `depth` rounds; `ways` are those in which a
    request may end."""
    return Instance(
        ENDS,
        {"Request": requests, "Block": blocks, "Job": jobs},
        rigid={"depth": {(): depth}},
        # Nobody waits that long: one more shows who would, and cuts nothing off.
        limits={"age": depth + 1},
        choices={"how": ways},
    )


PINNED: Final[dict[str, Callable[[], Instance]]] = {
    "claims": claims,
    "claims/two": lambda: claims(claims=2, generations=1, duration=1, hard=(1, 0)),
    "pool": pool,
    "pool/soft": lambda: pool(hard=(1, 0)),
    "pool/requests": lambda: pool(hard=(1,), admit_reuse=(1, 0)),
    "pool/keys": lambda: pool(hard=(1,), keys=2),
    "pool/soft-keys": lambda: pool(hard=(0,), keys=2),
    "pool/soft-copies": lambda: pool(hard=(0,), admit_reuse=(1, 1)),
    "pool/ways": lambda: pool(blocks=1, hard=(1,), ways=(0, 1, 2)),
    "blockclaims": blockclaims,
    "admission": admission,
    "admission/claims": lambda: admission(
        requests=1, sizes=(1, 1), defer_limit=2, needs=(1, 2, 3), growth=(0,)
    ),
    "admission/congestion": lambda: admission(requests=3, sizes=(), needs=(1, 2), growth=(0,)),
    "admission/growth": lambda: admission(requests=3, sizes=(), usable=3, needs=(1,)),
    "admission/sizes": lambda: admission(requests=1, sizes=(1, 2), usable=3, needs=(1,)),
    "groups": groups,
    "groups/claims": lambda: groups(blocks=2, sizes=(1, 1), tokens=1, hard=(1,)),
    "groups/soft": lambda: groups(blocks=2, sizes=(1, 1), tokens=1, hard=(0,)),
    "groups/requests": lambda: groups(blocks=2, sizes=(1,), windows=(0,), tokens=1, requests=2),
    "groups/two-claims": lambda: groups(blocks=1, sizes=(1,), windows=(0,), tokens=1, hard=(1, 1)),
    "groups/prompts": lambda: groups(
        blocks=2, sizes=(1,), windows=(0,), tokens=1, requests=2, prompts=2
    ),
    "groups/lengths": lambda: groups(blocks=2, sizes=(1,), windows=(0,), prompts=2),
    "groups/foreign": lambda: groups(
        blocks=2, sizes=(1,), windows=(0,), tokens=1, hard=(1,), prompts=2
    ),
    "groups/mixed": lambda: groups(
        blocks=1, sizes=(1,), windows=(0,), tokens=1, hard=(1, 0), prompts=2
    ),
    "groups/promised": lambda: groups(
        blocks=2, sizes=(1,), windows=(0,), tokens=1, requests=2, hard=(1,)
    ),
    "groups/windows": lambda: groups(blocks=2, sizes=(1,), windows=(1,), requests=2),
    "groups/skipped": lambda: groups(sizes=(1, 1), windows=(1, 0), skipped=1),
    "groups/two-soft": lambda: groups(
        blocks=1, sizes=(1,), windows=(0,), tokens=1, hard=(0, 0), prompts=2
    ),
    "groups/same": lambda: groups(blocks=2, sizes=(1,), windows=(0,), tokens=1, hard=(1, 1)),
    "groups/shared": lambda: groups(
        blocks=2, sizes=(1,), windows=(0,), tokens=1, hard=(1, 1), prompts=2
    ),
    "arbitration": arbitration,
    "arbitration/spare": lambda: arbitration(covers=(0, 1), shared=0, spare=(1, 2), loans=(0, 0)),
    "arbitration/holds": lambda: arbitration(
        usable=3, need=2, holds=1, covers=(1, 1), shared=1, loans=(2, 1)
    ),
    "feasible": feasible,
    "written": written,
    "written/keys": lambda: written(keys=2, claims=0),
    "written/blocks": lambda: written(blocks=2, soft=(0,)),
    "written/claims": lambda: written(keys=2, soft=(0,)),
    "written/pair": lambda: written(soft=(0,), claims=2),
    "written/told": lambda: written(blocks=2, soft=(1,), claims=0),
    "owners": owners,
    "owners/quota": lambda: owners(owners=1, owned_by=(0, 0), hard=(1, 1), cap=2, blocks=2),
    "owners/cap": lambda: owners(owners=2, owned_by=(0, 1), hard=(1, 1), versions=1),
    "owners/soft": lambda: owners(owners=2, hard=(0,), cap=0),
    "owners/mixed": lambda: owners(owners=1, owned_by=(0, 0), hard=(1, 0), cap=0, versions=1),
    "tiers": tiers,
    "tiers/claims": lambda: tiers(claims=2, tiers=1),
    "elastic": elastic,
    "elastic/blocks": lambda: elastic(layers=2, lent=(1, 1)),
    "elastic/claims": lambda: elastic(layers=1, lent=(0, 1), jobs=0, claims=1),
    "elastic/jobs": lambda: elastic(layers=1, lent=(0, 1), claims=1),
    "elastic/promises": lambda: elastic(layers=1, lent=(0,), jobs=0, claims=2),
    "elastic/pair": lambda: elastic(layers=1, lent=(1,), jobs=2),
    "elastic/null": lambda: elastic(layers=1, lent=(), jobs=0, claims=1),
    "trace": trace,
    "trace/facts": lambda: trace(facts=2, events=2),
    "trace/clock": lambda: trace(events=2, meetings=1, clock=1),
    "trace/foreign": lambda: trace(events=2, foreign=1),
    "events": events,
    "events/tiers": lambda: events(tiers=(0, 1)),
    "events/keys": lambda: events(tiers=(0,), keys=2),
    "ends": ends,
    "ends/jobs": lambda: ends(jobs=2, depth=2, ways=(0,)),
    "ends/blocks": lambda: ends(blocks=2, ways=(1,)),
    "ends/requests": lambda: ends(requests=2, ways=(2,)),
    "ends/at-once": lambda: ends(depth=0, ways=(3,)),
}
"""The instances that every run covers; together they fire every action of every machine."""


def _seen_as(refinement: Refinement, name: str) -> Instance:
    """A pinned instance, explored for what a refinement asks of each step."""
    return replace(PINNED[name](), machine=refinement.machine)


REFINED: Final[dict[str, Callable[[], Instance]]] = {
    name.replace("pool", refinement.name, 1): partial(_seen_as, refinement, name)
    for refinement in (POOL_CLAIMS, POOL_FEASIBLE)
    for name in PINNED
    if name.split("/")[0] == "pool"
}
"""Every pinned instance of the pool, seen as the machines that the pool refines."""

KNOWN: Final = PINNED | SLICES | REFINED
"""All that is explored."""

_BUILDERS: Final[dict[str, Callable[..., Instance]]] = {
    function.__name__: function
    for function in (
        claims,
        pool,
        admission,
        written,
        owners,
        tiers,
        elastic,
        trace,
        events,
        ends,
        blockclaims,
        groups,
        arbitration,
        feasible,
    )
}


def instance(name: str, settings: Mapping[str, str]) -> Instance:
    """The instance `name`, with `--set` values read as whole numbers or lists of them.

    Raises BadOperation for an unknown instance or setting, for negative sizes, and for an
    instance that is larger than anything that can be explored.
    """
    if name not in KNOWN:
        raise BadOperation(f"unknown machine {name!r} (known: {', '.join(KNOWN)})")
    if not settings:
        return KNOWN[name]()
    if name not in _BUILDERS:
        whole = name.split("/", maxsplit=1)[0]
        raise BadOperation(f"{name} takes no settings; set them on {whole}")
    known = _settings_of(_BUILDERS[name])
    values: dict[str, int | tuple[int, ...]] = {}
    for setting, text in settings.items():
        if setting not in known:
            raise BadOperation(f"{name} has no setting {setting!r} (known: {', '.join(known)})")
        numbers = tuple(_number(setting, part) for part in text.split(","))
        if known[setting] is int and len(numbers) != 1:
            raise BadOperation(f"{setting} takes one number, not {text!r}")
        values[setting] = numbers[0] if known[setting] is int else numbers
    judge_numbers(name, values)
    made = _BUILDERS[name](**values)
    judge(name, made)
    return made


def _settings_of(builder: Callable[..., Instance]) -> dict[str, Any]:
    """What a builder can be told, by name: the type is `int`, or a tuple of them."""
    hints = get_type_hints(builder)
    return {name: hint for name, hint in hints.items() if name != "return"}


def _number(setting: str, text: str) -> int:
    if not text.strip().isdigit():
        raise BadOperation(f"{setting} must be a whole number of at least 0, not {text!r}")
    return int(text)
