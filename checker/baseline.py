"""Known findings of an engine: what is broken in it, allowed by name and not by silence.

A baseline is a TOML file with one table for each finding:

    [[finding]]
    name = "never-computed-hit"          # how reports call it
    rule = "B4"                          # the rule that it breaks
    package = "vllm"                     # the engine's import package
    versions = ">=0.24,<0.34"            # those that have it (PEP 440)
    signature = "Scheduler.schedule: .*" # matches "<operation>: <message>" from its start
    meaning = "what goes wrong, in one line"
    script = "docs/findings/never_computed_hit.py"
    reference = "vllm#43569"             # where it was reported, if it was
    allow = false                        # known, but only by wrong use: still a violation
    goes_on = true                       # the state is sound all the same: judge the run further

A violation is allowed only by a finding of the same rule, package and version whose signature
matches; everything else stays a violation.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from kvclaims.spec.interface import BadOperation, Engine
from kvclaims.spec.vocabulary import RULES

_NEEDED: Final = ("name", "rule", "package", "versions", "signature", "meaning")
_OPTIONAL: Final = ("script", "reference", "allow", "goes_on")


class BaselineError(BadOperation):
    """A baseline that cannot be read; the message says where and why."""


@dataclass(frozen=True)
class KnownFinding:
    """One finding, with the violations that are it."""

    name: str
    rule: str
    package: str
    versions: SpecifierSet
    signature: re.Pattern[str]
    meaning: str
    script: str = ""
    reference: str = ""
    allow: bool = True
    """Whether a check may pass in spite of it."""
    goes_on: bool = False
    """Whether what comes after it can still be judged: nothing but what is told was wrong."""

    def covers(self, package: str, version: str, rule: str, text: str) -> bool:
        """Whether a violation of `rule` told as `text` is this finding."""
        return (
            rule == self.rule
            and package == self.package
            and _within(version, self.versions)
            and self.signature.match(text) is not None
        )


@dataclass(frozen=True)
class Baseline:
    findings: tuple[KnownFinding, ...] = ()

    def allows(self, package: str, version: str, rule: str, text: str) -> KnownFinding | None:
        """The finding that a violation is, None for one that nobody knows.

        `text` is the step that broke the rule and what was seen: `"<operation>: <message>"`.
        """
        for finding in self.findings:
            if finding.allow and finding.covers(package, version, rule, text):
                return finding
        return None

    def named(self, name: str) -> KnownFinding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise BaselineError(f"no known finding {name!r}")


Allowed = Callable[[str, str], KnownFinding | None]
"""Rule and text of a violation → the finding that it is, None where it is none."""


def own_findings(engine: Engine) -> tuple[KnownFinding, ...]:
    """What an engine's own file says is known of it; nothing where it has none."""
    path = getattr(engine, "findings", None)
    return read_baseline(path).findings if isinstance(path, Path) else ()


def allowing(engine: Engine, findings: Sequence[KnownFinding] | None = None) -> Allowed:
    """What may be broken by this engine, by name: these findings, or its own where none are
    given."""
    known = Baseline(own_findings(engine) if findings is None else tuple(findings))
    package = engine.package
    if package is None or not known.findings:
        return lambda _rule, _text: None
    version = engine.info().version

    return partial(known.allows, package, version)


def read_baseline(path: Path) -> Baseline:
    """Read a baseline file.  Raises `BaselineError` with one line that says what is wrong."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BaselineError(f"{path}: not TOML: not UTF-8 text") from None
    except ValueError as error:
        raise BaselineError(f"{path}: not TOML: {error}") from None
    tables = raw.get("finding")
    if not isinstance(tables, list) or not tables or set(raw) != {"finding"}:
        raise BaselineError(f"{path}: a baseline is a list of [[finding]] tables")
    findings = tuple(_read(table, path) for table in tables)
    if len({finding.name for finding in findings}) != len(findings):
        raise BaselineError(f"{path}: two findings have one name")
    return Baseline(findings)


def _read(table: Mapping[str, Any], path: Path) -> KnownFinding:
    where = f"{path}: finding {table.get('name', '?')!r}"
    for field in _NEEDED:
        if not isinstance(table.get(field), str) or not table[field]:
            raise BaselineError(f"{where}: lacks {field}")
    strange = set(table) - {*_NEEDED, *_OPTIONAL}
    if strange:
        raise BaselineError(f"{where}: unknown field {sorted(strange)[0]}")
    for flag in ("allow", "goes_on"):
        if type(table.get(flag, True)) is not bool:
            raise BaselineError(f"{where}: {flag} is true or false")
    if table["rule"] not in RULES:
        raise BaselineError(f"{where}: unknown rule {table['rule']}")
    try:
        versions = SpecifierSet(table["versions"])
        signature = re.compile(table["signature"])
    except (InvalidSpecifier, re.error) as error:
        raise BaselineError(f"{where}: {error}") from None
    return KnownFinding(**{**table, "versions": versions, "signature": signature})


def _within(version: str, versions: SpecifierSet) -> bool:
    try:
        return versions.contains(Version(version).base_version, prereleases=True)
    except InvalidVersion:  # a checkout that states none: no finding is known for it
        return False
