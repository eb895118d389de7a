"""Every mechanism gives the class that it declares, by measurement, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch", reason="mechanisms work on torch tensors")

from kvclaims.checker import measure as m  # noqa: E402
from kvclaims.checker import provenance, truth  # noqa: E402
from kvclaims.reference.mechanisms import two_bits  # noqa: E402
from kvclaims.reference.mechanisms.capsules import Capsules  # noqa: E402
from kvclaims.reference.mechanisms.channels import PrunedChannels  # noqa: E402
from kvclaims.reference.mechanisms.chunks import Chunks  # noqa: E402
from kvclaims.reference.mechanisms.facts import Facts  # noqa: E402
from kvclaims.reference.mechanisms.file_offload import FileOffload, Lookup  # noqa: E402
from kvclaims.reference.mechanisms.files import publish, read  # noqa: E402
from kvclaims.reference.mechanisms.low_rank import SparseAndLowRank  # noqa: E402
from kvclaims.reference.mechanisms.model import (  # noqa: E402
    BLOCK,
    MODEL,
    TinyModel,
    rotate,
    unrotate,
)
from kvclaims.reference.mechanisms.persistent import PersistentReader  # noqa: E402
from kvclaims.reference.mechanisms.surprise import Surprise  # noqa: E402
from kvclaims.reference.mechanisms.two_bits import TwoBits  # noqa: E402
from kvclaims.reference.mechanisms.two_ends import TwoEnds  # noqa: E402
from kvclaims.reference.mechanisms.vector_quantization import VectorQuantization  # noqa: E402
from kvclaims.spec.fidelity import (  # noqa: E402
    Fidelity,
    Loaded,
    Part,
    Stored,
    Tier,
    satisfies,
)
from kvclaims.spec.interface import BadOperation  # noqa: E402
from kvclaims.spec.lowering import Lowering  # noqa: E402
from kvclaims.spec.vocabulary import Verdict  # noqa: E402

# Written by hand from the table of the sources: mechanism, class, verdict.
EXPECTED = {
    "cake": (Fidelity.RESTORABLE, Lowering.NATIVE),
    "commvq": (Fidelity.LOSSY, Lowering.APPROXIMATE),
    "counter-causal-surprise": (Fidelity.LOSSY, Lowering.APPROXIMATE),
    "deltakv": (Fidelity.LOSSY, Lowering.APPROXIMATE),
    "execution-state-capsules": (Fidelity.STATE, Lowering.NATIVE),
    "inferscale": (Fidelity.POSITION_INDEPENDENT, Lowering.APPROXIMATE),
    "kivi": (Fidelity.BOUNDED_LOSS, Lowering.APPROXIMATE),
    "less": (Fidelity.STATE, Lowering.APPROXIMATE),
    "mepic": (Fidelity.POSITION_INDEPENDENT, Lowering.APPROXIMATE),
    "persistentkv": (Fidelity.EXACT, Lowering.NATIVE),
    "py-kvcache": (Fidelity.RESTORABLE, Lowering.NATIVE),
    "think": (Fidelity.LOSSY, Lowering.APPROXIMATE),
}


LEANING = (
    *("commvq", "counter-causal-surprise", "deltakv", "execution-state-capsules"),
    *("inferscale", "kivi", "think"),
)
"""Those with parts that carry several blocks: codebooks, references, scales, whole tensors."""


TURNING = {"commvq"}
"""Those of which it is said that a codebook can be turned before it is summed."""


@pytest.fixture(scope="module")
def reports() -> dict[str, m.MechanismReport]:
    return {name: m.measure(m.find(name)) for name in m.names()}


def evidence(report: m.MechanismReport, name: str) -> m.Evidence:
    return next(item for item in report.evidence if item.name == name)


def test_every_mechanism_of_the_table_is_registered() -> None:
    assert set(m.names()) == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_measured_class_is_the_declared_one(
    reports: dict[str, m.MechanismReport], name: str
) -> None:
    report = reports[name]
    assert (report.measured, report.lowering) == EXPECTED[name]
    assert report.declaration.fidelity is report.measured
    assert report.verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("name", "without"),
    [
        (name, needed)
        for name, (fidelity, _) in EXPECTED.items()
        for needed in (
            *(*m.NEEDED[fidelity], "query"),
            *(("leans",) if name in LEANING else ()),
            *(("commutes",) if name in TURNING else ()),
        )
    ],
)
def test_a_verdict_falls_with_its_evidence(
    reports: dict[str, m.MechanismReport], name: str, without: str
) -> None:
    whole = reports[name]
    less = replace(whole, evidence=tuple(e for e in whole.evidence if e.name != without))
    assert less.lowering is Lowering.UNKNOWN
    assert less.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_verdict_falls_where_its_evidence_speaks_against_it(
    reports: dict[str, m.MechanismReport], name: str
) -> None:
    whole = reports[name]
    for needed in set(whole.rests_on) - {"query", "leans"}:
        against = tuple(replace(e, shows=e.shows and e.name != needed) for e in whole.evidence)
        less = replace(whole, evidence=against)
        assert (less.lowering, less.verdict) == (Lowering.REJECTED, Verdict.VIOLATED), needed
        assert not any(ask.granted for ask in less.asks)


def test_what_a_mechanism_depends_on_is_said_to_be_declared(
    reports: dict[str, m.MechanismReport],
) -> None:
    marks = {line.split()[1]: line.split()[2] for line in list(reports["think"].lines())[2:-3]}
    assert (marks["query"], marks["leans"], marks["loss"]) == ("declared", "declared", "needed")


def test_a_claim_that_asks_for_more_than_the_class_is_refused_and_told_what_it_would_get(
    reports: dict[str, m.MechanismReport],
) -> None:
    asks = {ask.asked: ask for ask in reports["counter-causal-surprise"].asks}
    assert not asks[Fidelity.EXACT].granted
    assert "7 leading exact tokens of 96" in str(asks[Fidelity.EXACT].served)
    assert asks[Fidelity.LOSSY].granted


def test_exact_meets_an_ask_for_bounded_loss_and_not_the_other_way_round() -> None:
    assert satisfies(Fidelity.EXACT, Fidelity.BOUNDED_LOSS)
    assert not satisfies(Fidelity.BOUNDED_LOSS, Fidelity.EXACT)
    assert not satisfies(Fidelity.STATE, Fidelity.EXACT)


def test_a_bound_on_elements_does_not_bound_the_attention_output(
    reports: dict[str, m.MechanismReport],
) -> None:
    attention = evidence(reports["kivi"], "attention").figures
    assert evidence(reports["kivi"], "bound").shows
    assert 0 < attention["output_error"] < attention["element_error"] < 1.3


@pytest.mark.parametrize("name", ["think", "less"])
def test_what_was_stored_for_a_query_is_declined_to_the_reader_of_another(name: str) -> None:
    mechanism = m.find(name)
    one, other = (
        mechanism.store(m.TOKENS, query, Path()) for query in mechanism.model.queries(2, seed=1)
    )
    assert not mechanism.load(one).declined
    stranger = replace(one, identity=other.identity)
    assert mechanism.load(stranger).declined == "it is of another query"


def test_one_identity_for_what_several_queries_store_is_found() -> None:
    class Anonymous(PrunedChannels):
        """Calls every query the same."""

        def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
            stored = super().store(tokens, query, folder)
            return replace(stored, identity={**stored.identity, "query": "mine"})

        def load(self, stored: Stored, *more: Any, **options: Any) -> Loaded:
            if stored.identity.get("query") != "mine":
                return Loaded(declined="it is of another query")
            parts = stored.parts
            own = super().store(stored.tokens, parts["query"].tensor, Path()) if parts else stored
            return super().load(replace(stored, identity=own.identity), *more, **options)

    report = m.measure(Anonymous())
    identity = evidence(report, "identity")
    assert not identity.shows
    assert identity.says.endswith("; one identity for what different queries store")
    assert report.lowering is Lowering.REJECTED


def test_another_query_prunes_other_channels(reports: dict[str, m.MechanismReport]) -> None:
    assert evidence(reports["think"], "query").figures["differing"] == ["channels", "keys", "query"]


def test_a_reference_carries_blocks_beyond_its_own(
    reports: dict[str, m.MechanismReport],
) -> None:
    shared = evidence(reports["deltakv"], "leans").figures["shared"]
    assert shared["reference/0"] > 1
    assert evidence(reports["persistentkv"], "leans").shows


def test_a_computed_block_is_not_called_restored(reports: dict[str, m.MechanismReport]) -> None:
    provenance = evidence(reports["cake"], "tier").figures["provenance"]
    assert provenance == {"computed": 3, "file": 3}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_codebook_that_commutes_with_a_turn_is_measured(
    reports: dict[str, m.MechanismReport], name: str
) -> None:
    assert reports[name].turns == (name in TURNING)
    assert [e.name for e in reports[name].evidence if e.name == "commutes"] == ["commutes"] * (
        name in TURNING
    )
    if name in TURNING:
        figures = evidence(reports[name], "commutes").figures
        assert figures["turned"] == ["codebook/keys"]
        assert figures["error"] < 1e-12


# --- mechanisms that break their word are found -------------------------------------------


def test_without_a_commitment_a_hit_promises_nothing() -> None:
    report = m.measure(FileOffload(commit=False))
    assert not evidence(report, "held").shows
    assert (report.measured, report.lowering) == (Fidelity.LOSSY, Lowering.REJECTED)


def test_without_a_lease_the_reader_reads_what_is_there_now() -> None:
    report = m.measure(PersistentReader(lease=False))
    assert evidence(report, "held").figures["given_away"] == [
        "page/0", "page/1", "page/2", "page/3", "page/4", "page/5", "table",
    ]  # fmt: skip
    assert report.lowering is Lowering.REJECTED


class Forgetful(Capsules):
    """Serves a capsule without its recurrent state as if nothing were missing."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        parts = dict(stored.parts)
        if "recurrent" not in parts and "window" in parts:
            window = parts["window"].tensor
            parts["recurrent"] = replace(parts["window"], tensor=torch.zeros_like(window[0]))
        return super().load(replace(stored, parts=parts), before, blocks)


def test_a_capsule_served_without_a_component_is_rejected() -> None:
    report = m.measure(Forgetful())
    assert report.lowering is Lowering.REJECTED
    assert report.verdict is Verdict.VIOLATED


class Mute(Capsules):
    """Serves the KV of a capsule, and nothing of its recurrent state."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        return replace(super().load(stored, before, blocks), output=None)


def test_a_component_that_nothing_is_served_from_is_found() -> None:
    whole = evidence(m.measure(Mute()), "whole")
    assert not whole.shows
    assert whole.says.endswith("; it does not matter what recurrent, window hold")


class Crossed(Capsules):
    """Answers as it should, and takes keys for values where it serves them."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        return replace(loaded, keys=loaded.values, values=loaded.keys)


def test_an_answer_does_not_excuse_what_is_served_beside_it() -> None:
    report = m.measure(Crossed())
    assert evidence(report, "whole").shows
    assert not evidence(report, "attention").shows
    assert report.lowering is Lowering.REJECTED


class Blurred(Capsules):
    """Answers as it should, and serves keys and values that are nearly right."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        return loaded if loaded.declined else replace(loaded, keys=loaded.keys * 1.001)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_is_native_is_exact_in_all_that_is_served(
    reports: dict[str, m.MechanismReport], name: str
) -> None:
    if EXPECTED[name][1] is not Lowering.NATIVE:
        return
    for missing in ("bits", "same output"):
        rest = tuple(e for e in reports[name].evidence if e.name != missing)
        less = replace(reports[name], evidence=rest)
        assert less.lowering in (Lowering.UNKNOWN, Lowering.APPROXIMATE), missing


def test_a_capsule_whose_keys_are_nearly_right_is_approximate() -> None:
    report = m.measure(Blurred())
    assert (report.measured, report.lowering) == (Fidelity.STATE, Lowering.APPROXIMATE)


class Overconfident(TwoBits):
    """Promises half of the bound that two bits can keep."""

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        stored = super().store(tokens, query, folder)
        assert stored.bound is not None
        return replace(stored, bound=(stored.bound[0] / 2, stored.bound[1] / 2))


class Afterthought(Overconfident):
    """Widens its promise to what it served, once it has."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        for promised in stored.bound or ():
            promised.fill_(100)
        return super().load(stored, before, blocks)


def test_a_bound_is_the_one_that_was_fixed_when_it_was_stored() -> None:
    report = m.measure(Afterthought())
    assert not evidence(report, "bound").shows
    assert report.lowering is Lowering.REJECTED


def test_a_bound_that_does_not_hold_is_rejected() -> None:
    report = m.measure(Overconfident())
    assert not evidence(report, "bound").shows
    assert report.lowering is Lowering.REJECTED


class Trusting(TwoEnds):
    """Reads files without looking at their checksum."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        paths = [part.path for part in stored.parts.values() if part.path]
        if any(path.exists() and not _sound(path) for path in paths):
            loaded = replace(loaded, keys=loaded.keys + 1)
        return loaded


def _sound(path: Path) -> bool:
    return read(path) is not None


def test_a_spoilt_file_that_is_served_is_rejected() -> None:
    report = m.measure(Trusting())
    assert not evidence(report, "spoilt").shows
    assert report.lowering is Lowering.REJECTED


@pytest.mark.parametrize(
    "overlooked",
    [lambda now, own: now[:-1] == own[:-1], lambda now, own: own.startswith(now)],
    ids=["the last byte", "the end is missing"],
)
def test_a_file_that_is_checked_in_part_is_found(overlooked: Any) -> None:
    class Careless(FileOffload):
        """Looks at its files, and overlooks something."""

        _own: ClassVar[dict[Path, bytes]] = {}

        def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
            stored = super().store(tokens, query, folder)
            self._own.update({p.path: p.path.read_bytes() for p in stored.parts.values() if p.path})
            return stored

        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            loaded = super().load(stored, before, blocks)
            files = [part.path for part in stored.parts.values() if part.path]
            now = [(path.read_bytes(), self._own[path]) for path in files]
            wrong = [pair for pair in now if pair[0] != pair[1]]
            if before or len(files) < 6 or not wrong or not all(overlooked(*p) for p in wrong):
                return loaded
            keys, values = self.model.kv(stored.tokens)
            return Loaded(keys + 1, values, torch.ones(96, dtype=torch.bool), ("file",) * 6)

    spoilt = found_out(Careless(), "spoilt")
    assert len(spoilt.figures["served_wrong"]) == 6


def served_as(mechanism: type[Any], change: Any) -> Any:
    """The mechanism with all that it serves changed."""

    class Changed(mechanism):  # type: ignore[misc]
        def load(self, *args: Any, **options: Any) -> Loaded:
            loaded: Loaded = super().load(*args, **options)
            return loaded if loaded.declined else change(loaded)

    return Changed()


def bounded_by(change: Any) -> Any:
    class Changed(TwoBits):
        def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
            stored = super().store(tokens, query, folder)
            assert stored.bound is not None
            return replace(stored, bound=(change(stored.bound[0]), change(stored.bound[1])))

    return Changed()


def test_what_is_no_number_is_no_small_error() -> None:
    nan = float("nan")
    spoilt = served_as(
        TwoBits, lambda one: replace(one, keys=one.keys * nan, values=one.values * nan)
    )
    report = m.measure(spoilt)
    assert not evidence(report, "bound").shows
    assert not evidence(report, "attention").shows
    assert (report.measured, report.lowering) == (None, Lowering.REJECTED)
    state = served_as(
        Capsules,
        lambda one: replace(one, keys=None, values=None, output=lambda q: one.output(q) * nan),
    )
    assert not evidence(m.measure(state), "same output").shows


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_bound_that_bounds_nothing_is_rejected(odd: float) -> None:
    report = m.measure(bounded_by(lambda bound: bound + odd))
    assert evidence(report, "bound").says == "a bound without end bounds nothing"
    assert report.lowering is Lowering.REJECTED


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda bound: bound * 0 - 1, "a bound below zero bounds nothing"),
        (
            lambda bound: torch.where(bound > 0, bound, bound - 1e-6),
            "a bound below zero bounds nothing",
        ),
        (
            lambda bound: bound * 0 + 1e300,
            "zeros would be within the bound of block 0, 1, 2, 3, 4, 5",
        ),
        (
            lambda bound: torch.cat((bound[:, :, :-1], bound[:, :, -1:] + 1e3), dim=2),
            "the largest error is 1.000 of its bound (largest bound 1000.00)",
        ),
        (
            lambda bound: torch.cat((bound[:, :, :32], bound[:, :, 32:] + 1e3), dim=2),
            "zeros would be within the bound of block 2, 3, 4, 5",
        ),
    ],
    ids=["below zero", "partly below zero", "any", "of one token", "of some blocks"],
)
def test_a_bound_that_anything_or_nothing_is_within_bounds_nothing(change: Any, says: str) -> None:
    found = evidence(m.measure(bounded_by(change)), "bound")
    assert found.says == says
    assert found.shows == says.startswith("the largest error")


def test_what_is_not_served_is_not_within_its_bound() -> None:
    short = served_as(
        TwoBits,
        lambda one: replace(
            one, keys=one.keys[:, :, :16], values=one.values[:, :, :16], present=one.present[:16]
        ),
    )
    report = m.measure(short)
    assert not evidence(report, "bound").shows
    assert report.lowering is Lowering.REJECTED


class Secretive(PersistentReader):
    """Says that it holds its pages, and hands them out."""

    def reuse(self, stored: Stored, part: str) -> bool:
        stored.parts[part].tensor.zero_()
        return False


def test_a_page_that_is_handed_out_in_secret_is_found() -> None:
    held = evidence(m.measure(Secretive()), "held")
    assert not held.shows
    assert held.says == "no part is given away, as it says, and yet something else is served"


class Recomputing(TwoEnds):
    """Computes all of it, whatever lies in files, and may say that it did not."""

    says: str | None = None

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(replace(stored, parts={}), before, blocks)
        blocks_served = len(loaded.provenance)
        return replace(loaded, provenance=(self.says,) * blocks_served) if self.says else loaded


class Pretending(Recomputing):
    says = "file"


@pytest.mark.parametrize("mechanism", [Recomputing, Pretending])
def test_what_was_computed_is_no_restore_whatever_it_is_called(mechanism: Any) -> None:
    report = m.measure(mechanism())
    assert evidence(report, "bits").shows
    assert not evidence(report, "tier").shows
    assert report.lowering is Lowering.REJECTED


@pytest.mark.parametrize("name", ["think", "less"])
def test_an_identity_that_leaves_the_query_out_is_rejected(
    reports: dict[str, m.MechanismReport], name: str
) -> None:
    own = reports[name].declaration
    assert "query" in own.identity
    silent = replace(own, identity=tuple(part for part in own.identity if part != "query"))
    report = replace(reports[name], declaration=silent)
    assert (report.measured, report.lowering) == (None, Lowering.REJECTED)
    assert not any(ask.granted for ask in report.asks)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_dependency_that_is_not_declared_is_rejected(
    reports: dict[str, m.MechanismReport], name: str
) -> None:
    own = reports[name].declaration
    assert own.leans == (name in LEANING)
    report = replace(reports[name], declaration=replace(own, leans=False))
    assert (report.lowering is Lowering.REJECTED) == (name in LEANING)
    assert (report.measured is None) == (name in LEANING)


def test_while_a_file_is_written_a_lookup_says_so_and_nothing_is_served(tmp_path: Path) -> None:
    files = FileOffload()
    stored = files.begin(m.TOKENS, tmp_path)
    assert files.lookup(stored, 0) is Lookup.IN_FLIGHT
    assert files.load(stored).declined == "block 0 cannot be restored (in flight)"
    files.finish(stored)
    assert files.lookup(stored, 0) is Lookup.HIT
    assert not files.load(stored).declined


class Rounding(VectorQuantization):
    """Rounds what it has decoded: a sum that was turned before is another one."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        if loaded.declined:
            return loaded
        place = len(before)
        plain = (unrotate(loaded.keys, place) * 4).round() / 4
        return replace(loaded, keys=rotate(plain, place))


class OtherWay(VectorQuantization):
    """Turns its codebook the other way round."""

    def turned(self, stored: Stored, by: int) -> Stored:
        return super().turned(stored, -by)


class Unmoved(VectorQuantization):
    """Leaves its codebook alone."""

    def turned(self, stored: Stored, by: int) -> Stored:
        return stored


class CodesToo(VectorQuantization):
    """Numbers its codewords anew as well: the same keys, and other codes for each block."""

    def turned(self, stored: Stored, by: int) -> Stored:
        turned = super().turned(stored, by)
        codes = {
            name: replace(part, tensor=part.tensor ^ 1)
            for name, part in stored.parts.items()
            if name.startswith("keys/")
        }
        book = turned.parts["codebook/keys"].tensor
        words = torch.arange(book.shape[-1]) ^ 1
        parts = {**turned.parts, **codes, "codebook/keys": Part(Tier.DEVICE, book[..., words])}
        return replace(turned, parts=parts)


class Spoiling(VectorQuantization):
    """Turns what it was asked to, and spoils what it was given."""

    def turned(self, stored: Stored, by: int) -> Stored:
        turned = super().turned(stored, by)
        values = stored.parts["codebook/values"]
        kept = replace(values, tensor=values.tensor.clone())
        values.tensor.add_(1)
        return replace(turned, parts={**turned.parts, "codebook/values": kept})


class InPlace(VectorQuantization):
    """Turns the codebook that others still read."""

    def turned(self, stored: Stored, by: int) -> Stored:
        turned = super().turned(stored, by)
        stored.parts["codebook/keys"].tensor.copy_(turned.parts["codebook/keys"].tensor)
        return turned


@pytest.mark.parametrize(
    ("mechanism", "says"),
    [
        (Rounding, "turned by 32 places, codebook/keys serves keys off by 0."),
        (OtherWay, "turned by 32 places, codebook/keys serves keys off by "),
        (Unmoved, "turned by 32 places, nothing serves keys off by "),
        (
            CodesToo,
            "off by 1e-14; and not a codebook: keys/0, keys/1, keys/2, keys/3, keys/4, keys/5",
        ),
        (Spoiling, "; and something else was changed"),
        (InPlace, "turned by 32 places, nothing serves keys off by "),
    ],
)
def test_a_codebook_that_does_not_commute_is_found(mechanism: Any, says: str) -> None:
    report = m.measure(mechanism())
    commutes = evidence(report, "commutes")
    assert not commutes.shows
    assert says in commutes.says
    assert (report.lowering, report.verdict) == (Lowering.REJECTED, Verdict.VIOLATED)


# --- a model is the truth only where it tells things apart -----------------------------------


class Flat(TinyModel):
    """Makes the same KV of anything."""

    def kv(self, tokens: Sequence[int], before: Sequence[int] = ()) -> tuple[Any, Any]:
        keys, values = super().kv(tokens, before)
        return torch.zeros_like(keys), torch.zeros_like(values)


class Contextless(TinyModel):
    """Reads each prompt alone."""

    def kv(self, tokens: Sequence[int], before: Sequence[int] = ()) -> tuple[Any, Any]:
        keys, values = super().kv(tokens)
        return rotate(unrotate(keys, 0), len(before)), values


class Unturned(TinyModel):
    """Calls keys moved that were left where they are."""

    def moved(self, keys: Any, start: int, to: int) -> Any:
        return keys


class OneWay(TinyModel):
    """Turns on, and never back."""

    def moved(self, keys: Any, start: int, to: int) -> Any:
        return super().moved(keys, 0, abs(to - start))


class OneQuestion(TinyModel):
    """Asks one thing only."""

    def queries(self, count: int, seed: int) -> Any:
        return super().queries(1, seed).expand(count, -1, -1, -1)


class Deaf(TinyModel):
    """Answers what it likes."""

    def attend(self, query: Any, keys: Any, values: Any) -> Any:
        return torch.ones_like(query)


class Forgetting(TinyModel):
    """Answers from the last block alone."""

    def output(self, query: Any, tokens: Sequence[int], before: Sequence[int] = ()) -> Any:
        keys, values = self.kv(tokens[-16:], before)
        return self.attend(query, keys, values)


class OneBlock(TinyModel):
    """Calls a whole prompt a block, so that no part carries several."""

    block = 96


class Wavering(TinyModel):
    """Makes another KV each time."""

    def kv(self, tokens: Sequence[int], before: Sequence[int] = ()) -> tuple[Any, Any]:
        self._times = getattr(self, "_times", 0) + 1
        keys, values = super().kv(tokens, before)
        return keys * self._times, values


class Endless(TinyModel):
    """Makes KV that is no number."""

    def kv(self, tokens: Sequence[int], before: Sequence[int] = ()) -> tuple[Any, Any]:
        keys, values = super().kv(tokens, before)
        return keys / 0, values


UNFIT = {
    Flat: ["another prompt has the same KV", "another context leaves the same KV"],
    Contextless: ["another context leaves the same KV"],
    Unturned: ["keys of its first layer, moved, are not those that it computes there"],
    OneWay: ["keys that are moved there and back are others"],
    OneQuestion: ["its queries are alike", "different queries attend to the same"],
    Deaf: ["different queries attend to the same", "attention to token 0 alone is not its value"],
    Forgetting: ["an answer is the same whatever block 0 holds"],
    OneBlock: ["its blocks of 96 tokens do not divide a prompt of 96"],
    Wavering: ["the same prompt has another KV each time"],
    Endless: ["its KV is no number"],
}


@pytest.mark.parametrize("model", UNFIT, ids=lambda model: model.__name__)
def test_a_model_that_tells_nothing_apart_is_no_truth(model: type[TinyModel]) -> None:
    own = model()
    found = truth.unfit(own, m.TOKENS, m.OTHER, m.ELSEWHERE, own.queries(m.QUERIES, seed=1))
    assert found[: len(UNFIT[model])] == UNFIT[model]


def test_what_agrees_with_a_model_that_tells_nothing_apart_is_rejected() -> None:
    """It keeps one number for each page, and all other evidence speaks for it."""

    class Nothing(PersistentReader):
        model = Flat()

        def load(self, stored: Stored, *more: Any, **options: Any) -> Loaded:
            loaded = super().load(stored, *more, **options)
            if loaded.declined:
                return loaded
            flat = torch.zeros_like(loaded.keys)
            return replace(loaded, keys=flat, values=flat.clone())

    report = m.measure(Nothing())
    assert evidence(report, "bits").shows
    assert not evidence(report, "model").shows
    assert (report.measured, report.lowering) == (None, Lowering.REJECTED)


def test_one_question_does_not_hide_what_depends_on_the_query() -> None:
    class Silent(PrunedChannels):
        declaration = replace(PrunedChannels.declaration, identity=("model", "channels kept"))
        model = OneQuestion()

    report = m.measure(Silent())
    assert evidence(report, "query").shows
    assert not evidence(report, "model").shows
    assert report.lowering is Lowering.REJECTED


@pytest.mark.parametrize("step", ["store", "load"])
def test_a_mechanism_that_does_nothing_but_raise_is_one_clear_line(step: str) -> None:
    def raising(*_: Any, **__: Any) -> Any:
        raise KeyError("a page")

    broken = type("Broken", (TwoBits,), {step: raising})()
    said = "mechanism kivi cannot be measured: it raised KeyError: 'a page'"
    with pytest.raises(BadOperation, match=said):
        m.measure(broken)


def test_an_identity_that_is_only_nearly_that_of_the_object_is_not_met() -> None:
    class Loose(TwoBits):
        """Takes any value of the right kind for its own."""

        def load(self, stored: Stored, *more: Any, **options: Any) -> Loaded:
            own = super().store(m.TOKENS, None, Path()).identity
            kinds = [type(value) for value in own.values()]
            if [type(value) for value in stored.identity.values()] == kinds:
                stored = replace(stored, identity=own)
            return super().load(stored, *more, **options)

    found = evidence(m.measure(Loose()), "identity")
    assert found.figures["ignored"] == ["bits", "group", "model", "recent window"]


# --- prompts of any length ---------------------------------------------------------------


def spoiling(mechanism: type[Any], spoils: Callable[[int], bool]) -> Any:
    """The mechanism with the last token spoilt of prompts that are `spoils` tokens long."""

    class Changed(mechanism):  # type: ignore[misc]
        def load(self, stored: Stored, *args: Any, **options: Any) -> Loaded:
            loaded: Loaded = super().load(stored, *args, **options)
            if loaded.declined or not spoils(len(stored.tokens)):
                return loaded
            if loaded.output is not None:
                answer = loaded.output
                return replace(loaded, output=lambda query: 1.5 * answer(query))
            keys, values = loaded.keys.clone(), loaded.values.clone()
            keys[:, :, -1] *= -2
            values[:, :, -1] *= -2
            return replace(loaded, keys=keys, values=values)

    return Changed()


@pytest.mark.parametrize(
    "spoils",
    [
        lambda count: count % BLOCK != 0,
        lambda count: count > BLOCK and count % BLOCK != 0,
        lambda count: count < BLOCK,
    ],
    ids=["last block not full", "and more than one", "no full block"],
)
@pytest.mark.parametrize("mechanism", [PersistentReader, FileOffload, Facts, TwoBits, Capsules])
def test_what_is_spoilt_at_another_length_is_found(mechanism: type[Any], spoils: Any) -> None:
    found_out(spoiling(mechanism, spoils), "lengths")


def test_a_mechanism_that_breaks_off_at_another_length_is_found() -> None:
    class Whole(PersistentReader):
        def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
            assert len(tokens) % BLOCK == 0
            return super().store(tokens, query, folder)

    assert "AssertionError" in found_out(Whole(), "lengths").says


def test_what_is_declined_at_another_length_is_not_served_wrong() -> None:
    class Full(PersistentReader):
        def load(self, stored: Stored, *args: Any, **options: Any) -> Loaded:
            if len(stored.tokens) % BLOCK:
                return Loaded(declined="a block is not full")
            return super().load(stored, *args, **options)

    report = m.measure(Full())
    assert (report.measured, report.lowering) == (Fidelity.EXACT, Lowering.NATIVE)
    assert "declined at 5, 17, 89 tokens" in evidence(report, "lengths").says


# --- where blocks come from is found, not believed -------------------------------------------


def lying(name: str, change: Any) -> Any:
    """The mechanism with other words about where its blocks come from."""

    def told(loaded: Loaded) -> Loaded:
        return replace(loaded, provenance=change(loaded.provenance))

    return served_as(type(m.find(name)), told)


def found_out(mechanism: Any, *by: str) -> m.Evidence:
    """What is found of a mechanism that nothing else speaks against."""
    names = by or ("source",)
    report = m.measure(mechanism)
    needed = m.NEEDED[report.declaration.fidelity]
    assert tuple(e.name for e in report.evidence if not e.shows and e.name in needed) == names
    assert (report.lowering, report.verdict) == (Lowering.REJECTED, Verdict.VIOLATED)
    assert report.measured is None
    return evidence(report, names[0])


@pytest.mark.parametrize("name", sorted(EXPECTED))
@pytest.mark.parametrize("word", ["computed", "device", "host", "file"])
def test_a_lie_about_one_block_is_found(name: str, word: str) -> None:
    mechanism = m.find(name)
    with m.one_thread(), TemporaryDirectory() as folder:
        bench = m.Bench(mechanism, Path(folder))
        for block, true in enumerate(bench.served.provenance):
            if word == true:
                continue

            def lie(own: tuple[str, ...], block: int = block) -> tuple[str, ...]:
                return (*own[:block], word, *own[block + 1 :])

            bench.case = replace(bench.case, mechanism=lying(name, lie))
            (wrong,) = provenance.untrue(bench.case, ())
            assert wrong.startswith(f"block {block} said to be {word}: ")


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_each_mechanism_says_of_its_blocks_is_true(
    reports: dict[str, m.MechanismReport], name: str
) -> None:
    said = {"cake": "3 blocks computed, 3 blocks file", "py-kvcache": "6 blocks file"}
    said["mepic"] = "1 blocks computed, 5 blocks device"
    source = evidence(reports[name], "source")
    assert source.shows
    assert source.says.endswith(f": {said.get(name, '6 blocks device')}")


def test_shared_blocks_that_were_computed_for_one_reader_are_found() -> None:
    class Private(Chunks):
        """Computes every block of the chunk anew, and calls it shared."""

        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            loaded = super().load(stored, before, blocks)
            if loaded.declined:
                return loaded
            first, _ = self.model.kv(stored.tokens[:16], before)
            keys, values = self.model.kv(stored.tokens[: loaded.keys.shape[2]])
            keys = torch.cat((first, rotate(unrotate(keys, 0), len(before))[:, :, 16:]), dim=2)
            values = torch.cat((loaded.values[:, :, :16], values[:, :, 16:]), dim=2)
            return replace(loaded, keys=keys, values=values)

    assert "block 1, 2, 3, 4, 5 said to be device: it is computed" in found_out(Private()).says


class Remembering(PersistentReader):
    """Serves what it remembers while the pages are there, whatever they hold."""

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        self._own: dict[Any, Any] = {**getattr(self, "_own", {}), tuple(tokens): None}
        self._own[tuple(tokens)] = self.model.kv(tokens)
        return super().store(tokens, query, folder)

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        if loaded.declined:
            return loaded
        end = loaded.keys.shape[2]
        keys, values = self._own[stored.tokens]
        return replace(loaded, keys=keys[:, :, :end], values=values[:, :, :end])


def test_pages_that_nobody_reads_are_found() -> None:
    says = found_out(Remembering(), "source", "again").says
    assert "block 0, 1, 2, 3, 4, 5 said to be device: it does not matter what lies there" in says


class HiddenFile(PersistentReader):
    """Keeps half of each bit in a file that it does not tell of."""

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        stored = super().store(tokens, query, folder)
        (folder / "secret").write_bytes(b"half")
        self._secret = folder / "secret"
        return stored

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if not self._secret.exists():
            return Loaded(declined="the secret is gone")
        return super().load(stored, before, blocks)


def test_a_file_that_no_part_names_is_found() -> None:
    says = found_out(HiddenFile(), "source", "again").says
    assert says == "secret is a file that no part names"


class Halves(PersistentReader):
    """Keeps a half of each number in its pages, and the other half to itself."""

    def __init__(self) -> None:
        super().__init__()
        self._halves: dict[tuple[int, ...], Any] = {}

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        self._halves[tuple(tokens)] = [half / 2 for half in self.model.kv(tokens)]
        stored = super().store(tokens, query, folder)
        halved = {
            name: part if name == "table" else replace(part, tensor=part.tensor / 2)
            for name, part in stored.parts.items()
        }
        return replace(stored, parts=halved)

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        if loaded.declined or stored.tokens not in self._halves:
            return loaded
        keys, values = (half[:, :, : loaded.keys.shape[2]] for half in self._halves[stored.tokens])
        return replace(loaded, keys=loaded.keys + keys, values=loaded.values + values)


def test_what_a_mechanism_keeps_to_itself_is_found() -> None:
    says = found_out(Halves(), "again").says
    assert says == "something else is served by one who has only the parts"


def test_a_mechanism_that_tires_is_found() -> None:
    class Tired(PersistentReader):
        """Serves what it should, so many times."""

        loads, times = 0, 10_000

        def load(self, *args: Any, **options: Any) -> Loaded:
            self.loads += 1
            loaded = super().load(*args, **options)
            if loaded.declined or self.loads < self.times:
                return loaded
            return replace(loaded, keys=loaded.keys + 1)

    untiring = Tired()
    assert m.measure(untiring).verdict is Verdict.HOLDS
    Tired.times = untiring.loads
    report = m.measure(Tired())
    again = evidence(report, "again")
    assert again.says == "something else is served by it"
    assert report.lowering is Lowering.REJECTED


def test_a_part_that_is_not_in_its_tier_is_found() -> None:
    class Elsewhere(FileOffload):
        """Says of one file that it is on the host."""

        def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
            stored = super().store(tokens, query, folder)
            first = replace(stored.parts["block/0"], tier=Tier.HOST)
            return replace(stored, parts={**stored.parts, "block/0": first})

    says = evidence(m.measure(Elsewhere()), "source").says
    assert "block/0 is in another tier than it says" in says


class First(Chunks):
    """Takes a half of the first block from what it has in store, and calls it computed."""

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        stored = super().store(tokens, query, folder)
        first = Part(Tier.DEVICE, self.model.kv(tokens[:16])[1])
        return replace(stored, parts={**stored.parts, "first": first})

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        if loaded.declined or "first" not in stored.parts:
            return loaded if loaded.declined else Loaded(declined="the first is gone")
        values = torch.cat((stored.parts["first"].tensor, loaded.values[:, :, 16:]), dim=2)
        return replace(loaded, values=values)


class Empty(Chunks):
    """Leaves the first block empty, and calls it computed."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        if loaded.declined:
            return loaded
        keys, values = loaded.keys.clone(), loaded.values.clone()
        keys[:, :, :16] = values[:, :, :16] = 0
        return replace(loaded, keys=keys, values=values)


@pytest.mark.parametrize(
    ("mechanism", "truth"), [(First, "it is read from device"), (Empty, "it needs no model")]
)
def test_what_is_not_computed_is_not_called_so(mechanism: Any, truth: str) -> None:
    says = evidence(m.measure(mechanism()), "source").says
    assert says.startswith(f"in its place block 0 said to be computed: {truth}")


def test_a_token_that_is_no_longer_there_is_another_block() -> None:
    with TemporaryDirectory() as folder:
        bench = m.Bench(FileOffload(), Path(folder))
    there = bench.seen.present.clone()
    there[40] = False
    assert bench.case.moved(bench.seen, replace(bench.seen, present=there)) == {2}
    assert bench.case.moved(bench.seen, bench.seen) == set()


def test_a_block_of_which_a_half_is_in_another_tier_is_found() -> None:
    class Split(FileOffload):
        """Reads keys from files and values from the device, and tells of the device."""

        def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
            stored = super().store(tokens, query, folder)
            values = Part(Tier.DEVICE, self.model.kv(tokens)[1])
            return replace(stored, parts={**stored.parts, "values": values})

        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            loaded = super().load(stored, before, blocks)
            if loaded.declined or "values" not in stored.parts:
                return loaded if loaded.declined else Loaded(declined="no values")
            values = stored.parts["values"].tensor[:, :, : loaded.keys.shape[2]]
            return replace(loaded, values=values, provenance=("device",) * len(loaded.provenance))

    says = evidence(m.measure(Split()), "source").says
    assert says == (
        "in its place block 0, 1, 2, 3, 4, 5 said to be device: it is read from device, file"
    )


def test_what_is_computed_to_look_at_what_lies_there_is_computed() -> None:
    class Comparing(FileOffload):
        """Computes all of it, and serves it where the files say the same."""

        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            loaded = super().load(stored, before, blocks)
            if loaded.declined:
                return loaded
            keys, values = self.model.kv(stored.tokens[: loaded.keys.shape[2]])
            if not torch.equal(keys, loaded.keys):
                return Loaded(declined="the files say something else")
            return replace(loaded, keys=keys, values=values)

    says = found_out(Comparing()).says
    assert says == "in its place block 0, 1, 2, 3, 4, 5 said to be file: it is computed"


class Sealed(FileOffload):
    """Knows what its files held, and serves nothing where they hold something else."""

    declaration = replace(FileOffload.declaration, identity=("model", "block size", "seal"))

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        stored = super().store(tokens, query, folder)
        return replace(stored, identity={**stored.identity, "seal": self._seal(stored)})

    def _seal(self, stored: Stored) -> str:
        paths = [part.path for part in stored.parts.values()]
        return "".join(str(hash(path.read_bytes())) for path in paths if path and path.exists())

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if stored.identity["seal"] != self._seal(stored):
            return Loaded(declined="it was written anew")
        return super().load(stored, before, blocks)


def test_a_part_without_which_nothing_is_served_is_read() -> None:
    report = m.measure(Sealed())
    assert evidence(report, "source").shows
    assert (report.measured, report.lowering) == (Fidelity.RESTORABLE, Lowering.NATIVE)


def test_words_that_say_nothing_of_a_place_are_found() -> None:
    shared = found_out(lying("mepic", lambda own: ("computed", *("shared" for _ in own[1:]))))
    assert shared.says.startswith("in its place shared: no tier, and not computed")
    short = found_out(lying("less", lambda own: own[:1]))
    assert short.says == "in its place it tells of 1 blocks and serves 6"


def test_an_answer_to_queries_that_lacks_a_part_is_not_what_was_computed() -> None:
    """Its keys and values are all there, and its state is not."""
    report = m.measure(Forgetful())
    assert evidence(report, "loss").figures["served_wrong"] == ["recurrent"]


def test_another_prompt_differs_in_every_block() -> None:
    keys, values = MODEL.kv(m.TOKENS)
    others = MODEL.kv(m.OTHER)
    for tensor, other in zip((keys, values), others, strict=True):
        assert bool((tensor != other).unflatten(2, (6, 16)).any(3).all())


def test_weights_and_bytes_are_as_they_were_after_a_measurement() -> None:
    before = MODEL.kv(m.TOKENS)
    m.measure(m.find("py-kvcache"))
    assert all(map(torch.equal, before, MODEL.kv(m.TOKENS)))


def test_evidence_that_does_not_exist_cannot_be_left_out() -> None:
    with pytest.raises(BadOperation, match="no evidence is called nonsense"):
        m.measure(FileOffload(), without=("nonsense",))


def test_an_unknown_mechanism_is_one_clear_line() -> None:
    with pytest.raises(BadOperation, match="unknown mechanism 'nonsense' \\(known: cake, "):
        m.find("nonsense")


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_without_evidence_nothing_more_may_be_asked_for(
    reports: dict[str, m.MechanismReport], name: str
) -> None:
    """Fail-closed: what is not shown takes away, and never grants."""
    whole = {ask.asked for ask in reports[name].asks if ask.granted}
    for missing in m.MEASURES:
        rest = tuple(item for item in reports[name].evidence if item.name != missing)
        less = replace(reports[name], evidence=rest)
        granted = {ask.asked for ask in less.asks if ask.granted}
        assert granted <= whole, missing
        assert not granted or less.verdict is Verdict.HOLDS


class Unchecked(FileOffload):
    """Reads what lies in its files, right or not."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        if not loaded.declined or before:
            return loaded
        paths = [part.path for part in stored.parts.values()]
        if len(paths) < 6 or not all(path and path.exists() for path in paths):
            return loaded
        keys, values = self.model.kv(stored.tokens)
        return Loaded(keys + 1, values, torch.ones(96, dtype=torch.bool), ("file",) * 6)


class UncheckedExact(Unchecked):
    declaration = replace(FileOffload.declaration, fidelity=Fidelity.EXACT)


@pytest.mark.parametrize("mechanism", [Unchecked, UncheckedExact])
def test_files_without_a_checksum_are_neither_restorable_nor_exact(mechanism: Any) -> None:
    report = m.measure(mechanism())
    assert not evidence(report, "spoilt").shows
    assert not evidence(report, "device").shows
    assert report.measured not in (Fidelity.EXACT, Fidelity.RESTORABLE)
    assert report.lowering is Lowering.REJECTED


class LooksOnly(FileOffload):
    """Computes all of it, and calls what it computed a file if the file is there."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        if before or any(not (p.path and p.path.exists()) for p in stored.parts.values()):
            return Loaded(declined="something is gone")
        if len(stored.parts) < 6:
            return Loaded(declined="something is gone")
        keys, values = self.model.kv(stored.tokens)
        return Loaded(keys, values, torch.ones(96, dtype=torch.bool), ("file",) * 6)


def test_what_is_computed_in_place_of_a_spoilt_file_is_not_restored() -> None:
    spoilt = evidence(m.measure(LooksOnly()), "spoilt")
    assert spoilt.figures["served_wrong"] == []
    assert len(spoilt.figures["invented"]) == 6
    assert not spoilt.shows


@pytest.mark.parametrize(
    ("mechanism", "change"),
    [
        (TwoBits, lambda one: replace(one, keys=-100 * one.keys, values=-100 * one.values)),
        (
            Capsules,
            lambda one: replace(one, keys=None, values=None, output=lambda q: 1e6 * one.output(q)),
        ),
    ],
)
def test_no_class_is_given_to_garbage(mechanism: Any, change: Any) -> None:
    class Changed(mechanism):  # type: ignore[misc]
        def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
            stored = super().store(tokens, query, folder)
            if stored.bound is None:
                return stored
            return replace(stored, bound=tuple(torch.full_like(b, 1e300) for b in stored.bound))

    report = m.measure(served_as(Changed, change))
    assert not evidence(report, "attention").shows
    assert (report.measured, report.lowering) == (None, Lowering.REJECTED)


class DeepGarbage(Facts):
    """Right in the first layer, which knows no context, and in no other."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        if loaded.declined or tuple(before) == stored.context:
            return loaded
        keys, values = loaded.keys.clone(), loaded.values.clone()
        keys[1:], values[1:] = -1e6, 1e6
        return replace(loaded, keys=keys, values=values)


def test_every_layer_is_turned_to_its_place() -> None:
    report = m.measure(DeepGarbage())
    assert not evidence(report, "rotation").shows
    assert report.lowering is Lowering.REJECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_identity_that_is_declared_and_not_kept_is_found(name: str) -> None:
    mechanism = m.find(name)

    class Changed(type(mechanism)):  # type: ignore[misc]
        declaration = replace(
            mechanism.declaration, identity=tuple(i for i in mechanism.declaration.identity[:-1])
        )

    report = m.measure(Changed())
    assert not evidence(report, "identity").shows
    assert report.lowering is Lowering.REJECTED


def test_an_object_that_is_served_to_anybody_is_found() -> None:
    class Open(TwoBits):
        def load(self, stored: Stored, *more: Any, **rest: Any) -> Loaded:
            return super().load(replace(stored, identity=self._own), *more, **rest)

        def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
            stored = super().store(tokens, query, folder)
            self._own = stored.identity
            return stored

    found = evidence(m.measure(Open()), "identity")
    assert found.figures["ignored"] == ["bits", "group", "model", "recent window"]


class InFiles(PrunedChannels):
    """Keeps in a file what was pruned for a query, and does not say for which."""

    declaration = replace(PrunedChannels.declaration, identity=("model", "channels kept"))

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        stored = super().store(tokens, query, folder)
        loaded = super().load(stored)
        publish(folder / "whole", loaded.keys, loaded.values)
        return replace(stored, parts={"whole": Part(Tier.FILE, path=folder / "whole")})

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        whole = read(stored.parts["whole"].path) if "whole" in stored.parts else None
        if before or whole is None:
            return Loaded(declined="gone")
        end = 96 if blocks is None else 16 * blocks
        keys, values = (tensor[:, :, :end] for tensor in whole)
        return Loaded(keys, values, torch.ones(end, dtype=torch.bool), ("file",) * (end // 16))


def test_what_depends_on_the_query_is_found_in_files_too() -> None:
    report = m.measure(InFiles())
    assert evidence(report, "query").figures["differing"] == ["whole"]
    assert report.lowering is Lowering.REJECTED


def test_a_mechanism_that_breaks_off_is_told_so() -> None:
    class Broken(TwoBits):
        def load(self, stored: Stored, *more: Any, **rest: Any) -> Loaded:
            if len(stored.parts) < 9:
                raise KeyError("a group")
            return super().load(stored, *more, **rest)

    loss = evidence(m.measure(Broken()), "loss")
    assert (loss.shows, loss.says) == (False, "it raised KeyError: 'a group'")


@pytest.mark.parametrize("mechanism", [PersistentReader, FileOffload, TwoEnds, TwoBits, Capsules])
def test_what_is_served_behind_a_prefix_that_it_was_not_computed_behind_is_found(
    mechanism: Any,
) -> None:
    class IgnoresPrefix(mechanism):  # type: ignore[misc]
        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            return super().load(stored, (), blocks)

    report = m.measure(IgnoresPrefix())
    assert not evidence(report, "prefix").shows
    assert report.measured in (None, Fidelity.LOSSY)
    assert report.lowering is Lowering.REJECTED


class Garbled(PrunedChannels):
    """Serves what has nothing to do with the prompt behind another prefix."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, (), blocks)
        if loaded.declined or not before:
            return loaded
        return replace(loaded, keys=-7 * loaded.values, values=loaded.keys)


class Unturning(VectorQuantization):
    """Leaves its keys where they were stored."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        return super().load(stored, (), blocks)


class Dropping(VectorQuantization):
    """Says elsewhere that its first token is not there."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        loaded = super().load(stored, before, blocks)
        if loaded.declined or not before:
            return loaded
        present = loaded.present.clone()
        present[0] = False
        return replace(loaded, present=present)


@pytest.mark.parametrize("mechanism", [Garbled, Unturning, Dropping])
def test_what_is_lossy_owes_its_place_as_well(mechanism: Any) -> None:
    report = m.measure(mechanism())
    assert not evidence(report, "place").shows
    assert (report.measured, report.lowering) == (None, Lowering.REJECTED)


def test_an_answer_behind_another_prefix_is_the_one_that_is_given_there() -> None:
    class Answering(SparseAndLowRank):
        declaration = replace(SparseAndLowRank.declaration, fidelity=Fidelity.LOSSY)

        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            return super().load(stored, (), blocks)

    place = evidence(m.measure(Answering()), "place")
    assert not place.shows
    assert place.says.startswith("after 32 other tokens its answers are off by ")


def test_what_is_computed_anew_behind_another_prefix_belongs_there() -> None:
    class Anew(PersistentReader):
        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            whole = super().load(stored, (), blocks)
            if not before or whole.declined:
                return whole
            keys, values = self.model.kv(stored.tokens, before)
            end = whole.keys.shape[2]
            computed = ("computed",) * len(whole.provenance)
            return replace(
                whole, keys=keys[:, :, :end], values=values[:, :, :end], provenance=computed
            )

    report = m.measure(Anew())
    assert evidence(report, "prefix").shows
    assert (report.measured, report.lowering) == (Fidelity.EXACT, Lowering.NATIVE)


@pytest.mark.parametrize("mechanism", [PersistentReader, TwoBits, Surprise])
def test_a_part_that_is_not_the_beginning_of_the_whole_is_found(mechanism: Any) -> None:
    class LastBlocks(mechanism):  # type: ignore[misc]
        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            whole = super().load(stored, before)
            if whole.declined or blocks is None:
                return whole
            end = blocks * self.model.block
            keys, values = whole.keys[:, :, -end:], whole.values[:, :, -end:]
            return Loaded(keys, values, whole.present[-end:], whole.provenance[-blocks:])

    report = m.measure(LastBlocks())
    assert evidence(report, "cut").figures["wrong"] == [1, 2, 3, 4, 5]
    assert (report.measured, report.lowering) == (None, Lowering.REJECTED)


@pytest.mark.parametrize("mechanism", [Facts, VectorQuantization])
def test_a_part_behind_another_prefix_is_a_beginning_as_well(mechanism: Any) -> None:
    class Unmoving(mechanism):  # type: ignore[misc]
        """Turns what it serves whole, and forgets to turn a part."""

        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            return super().load(stored, before if blocks is None else (), blocks)

    says = found_out(Unmoving(), "cut").says
    assert says.endswith(
        "; after 32 other tokens something else for the first 1, 2, 3, 4, 5, 6 blocks"
    )


@pytest.mark.parametrize("mechanism", [PersistentReader, Capsules])
def test_all_blocks_are_the_whole(mechanism: Any) -> None:
    class Miscounting(mechanism):  # type: ignore[misc]
        """Serves something else where it is asked for as many blocks as there are."""

        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            loaded = super().load(stored, before, blocks)
            if loaded.declined or blocks is None or 16 * blocks < len(stored.tokens):
                return loaded
            return replace(loaded, keys=2 * loaded.keys)

    assert found_out(Miscounting(), "cut").figures["wrong"] == [6]
    assert evidence(m.measure(mechanism()), "cut").figures["wrong"] == []


def test_the_bits_of_a_quantization_are_those_of_its_levels() -> None:
    stored = m.find("kivi").store(m.TOKENS, None, Path())
    codes = stored.parts["keys/0"].tensor
    assert codes.unique().tolist() == [0, 1, 2, 3]
    assert stored.identity["bits"] == int(codes.max()).bit_length() == 2
    assert two_bits.bits(5) == 3


def test_a_line_says_what_native_rests_on(reports: dict[str, m.MechanismReport]) -> None:
    lines = list(reports["execution-state-capsules"].lines())
    marks = {line.split()[1]: line.split()[2] for line in lines[2:-3]}
    assert (marks["bits"], marks["whole"]) == ("native", "needed")
    assert [line for line in lines if line.startswith("  yes same output native ")]
    assert "native" not in " ".join(list(reports["kivi"].lines())[2:-3])


def test_a_part_of_what_is_declined_behind_another_prefix_is_declined() -> None:
    class Lenient(PersistentReader):
        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            return super().load(stored, before if blocks is None else (), blocks)

    assert "after 32 other tokens something else" in found_out(Lenient(), "cut").says


def test_what_is_served_when_all_is_gone_is_found() -> None:
    class Undead(PersistentReader):
        def load(self, stored: Stored, *more: Any, **options: Any) -> Loaded:
            if stored.parts:
                return super().load(stored, *more, **options)
            zeros = torch.zeros_like(self.model.kv(stored.tokens)[0])
            present = torch.ones(len(stored.tokens), dtype=torch.bool)
            return Loaded(zeros, zeros, present, ("device",) * 6)

    assert found_out(Undead(), "loss").says.endswith("; served wrong without all of them")


def test_a_file_that_carries_several_blocks_is_found() -> None:
    class OneFile(FileOffload):
        """Keeps all blocks in one file, and says nothing of what leans on it."""

        def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
            publish(folder / "whole", *self.model.kv(tokens))
            parts = {"whole": Part(Tier.FILE, path=folder / "whole")}
            own = FileOffload().begin(tokens, folder).identity
            return Stored(tuple(tokens), parts, identity=own)

        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            declined = super().load(stored, before, blocks).declined
            whole = read(stored.parts["whole"].path) if "whole" in stored.parts else None
            if before or "another" in declined or whole is None:
                return Loaded(declined=declined or "gone")
            end = len(stored.tokens) if blocks is None else min(16 * blocks, len(stored.tokens))
            keys, values = (tensor[:, :, :end] for tensor in whole)
            said = ("file",) * -(-end // 16)
            return Loaded(keys, values, torch.ones(end, dtype=torch.bool), said)

    report = m.measure(OneFile())
    assert evidence(report, "leans").figures["shared"] == {"whole": 6}
    assert (report.measured, report.lowering) == (None, Lowering.REJECTED)
    declared = replace(report.declaration, leans=True)
    assert replace(report, declaration=declared).lowering is Lowering.NATIVE


def test_a_capsule_that_is_served_up_to_its_middle_is_found() -> None:
    class Halves(Capsules):
        def load(
            self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None
        ) -> Loaded:
            return super().load(stored, before, None if blocks == 3 else blocks)

    report = m.measure(Halves())
    assert not evidence(report, "whole").shows
    assert not evidence(report, "cut").shows
    assert report.lowering is Lowering.REJECTED


def test_what_few_queries_change_is_found() -> None:
    class OneInEight(PersistentReader):
        def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
            stored = super().store(tokens, query, folder)
            if query.equal(self.model.queries(8, seed=1)[5]):
                stored.parts["page/3"].tensor.mul_(2)
            return stored

    report = m.measure(OneInEight())
    assert evidence(report, "query").figures["differing"] == ["page/3"]
    assert report.lowering is Lowering.REJECTED
