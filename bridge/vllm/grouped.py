"""vLLM's scheduler on KV groups of many kinds, driven by operations and judged after each.

Start at `GroupedRun`.  The runner (`grouped_memory`) knows what it wrote, and the rules
(`grouped_rules`, `wholepool`) what has to be so; nothing asks vLLM how it does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from kvclaims.bridge.vllm import layouts, setup
from kvclaims.bridge.vllm.grouped_memory import Load, Runner, Step, Text, Work
from kvclaims.bridge.vllm.grouped_rules import Certain, Names, Router, contents_stand
from kvclaims.bridge.vllm.layouts import Layout
from kvclaims.bridge.vllm.wholepool import (
    Broken,
    Key,
    blocks_stand,
    holders_of,
    lookups_stand,
    visible,
)
from kvclaims.checker.engines import first_line
from kvclaims.spec.content import GENERATED_TOKEN
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.operations import Operation, domain_of, request_spec

STALLED: Final = 12
"""Steps of a drain in which nothing is computed and nothing ends: nobody makes progress (B11)."""


class GroupedRun:
    """One run of one arrangement.  `do` performs an operation and tells what it broke."""

    def __init__(self, name: str, usable: int, block_size: int) -> None:
        self.layout: Layout = layouts.named(name)
        if block_size != self.layout.unit:
            raise BadOperation(f"{name!r} counts in blocks of {self.layout.unit} tokens")
        self.scheduler = layouts.make_scheduler(self.layout, usable)
        self.runner = Runner(self.layout)
        self.steps = 0
        self._usable = usable
        self._full = [g for g, x in enumerate(self.layout.groups) if x.kind == layouts.FULL]
        self._is_plain = self.layout.ranks == 1 and len(self.layout.groups) == 1
        self._manager = self.scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._groups = self._manager.coordinator.single_type_managers
        self._hasher = setup.block_hasher(self.layout.unit)
        self._names = Names(self.layout.unit)
        self._gives_up = not getattr(self.scheduler, "num_hash_lookahead_tokens", 0)
        """Whether a hash says nothing of the next token, which a drafter's KV depends on."""
        self._router = Router(self.layout, self._names)
        self._texts: dict[str, Text] = {}
        self._flying: Step | None = None
        self._loading: dict[str, Load] = {}
        self._loaded: set[str] = set()
        self._fresh: set[tuple[Key, int]] = set()
        """What the step under way made visible and does not write."""
        self._left_out = False
        self._events: list[Any] = []
        self._listen()
        self._connector: Any = self.scheduler.connector
        if self._connector is not None:
            self._connector.waits = self.layout.connector != "sync"
            self._connector.completes = self.layout.connector == "any"

    def _listen(self) -> None:
        """Have KV events told, and keep them whoever takes them."""
        self._manager.enable_kv_cache_events = True
        self._pool.enable_kv_cache_events = True
        take = self._manager.take_events

        def keep() -> Any:
            events = take()
            self._events += events
            return events

        self._manager.take_events = keep

    # -- operations ----------------------------------------------------------------------------

    def do(self, operation: Operation) -> list[Broken]:
        """Perform it; `BadOperation` where it makes no sense now, and nothing has changed."""
        doing = _OPERATIONS.get(operation.op)
        if doing is None:
            raise BadOperation(f"{operation.op} is not for KV groups alone")
        try:
            found = list(doing(self, operation.fields))
            return found or list(self._judged())
        except BadOperation:
            raise
        except Exception as error:  # noqa: BLE001  (whatever the engine raises, it fails by it)
            return [("B9", f"{type(error).__name__}: {first_line(error)}")]

    def _submit(self, fields: Mapping[str, Any]) -> Iterable[Broken]:
        spec = request_spec(fields, self.layout.unit)
        under_way = self._flying.work if self._flying is not None else ()
        if spec.request_id in {*self.scheduler.requests, *(work.request for work in under_way)}:
            raise BadOperation(f"request {spec.request_id!r} is not over")
        needed = (len(spec.tokens) + spec.max_new_tokens) / max(
            map(self.layout.block_of, self._full)
        )
        if needed > self._usable:
            raise BadOperation("a request that is larger than the pool")
        if spec.external and self._connector is None:
            raise BadOperation("nothing is loaded here")
        whole = fields.get("priority", 0) > 0 and self._is_plain
        request = setup.make_request(
            spec.request_id,
            spec.tokens,
            spec.max_new_tokens,
            self._hasher,
            salt=spec.salt,
            extra_args={"kv_cache_report_mode": "full"} if whole else None,
        )
        if self._connector is not None:
            self._connector.offers[spec.request_id] = self._offered(spec.external)
        self._texts[spec.request_id] = Text(domain_of(fields), spec.tokens)
        self._names.forget(spec.request_id)
        self._names.learn(request, self._texts[spec.request_id])
        self.scheduler.add_request(request)
        return ()

    def _offered(self, tokens: int) -> int:
        """Tokens that a connector has: any number with full attention alone, else so many that
        every group begins a new block behind them."""
        kinds = {group.kind for group in self.layout.groups}
        return tokens if kinds == {layouts.FULL} else tokens // self.layout.step * self.layout.step

    def _abort(self, fields: Mapping[str, Any]) -> Iterable[Broken]:
        from vllm.v1.request import RequestStatus

        name = fields["request"]
        if name not in self.scheduler.requests:
            raise BadOperation(f"no request {name!r} waits or runs")
        if name in self._loading:
            raise BadOperation(f"request {name!r} is loaded")
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return ()

    def _reset(self, _: Mapping[str, Any]) -> Iterator[Broken]:
        held = len(self._pool.blocks) - 1 - self._pool.free_block_queue.num_free_blocks
        if self.scheduler.reset_prefix_cache():
            if visible(self._pool):
                yield "B10", "a reset says that it succeeded, and content can be found"
        elif not held:
            yield "B10", "a reset failed, and no block is in use"

    def _load(self, fields: Mapping[str, Any]) -> Iterable[Broken]:
        name = fields["request"]
        if name not in self._loading:
            raise BadOperation(f"request {name!r} is not loaded")
        self._loaded.add(name)
        return list(self.runner.load(self._loading.pop(name)))

    def _step(self, fields: Mapping[str, Any]) -> Iterator[Broken]:
        for _ in range(fields.get("times", 1)):
            if self._flying is not None:
                yield from self._complete({})
                yield from self._judged()
            yield from self._dispatch({})
            yield from self._judged()
            yield from self._complete({})
            yield from self._judged()

    def _drain(self, _: Mapping[str, Any]) -> Iterator[Broken]:
        """Until nobody waits or runs: everything comes back (B7)."""
        idle = 0
        if self._flying is not None:
            yield from self._complete({})
        while self.scheduler.requests:
            for name in list(self._loading):
                yield from self._load({"request": name})
            before = len(self.scheduler.requests)
            found = list(self._step({}))
            yield from found
            if any(rule != "B8" for rule, _ in found):
                return  # what events say changes nothing
            moved = self._computed or len(self.scheduler.requests) < before
            idle = 0 if moved else idle + 1
            if idle > STALLED:
                yield "B11", f"{before} requests wait or run, and none makes progress"
                return
        free = self._pool.free_block_queue.num_free_blocks
        if free != self._usable:
            yield "B7", f"nobody waits or runs, and {free} of {self._usable} blocks are free"

    def _dispatch(self, _: Mapping[str, Any]) -> Iterator[Broken]:
        if self._flying is not None:
            raise BadOperation("a step is in flight")
        before = visible(self._pool)
        output = self.scheduler.schedule()
        self.steps += 1
        self.runner.learn(output)
        work = tuple(self._work(r, n) for r, n in output.num_scheduled_tokens.items())
        self._computed = bool(work)
        self._flying = Step(output, work, tuple(self._started()))
        yield from self._made_visible(before, output)
        yield from self._shorter(before, output)
        yield from self._given_up(before, output)
        yield from self._written_again(before)

    def _work(self, request_id: str, count: int) -> Work:
        end = int(self.scheduler.requests[request_id].num_computed_tokens)
        return Work(request_id, self._texts[request_id], end - count, end)

    def _started(self) -> Iterator[Load]:
        """Loads that were asked for: to be done at once, or while the request waits."""
        if self._connector is None:
            return
        started, self._connector.started = self._connector.started, {}
        for name, (start, end, tables) in started.items():
            load = Load(self._texts[name], start, end, tables)
            if self._connector.waits:
                self._loading[name] = load
            else:
                yield load

    def _made_visible(self, before: Mapping[Key, tuple[int, ...]], output: Any) -> Iterator[Broken]:
        """What became visible in this step and is not written by it, for one was preempted in the
        step that was to compute it."""
        assert self._flying is not None
        self._left_out = bool(getattr(output, "preempted_req_ids", None))
        if not self._left_out:
            return
        written = {(group, block) for group, block, _ in self.runner.written_by(self._flying)}
        for key, blocks in visible(self._pool).items():
            for block in blocks:
                if block not in before.get(key, ()) and (key[1], block) not in written:
                    told = f"block {block} of KV group {key[1]} is found"
                    yield "B4", f"{told}, and the step that was to compute it left its request out"
                    return

    def _shorter(self, before: Mapping[Key, tuple[int, ...]], output: Any) -> Iterator[Broken]:
        """Who was let in was served what was certainly there (P5)."""
        assert self._flying is not None
        if self._connector is not None or self._removed():
            return
        certain = Certain(self.layout, before)
        for work in self._flying.work:
            if work.request in self._let_in(output):
                request = self.scheduler.requests[work.request]
                hit = certain.hit(request.block_hashes, int(request.num_tokens))
                served = self.runner.found(work.request)
                if served < hit:
                    yield (
                        "P5",
                        f"request {work.request} finds {hit} leading tokens in every KV group, and "
                        f"was served {served}",
                    )

    def _let_in(self, output: Any) -> set[str]:
        """Requests that a step lets in."""
        new = {request.req_id for request in output.scheduled_new_reqs}
        return new | set(output.scheduled_cached_reqs.resumed_req_ids)

    def _written_again(self, before: Mapping[Key, tuple[int, ...]]) -> Iterator[Broken]:
        """Nobody writes what others may find already (B5): a hit ends where its reader goes on in a
        block of its own."""
        assert self._flying is not None
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as convert

        after, removed = visible(self._pool), self._removed()
        told = {
            (key[1], block): key[0]
            for key, blocks in before.items()
            if self.layout.groups[key[1]].kind != layouts.RECURRENT
            for block in blocks
            if block in after.get(key, ())
        }
        for group, block, tokens in self.runner.written_by(self._flying):
            raw = told.get((group, block))
            named = self._names.of(raw) if raw is not None else None
            if named is not None and tokens < named[1] and convert(raw) not in removed:
                yield (
                    "B5",
                    f"token {tokens} is written into block {block} of KV group {group}, which is "
                    f"found as the first {named[1]} tokens of a text",
                )

    def _removed(self) -> set[Any]:
        """What the step under way said that is gone: its blocks were taken anew, and may have got
        the same again."""
        self._manager.take_events()
        gone = (e.block_hashes for e in self._events if type(e).__name__ == "BlockRemoved")
        return {name for hashes in gone for name in hashes}

    def _given_up(self, before: Mapping[Key, tuple[int, ...]], output: Any) -> Iterator[Broken]:
        """What a drafter keeps of the last token before a continuation is not served (B4): it finds
        a block more, and gives it up."""
        assert self._flying is not None
        drafters = [g for g, x in enumerate(self.layout.groups) if x.drafts and self._gives_up]
        after = visible(self._pool)
        for work in self._flying.work:
            if not work.start or work.request not in self._let_in(output):
                continue
            own = {block for _, block, _ in self.runner.written_by(Step(output, (work,)))}
            others = {key for key, blocks in after.items() if not own.issuperset(blocks)}
            found = Certain(self.layout, before.keys() | others)
            hashes = self.scheduler.requests[work.request].block_hashes
            for group in drafters:
                if not found.gives_up(group, hashes, work.start):
                    yield (
                        "B4",
                        f"request {work.request} was served {work.start} tokens, and KV group "
                        f"{group} finds no more: its drafter's KV of the last one was made before "
                        "another continuation",
                    )

    def _complete(self, _: Mapping[str, Any]) -> Iterator[Broken]:
        from vllm.v1.outputs import ModelRunnerOutput

        if self._flying is None:
            raise BadOperation("no step is in flight")
        step, self._flying = self._flying, None
        yield from self.runner.run(step)
        live = self.scheduler.requests
        ends = [w.request in live and w.end >= int(live[w.request].num_tokens) for w in step.work]
        ids = [work.request for work in step.work]
        self.scheduler.update_from_output(
            step.output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={r: i for i, r in enumerate(ids)},
                sampled_token_ids=[[GENERATED_TOKEN] if end else [] for end in ends],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=self._received(),
            ),
        )
        for name, request in live.items():
            self._names.learn(request, self._texts[name])

    def _received(self) -> Any:
        if not self._loaded:
            return None
        from vllm.v1.outputs import KVConnectorOutput

        loaded, self._loaded = self._loaded, set()
        return KVConnectorOutput(finished_recving=loaded)

    # -- judging -------------------------------------------------------------------------------

    def _judged(self) -> Iterator[Broken]:
        """The pool as it stands between operations."""
        yield from blocks_stand(self._pool, holders_of(self._groups))
        yield from lookups_stand(self._pool)
        self._manager.take_events()
        events, self._events = self._events, []
        found = visible(self._pool)
        yield from self._router.follow(events, found)
        if self._flying is None:
            for _, _, message in contents_stand(found, self._names, self.runner):
                yield "B4", message

    @property
    def reads(self) -> int:
        return self.runner.reads

    def close(self) -> None:
        self.scheduler.shutdown()


_OPERATIONS: Final[dict[str, Callable[[GroupedRun, Mapping[str, Any]], Iterable[Broken]]]] = {
    "submit": GroupedRun._submit,
    "abort": GroupedRun._abort,
    "step": GroupedRun._step,
    "dispatch": GroupedRun._dispatch,
    "complete": GroupedRun._complete,
    "drain": GroupedRun._drain,
    "reset": GroupedRun._reset,
    "load": GroupedRun._load,
}
