"""The two solvers that decide obligations, told apart by nothing but their names.

Z3 is asked through its terms, cvc5 through the SMT-LIB text that is also written to files, so
the two share neither code nor a parser.  Of the answers `unsat` proves, `sat` refutes what was
asked, and everything else (a time limit, an error) is UNKNOWN with its reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import z3

from kvclaims.spec.interface import BadOperation, EngineMissing

Z3: Final = "z3"
CVC5: Final = "cvc5"

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {Z3: (Z3,), CVC5: (CVC5,), "both": (Z3, CVC5)}
"""What `--solver` takes, and who is asked then, in order."""

_PACKAGES: Final = {Z3: "z3-solver", CVC5: "cvc5"}

Options = Mapping[str, str]

DEFAULT: Final[Options] = {}
PORTFOLIO: Final[tuple[Options, ...]] = (
    {"full-saturate-quant": "true"},
    {"enum-inst": "true", "e-matching": "false"},
    {"enum-inst": "true", "cegqi": "true", "cegqi-all": "true"},
    {"finite-model-find": "true"},
)
"""What cvc5 tries on obligations that it does not decide by itself: ways to instantiate
quantifiers, and last to look for a finite model (sorts are finite, so that loses nothing)."""


NOTHING: Final[Mapping[int, Any]] = {}


class Answer(StrEnum):
    UNSAT = "unsat"
    SAT = "sat"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Reply:
    """What a solver answered; why, where it is UNKNOWN."""

    answer: Answer
    reason: str = ""


def solver_version(solver: str) -> str:
    """The installed version.  Raises EngineMissing, with the command that installs it."""
    package = _PACKAGES[solver]
    try:
        return version(package)
    except PackageNotFoundError:
        raise EngineMissing(f"{solver} is not installed: pip install {package}") from None


def chosen(solver: str) -> tuple[str, ...]:
    """The solvers to ask, installed or not."""
    if solver not in CHOICES:
        raise BadOperation(f"unknown solver {solver!r} (known: {', '.join(CHOICES)})")
    return CHOICES[solver]


def ask_z3(
    assertions: list[z3.ExprRef],
    context: z3.Context,
    timeout_ms: int,
    tracked: Mapping[int, z3.ExprRef] = NOTHING,
) -> tuple[Reply, tuple[int, ...]]:
    """The answer, and for `unsat` which of the tracked assertions it took.

    Which it takes hangs on what its context saw before.  So that it does not hang on what else
    was asked, tracked assertions get a context of their own.
    """
    if tracked:
        context = z3.Context()
        assertions = [assertion.translate(context) for assertion in assertions]
        tracked = {number: fact.translate(context) for number, fact in tracked.items()}
    solver = z3.Solver(ctx=context)
    solver.set("timeout", timeout_ms)
    solver.add(*assertions)
    marks = {z3.Bool(f"taken!{number}", context): number for number in tracked}
    for mark, number in marks.items():
        solver.add(z3.Implies(mark, tracked[number]))
    answer = Answer(str(solver.check(*marks)))
    if answer is Answer.UNSAT:
        return Reply(answer), tuple(sorted(marks[mark] for mark in solver.unsat_core()))
    return Reply(answer, solver.reason_unknown() if answer is Answer.UNKNOWN else ""), ()


def ask_cvc5(text: str, timeout_ms: int, options: Options = DEFAULT) -> Reply:
    """The answer to the one `check-sat` of a script."""
    cvc5: Any = importlib.import_module("cvc5")
    solver = cvc5.Solver(cvc5.TermManager())
    solver.setOption("tlimit-per", str(timeout_ms))
    for name, value in options.items():
        solver.setOption(name, value)
    parser = cvc5.InputParser(solver)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, text, "obligation")
    printed = []
    try:
        while not (command := parser.nextCommand()).isNull():
            printed.append(str(command.invoke(solver, parser.getSymbolManager())).strip())
    except RuntimeError as error:  # what cvc5 raises for text that it cannot read
        return Reply(Answer.UNKNOWN, " ".join(f"cvc5: {error}".split()))
    answers = [line for line in printed if line]
    if answers in (["unsat"], ["sat"]):
        return Reply(Answer(answers[0]))
    return Reply(Answer.UNKNOWN, " ".join(" ".join(answers).split()) or "cvc5 gave no answer")
