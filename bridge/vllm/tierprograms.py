"""What a tier owes, shown by runs: each program is a handful of acts and what has to come of them.

They are the probes of `kvclaims lower` for offloadable claims, and run alone by `kvclaims tier`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from kvclaims.bridge.serving.settings import Settings
from kvclaims.bridge.vllm.serving_bench import ServedPool, quiet
from kvclaims.bridge.vllm.tierworld import LABELS, OWNERS, SIZE, TierRun, World
from kvclaims.checker.tiers import ProgramReport
from kvclaims.spec.content import fingerprint
from kvclaims.spec.interface import EngineInfo, RequestSpec

_USABLE: Final = 12
_CLAIMED: Final = 5
_ANN, _BOB = range(len(OWNERS))
_A, _B, _C = range(len(LABELS))

Shows = tuple[str, bool]
"""A sentence, and whether it came true."""


def restore(folder: Path) -> Iterator[Shows]:
    """The whole way of a claim: known, kept, away, required, restored, reused (O1, O3)."""
    run = TierRun(World(_USABLE), folder)
    run.pace(1)
    run.claim(_ANN, _A, _CLAIMED, 0, clip=False, ends=0)
    yield "the tier knows the claim before anything is in it", _promised(run) == _CLAIMED
    run.ask(_A, _CLAIMED, 1, 1, admits=True)
    run.step(2)
    yield "written on the device alone, it is not materialized", _phase(run) == "accepted"
    run.step(_CLAIMED)
    yield "materialized when every copy is published", _phase(run) == "materialized"
    yield "each copy is in its file", len(run.files()) == _CLAIMED
    _press(run)
    yield "pressure offloads it and takes its blocks", _phase(run) == "offloaded"
    yield "none of it is on the device", _on_device(run, _A) == []
    before = (_phase(run), _promised(run), run.pool.enforcer.queue_length())
    contents, names = _copies(run)
    found = run.pool.enforcer.offloading.tier.matching(contents, names)
    after = (_phase(run), _promised(run), run.pool.enforcer.queue_length())
    yield "a lookup finds it and changes nothing", found == _CLAIMED and before == after
    run.ask(_A, _CLAIMED, 1, 1, admits=True)
    run.step(2)
    yield "a request that needs it makes it wait for its load", _phase(run) == "restoring"
    run.step(_CLAIMED + 2)
    yield "it is back, under the same id", _phase(run) == "materialized"
    yield "each block holds what it held", _on_device(run, _A) == [True] * _CLAIMED
    run.judge()
    events = [n for n in _ORDER if run.counts[n]]
    yield "its events are all told, once each", events == list(_ORDER) and _once(run)
    yield from _ended(run)


def failed(folder: Path) -> Iterator[Shows]:
    """A copy that is not right is not served, and its own claim is told of it (O2)."""
    for how, what in enumerate(("a bit turned over", "cut short", "gone", "another's")):
        run = TierRun(World(_USABLE), folder / str(how))
        for owner, label in ((_ANN, _A), (_BOB, _B)):
            run.claim(owner, label, _CLAIMED, 0, clip=False, ends=0)
            _serve(run, label)
            _press(run)
        yield f"two claims are away ({what})", [_phase(run), _phase(run, 1)] == ["offloaded"] * 2
        run.harm(_which(run, _A, 2), how, 700)
        _serve(run, _A)
        run.judge()
        told = run.failed_restores
        own = [(run.claims_made[0], "harmed"), (run.claims_made[1], "offloaded")]
        seen = [(c, _phase(run, n)) for n, c in enumerate(run.claims_made)]
        yield f"its restore is told to have failed ({what})", told == [run.claims_made[0]]
        yield f"it is harmed, and the other is not ({what})", seen == own
        right = _on_device(run, _A) == [True] * _CLAIMED
        yield f"the request is served what is right ({what})", right
        _press(run)
        _serve(run, _B)
        yield f"the other comes back ({what})", _phase(run, 1) == "materialized"
        yield from _ended(run)


def identity(folder: Path) -> Iterator[Shows]:
    """A copy is of its tokens, their salt and this life, and nobody else is served it."""
    run = TierRun(World(_USABLE), folder)
    run.claim(_ANN, _A, _CLAIMED, 0, clip=False, ends=0)
    _serve(run, _A)
    _press(run)
    run.judge()
    tokens = run.pool.tokens(LABELS[_A], _CLAIMED, 1)
    made = run.pool.driver.request(RequestSpec("salted", tuple(tokens), salt="other"), {})
    run.introduce("salted")
    run.pool.driver.add(made)
    run.finish()
    run.judge()
    yield "the same tokens under another salt load nothing", not run.counts["external_load_started"]
    yield "and the claim stays away", _phase(run) == "offloaded"
    run.reset()
    yield "a reset ends it", _phase(run) == "harmed"
    _serve(run, _A)
    run.judge()
    yield "what is of the life before is not loaded", not run.counts["external_load_started"]
    run.kill(99)
    _serve(run, _A)
    run.judge()
    yield "nor what a killed engine left", not run.counts["external_load_started"]
    yield from _ended(run)


def refused(folder: Path) -> Iterator[Shows]:
    """An answer is given before the first copy: accepted, clipped, or refused with numbers."""
    none = ServedPool(_USABLE, SIZE, Settings())
    told = none.declare("c", "A", _CLAIMED, protection="offloadable").body
    yield "without a tier: refused", (told["decision"], told["reason"]) == ("refused", "no tier")
    none.close()
    run = TierRun(World(_USABLE, tier=8, quota=6), folder)
    answers = [
        run.pool.declare(name, label, blocks, OWNERS[owner], protection="offloadable", **more).body
        for name, label, blocks, owner, more in (
            ("one", "A", 6, _ANN, {}),
            ("two", "A", 1, _ANN, {}),
            ("three", "B", 4, _BOB, {}),
            ("four", "B", 4, _BOB, {"min_blocks": 1}),
        )
    ]
    told_all = [(a["decision"], a["granted_blocks"]) for a in answers]
    expected = [("accepted", 6), ("refused", 0), ("refused", 0), ("conditionally_accepted", 2)]
    yield "answers are joint, by owner and by room", told_all == expected
    yield (
        "and have numbers",
        "quota of 6" in answers[1]["reason"] and "2 of 8" in answers[2]["reason"],
    )
    run.also_made(("ann", "one"), ("bob", "four"))
    yield from _ended(run)


PROGRAMS: Final[dict[str, Callable[[Path], Iterator[Shows]]]] = {
    "tier-restore": restore,
    "tier-failed": failed,
    "tier-identity": identity,
    "tier-refused": refused,
}


def run_program(engine: EngineInfo, name: str) -> ProgramReport:
    """Run one of them; raises `NotExposed` where this version has no tier."""
    with TemporaryDirectory(prefix="kvclaims-tier-") as folder, quiet():
        shown = list(PROGRAMS[name](Path(folder)))
    title = (PROGRAMS[name].__doc__ or "").splitlines()[0]
    return ProgramReport(engine, name, title, tuple(shown))


# -- small helpers ---------------------------------------------------------------------------------

_ORDER: Final = (
    *("resident_claim_submitted", "resident_claim_accepted", "resident_claim_materialized"),
    *("resident_claim_offloaded", "restoration_required", "external_load_started"),
    *("external_load_finished", "resident_claim_restored"),
)


def _once(run: TierRun) -> bool:
    return all(run.counts[name] == 1 for name in _ORDER)


def _serve(run: TierRun, label: int) -> None:
    run.ask(label, _CLAIMED, 1, 1, admits=True)
    run.finish()


def _press(run: TierRun) -> None:
    """Something else takes every block."""
    run.ask(_C, _USABLE - 1, 1, 1, admits=True)
    run.finish()


def _claim(run: TierRun, number: int = 0) -> Any:
    return run.pool.enforcer.book.claims[run.claims_made[number]]


def _phase(run: TierRun, number: int = 0) -> str:
    return str(_claim(run, number).phase)


def _promised(run: TierRun) -> int:
    return int(run.pool.enforcer.offloading.tier.promised)


def _copies(run: TierRun) -> tuple[list[str], list[str]]:
    contents = list(_claim(run).keys)
    copies = run.pool.enforcer.offloading.tier.copies
    return contents, [copies[content] for content in contents]


def _which(run: TierRun, label: int, position: int) -> int:
    """The place of a content's copy among all of them by name, as `harm` counts."""
    keys = run.pool.enforcer.names.of_tokens(tuple(run.pool.tokens(LABELS[label], _CLAIMED)), "")
    copies = run.pool.enforcer.offloading.tier.copies
    return sorted(copies.values()).index(copies[keys[position]])


def _on_device(run: TierRun, label: int) -> list[bool]:
    """For each block of this content that can be found, whether it reads as what it is."""
    enforcer = run.pool.enforcer
    keys = enforcer.names.of_tokens(tuple(run.pool.tokens(LABELS[label], _CLAIMED)), "")
    found = [(key, enforcer.observer.lookup(key)) for key in keys]
    read = run.pool.driver.fingerprint
    return [read((block,)) == (fingerprint(key),) for key, block in found if block is not None]


def _ended(run: TierRun) -> Iterator[Shows]:
    run.end()
    said = "; ".join(map(str, run.findings))
    yield f"monitor, memory, files and audit find nothing{said and ': '}{said}", not run.findings
