"""report.html in a browser: opens clean, steps, tells the numbers of the JSON, fits a phone.

Skipped, with the reason, where Chromium or playwright is missing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker.counterexample import Counterexample
from kvclaims.checker.report import page_of_gate, page_of_runs, report, write_page
from kvclaims.checker.reportpage import Case, Page
from kvclaims.checker.reporttimeline import timeline
from kvclaims.checker.verdicts import Violation
from kvclaims.reference.engine import ENGINE
from kvclaims.spec.interface import PoolConfig
from kvclaims.spec.operations import parse, perform
from kvclaims.spec.telemetry import Event

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="pip install playwright", exc_type=ImportError
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium"),
]

Open = Callable[..., Any]

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}

CONFLICT: list[dict[str, Any]] = [
    {"op": "submit", "request": "resident", "content": [["A", 60]]},
    {"op": "drain"},
    {"op": "declare", "claim": "keep", "content": [["A", 60]], "n": 60},
    {"op": "submit", "request": "active", "content": [["B", 70]]},
    {"op": "drain"},
]

EVENTS = 100_000

WORK = 5_000
"""Changes applied and shapes drawn for one step of a long run; measured: 616, and 380,192 if the
whole run is drawn."""


def conflict() -> tuple[Event, ...]:
    runtime = ENGINE.open(PoolConfig(80), "L3")
    for raw in CONFLICT:
        perform(runtime, parse(raw))
    runtime.close()
    return tuple(runtime.events())


def long_run(events: int) -> Iterator[Event]:
    """Requests of four blocks come and go, each finding another four."""
    seq = 0

    def event(kind: str, request: str | None = None, **data: Any) -> Event:
        nonlocal seq
        made = Event(seq, seq, "long", kind, "resident_claims", 64, request, data=data)
        seq += 1
        return made

    yield event("trace_opened", engine="made", block_size=16, defer_limit=1)
    for number in range((events - 2) // 5):
        name, first = f"r{number}", 1 + number % 60
        yield event(
            "active_request_submitted", name, admit_reuse=True, active_live_blocks_required=4
        )
        yield event(
            *("active_request_admitted", name),
            hit_blocks=0,
            new_blocks=4,
            free_blocks_before_allocate=64,
        )
        blocks = list(range(first, first + 4))
        yield event("active_request_blocks", name, blocks=blocks, lent=[])
        yield event("active_request_finished", name, outcome="served", blocks=4)
        yield event("future_reuse_admitted", name, blocks=4)
    yield event("trace_closed", events=seq)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The founding conflict, a counterexample and a gate, each as a page."""
    folder = tmp_path_factory.mktemp("pages")
    events = conflict()
    trace = folder / "trace.jsonl"
    trace.write_text("".join(event.to_json() + "\n" for event in events))
    write_page(page_of_runs("trace.jsonl", [events]), folder / "conflict.html")
    report(counterexample(folder), folder / "broken.html", None, lambda _: None)
    gate = {
        "parts": [
            {
                "name": "litmus reference",
                "verdict": "HOLDS",
                "seconds": 1.25,
                "did": "1 program",
                "monitored_steps": 7,
                "programs": [{**PROGRAM, "not_exposed": [], "violations": []}],
            }
        ]
    }
    write_page(page_of_gate(gate, folder, lambda _: None), folder / "gate.html")
    return folder


PROGRAM = {
    "id": "L3",
    "title": "a hard claim refuses the request",
    "rules": ["F4"],
    "verdict": "HOLDS",
    "observed": {"shortfall": 50, "free": 20},
}


def counterexample(folder: Path) -> Path:
    """A refusal that blames every claim, by a fault planted in the reference."""
    from kvclaims.checker import engines, faults

    engine, _ = engines.ready("reference")
    fault = faults.named("everyone-to-blame", engine)
    assert fault.program is not None
    example = Counterexample("reference", fault.program, "F4", fault.meaning, fault=fault.id)
    return example.write(folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a file; the test fails if the page says anything on its console or asks for more."""
    said: list[str] = []
    contexts = []

    def open_file(file: Path, size: dict[str, int] = DESK, scheme: str = "light") -> Any:
        context = browser.new_context(viewport=size, color_scheme=scheme, has_touch=size is PHONE)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda asked: asked.url == page.url or said.append(asked.url))
        page.goto(file.as_uri())
        page.wait_for_function("!document.querySelector('.timeline') || kvclaims.timelines.length")
        said[:] = [line for line in said if line != file.as_uri() and not line.startswith("data:")]
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert said == []


def where(page: Any) -> int:
    """The step that is shown, counted from 1."""
    found = re.match(r"step ([\d,]+) of", page.text_content(".where"))
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("name", ["conflict", "broken", "gate"])
@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESK, "light")])
def test_pages_open_clean_and_fit(
    pages: Path, open_page: Open, name: str, size: dict[str, int], scheme: str
) -> None:
    page = open_page(pages / f"{name}.html", size, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(18, 20, 22)" if scheme == "dark" else "rgb(250, 250, 248)")
    for canvas in page.query_selector_all("canvas.picture"):
        assert canvas.bounding_box()["width"] <= size["width"]
        colours = canvas.evaluate(
            "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
        )
        assert colours > 10  # something is drawn


def test_the_stepper_steps_by_keyboard(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "conflict.html")
    assert where(page) == 11  # it opens at the refusal
    page.focus(".scrub")
    seen = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight"):
        page.keyboard.press(key)
        seen.append(where(page))
    assert seen == [1, 2, 3, 2, 12, 12]
    assert page.get_attribute(".scrub", "aria-valuetext") == "step 12 of 12: the trace closes"


def test_every_step_tells_its_text_rule_and_numbers(pages: Path, open_page: Open) -> None:
    """The page's own arithmetic against that of the JSON, step by step."""
    line = timeline(conflict())
    page = open_page(pages / "conflict.html")
    page.click("[data-do=first]")
    for step, counts in enumerate(line.counts()):
        assert page.text_content(".now .text") == line.text(step)
        shown = {
            item.get_attribute("data-count"): int(item.text_content().replace(",", ""))
            for item in page.query_selector_all(".legend [data-count]")
        }
        names = ("active", "protected", "reserved", "cached", "free")
        assert shown == {name: getattr(counts, name) for name in names}
        assert page.text_content(".whole-sum").endswith(f"= {counts.headroom}")
        page.click("[data-do=on]")
    assert where(page) == len(line.steps)


def test_the_refused_request_and_its_blocker_are_drawn_however_many_run(
    tmp_path: Path, open_page: Open
) -> None:
    """Twelve requests run and eight lanes are drawn: that of the refusal is among them."""
    runtime = ENGINE.open(PoolConfig(400), "busy")
    doc = {"content": [["D", 100]]}
    plan: list[dict[str, Any]] = [
        {"op": "submit", "request": "doc", **doc},
        {"op": "drain"},
        *({"op": "declare", "claim": f"c{n}", "n": 100, **doc} for n in range(10)),
        {"op": "declare", "claim": "last", "content": [["E", 150]], "n": 150},
    ]
    for number in range(12):
        own = {"content": [[f"C{number}", 5]], "max_new_tokens": 40}
        plan.append({"op": "submit", "request": f"r{number}", **own})
    plan += [{"op": "step"}] * 2
    plan += [{"op": "submit", "request": "huge", "content": [["H", 290]]}, {"op": "drain"}]
    for raw in plan:
        perform(runtime, parse(raw))
    write_page(page_of_runs("trace", [runtime.events()]), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html", PHONE)
    assert page.text_content(".now .text").startswith("request huge is refused")
    drawn = page.evaluate("kvclaims.timelines[0].lanes")
    blockers = page.eval_on_selector_all(".door button", "all => all.map(b => b.textContent)")
    assert blockers
    assert {"request huge", *blockers} <= set(drawn)
    assert len(drawn) == 16


def test_the_refusal_names_its_blocker_and_leads_to_it(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "conflict.html")
    assert "60 protected + 70 wanted = 130 > 80 usable: 50 short" in page.text_content(".door")
    page.click(".door button")
    assert page.text_content(".now .text").startswith("claim keep is accepted")
    page.click("[data-do=next]")
    assert page.text_content(".now .text").startswith("request active has to wait for claim keep")


def test_it_steps_by_touch(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "conflict.html", PHONE)
    page.tap("[data-do=first]")
    assert where(page) == 1
    box = page.query_selector("canvas.picture").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] * 6.5 / 12, box["y"] + 100)
    assert where(page) == 7
    page.tap(".steps li:last-child button")
    assert where(page) == 11


def test_a_violation_is_understood_from_the_page_alone(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "broken.html", PHONE)
    assert page.text_content("h1") == "VIOLATED"
    text = page.inner_text(".case")
    for words in ("F4", "with minimal blame", "should be ['c']", "kvclaims replay", "drain"):
        assert words in text
    assert "✕ breaks F4" in page.text_content(".now")
    assert page.query_selector(".operations .here").inner_text().startswith("drain")
    assert page.query_selector("[aria-label='Step']") is not None


def test_a_step_tells_the_same_event_as_the_violation(tmp_path: Path, open_page: Open) -> None:
    events = [
        replace(event, data={**event.data, "blocking_claim_ids": ["x"]})
        if event.event == "active_request_refused"
        else event
        for event in conflict()
    ]
    write_page(page_of_runs("trace", [events]), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert "73 of run L3" in page.inner_text(".facts")
    assert "events 72 to 73 of 0 to 74" in page.inner_text(".now")  # it asks, and is refused
    page.click("[data-do=on]")
    assert "event 74 of 0 to 74" in page.inner_text(".now")


def test_nothing_is_broken_inside_a_word_on_a_phone(tmp_path: Path, open_page: Open) -> None:
    after = {"claim c: generation": 1, "claim c: protection": "hard_protected"}
    case = Case(Violation("F2", "m", after=after), "a run", line=timeline(conflict()))
    write_page(Page("page", "VIOLATED", "", cases=(case,)), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html", PHONE)
    heights = page.eval_on_selector_all(".changes thead th", "all => all.map(h => h.clientHeight)")
    assert len(set(heights)) == 1
    assert heights[0] < 40  # one line


def test_a_headroom_below_zero_is_a_number_with_a_sign(tmp_path: Path, open_page: Open) -> None:
    """The runtime promises more than it has: the picture shows it, and the sum is readable."""
    runtime = ENGINE.open(PoolConfig(20), "run")
    for claim in "ab":
        perform(runtime, parse({"op": "declare", "claim": claim, "content": [[claim, 5]], "n": 5}))
    events = [replace(event, usable_blocks=8) for event in runtime.events()]
    write_page(page_of_runs("trace", [events]), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    page.click("[data-do=last]")
    assert page.inner_text(".whole-sum").endswith("headroom 8 − 0 − 0 − 10 = −2")
    assert page.evaluate("kvclaims.timelines[0].run.top") == 10  # and it fits the picture


def test_the_gate_tells_the_numbers_of_its_json(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "gate.html")
    row = page.query_selector("table.checks tbody tr").inner_text()
    assert all(word in row for word in ("litmus reference", "HOLDS", "1.2", "1 program"))
    f4 = page.query_selector("table.rules tbody tr:has(b:text-is('F4'))").inner_text()
    assert "L3 on 1 engine" in f4
    assert "7 steps judged" in f4
    silent = open_page(pages / "gate.html", PHONE).inner_text("table.rules tr:has(b:text-is('V4'))")
    assert silent.endswith("nothing shown")
    assert silent.count("nothing shown") == 1
    page.click("summary")
    assert "shortfall 50" in page.inner_text("details")


def test_the_graph_lights_the_way_of_the_claim(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "conflict.html")
    graph = page.frame_locator(".graph iframe")
    assert graph.locator(".step.lit").count() == 4
    assert graph.locator(".box.lit").count() == 4
    assert graph.locator(".box.lit").last.is_visible()
    before = graph.locator("#map").get_attribute("viewBox")
    graph.locator("#map").press("+")
    assert graph.locator("#map").get_attribute("viewBox") != before


def test_what_is_lit_can_be_read_on_a_phone(pages: Path, open_page: Open) -> None:
    """The end of the path at first, the whole graph on demand."""
    page = open_page(pages / "conflict.html", PHONE)
    graph = page.frame_locator(".graph iframe")
    map_ = graph.locator("#map")
    letters = "map => 11 * map.getScreenCTM().a"
    assert map_.evaluate(letters) > 7
    inside = """map => {
      const view = map.getBoundingClientRect();
      return [map.querySelector(".dot.chosen")].map(b => b.getBoundingClientRect())
        .every(b => b.left >= view.left && b.right <= view.right && b.top >= view.top
          && b.bottom <= view.bottom) }"""
    assert map_.evaluate(inside)
    graph.locator("#whole").tap()
    assert map_.evaluate(letters) < 7


def test_all_that_is_used_has_a_name(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "broken.html")
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, canvas, iframe, [role=group]")]
        .filter(e => !e.hidden)
        .filter(e => !(e.getAttribute("aria-label") || e.title || e.textContent.trim()))
        .map(e => e.outerHTML)"""
    )
    assert nameless == []


def test_on_paper_every_step_is_listed_in_light_colours(pages: Path, open_page: Open) -> None:
    page = open_page(pages / "conflict.html", scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function("document.querySelectorAll('.steps li').length === 12")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.is_visible(".bar")
    graph = page.frame_locator(".graph iframe")
    back = graph.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    assert back == "rgb(255, 255, 255)"
    assert not graph.locator("#panel").is_visible()  # lists to choose from
    assert graph.locator(".box.lit").last.is_visible()


def test_on_paper_the_verdict_and_what_follows_share_a_page(pages: Path, open_page: Open) -> None:
    """Nothing but the picture itself is kept in one piece: no page is left nearly empty."""
    page = open_page(pages / "conflict.html")
    paper = page.pdf(format="A4")
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) <= 3


def test_a_long_run_stays_light(tmp_path: Path, open_page: Open) -> None:
    """A hundred thousand events: few nodes, and a step costs what is seen, not what was run."""
    events = tuple(long_run(EVENTS))
    page_file = tmp_path / "long.html"
    write_page(page_of_runs("long", [events]), page_file)
    page = open_page(page_file)
    assert page.evaluate("document.querySelectorAll('*').length") < 400
    page.focus(".scrub")
    for key in ("Home", "ArrowRight", "End", "ArrowLeft", "ArrowLeft"):
        before = page.evaluate("kvclaims.work")
        page.keyboard.press(key)
        assert page.evaluate("kvclaims.work") - before < WORK
    steps = json.loads(page.evaluate("JSON.stringify(kvclaims.timelines[0].run.length)"))
    assert (len(events), where(page)) == (99_997, steps - 2)
