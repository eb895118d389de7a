"""Random runs of an engine and what was seen of each, operation by operation.

Where two versions of an engine differ in any answer, event, allocator step or state, playing the
recorded runs shows the first operation that tells them apart.  That judges nothing: it says which
runs are worth judging, and where no run differs none has to be.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvclaims.checker.drawing import CODE, POOL_CODE, STREAMS, Drawer, draw_config
from kvclaims.checker.scenes import Scene
from kvclaims.checker.supervise import features_of
from kvclaims.spec.content import tokens_of
from kvclaims.spec.interface import (
    PRIORITY,
    BadOperation,
    Engine,
    Feature,
    NotExposed,
    Observation,
    PoolConfig,
    Runtime,
)
from kvclaims.spec.operations import NoProgress, Operation, domain_of, parse, perform
from kvclaims.spec.telemetry import Event

SEED: Final = 8
LENGTH: Final = 40
"""Operations in one run, or one more."""

SPOIL: Final = 4
"""Of so many operations that can be spoiled one is done again, spoiled."""

SPOILED: Final[Mapping[str, tuple[Mapping[str, Any], ...]]] = {
    "declare": (
        {"claim": ""},
        {"generation": 0},
        {"duration": 0},
        {"duration": -1},
        {"min_blocks": 0},
        {"n": 99},
        {},
    ),
    "submit": (
        {"request": ""},
        {"request": "fresh", "max_new_tokens": 0},
        {"request": "fresh", "external": -1},
        {"request": "fresh", "accepts": -1},
        {"request": "fresh", "content": ()},
        {},
    ),
    "renew": ({"duration": 0}, {"duration": -1}, {"claim": "nobody"}),
    "release": ({"claim": "nobody"}, {}),
    "demote": ({"claim": "nobody"}, {}),
    "lose": ({"position": -1}, {"position": 1}, {"position": 2}, {"position": 3}),
    "advance": ({"ticks": 0}, {"ticks": -1}),
    "abort": ({"request": "nobody"}, {}),
    "load": ({"blocks": -1}, {"blocks": 99}, {"request": "nobody"}, {}),
}
"""What no runtime accepts, or not twice: fields to change in an operation, by its name."""

CROWDED: Final = 2_000
"""From this number on the runs are crowded: few and small blocks, so that requests grow, give way
and come back in nearly every step."""

CROWD: Final[Mapping[str, int]] = {
    "submit": 7,
    "dispatch": 10,
    "complete": 7,
    "step": 3,
    "declare": 3,
    "load": 2,
    "lose": 1,
    "release": 1,
    "abort": 1,
    "advance": 1,
    "sleep": 1,
    "wake": 3,
}
"""Operations of a crowded run, each as often as it should be drawn."""

LATE: Final = tuple(
    parse(raw)
    for raw in (
        {"op": "declare", "claim": "late", "content": [["A", 1]], "n": 1},
        {"op": "submit", "request": "late", "content": [["A", 1]]},
        {"op": "abort", "request": "late"},
        {"op": "load", "request": "late", "blocks": 1},
        *({"op": op} for op in ("step", "dispatch", "complete")),
    )
)
"""What a closed runtime is asked."""

DRAIN: Final = 40
"""Steps that end every request of a run, if nothing outside holds it up."""


@dataclass(frozen=True)
class Recorded:
    """A run: its pool, its operations, and a digest of what was seen after each.

    `spoiled` tells which operations are none that anyone should accept."""

    number: int
    config: PoolConfig
    operations: tuple[Operation, ...]
    seen: tuple[str, ...]
    spoiled: frozenset[int] = frozenset()

    @property
    def sound(self) -> Iterator[Operation]:
        """The operations without those that are spoiled."""
        return (o for i, o in enumerate(self.operations) if i not in self.spoiled)

    @property
    def digest(self) -> str:
        """Of all that was seen in it."""
        return hashlib.sha256("".join(self.seen).encode()).hexdigest()[:16]


class _Watched:
    """A runtime, and all that shows from outside after an operation."""

    def __init__(self, engine: Engine, config: PoolConfig) -> None:
        self.runtime: Runtime = engine.open(config, "recorded")
        self._steps: list[Any] = []
        self._told = 0
        self._blocks = tuple(self.runtime.snapshot().facts)
        self._routed = Feature.KV_EVENTS in features_of(engine)
        self.runtime.listen(self._steps.append)

    def do(self, operation: Operation) -> str:
        """What the operation was answered and what it told."""
        answer = _answer(lambda: perform(self.runtime, operation))
        contents = self.runtime.kv_events() if self._routed else ()
        memory = self.runtime.fingerprint(self._blocks)
        steps = self._steps_since()
        return _digest(answer, self._events(), steps, contents, memory, self._found(operation))

    def close(self) -> str:
        """What is left of the run, the whole pool and the last events, and what comes too late."""
        runtime = self.runtime
        nowhere = _answer(lambda: runtime.fingerprint((*self._blocks, max(self._blocks) + 1)))
        left = runtime.observe(), runtime.snapshot(), nowhere
        runtime.close()
        late = [_answer(lambda o=o: perform(runtime, o)) for o in LATE]  # type: ignore[misc]
        return _digest(*left, self._events(), late, _answer(runtime.close))

    def _found(self, operation: Operation) -> object:
        """Where the content is found that the operation speaks of."""
        content = operation.fields.get("content", ())
        tokens = tokens_of(content, self.runtime.config.block_size)
        return self.runtime.locate(tokens, domain_of(operation.fields))

    def _events(self) -> Sequence[Event]:
        events = self.runtime.events()
        new, self._told = events[self._told :], len(events)
        return new

    def _steps_since(self) -> list[Any]:
        steps = [(s.action, s.args, s.facts, s.free) for s in self._steps]
        self._steps.clear()
        return steps


def _answer(ask: Callable[[], Any]) -> Any:
    """What the runtime answers, or the words with which it turns the question down."""
    try:
        return ask()
    except (BadOperation, NotExposed, NoProgress) as error:
        return f"{type(error).__name__}: {error}"


def _digest(*seen: object) -> str:
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


def introduced(engine: Engine) -> str:
    """What an engine says of itself."""
    said = engine.name, engine.block_size, engine.package, str(engine.faults), engine.info()
    return f"{said} {sorted(features_of(engine))}"


def draw_run(engine: Engine, number: int) -> tuple[PoolConfig, Callable[[Observation], Operation]]:
    """The pool of the run of that number, and what draws the next operation."""
    rng = random.Random(SEED * 1_000_003 + number)
    features = features_of(engine)
    crowded = number >= CROWDED
    config = draw_config(rng.randbytes(POOL_CODE), 2 if crowded else engine.block_size, features)
    if crowded:
        config = _crowded(config, rng, features)
    drawer = Drawer(config, features, CROWD if crowded else None)

    def following(seen: Observation) -> Operation:
        raw = drawer.draw(rng.randbytes(CODE), seen)
        operation = parse({**raw, **_changes(raw["op"], rng)} if crowded else raw)
        # A request that loads for ever would be waited for as long as that.
        return Operation("step", {"times": DRAIN}) if operation.op == "drain" else operation

    return config, following


def _crowded(config: PoolConfig, rng: random.Random, features: frozenset[Feature]) -> PoolConfig:
    """A smaller pool, two times out of three with ranks and with a small budget."""
    more: dict[str, Any] = {"usable": rng.randrange(5, 10)}
    if Feature.PRIORITY in features and rng.randrange(3):
        more["policy"] = PRIORITY
    if Feature.CHUNKING in features:
        more["token_budget"] = rng.choice((0, 3, 5))
    if Feature.IN_FLIGHT in features and not config.drafts:
        more["in_flight"] = rng.choice((1, 2, 3))
    return replace(config, **more)


def _changes(op: str, rng: random.Random) -> Mapping[str, Any]:
    """What is other in an operation of a crowded run: most requests begin small and grow, and
    even a claim of a range says how far it may be clipped."""
    if op == "declare":
        return {"min_blocks": 1}
    if op != "submit" or not rng.randrange(4):
        return {}
    content = [rng.choice(STREAMS), rng.choice((1, 1, 2)), rng.choice((0, 1))]
    return {"content": [content], "max_new_tokens": rng.choice((2, 4, 7))}


def record(engine: Engine, number: int) -> Recorded:
    """Draw the run of that number and note what the engine shows."""
    config, following = draw_run(engine, number)
    watched = _Watched(engine, config)
    rng = random.Random(number)
    operations: list[Operation] = []
    seen: list[str] = []
    spoiled: set[int] = set()
    while len(operations) < LENGTH:
        operation = following(watched.runtime.observe())
        operations.append(operation)
        seen.append(watched.do(operation))
        if operation.op in SPOILED and rng.randrange(SPOIL) == 0:
            change = rng.choice(SPOILED[operation.op])
            spoiled.add(len(operations))
            operations.append(Operation(operation.op, {**operation.fields, **change}))
            seen.append(watched.do(operations[-1]))
    return Recorded(number, config, tuple(operations), (*seen, watched.close()), frozenset(spoiled))


def play(engine: Engine, number: int, scene: Scene) -> Recorded:
    """Do what the scene says and note what the engine shows, if only that it opens no such pool."""
    watched = _answer(lambda: _Watched(engine, scene.config))
    if isinstance(watched, str):
        return Recorded(number, scene.config, (), (watched,))
    seen = [watched.do(operation) for operation in scene.operations]
    whole = (*seen, watched.close())
    return Recorded(number, scene.config, scene.operations, whole, scene.refused)


def differs(engine: Engine, run: Recorded) -> str | None:
    """The first operation of the run after which the engine shows something else, None if none.

    Raises whatever the engine raises."""
    watched = _answer(lambda: _Watched(engine, run.config))
    if isinstance(watched, str):
        return None if run.seen == (watched,) else f"run {run.number}: {watched}"
    for number, (operation, seen) in enumerate(zip(run.operations, run.seen, strict=False), 1):
        if watched.do(operation) != seen:
            return f"run {run.number}, operation {number}: {operation}"
    return None if watched.close() == run.seen[-1] else f"run {run.number}: when it is closed"


def differing(engine: Engine, runs: Iterable[Recorded]) -> Iterator[tuple[Recorded, str]]:
    """The runs in which the engine does not show what was recorded, and where; one that raises
    differs."""
    for run in runs:
        try:
            where = differs(engine, run)
        except Exception as error:  # noqa: BLE001  (whatever another version does)
            where = f"run {run.number}: {type(error).__name__}: {error}"
        if where is not None:
            yield run, where
