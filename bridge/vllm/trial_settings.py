"""What a trial of vLLM is about: its pool, its model, and what it has beside plain requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final

BLOCK_SIZE: Final = 4

GENERATE: Final = "generate"
POOLING: Final = "pooling"
DIFFUSION: Final = "diffusion"

LONGEST: Final = 32
"""Blocks of the longest request that an engine takes."""

CANVAS: Final = 3
"""Tokens that a diffusion model refines at a time."""

MOST: Final = 6
"""Requests at a time."""

SMALL: Final = 6
"""Blocks of a request, at most, where all are to have room."""


@dataclass(frozen=True)
class Setting:
    """A pool and what its run has beyond plain requests."""

    usable: int
    windows: tuple[int, ...] = (0,)
    in_flight: int = 1
    connector: int = 0
    token_budget: int = 0
    model: str = GENERATE
    sessions: bool = False
    resets: bool = False
    """Resets may make what runs give way."""
    clears: bool = False
    """The worker clears new blocks when it is told to; what it is not told of stays as it was."""
    throttles: bool = False
    """Steps may be asked to put prefills off."""
    stages: int = 1
    """Of a pipeline: so many steps and one more are in flight."""
    crowds: bool = False
    """Requests have little input and generate much: they get in each other's way."""
    encoder_room: int = 0
    """Tokens of modality inputs that there is room for at a time; 0 where none are ever short."""
    watermark: int = 0
    """Blocks that an admission leaves free while others run."""
    fails: bool = True
    """Transfers may fail.  Where they cannot, and only a window of what they bring is kept,
    requests may be longer than the pool."""

    def __str__(self) -> str:
        plain = Setting(self.usable)
        more = [
            f"{name} {value}" for name, value in vars(self).items() if value != vars(plain)[name]
        ]
        return ", ".join([f"pool of {self.usable} blocks of {BLOCK_SIZE} tokens", *more])


def _sessions(r: Random, s: Setting) -> Setting:
    """Under pressure, or with room for all where steps overlap: a session that gives way while its
    answer is under way loses all that it had (`docs/findings/session_forgets.py`)."""
    in_flight = r.choice((1, 2))
    usable = r.randint(5, 9) if in_flight == 1 else MOST * SMALL
    return replace(s, usable=usable, sessions=True, in_flight=in_flight)


def _into_window(r: Random, s: Setting) -> Setting:
    windows, fails = (r.choice((6, 8)),), r.choice((False, False, True))
    return replace(s, connector=1, windows=windows, fails=fails, in_flight=r.choice((1, 2)))


def _crowded(r: Random, s: Setting) -> Setting:
    return replace(s, crowds=True, usable=r.randint(5, 8))


KINDS: Final[tuple[tuple[str, Callable[[Random, Setting], Setting]], ...]] = (
    ("sessions", _sessions),
    ("resets", lambda r, s: replace(s, resets=True, in_flight=r.choice((1, 2, 2)))),
    ("in flight", lambda r, s: _crowded(r, replace(s, in_flight=2, connector=r.choice((0, 2))))),
    ("pipeline", lambda r, s: _crowded(r, replace(s, stages=3))),
    ("pipeline that is reset", lambda r, s: replace(s, stages=r.choice((2, 3)), resets=True)),
    ("transfers", lambda r, s: replace(s, connector=r.choice((1, 2)), in_flight=r.choice((1, 2)))),
    ("transfers into a window", _into_window),
    ("clearing", lambda r, s: replace(s, clears=True, connector=r.choice((0, 1, 1, 1)))),
    ("pooling", lambda r, s: replace(s, model=POOLING, in_flight=r.choice((1, 2)))),
    ("diffusion", lambda _, s: replace(s, model=DIFFUSION)),
    ("throttled", lambda r, s: replace(s, throttles=True, connector=r.choice((0, 1)))),
    ("inputs", lambda r, s: replace(s, token_budget=5, encoder_room=r.choice((4, 8)))),
    ("a margin", lambda r, s: _crowded(r, replace(s, watermark=2))),
    ("sessions that are reset", lambda r, s: replace(_sessions(r, s), resets=True)),
)
"""What a run is about, and how its setting is drawn; runs take them in turn."""


def draw_setting(chance: Random, kind: int) -> Setting:
    """The setting of a run of `KINDS[kind]`."""
    plain = Setting(chance.randint(5, 12), token_budget=chance.choice((0, 0, 5, 9)))
    setting = KINDS[kind][1](chance, plain)
    return setting if setting.stages == 1 else replace(setting, in_flight=setting.stages + 1)
