"""The step log of elastic memory, judged by the declared machine `spec.elastic`.

`ElasticMonitor` hears one run as it goes: each step's guards are evaluated over a shadow state.
`conform` sets up every reachable state of a small instance on the real thing, the twin with its
pool, takes every enabled step there and compares the whole state, and sees every disabled step
refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, Final

from kvclaims.bridge.vmm.blocks import BlockPool
from kvclaims.bridge.vmm.memory import ACT, KV, ElasticMemory, Mode, Refused, Shape, Side
from kvclaims.bridge.vmm.tensors import bytes_at
from kvclaims.bridge.vmm.twin import TwinDriver
from kvclaims.checker.conform import Conformance, Difference
from kvclaims.checker.finite import Compiled, State, compile_instance
from kvclaims.checker.instances import PINNED
from kvclaims.checker.stepcode import Compiler, Shadow
from kvclaims.checker.verdicts import Violation
from kvclaims.spec import elastic
from kvclaims.spec.language import BOOL, NUMERIC, Update, Var
from kvclaims.spec.pool import BLOCK, null

INSTANCES: Final = ("elastic", "elastic/blocks", "elastic/claims")

_COMPARED: Final = tuple(s for s in elastic.ELASTIC.symbols if not s.rigid)


class ElasticMonitor:
    """A `Tell` that judges.  `violations` holds what was found, `fired` how often each action."""

    def __init__(self, shape: Shape) -> None:
        self.shadow = Shadow(elastic.ELASTIC)
        self.violations: list[Violation] = []
        self.fired = {action.name: 0 for action in elastic.ACTIONS}
        compiler = Compiler(self.shadow)
        self._term = compiler.term
        self._guards = {
            a.name: [(g, compiler.term(g.condition)) for g in a.guards] for a in elastic.ACTIONS
        }
        self._actions = {a.name: a for a in elastic.ACTIONS}
        self._updates = {a.name: [self._update(u) for u in a.updates] for a in elastic.ACTIONS}
        self._begin(shape)

    @property
    def steps(self) -> int:
        return sum(self.fired.values())

    def __call__(self, action: str, args: Mapping[str, Any]) -> None:
        declared = self._actions[action]
        self.fired[action] += 1
        for param in declared.params:
            if param.sort not in NUMERIC:
                self.shadow.meet(param.sort, args[param.name])
        env = {param: args[param.name] for param in declared.params}
        for guard, holds in self._guards[action]:
            if not holds(env):
                shown = ", ".join(str(v) for v in args.values())
                self.violations.append(
                    Violation(guard.protects[0], f"not so: {guard.why}", f"{action}({shown})")
                )
        changes = [change for update in self._updates[action] for change in update(env)]
        for symbol, place, value in changes:
            self.shadow.set(symbol, place, value)

    def broken(self) -> tuple[str, ...]:
        """The rules that the state reached breaks; for the end of a run, it looks at all of it."""
        return tuple(
            p.rule for p in elastic.PROPERTIES if not p.of_steps and not self._term(p.formula)({})
        )

    @property
    def mode(self) -> Mode:
        return Mode(elastic.MODE.values[self.shadow.get(elastic.mode, ())])

    def _begin(self, shape: Shape) -> None:
        shadow = self.shadow
        for layer in range(shape.layers):
            shadow.meet(elastic.LAYER, layer)
            shadow.set(elastic.act_mapped, (layer,), True)
            shadow.set(elastic.act_access, (layer,), True)
        for block in range(1 + shape.base_blocks + shape.lent_blocks):
            shadow.meet(BLOCK, block)
            shadow.set(elastic.lent, (block,), block in shape.lent)
            shadow.set(elastic.free, (block,), 0 < block <= shape.base_blocks)
        shadow.set(null, (0,), True)

    def _update(self, update: Update) -> Callable[[Any], Iterable[Any]]:
        symbol, value = update.target.symbol, self._term(update.value)
        places = [a for a in update.target.args if isinstance(a, Var)]

        def changes(env: Any) -> Iterable[Any]:
            inner = dict(env)
            if not update.over:
                yield symbol, tuple(inner[v] for v in places), value(inner)
                return
            (var,) = update.over
            for element in list(self.shadow.known[var.sort]):
                inner[var] = element
                yield symbol, tuple(inner[v] for v in places), value(inner)

        return changes


# --- conformance -------------------------------------------------------------------------------


class TwinWorld:
    """The twin with its pool, driven one machine action at a time and read back whole.

    What a request writes is a mark in every layer of its block, so `intact` is read from memory.
    """

    _BYTES: Final = 4096

    def __init__(self, layers: int, base: int, lent: int) -> None:
        self.driver = TwinDriver()
        shape = Shape.fit(layers, self._BYTES, base, lent, self.driver.granularity)
        self.memory = ElasticMemory(self.driver, shape)
        self.pool = BlockPool(self.memory)
        self._tensors = [
            bytes_at(self.memory.address(x), self.memory.kv_bytes, "cpu") for x in range(layers)
        ]

    def apply(self, action: str, args: Mapping[str, Any]) -> bool:
        """Take the step; False where the real thing refuses it."""
        memory, pool = self.memory, self.pool
        kind, _, side = action.partition("_")
        try:
            if side in (KV, ACT):
                getattr(memory, kind)(side, args["x"])
            elif action in _MEMORY:
                getattr(memory, _MEMORY[action])()
            else:
                getattr(pool, _POOL.get(action, action))(**args)
        except Refused:
            return False
        if action in ("take", "keep"):
            self._write(args["b"], int(action == "keep"))
        return True

    def state(self) -> dict[str, Any]:
        """Everything, under the machine's names: relations as sets of places."""
        memory, pool, driver = self.memory, self.pool, self.driver
        layers = range(memory.shape.layers)
        kv = {x: memory.side(KV, x).address for x in layers}
        act = {x: memory.side(ACT, x).address for x in layers}
        return {
            "mode": elastic.MODE.values.index(memory.mode),
            "kv_mapped": {(x,) for x in layers if driver.mapped(kv[x])},
            "kv_access": {(x,) for x in layers if driver.opened(kv[x])},
            "act_mapped": {(x,) for x in layers if driver.mapped(act[x])},
            "act_access": {(x,) for x in layers if driver.opened(act[x])},
            "misused": driver.misused,
            "needed": int(memory.needed),
            "prefill": int(memory.in_prefill),
            "free": {(b,) for b in pool.free},
            "held": {(b,) for b in pool.held},
            "hashed": {(b,) for b in pool.hashed},
            "intact": {(b,) for b in (*pool.base, *pool.lent) if self._intact(b)},
            "touches": set(pool.touching),
            "promised": {c: n for c, n in pool.promised.items() if n},
            "covers": set(pool.covers),
        }

    def save(self) -> dict[str, Any]:
        """All there is, to come back to: bookkeeping, mappings, and the marks in memory."""
        memory, pool = self.memory, self.pool
        return {
            "memory": {name: getattr(memory, name) for name in _FLAGS},
            "sides": [(s.mapped, s.open) for s in self._sides()],
            "pool": {name: copy(getattr(pool, name)) for name in _SETS},
            "marks": [int(self._spot(*p)) if self._readable(*p) else 0 for p in self._places()],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Back to what was saved, by driver calls of its own."""
        for name, value in saved["memory"].items():
            setattr(self.memory, name, value)
        for name, value in saved["pool"].items():
            setattr(self.pool, name, copy(value))
        size = self.memory.shape.lent_bytes
        wanted = list(zip(self._sides(), saved["sides"], strict=True))
        for side, (mapped, opened) in wanted:
            if side.mapped and (not mapped or (side.open and not opened)):
                self.driver.unmap(side.address, size)
                side.mapped = side.open = False
        for number, (side, (mapped, opened)) in enumerate(wanted):
            if mapped and not side.mapped:
                self.driver.map(side.address, size, self.memory._handles[number // 2])
            if opened and not side.open:
                self.driver.open(side.address, size)
            side.mapped, side.open = mapped, opened
        for place, mark in zip(self._places(), saved["marks"], strict=True):
            if self._readable(*place):
                self._spot(*place).fill_(mark)

    def close(self) -> None:
        self.memory.close()

    def _sides(self) -> list[Side]:
        layers = range(self.memory.shape.layers)
        return [self.memory.side(name, x) for x in layers for name in (KV, ACT)]

    def _places(self) -> list[tuple[int, int]]:
        layers = range(self.memory.shape.layers)
        return [(b, x) for b in (*self.pool.base, *self.pool.lent) for x in layers]

    def _spot(self, block: int, layer: int) -> Any:
        start = block * self._BYTES
        return self._tensors[layer][start : start + 1]

    def _write(self, block: int, mark: int) -> None:
        for layer in range(self.memory.shape.layers):
            if self._readable(block, layer):
                self._spot(block, layer).fill_(mark)

    def _readable(self, block: int, layer: int) -> bool:
        return block in self.pool.base or self.driver.opened(self.memory.side(KV, layer).address)

    def _intact(self, block: int) -> bool:
        layers = range(self.memory.shape.layers)
        return all(self._readable(block, x) and int(self._spot(block, x)) == 1 for x in layers)


_FLAGS: Final = ("mode", "needed", "in_prefill")
_SETS: Final = ("free", "held", "hashed", "touching", "promised", "covers")
_MEMORY: Final = {
    "lend": "begin_lend",
    "give_back": "begin_return",
    "withdraw": "withdraw",
    "turn_back": "turn_back",
    "arrive_lent": "arrive_lent",
    "arrive_home": "arrive_home",
    "need": "need",
    "start_prefill": "start_prefill",
    "end_prefill": "end_prefill",
}
_POOL: Final = {"drain": "empty", "list": "list_"}


def conform(name: str, world: Callable[[int, int, int], TwinWorld] = TwinWorld) -> Conformance:
    """Every reachable state of the pinned instance `name`, set up and stepped on the twin."""
    start = time.perf_counter()
    replay = _Replay(name, world)
    try:
        difference = replay.run()
    finally:
        replay.world.close()
    seconds = time.perf_counter() - start
    return Conformance(name, replay.states, replay.edges, replay.refused, seconds, difference)


class _Replay:
    def __init__(self, name: str, world: Callable[[int, int, int], TwinWorld]) -> None:
        self.name = name
        self.instance = PINNED[name]()
        self.compiled: Compiled = compile_instance(self.instance)
        self.states = self.edges = self.refused = 0
        sizes, lent = self.instance.sizes, sum(self.instance.rigid["lent"].values())
        self.world = world(sizes["Layer"], sizes["Block"] - lent - 1, lent)
        self._parent: dict[State, tuple[State, int] | None] = {}
        self._saved: dict[State, dict[str, Any]] = {}

    def run(self) -> Difference | None:
        (initial,) = self.compiled.initial
        self._parent[initial] = None
        self._saved[initial] = self.world.save()
        queue = [initial]
        for state in queue:
            self.states += 1
            found = self._steps(state, queue) or self._refusals(state)
            if found:
                return found
        return None

    def _steps(self, state: State, queue: list[State]) -> Difference | None:
        """Take every enabled step from here, and compare where each leads."""
        moved = dict(self.compiled.successors(state))
        for number in self.compiled.enabled(state):
            after = moved.get(number, state)
            self.world.load(self._saved[state])
            if not self.world.apply(self.compiled.actions[number].name, self._args(number)):
                return self._differ(state, number, "enabled in the machine, refused here")
            self.edges += 1
            if found := self._compare(after):
                return self._differ(state, number, found)
            if after not in self._parent:
                self._parent[after] = (state, number)
                self._saved[after] = self.world.save()
                queue.append(after)
        return None

    def _refusals(self, state: State) -> Difference | None:
        """Try every disabled step; all is as before when each was refused."""
        enabled = set(self.compiled.enabled(state))
        self.world.load(self._saved[state])
        for number, action in enumerate(self.compiled.actions):
            if number in enabled:
                continue
            if self.world.apply(action.name, self._args(number)):
                return self._differ(state, number, "disabled in the machine, taken here")
            self.refused += 1
        found = self._compare(state)
        return self._differ(state, None, found) if found else None

    def _args(self, number: int) -> dict[str, Any]:
        action = self.compiled.actions[number]
        params = self.instance.machine.action(action.name).params
        return {p.name: value for p, value in zip(params, action.args, strict=True)}

    def _compare(self, state: State) -> str | None:
        expected, found = self._expected(state), self.world.state()
        for name in expected:
            if expected[name] != found[name]:
                return f"{name}: the machine says {expected[name]}, the twin {found[name]}"
        return None

    def _expected(self, state: State) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        for symbol in _COMPARED:
            whole[symbol.name] = (0 if not symbol.domain else set()) if symbol.range == BOOL else {}
        for (symbol, args), number in zip(self.compiled.slots, state, strict=True):
            if symbol.rigid:
                continue
            if not symbol.domain:
                whole[symbol.name] = number
            elif symbol.range == BOOL:
                if number:
                    whole[symbol.name].add(args)
            elif number:
                whole[symbol.name][args[0]] = number
        return whole

    def _differ(self, state: State, number: int | None, message: str) -> Difference:
        path, at = [], state
        while (link := self._parent[at]) is not None:
            at, step = link
            path.append(self.compiled.actions[step].label)
        name = "after every refusal" if number is None else self.compiled.actions[number].label
        return Difference(self.name, tuple(reversed(path)), name, message)
