"""One more action for the machine of `own_machine.py`, first carelessly and then right.

python examples/own_action.py
"""

from __future__ import annotations

from dataclasses import replace

from own_machine import SHELF, b, cached, owed, promised, show

from kvclaims.spec.language import Action, Guard, becomes

CARELESS = Action(
    "take_back",
    (b,),
    (Guard(("B1",), promised(b), "the block was promised"),),
    (becomes(promised(b), False), becomes(cached(b), False)),
    "the engine takes a promised block back",
)
TAKE_BACK = replace(CARELESS, updates=(*CARELESS.updates, becomes(owed(), owed() - 1)))

if __name__ == "__main__":
    for action in (CARELESS, TAKE_BACK):
        show(replace(SHELF, actions=(*SHELF.actions, action)), action)
