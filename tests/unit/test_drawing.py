"""Operations out of bytes: every byte string is an operation, and the same one each time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvclaims.checker.drawing import CODE, MORE, WEIGHTS, Drawer, draw_config
from kvclaims.spec.interface import Feature, Observation, PoolConfig
from kvclaims.spec.operations import SCHEMA, parse

ALL = frozenset(Feature)
CODES = st.lists(st.binary(min_size=CODE, max_size=CODE), max_size=12)
NOTHING = Observation(8, 8, 8, {}, {}, {})


@given(codes=CODES, pool=st.binary(max_size=CODE))
@settings(max_examples=60, database=None)
def test_whatever_is_drawn_is_an_operation(codes: list[bytes], pool: bytes) -> None:
    config = draw_config(pool, 4, ALL)
    first, again = Drawer(config, ALL), Drawer(config, ALL)
    for code in codes:
        raw = first.draw(code, NOTHING)
        assert again.draw(code, NOTHING) == raw
        assert parse(raw).op == raw["op"]


@given(code=st.binary(min_size=CODE, max_size=CODE))
@settings(max_examples=60, database=None)
def test_without_features_nothing_beyond_the_plain_pool_is_drawn(code: bytes) -> None:
    plain = frozenset[Feature]()
    config = draw_config(code, 4, plain)
    assert config == PoolConfig(config.usable, 4, config.defer_limit)
    raw = Drawer(config, plain).draw(code, NOTHING)
    assert raw["op"] in WEIGHTS
    assert not {"adapter", "modality", "external", "priority", "accepts"} & raw.keys()


def test_every_operation_of_a_runtime_can_be_drawn() -> None:
    drawn = {*WEIGHTS, *(kind for kinds in MORE.values() for kind in kinds)}
    assert drawn == SCHEMA.keys() - {"mark"}
