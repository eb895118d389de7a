"""The trace: a recorder beside a transition system, and a folder that reads it (rules T1 to T3).

For any number of facts and events.  The state of the runtime is a set of facts (the phase of a
claim, the outcome of a request, the claims blamed for it), and a `step` turns one of them over
and emits one event that says so; which facts a runtime has is for the other machines to say.
Every event has a number and a time.

Between recorder and folder the file may suffer: events get lost, are met twice or out of order,
and lines of another run (`foreign`) may be mixed in.  The folder meets the lines as they come:
the one that it waits for is folded, any other spoils the trace for good.  It accepts only after
the closing line, which says how many events there were.

`after(e, x)` is a ghost for the proof: whether fact x held right after event e.
"""

from __future__ import annotations

from typing import Final

from kvclaims.spec.language import (
    NAT,
    Action,
    Guard,
    Machine,
    Property,
    Sort,
    Symbol,
    Term,
    Var,
    becomes,
    both,
    either,
    eq,
    every,
    iff,
    ite,
    ne,
    new,
    some,
)

FACT: Final = Sort("Fact")
EVENT: Final = Sort("Event")

foreign: Final = Symbol("foreign", (EVENT,), rigid=True, meaning="the line is of another run")
fact: Final = Symbol("fact", (FACT,), meaning="the fact holds in the runtime")
clock: Final = Symbol("clock", (), NAT, meaning="what the machine's clock shows")
closed: Final = Symbol("closed", (), meaning="the run is over, and the closing line written")
emitted: Final = Symbol("emitted", (EVENT,), meaning="the event has happened")
events: Final = Symbol("events", (), NAT, meaning="how many events were emitted")
last: Final = Symbol("last", (), NAT, meaning="the time of the last event")
seq: Final = Symbol("seq", (EVENT,), NAT, meaning="the event's number")
time: Final = Symbol("time", (EVENT,), NAT, meaning="the event's time")
about: Final = Symbol("about", (EVENT, FACT), meaning="the event tells of the fact")
says: Final = Symbol("says", (EVENT, FACT), meaning="and that it holds from now on")
after: Final = Symbol("after", (EVENT, FACT), meaning="the fact held after the event")
kept: Final = Symbol("kept", (EVENT,), meaning="the event is in the file")
closing: Final = Symbol("closing", (), meaning="the closing line is in the file")
folded: Final = Symbol("folded", (FACT,), meaning="the fact holds according to the folder")
awaits: Final = Symbol("awaits", (), NAT, meaning="the number that the folder waits for")
times: Final = Symbol("times", (EVENT,), NAT, meaning="how often the folder met the line")
spoiled: Final = Symbol("spoiled", (), meaning="the folder met what it did not wait for")
accepted: Final = Symbol("accepted", (), meaning="the folder vouches for the state")

e: Final = Var("e", EVENT)
x: Final = Var("x", FACT)
n: Final = Var("n", NAT)
_e: Final = Var("d", EVENT)
_x: Final = Var("y", FACT)


def awaited(event: Term) -> Term:
    """The event that the folder waits for."""
    return ~foreign(event) & eq(seq(event), awaits())


def _in_the_file(line: Term) -> Term:
    return kept(line) | foreign(line)


def _present(*protects: str) -> Guard:
    return Guard(protects, _in_the_file(e), "the line is in the file")


ACTIONS: Final = (
    Action(
        "step",
        (e, x),
        (
            Guard(("T2", "T3"), ~closed(), "the run is not over"),
            Guard(("T1", "T3"), ~emitted(e), "the event is a new one"),
            Guard(("T1",), ~foreign(e), "it is of this run"),
            Guard(("T1",), clock() >= last(), "the clock has not run back"),
        ),
        (
            becomes(fact(x), ~fact(x)),
            becomes(emitted(e), True),
            becomes(kept(e), True),
            becomes(seq(e), events()),
            becomes(events(), events() + 1),
            becomes(time(e), clock()),
            becomes(last(), clock()),
            becomes(about(e, _x), eq(_x, x), over=(_x,)),
            becomes(says(e, _x), eq(_x, x) & ~fact(x), over=(_x,)),
            becomes(after(e, _x), ite(eq(_x, x), ~fact(_x), fact(_x)), over=(_x,)),
        ),
        "the runtime takes a step and emits the event that tells of it",
    ),
    Action("set_clock", (n,), (), (becomes(clock(), n),), "the clock goes on, or is set back"),
    Action(
        "close",
        (),
        (),
        (becomes(closed(), True), becomes(closing(), True)),
        "the run ends; the closing line says how many events there were",
    ),
    Action("lose", (e,), (), (becomes(kept(e), False),), "the file loses an event"),
    Action("cut", (), (), (becomes(closing(), False),), "the file loses its closing line"),
    Action(
        "fold",
        (e,),
        (
            _present("T3", "T2"),
            Guard(("T3", "T2"), ~foreign(e), "it is of this run"),
            Guard(("T3", "T2"), eq(seq(e), awaits()), "its number is the one waited for"),
        ),
        (
            becomes(folded(_x), ite(about(e, _x), says(e, _x), folded(_x)), over=(_x,)),
            becomes(awaits(), awaits() + 1),
            becomes(times(e), times(e) + 1),
        ),
        "the folder meets the line that it waits for",
    ),
    Action(
        "spoil",
        (e,),
        (
            _present("T3"),
            Guard(("T3",), ~awaited(e), "it is not the one waited for"),
            Guard(("T3",), ~accepted(), "the end of the file was not reached"),
        ),
        (becomes(spoiled(), True), becomes(times(e), times(e) + 1)),
        "the folder meets a line twice, too early, or of another run",
    ),
    Action(
        "accept",
        (),
        (
            Guard(("T3",), closing(), "the closing line is in the file"),
            Guard(("T3",), ~spoiled(), "every line met was the one waited for"),
            Guard(("T3", "T2"), eq(awaits(), events()), "as many events as the closing line says"),
        ),
        (becomes(accepted(), True),),
        "the folder vouches for the state that it has folded",
    ),
)

_newly: Final = ~emitted(e) & new(emitted(e))

PROPERTIES: Final = (
    Property(
        "T1",
        "a step emits an event",
        every(
            x,
            ne(new(fact(x)), fact(x)) >> some(e, both(_newly, new(about(e, x)))),
        ),
        "No fact changes without a new event that tells of it.",
    ),
    Property(
        "T1",
        "no more than one",
        every(
            e,
            every(_e, both(_newly, ~emitted(_e), new(emitted(_e))) >> eq(e, _e)),
        ),
        "A step emits one event at most.",
    ),
    Property(
        "T1",
        "an event tells of a change",
        every(e, _newly >> every(x, new(about(e, x)) >> ne(new(fact(x)), fact(x)))),
        "What a new event tells of has changed in that step.",
    ),
    Property(
        "T1",
        "an event has the time of its step",
        every(e, _newly >> eq(new(time(e)), clock())),
        "A new event is stamped with what the clock shows in its step.",
    ),
    Property(
        "T1",
        "numbers are dense",
        every(
            e,
            emitted(e)
            >> either(
                eq(seq(e), 0),
                some(_e, emitted(_e) & eq(seq(_e) + 1, seq(e))),
            ),
        ),
        "Every event but the first follows one whose number is one less.",
    ),
    Property(
        "T1",
        "numbers are unique",
        every(e, every(_e, both(emitted(e), emitted(_e), eq(seq(e), seq(_e))) >> eq(e, _e))),
        "No two events have the same number.",
    ),
    Property(
        "T1",
        "numbers are below their count",
        both(
            every(e, emitted(e) >> (seq(e) < events())),
            either(
                eq(events(), 0),
                some(_e, emitted(_e) & eq(seq(_e) + 1, events())),
            ),
        ),
        "The number of the last event is one less than how many there are.",
    ),
    Property(
        "T1",
        "time does not run back",
        every(
            e,
            every(_e, both(emitted(e), emitted(_e), seq(e) < seq(_e)) >> (time(e) <= time(_e))),
        ),
        "No event has an earlier time than one with a smaller number.",
    ),
    Property(
        "T1",
        "events are of this run",
        every(e, emitted(e) >> ~foreign(e)),
        "What the recorder emits carries the identity of this run.",
    ),
    Property(
        "T1",
        "what was emitted stays",
        every(
            e,
            emitted(e)
            >> both(
                new(emitted(e)),
                eq(new(seq(e)), seq(e)),
                eq(new(time(e)), time(e)),
                every(x, iff(new(says(e, x)), says(e, x))),
            ),
        ),
        "An event is not changed after it was emitted.",
    ),
    Property(
        "T2",
        "folding yields the state",
        eq(awaits(), events()) >> every(x, iff(folded(x), fact(x))),
        "A folder that has folded every event so far knows every fact.",
    ),
    Property(
        "T2",
        "what is accepted is the state",
        accepted() >> every(x, iff(folded(x), fact(x))),
        "The state that a folder vouches for is the runtime's.",
    ),
    Property(
        "T3",
        "what is accepted is complete",
        accepted() >> every(e, eq(times(e), ite(emitted(e), 1, 0))),
        "In a trace that is accepted every event was met once, and nothing else was met.",
    ),
    Property(
        "T3",
        "what is lost is lost",
        every(e, ~_in_the_file(e) >> eq(new(times(e)), times(e))),
        "The folder makes up no event that the file lacks.",
    ),
    Property(
        "T3",
        "spoiled for a reason",
        (~spoiled() & new(spoiled())) >> some(e, (new(times(e)) > times(e)) & ~awaited(e)),
        "Only a line that is out of place makes the folder reject a trace.",
    ),
    Property(
        "T3",
        "spoiled for good",
        spoiled() >> both(new(spoiled()), ~new(accepted())),
        "A trace that was spoiled is never accepted.",
    ),
    Property(
        "T2",
        "the fold is the state after an event",
        both(
            eq(awaits(), 0) >> every(x, ~folded(x)),
            every(
                e,
                (emitted(e) & eq(seq(e) + 1, awaits())) >> every(x, iff(folded(x), after(e, x))),
            ),
        ),
        "What is folded so far is what held after the last event folded.",
        goal=False,
    ),
    Property(
        "T2",
        "the state is that after the last event",
        both(
            eq(events(), 0) >> every(x, ~fact(x)),
            every(
                e,
                (emitted(e) & eq(seq(e) + 1, events())) >> every(x, iff(fact(x), after(e, x))),
            ),
        ),
        "What holds now is what held after the last event.",
        goal=False,
    ),
    Property(
        "T2",
        "each event tells the difference",
        every(
            e,
            every(
                x,
                emitted(e)
                >> both(
                    about(e, x) >> iff(after(e, x), says(e, x)),
                    (~about(e, x) & eq(seq(e), 0)) >> ~after(e, x),
                    every(
                        _e,
                        both(~about(e, x), emitted(_e), eq(seq(_e) + 1, seq(e)))
                        >> iff(after(e, x), after(_e, x)),
                    ),
                ),
            ),
        ),
        "From one event to the next nothing changes but what the event tells of.",
        goal=False,
    ),
    Property(
        "T3",
        "the folder is not ahead",
        both(awaits() >= 0, awaits() <= events(), every(e, kept(e) >> emitted(e))),
        "The folder has folded no more than was emitted.",
        goal=False,
    ),
    Property(
        "T3",
        "met once if folded",
        ~spoiled() >> every(e, eq(times(e), ite(emitted(e) & (seq(e) < awaits()), 1, 0))),
        "As long as nothing is spoiled, what was met is what was folded.",
        goal=False,
    ),
    Property(
        "T3",
        "accepted at the end",
        both(
            closing() >> closed(),
            accepted() >> both(closed(), ~spoiled(), eq(awaits(), events())),
        ),
        "Only a whole trace of a run that is over is accepted.",
        goal=False,
    ),
    Property(
        "T1",
        "the last time is the latest",
        every(e, both(times(e) >= 0, emitted(e) >> both(time(e) <= last(), seq(e) >= 0))),
        "No event is later than the last.",
        goal=False,
    ),
)

TRACE: Final = Machine(
    name="trace",
    meaning="a recorder, a file and a folder",
    symbols=(
        foreign,
        fact,
        clock,
        closed,
        emitted,
        events,
        last,
        seq,
        time,
        about,
        says,
        after,
        kept,
        closing,
        folded,
        awaits,
        times,
        spoiled,
        accepted,
    ),
    init=(
        becomes(fact(x), False, over=(x,)),
        becomes(clock(), 0),
        becomes(closed(), False),
        becomes(emitted(e), False, over=(e,)),
        becomes(events(), 0),
        becomes(last(), 0),
        becomes(seq(e), 0, over=(e,)),
        becomes(time(e), 0, over=(e,)),
        becomes(about(e, x), False, over=(e, x)),
        becomes(says(e, x), False, over=(e, x)),
        becomes(after(e, x), False, over=(e, x)),
        becomes(kept(e), False, over=(e,)),
        becomes(closing(), False),
        becomes(folded(x), False, over=(x,)),
        becomes(awaits(), 0),
        becomes(times(e), 0, over=(e,)),
        becomes(spoiled(), False),
        becomes(accepted(), False),
    ),
    actions=ACTIONS,
    properties=PROPERTIES,
)
