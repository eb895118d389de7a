"""Progress as data: what must happen in the end, under which fairness, and why it does.

A safety rule says what no step may do; a `Response` says that something *is* done: whenever its
premise holds, its goal holds then or later, on every run that is fair.  What fairness means is
said in steps of the machine: `Fair` steps are not put off for ever, `Recurring` ones are taken
without end, and steps that are `ceasing` are taken finitely often.  A `Ranking`, or an `Urgency`,
is the argument that this is enough, for any sizes.

`checker.lasso` searches finite instances for a fair run that never reaches the goal, and for a
state from which no run is fair; `checker.ranking` turns the arguments into obligations for a
solver.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvclaims.spec.language import MachineError, Term, Var


@dataclass(frozen=True)
class Steps:
    """Some actions of a machine under a name in words.

    `by` names parameters that all of them have: each choice of values is a kind by itself, so
    that fairness to one claim is no fairness to another.
    """

    name: str
    actions: tuple[str, ...]
    by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fair(Steps):
    """Steps that are not put off for ever: once one of them is enabled and stays so (with
    `strong`: is enabled again and again), one is taken.  A step that would change nothing does
    not count as enabled."""

    strong: bool = False


@dataclass(frozen=True)
class Recurring(Fair):
    """Steps that are taken again and again, whether or not they stay enabled; one that changes
    nothing counts.

    So time is treated in timed systems: only runs are looked at in which it passes without end
    (R. Alur and D. L. Dill, A theory of timed automata, 1994; R. Alur and T. A. Henzinger, Logics
    and models of real time, 1992).  What time may not pass over is *urgent*: it is done before.

    Who assumes this of a machine that can stop such steps for ever assumes the impossible, and
    proves anything.  So it has to be shown that whatever was done, one can still come: while none
    is possible, some step of `nearer` is, and each of these brings `distance` down, a number of at
    least zero.  With weakly or strongly fair steps beside them that is enough, because those can be
    taken in turn in between; `nearer` steps must be none of those that cease.
    """

    nearer: tuple[str, ...] = ()
    distance: Term | None = None


@dataclass(frozen=True)
class Helpful:
    """While `when` holds, a `fair` step for the values `at` is enabled (a recurring one comes, be
    it enabled now or not), and brings the rank down.

    `at` gives a value to each name in `fair.by`: variables of the response, or ones that are
    chosen anew wherever `when` holds of them.
    """

    fair: Fair
    when: Term
    at: tuple[Var, ...] = ()


@dataclass(frozen=True)
class Ranking:
    """Why the goal is reached.

    From the premise on `pending` holds until the goal does.  Meanwhile no step raises `rank`,
    numbers of at least zero of which an earlier one counts more than all later ones together;
    some `helpful` case applies, and goes on applying until the rank has fallen; and its fair
    steps make it fall.  Ceasing steps may raise the rank: after the last of them it holds.
    """

    pending: Term
    rank: tuple[Term, ...]
    helpful: tuple[Helpful, ...]


@dataclass(frozen=True)
class Urgency:
    """Why the goal is reached: from the premise on `pending` holds until the goal does, and
    meanwhile no step of `before` is possible.  One is taken in the end, so the goal was reached.
    """

    pending: Term
    before: Recurring


@dataclass(frozen=True)
class Response:
    """The premise leads to the goal, for every value of the variables `over`.

    `meaning` is the property in one sentence; `unless` says where it does not hold, and is
    empty where it always does.  Ceasing steps whose `by` names a variable in `over` are meant
    for that value only.
    """

    rule: str
    name: str
    over: tuple[Var, ...]
    premise: Term
    goal: Term
    fair: tuple[Fair, ...]
    meaning: str
    unless: str = ""
    ceasing: tuple[Steps, ...] = ()
    ranking: Ranking | Urgency | None = None

    def __post_init__(self) -> None:
        """Steps that go on for ever and cease are assumed of no run: anything would be shown."""
        ceasing = {action for steps in self.ceasing for action in steps.actions}
        for fair in self.fair:
            if both := sorted(ceasing.intersection(fair.actions)):
                raise MachineError(f"{self.name}: {both[0]} is fair ({fair.name}) and ceases")
