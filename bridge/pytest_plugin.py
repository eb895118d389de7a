"""A pytest plugin: any test suite that makes vLLM pools runs under the monitor, unchanged.

    pytest -p kvclaims.bridge.pytest_plugin …

A rule that is broken fails the test that broke it, with the operations that lead there.  States
that a test builds by hand (references poked, hashes set, tables filled, requests put into
`running`) are recognised and reported apart.  Findings that `--kvclaims-baseline` names for this
version of the engine are told and fail nothing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from kvclaims.bridge.vllm.poolcheck import Broken
from kvclaims.bridge.vllm.suite import RULES as JUDGED
from kvclaims.bridge.vllm.suite import SuiteMonitor, Tally, unobservable
from kvclaims.checker.baseline import Baseline, BaselineError, read_baseline
from kvclaims.spec.vocabulary import RULES, Verdict

SHOWN_OPERATIONS: Final = 40
"""Operations that a failure shows; the report file has all that were kept."""

NAME: Final = "kvclaims"


class BrokenRule(AssertionError):
    """A rule of the contract was broken while this test ran."""


@dataclass
class Totals:
    """What the whole run watched; JSON, so that workers can hand it over."""

    operations: int = 0
    calls: int = 0
    pools: int = 0
    tests: int = 0
    judged: Counter[str] = field(default_factory=Counter)
    violations: list[dict[str, Any]] = field(default_factory=list)
    known: list[dict[str, Any]] = field(default_factory=list)
    hand_built: list[dict[str, Any]] = field(default_factory=list)
    engines: list[dict[str, str]] = field(default_factory=list)
    lost_workers: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "judged": dict(self.judged)}

    def add(self, other: dict[str, Any]) -> None:
        """Take over what a worker counted."""
        for name in ("operations", "calls", "pools", "tests", "lost_workers"):
            setattr(self, name, getattr(self, name) + other[name])
        self.judged.update(other["judged"])
        for name in ("violations", "known", "hand_built"):
            getattr(self, name).extend(other[name])
        self.engines += [e for e in other["engines"] if e not in self.engines]

    @property
    def verdict(self) -> Verdict:
        if self.violations:
            return Verdict.VIOLATED
        if self.lost_workers:
            return Verdict.UNKNOWN
        return Verdict.HOLDS if self.operations and self.pools else Verdict.VACUOUS


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup(NAME, "vLLM pools under the kvclaims monitor")
    group.addoption("--kvclaims-report", type=Path, metavar="FILE", help="Write a JSON report.")
    group.addoption(
        "--kvclaims-rules",
        metavar="RULES",
        help=f"Judge these rules alone, for example B1,B2 (known: {_listed(JUDGED)}).",
    )
    group.addoption(
        "--kvclaims-baseline", type=Path, metavar="FILE", help="Known findings, allowed by name."
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin(config), f"{NAME}-monitor")


class Plugin:
    """One pytest process: the controller, a worker, or both in one."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rules = _chosen(config.getoption("--kvclaims-rules"))
        self._baseline = _baseline(config.getoption("--kvclaims-baseline"))
        self._report: Path | None = config.getoption("--kvclaims-report")
        self._totals = Totals()
        self._monitor = SuiteMonitor(self._rules)
        self._monitor.weaver.install()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._totals.tests += 1
        return (yield from self._phase(item, "setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "teardown"))

    def _phase(self, item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
        """Run one phase of a test; then say what it broke."""
        try:
            result = yield
        except BaseException:
            broken = self._settle(item, phase)
            if broken:
                item.add_report_section(phase, NAME, "\n\n".join(map(_told, broken)))
            raise
        broken = self._settle(item, phase)
        if broken:
            raise BrokenRule("\n\n".join(map(_told, broken)))
        return result

    def _settle(self, item: pytest.Item, phase: str) -> list[Broken]:
        """Count what the phase did; what it broke that no finding allows."""
        tally = self._monitor.take(audit=phase == "call")
        totals = self._totals
        totals.operations += tally.operations
        totals.calls += tally.calls
        totals.pools += tally.pools
        totals.judged += tally.judged
        if tally.pools:
            self._note_engine()
        where = f"{item.nodeid} ({phase})"
        self._note_by_hand(item, phase, tally)
        serious = []
        for one in tally.broken:
            raw = {"test": where, **_as_json(one)}
            finding = self._allowed(one)
            if finding is None:
                totals.violations.append(raw)
                serious.append(one)
            else:
                totals.known.append({**raw, "finding": finding})
        return serious

    def _note_by_hand(self, item: pytest.Item, phase: str, tally: Tally) -> None:
        if not tally.hand_built:
            return
        where = f"{item.nodeid} ({phase})"
        for state in tally.hand_built:
            after = {"after": state.after}
            self._totals.hand_built.append({"test": where, "what": state.what, **after})
        lines = [f"built by hand, not judged: {state.what}" for state in tally.hand_built]
        item.add_report_section(phase, NAME, "\n".join(lines))

    def _allowed(self, broken: Broken) -> str | None:
        if self._baseline is None or not self._totals.engines:
            return None
        engine = self._totals.engines[-1]
        text = f"{broken.operation}: {broken.message}"
        finding = self._baseline.allows("vllm", engine["version"], broken.rule, text)
        return None if finding is None else finding.name

    def _note_engine(self) -> None:
        engine = _engine()
        if engine not in self._totals.engines:
            self._totals.engines.append(engine)

    # -- the end -------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """xdist: a worker hands over what it counted; one that died cannot."""
        counted = getattr(node, "workeroutput", {}).get(NAME)
        if counted is None:
            self._totals.lost_workers += 1
        else:
            self._totals.add(json.loads(counted))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        worker = getattr(self._config, "workeroutput", None)
        if worker is not None:
            worker[NAME] = json.dumps(self._totals.to_json())
        elif self._report is not None:
            self._report.parent.mkdir(parents=True, exist_ok=True)
            self._report.write_text(json.dumps(self._whole(), indent=1) + "\n", encoding="utf-8")

    def _whole(self) -> dict[str, Any]:
        return {
            "verdict": self._totals.verdict,
            **self._totals.to_json(),
            "rules": sorted(self._rules, key=_number),
            "not_exposed": _not_exposed(self._rules),
        }

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        totals = self._totals
        terminalreporter.section(f"{NAME}: {totals.verdict}")
        for line in _summary(totals, self._rules):
            terminalreporter.line(line)


def _summary(totals: Totals, rules: frozenset[str]) -> list[str]:
    if not totals.pools:
        return ["no vLLM pool was made: nothing was judged"]
    engines = ", ".join(f"{e['version']} ({e['path']})" for e in totals.engines)
    by_hand = {state["test"] for state in totals.hand_built}
    lines = [
        f"vllm {engines}",
        f"{totals.operations:,} operations with {totals.calls:,} pool calls on "
        f"{totals.pools:,} pools in {totals.tests:,} tests, judged by {_listed(rules)}",
        f"{len(totals.hand_built)} states built by hand in {len(by_hand)} tests, not judged",
    ]
    unseen = [rule for rule in sorted(rules, key=_number) if not totals.judged[rule]]
    if unseen:
        lines.append(f"no occasion to judge {', '.join(unseen)}")
    for name, count in sorted(Counter(known["finding"] for known in totals.known).items()):
        lines.append(f"known finding {name}: {count}")
    if totals.lost_workers:
        lines.append(f"{totals.lost_workers} workers ended without a report")
    broken = (f"{one['rule']} {one['message']} [{one['test']}]" for one in totals.violations)
    return [*lines, *broken]


def _told(broken: Broken) -> str:
    """A violation for people: the rule, what was seen, and how it came to that."""
    shown = broken.operations[-SHOWN_OPERATIONS:]
    left_out = len(broken.operations) - len(shown)
    head = [
        f"{broken.rule} {RULES[broken.rule].meaning}",
        f"at {broken.operation}: {broken.message}",
    ]
    story = [f"  … {left_out} lines before"] if left_out else []
    return "\n".join([*head, "operations:", *story, *(f"  {line}" for line in shown)])


def _as_json(broken: Broken) -> dict[str, Any]:
    return {
        "rule": broken.rule,
        "meaning": RULES[broken.rule].meaning,
        "message": broken.message,
        "operation": broken.operation,
        "operations": list(broken.operations),
    }


def _chosen(text: str | None) -> frozenset[str]:
    if text is None:
        return JUDGED
    rules = frozenset(part.strip() for part in text.split(",") if part.strip())
    strange = sorted(rules - JUDGED)
    if strange or not rules:
        named = ", ".join(strange) or "none"
        raise pytest.UsageError(f"--kvclaims-rules: {named} (known: {_listed(JUDGED)})")
    return rules


def _baseline(path: Path | None) -> Baseline | None:
    try:
        return None if path is None else read_baseline(path)
    except BaselineError as error:
        raise pytest.UsageError(f"--kvclaims-baseline: {error}") from None


def _engine() -> dict[str, str]:
    """Version and folder of the vLLM that was imported."""
    from kvclaims.bridge.vllm.engine import version_of

    folder = Path(str(sys.modules["vllm"].__file__)).parent
    return {"version": version_of(folder), "path": str(folder)}


def _not_exposed(rules: frozenset[str]) -> list[str]:
    """What this run could not judge, whatever the suite did: rules that need claims or a driver
    of their own, and what this version of the engine lacks."""
    rest = sorted(RULES.keys() - rules, key=_number)
    return [*rest, *unobservable()] if "vllm.v1.core.block_pool" in sys.modules else rest


def _listed(rules: frozenset[str]) -> str:
    return ", ".join(sorted(rules, key=_number))


def _number(rule: str) -> tuple[str, int]:
    return rule[0], int(rule[1:] or 0)
