"use strict";
// Steps through runs.  A run is data: what each step changed.  Nothing here is fetched.

const USES = ["free", "cached", "active", "protected", "both"];
const BANDS = ["active", "protected", "reserved", "cached", "free"];
const OVER = ["refused", "demoted", "expired", "released", "harmed", "served", "served_no_admit",
  "capacity_required", "aborted"];
const COLUMN = 15, MOST_ROWS = 256, LANES = 8, LIST = 9, PRINTED = 200;
const kvclaims = window.kvclaims = { work: 0, timelines: [] };  // what tests look at

// --- a run: the pool after any step

class Run {
  constructor(data) {
    Object.assign(this, data);
    this.length = data.words.length;
    this.stride = Math.max(256, Math.ceil(this.length * this.rows / 8e6));
    this.kept = [];
    this.tally = new Int32Array(this.length * USES.length);
    const uses = new Uint8Array(this.rows), tally = [this.rows, 0, 0, 0, 0];
    for (let step = 0; step < this.length; step++) {
      this.change(uses, step, tally);
      this.tally.set(tally, step * USES.length);
      if (step % this.stride === 0) this.kept.push(uses.slice());
    }
    this.marks = [...new Set([...this.doors.map(d => d.step), ...this.broken.map(b => b[0])])]
      .sort((a, b) => a - b);
    this.top = Math.max(this.usable, ...this.doors.slice(0, 5000).map(d => d.usable + d.missing));
    for (let step = 0; step < this.length; step++)  // more may have been promised than there is
      this.top = Math.max(this.top, this.usable - this.counts(step).headroom);
    this.top = Math.min(this.top, 2.5 * this.usable) || 1;
  }
  change(uses, step, tally) {
    const changes = this.blocks[step];
    for (let i = 0; i < changes.length; i += 3)
      for (let b = changes[i] - this.first; b <= changes[i + 1] - this.first; b++) {
        if (tally) { tally[uses[b]]--; tally[changes[i + 2]]++; }
        uses[b] = changes[i + 2];
        kvclaims.work++;
      }
  }
  usesAt(step) {
    const from = Math.floor(step / this.stride), uses = this.kept[from].slice();
    for (let i = from * this.stride + 1; i <= step; i++) this.change(uses, i);
    return uses;
  }
  counts(step) {
    const [blank, cached, active, guarded, both] =
      this.tally.subarray(step * USES.length, (step + 1) * USES.length);
    const reserved = this.reserved[step], fromBlank = Math.min(reserved, blank);
    const fromCached = Math.min(reserved - fromBlank, cached);
    return { active: active + both, protected: guarded, reserved, cached: cached - fromCached,
      free: blank - fromBlank, headroom: this.usable - active - both - guarded - reserved };
  }
  text(step) {
    const [kind, ...words] = this.words[step];
    return this.kinds[kind][0].replace(/\{(\d+)\}/g, (_, i) => String(words[i]))
      .replace(/(?<![\d,])1 blocks\b/g, "1 block");
  }
  rulesAt(step) { return this.kinds[this.words[step][0]][1]; }
  doorAt(step) { return this.doors.findLast(door => door.step === step); }
  start() {
    if (this.broken.length) return this.broken[0][0];
    const refused = this.doors.findLast(d => d.outcome !== "deferred") || this.doors.at(-1);
    return refused ? refused.step : this.length - 1;
  }
}

function phaseAt(spans, step) {
  let now;
  for (const span of spans) if (span[0] <= step) now = span[1];
  return now;
}
function blocks(n) { return `${number(n)} block` + (n === 1 ? "" : "s"); }
function number(n) { return n.toLocaleString("en"); }
function add(kind, inside, text, name) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  inside.append(made);
  return made;
}

// --- one timeline on the page

class Timeline {
  constructor(root, run, rules) {
    Object.assign(this, { root, run, rules });
    for (const name of ["where", "scrub", "now", "whole", "picture", "legend", "door", "held",
      "steps"]) this[name] = root.querySelector("." + name);
    this.at = run.start();
    for (const button of root.querySelectorAll("[data-do]"))
      button.onclick = () => this.does(button.dataset.do);
    root.querySelector("[data-do=next]").hidden = !run.marks.length;
    this.scrub.oninput = () => this.go(Number(this.scrub.value));
    root.addEventListener("keydown", event => this.key(event));
    for (const canvas of [this.picture, this.whole]) this.touch(canvas);
    new ResizeObserver(() => { if (this.width !== this.picture.clientWidth) this.resize(); })
      .observe(this.picture);
    this.resize();
  }
  does(what) {
    const { marks } = this.run, later = marks.find(step => step > this.at);
    this.go({ first: 0, back: this.at - 1, on: this.at + 1, last: this.run.length - 1,
      next: later ?? marks[0] }[what]);
  }
  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const what = { ArrowLeft: "back", ArrowRight: "on", ArrowUp: "back", ArrowDown: "on",
      Home: "first", End: "last" }[event.key];
    if (!what) return;
    event.preventDefault();
    this.does(what);
  }
  touch(canvas) {
    const go = event => {
      const x = event.clientX - canvas.getBoundingClientRect().left;
      const [from, columns] = canvas === this.whole ? [0, this.run.length] : this.window;
      this.go(from + Math.floor(x / canvas.clientWidth * columns));
    };
    canvas.addEventListener("pointerdown", event => {
      this.window = this.view(); canvas.setPointerCapture(event.pointerId); go(event);
    });
    canvas.addEventListener("pointermove", event => { if (event.buttons) go(event); });
  }
  go(step) {
    this.at = Math.max(0, Math.min(this.run.length - 1, step));
    this.show();
  }
  resize() {
    this.width = this.picture.clientWidth;
    this.small = null;
    this.show();
  }
  view() {
    const columns = Math.min(this.run.length, Math.max(12, Math.floor(this.width / COLUMN)));
    const from = Math.max(0, Math.min(this.at - Math.floor(columns / 2),
      this.run.length - columns));
    return [from, columns];
  }
  show() {
    const { run, at } = this;
    this.scrub.value = at;
    this.scrub.setAttribute("aria-valuetext", `step ${at + 1} of ${run.length}: ${run.text(at)}`);
    this.where.textContent = `step ${number(at + 1)} of ${number(run.length)}`;
    this.tellNow();
    this.tellCounts();
    this.tellDoor();
    this.tellClaims();
    this.tellSteps();
    drawPicture(this);
    drawWhole(this);
  }
  tellNow() {
    const { run, at, now } = this;
    now.replaceChildren();
    add("p", now, run.text(at), "text");
    for (const [step, rule, message] of run.broken)
      if (step === at) add("p", now, `✕ breaks ${rule}: ${message}`, "broken");
    const lines = run.rulesAt(at).map(rule => `${rule} ${this.rules[rule]}`);
    if (lines.length) add("p", now, lines.join("; "), "hint");
    const first = run.seqs[at], last = Math.max(first, (run.seqs[at + 1] ?? run.events) - 1);
    const which = first === last ? `event ${number(first)}`
      : `events ${number(first)} to ${number(last)}`;
    const facts = [`${which} of 0 to ${number(run.events - 1)}`];
    if (run.at.length) facts.push(`operation ${run.at[at]} of ${run.operations.length - 1}: `
      + run.operations[run.at[at]]);
    add("p", now, facts.join(" · "), "hint");
  }
  tellCounts() {
    const { run, at, legend } = this, is = run.counts(at);
    const was = at ? run.counts(at - 1) : is;
    legend.replaceChildren();
    for (const band of BANDS) {
      const item = add("span", legend), swatch = add("i", item, "", `swatch ${band}`);
      swatch.setAttribute("aria-hidden", "true");
      item.append(band + " ");
      add("b", item, number(is[band])).dataset.count = band;
      if (is[band] !== was[band]) add("span", item, ` (before: ${number(was[band])})`, "changed");
    }
    add("span", legend, BANDS.map(band => `${is[band]} ${band}`).join(" + ")
      + ` = ${BANDS.reduce((sum, band) => sum + is[band], 0)} of ${run.usable} usable;`
      + ` headroom ${run.usable} − ${is.active} − ${is.protected} − ${is.reserved}`
      + ` = ${String(is.headroom).replace("-", "−")}`, "whole-sum");
  }
  tellDoor() {
    const { run, at, door } = this, answer = run.doorAt(at);
    door.replaceChildren();
    if (!answer) return;
    add("h4", door, `Request ${answer.request}: ${answer.outcome.replace(/_/g, " ")}`);
    const sums = add("ul", door);
    answer.sums.forEach((sum, i) => add("li", sums, sum, i ? "over" : ""));
    const names = add("p", door, answer.blockers.length ? "Blocked by: " : "Waits on: ");
    for (const name of answer.blockers) {
      const claim = run.claims.findLast(c => c[1].claim === name && c[2][0][0] <= at);
      const button = add("button", names, `claim ${name}`);
      button.setAttribute("aria-label", `claim ${name}: go to its acceptance`);
      const accepted = claim && (claim[2].find(span => span[1] === "accepted") || claim[2][0]);
      if (accepted) button.onclick = () => this.go(accepted[0]);
    }
    names.append(answer.waits_on.map(name => `request ${name}`).join(", "));
    if (!answer.blockers.length && !answer.waits_on.length) names.append("nobody");
  }
  tellClaims() {
    const { run, at, held } = this;
    held.replaceChildren();
    const alive = run.claims.filter(c => c[2][0][0] <= at
      && !(OVER.includes(phaseAt(c[2], at)) && c[2].at(-1)[0] < at));
    if (!alive.length) return;
    add("h4", held, `Claims now (${number(alive.length)})`);
    const list = add("ul", held);
    for (const [name, told, spans] of alive.slice(0, LANES))
      add("li", list, `${name}: ${phaseAt(spans, at)}, ${told.protection.replace(/_/g, " ")}, `
        + `${blocks(told.footprint)}, owned by ${told.owner || "somebody who is not told"}`);
    if (alive.length > LANES) add("li", list, `and ${number(alive.length - LANES)} more`, "hint");
  }
  tellSteps() {
    const { run, at, steps } = this, all = this.printed && run.length <= PRINTED;
    const size = all ? run.length : Math.min(LIST, run.length);
    const from = all ? 0 : Math.max(0, Math.min(at - Math.floor(LIST / 2), run.length - size));
    const had = steps.contains(document.activeElement);
    steps.replaceChildren();
    const list = add("ol", steps);
    for (let step = from; step < from + size; step++) {
      const broken = run.broken.some(b => b[0] === step);
      const button = add("button", add("li", list));
      add("span", button, String(step + 1), "of");
      add("span", button, (broken ? "✕ " : "") + run.text(step));
      if (step === at) button.setAttribute("aria-current", "step");
      button.onclick = () => this.go(step);
    }
    if (had) steps.querySelector("[aria-current]").focus();
  }
}

// --- drawing

function colours() {
  const style = getComputedStyle(document.documentElement), found = {};
  for (const name of ["sheet", "ink", "soft", "line", "active", "protected", "cached", "free",
    "bad", "on"]) found[name] = style.getPropertyValue("--" + name).trim();
  return found;
}
function hatched(paint, colour, back, dots) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const on = tile.getContext("2d");
  on.fillStyle = back; on.fillRect(0, 0, 8, 8);
  on.fillStyle = on.strokeStyle = colour;
  if (dots) { on.fillRect(1, 1, 2, 2); on.fillRect(5, 5, 2, 2); } else {
    on.lineWidth = 2; on.beginPath();
    for (const x of [-8, 0, 8]) { on.moveTo(x, 8); on.lineTo(x + 8, 0); }
    on.stroke();
  }
  return paint.createPattern(tile, "repeat");
}
function ready(canvas, width, height) {
  const scale = window.devicePixelRatio || 1, paint = canvas.getContext("2d");
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  paint.setTransform(scale, 0, 0, scale, 0, 0);
  paint.font = "12px system-ui, sans-serif";
  paint.textBaseline = "middle";
  return paint;
}
function box(paint, x, y, width, height, fill, line) {
  kvclaims.work++;
  if (fill) { paint.fillStyle = fill; paint.fillRect(x, y, width, height); }
  if (line) { paint.strokeStyle = line; paint.strokeRect(x + .5, y + .5, width - 1, height - 1); }
}
// Text at x if it fits there, else moved left so that it does; a halo keeps it readable.
function label(paint, text, x, y, colour, back, width, right) {
  const wide = paint.measureText(text).width;
  const at = Math.max(2, Math.min(right ? x - wide : x, width - wide - 2));
  if (back) { paint.strokeStyle = back; paint.lineWidth = 3; paint.strokeText(text, at, y); }
  paint.lineWidth = 1;
  paint.fillStyle = colour;
  paint.fillText(text, at, y);
}
// Stretches of equal neighbours: calls draw(first, length, value).
function stretches(length, value, draw) {
  let first = 0, last = value(0);
  for (let i = 1; i <= length; i++) {
    const next = i < length ? value(i) : NaN;
    if (next === last) continue;
    draw(first, i - first, last);
    first = i; last = next;
  }
}

// The lanes that are drawn, in their own order: those that the step speaks of, then those that it
// is in or nearest to.
function nearest(bars, at, named) {
  const away = ([name, told, spans]) => named.includes(told.claim ?? name) ? -1
    : spans[0][0] > at ? spans[0][0] - at
    : OVER.includes(spans.at(-1)[1]) ? Math.max(0, at - spans.at(-1)[0]) : 0;
  const kept = new Set([...bars].sort((a, b) => away(a) - away(b)).slice(0, LANES));
  return bars.filter(bar => kept.has(bar));
}

function drawPicture(timeline) {
  const { run, picture, width } = timeline;
  if (!width) return;
  const [from, columns] = timeline.view(), wide = width / columns;
  const alive = bars => bars.filter(([, , spans]) => spans[0][0] < from + columns
    && !(OVER.includes(spans.at(-1)[1]) && spans.at(-1)[0] < from));
  const claims = alive(run.claims), requests = alive(run.requests);
  const door = run.doorAt(timeline.at), told = run.words[timeline.at].slice(1, 3).map(String);
  const shown = nearest(claims, timeline.at, door ? door.blockers : told);
  const asking = nearest(requests, timeline.at, door ? [door.request, ...door.waits_on] : told);
  timeline.lanes = [...shown.map(bar => `claim ${bar[1].claim}`),
    ...asking.map(bar => `request ${bar[0]}`)];
  const rows = run.rows <= MOST_ROWS ? run.rows : 0;
  const room = timeline.printed ? 150 : 260;  // on paper verdict and picture share a page
  const tall = rows ? Math.max(2, Math.min(14, Math.floor(room / rows))) : 0;
  const bands = { top: 24, height: timeline.printed ? 130 : 210 };
  const lanes = bands.top + bands.height + 14, lane = 38;
  const more = (claims.length > LANES) + (requests.length > LANES);
  const blocks = lanes + lane * (shown.length + asking.length) + 16 * more + 18;
  const height = rows ? blocks + rows * tall + 8 : blocks - 10;
  const paint = ready(picture, width, height), ink = colours();
  const looks = { active: ink.active, protected: ink.protected, cached: ink.cached, free: ink.free,
    reserved: hatched(paint, ink.protected, ink.sheet, true),
    both: hatched(paint, ink.active, ink.protected), bad: hatched(paint, ink.bad, ink.sheet) };
  const view = { paint, ink, looks, run, at: timeline.at, from, columns, wide, width };
  drawBands(view, bands);
  const places = new Map();
  shown.forEach((bar, i) => places.set(bar[0], lanes + lane * i));
  const second = lanes + lane * shown.length + 16 * (claims.length > LANES);
  asking.forEach((bar, i) => places.set(" " + bar[0], second + lane * i));
  drawBlame(view, places);
  let y = lanes;
  for (const bar of shown) { drawLane(view, bar, y, "claim"); y += lane; }
  if (claims.length > LANES) {
    label(paint, `and ${number(claims.length - LANES)} more claims`, 2, y + 8, ink.soft, null, width);
    y += 16;
  }
  for (const bar of asking) { drawLane(view, bar, y, "request"); y += lane; }
  if (requests.length > LANES)
    label(paint, `and ${number(requests.length - LANES)} more requests`, 2, y + 8, ink.soft, null, width);
  if (rows) drawRows(view, blocks, tall);
  drawCursor(view, timeline.at, height);
  picture.setAttribute("aria-label", `The pool of ${run.usable} blocks at steps ${from + 1} to `
    + `${from + columns}. Step ${timeline.at + 1}: ${run.text(timeline.at)}.`);
}

function drawBands({ paint, ink, looks, run, at, from, columns, wide, width }, { top, height }) {
  const level = n => top + height - n / run.top * height * .96;
  const counts = [];
  for (let i = 0; i < columns; i++) counts.push(run.counts(from + i));
  const below = band => c => BANDS.slice(0, BANDS.indexOf(band)).reduce((sum, b) => sum + c[b], 0);
  for (const band of BANDS) {
    const under = below(band);
    stretches(columns, i => under(counts[i]) * 1e7 + counts[i][band], (first, length, value) => {
      const size = counts[first][band], base = under(counts[first]);
      if (!size) return;
      const y = level(base + size), tall = level(base) - y;
      const left = Math.round(first * wide), right = Math.round((first + length) * wide);
      box(paint, left, y, right - left, tall, looks[band]);  // whole pixels leave no seams
      const text = `${number(size)} ${band}`;
      if (tall > 15 && paint.measureText(text).width < length * wide - 8)
        label(paint, text, first * wide + 5, y + tall / 2,
          band === "active" || band === "protected" ? ink.on : ink.ink,
          band === "reserved" ? ink.sheet : null, width);
    });
  }
  const line = level(run.usable);
  paint.strokeStyle = ink.ink; paint.setLineDash([5, 3]);
  paint.beginPath(); paint.moveTo(0, line); paint.lineTo(width, line); paint.stroke();
  paint.setLineDash([]);
  label(paint, `${number(run.usable)} usable`, 3, line - 9, ink.ink, ink.sheet, width);
  drawWanted({ paint, ink, looks, run, at, from, columns, wide, width }, level);
}

// What refused and waiting requests wanted, stacked on what is taken: the part past the line is
// what does not fit.
function drawWanted({ paint, ink, looks, run, at, from, columns, wide, width }, level) {
  const doors = run.doors.filter(d => d.step >= from && d.step < from + columns && d.missing > 0);
  const fit = d => Math.max(0, d.need - d.missing), taken = [];
  const line = d => level(d.usable), up = d => Math.max(2, level(d.usable + d.missing));
  for (const door of doors) {
    const x = (door.step - from) * wide, broad = Math.max(wide, 3);
    const base = level(door.usable - door.headroom);
    box(paint, x, line(door), broad, Math.max(0, base - line(door)), null, ink.bad);
    box(paint, x, up(door), broad, line(door) - up(door), looks.bad, ink.bad);
  }
  // The one at this step has its say first; others where there is room.
  doors.sort((a, b) => Math.abs(a.step - at) - Math.abs(b.step - at)).forEach(door => {
    const text = `${door.request} wants ${number(door.need)}: ${number(fit(door))} fit, `
      + `${number(door.missing)} do not`;
    const same = doors.filter(d => d.request === door.request && d.missing === door.missing);
    const end = (Math.min(...same.map(d => d.step)) - from) * wide - 6;
    const after = (Math.max(...same.map(d => d.step)) - from + 1) * wide + 6;
    paint.font = "bold 12px system-ui, sans-serif";
    const size = paint.measureText(text).width, fits = size < end;
    const right = fits ? end : Math.min(width, after + size), left = right - size;
    if (!taken.some(([a, b]) => left < b + 6 && a < right + 6)) {
      taken.push([left, right]);
      const middle = Math.max(10, (up(door) + line(door)) / 2);
      label(paint, text, left, middle, ink.bad, ink.sheet, width);
    }
    paint.font = "12px system-ui, sans-serif";
  });
}

function drawLane({ paint, ink, looks, from, columns, wide, width }, [name, told, spans], y, kind) {
  const isClaim = kind === "claim";
  const start = Math.max(0, (spans[0][0] - from) * wide);
  const more = isClaim ? `${told.protection.replace(/_/g, " ")}, ${blocks(told.footprint)}`
    : `wants ${blocks(told.wants)}`;
  const says = phase => (["harmed", "refused", "capacity_required"].includes(phase) ? "✕ " : "")
    + phase.replace(/_/g, " ");
  // How it ended stands in its column, else right of it, else with the name.
  const [ended, outcome] = spans.at(-1), after = (ended - from + 1) * wide;
  const long = paint.measureText(says(outcome)).width;
  const isNamed = OVER.includes(outcome) && long > wide - 6 && after + 6 + long >= width
    && ended >= from && ended < from + columns;
  label(paint, `${kind} ${name} · ${more}${isNamed ? " · " + says(outcome) : ""}`, start, y + 8,
    ink.ink, ink.sheet, width);
  spans.forEach(([step, phase], i) => {
    const end = i + 1 < spans.length ? spans[i + 1][0] : from + columns;
    const a = Math.max(step, from), isOver = OVER.includes(phase);
    const b = Math.min(isOver ? step + 1 : end, from + columns);
    if (b <= a) return;
    const bad = ["harmed", "refused", "capacity_required"].includes(phase);
    const look = { accepted: looks.reserved, materialized: looks.protected, running: looks.active,
      loading: looks.active, deferred: looks.cached }[phase];
    const soft = isClaim && told.protection !== "hard_protected" && phase === "materialized";
    const fill = bad ? ink.sheet : soft ? looks.cached : look;
    box(paint, (a - from) * wide, y + 17, (b - a) * wide, 17, fill || ink.sheet, bad ? ink.bad : ink.soft);
    const text = says(phase), size = paint.measureText(text).width, x = (a - from) * wide;
    const beside = isOver && size > wide - 6;
    if (isOver ? isNamed : size > (b - a) * wide - 6) return;
    const dark = fill === looks.protected || fill === looks.active;
    label(paint, text, beside ? x + wide + 4 : x + 4, y + 25.5,
      dark ? ink.on : bad ? ink.bad : ink.ink,
      beside || fill === looks.reserved ? ink.sheet : null, width);
  });
}

// From a request that was turned away to every claim that is to blame.
function drawBlame({ paint, ink, run, from, columns, wide }, places) {
  for (const door of run.doors) {
    if (door.step < from || door.step >= from + columns) continue;
    const y = places.get(" " + door.request), x = (door.step - from + .5) * wide;
    for (const blocker of door.blockers) {
      const claim = run.claims.findLast(c => c[1].claim === blocker && c[2][0][0] <= door.step);
      const to = claim && places.get(claim[0]);
      if (y === undefined || to === undefined) continue;
      paint.strokeStyle = paint.fillStyle = ink.bad; paint.lineWidth = 2;
      paint.beginPath(); paint.moveTo(x, y + 17); paint.lineTo(x, to + 38); paint.stroke();
      paint.beginPath(); paint.moveTo(x - 5, to + 42); paint.lineTo(x + 5, to + 42);
      paint.lineTo(x, to + 33); paint.fill();
      paint.lineWidth = 1;
    }
  }
}

function drawRows({ paint, ink, looks, run, from, columns, wide, width }, top, tall) {
  label(paint, `blocks ${run.first} to ${run.first + run.rows - 1}, one row each`, 2, top - 9,
    ink.soft, null, width);
  const uses = run.usesAt(from), open = new Int32Array(run.rows).fill(0), had = uses.slice();
  const close = (row, column) => {
    const use = USES[had[row]];
    const y = top + row * tall, gap = tall > 5 ? 1 : 0;
    box(paint, open[row] * wide, y, (column - open[row]) * wide + .3, tall - gap, looks[use]);
    open[row] = column; had[row] = uses[row];
  };
  for (let column = 1; column < columns; column++) {
    run.change(uses, from + column);
    const changed = run.blocks[from + column];
    for (let i = 0; i < changed.length; i += 3)
      for (let row = changed[i] - run.first; row <= changed[i + 1] - run.first; row++)
        if (uses[row] !== had[row]) close(row, column);
  }
  for (let row = 0; row < run.rows; row++) close(row, columns);
}

function drawCursor({ paint, ink, run, from, columns, wide, width }, at, height) {
  const x = (at - from) * wide;
  for (const [step] of run.broken) {
    if (step < from || step >= from + columns || step === at) continue;
    label(paint, "✕", (step - from + .5) * wide - 4, 7, ink.bad, null, width);
  }
  paint.strokeStyle = ink.ink; paint.lineWidth = 2;
  paint.strokeRect(x + 1, 15, Math.max(2, wide - 2), height - 16);
  paint.lineWidth = 1;
  const isBroken = run.broken.some(([step]) => step === at);
  const text = (isBroken ? "✕ " : "") + (at + 1);
  label(paint, text, x + wide / 2 - paint.measureText(text).width / 2, 7,
    isBroken ? ink.bad : ink.ink, ink.sheet, width);
}

// The whole run in small, drawn once for each size and look, then only the cursor.
function drawWhole(timeline) {
  const { run, whole, width } = timeline;
  whole.hidden = run.length <= timeline.view()[1];
  if (whole.hidden || !width) return;
  if (!timeline.small) {
    const small = timeline.small = document.createElement("canvas");
    const paint = ready(small, width, 34), ink = colours();
    for (let x = 0; x < width; x++) {
      const c = run.counts(Math.floor(x / width * run.length));
      let y = 34;
      for (const band of ["active", "protected", "reserved", "cached"]) {
        const tall = c[band] / run.usable * 34;
        box(paint, x, y -= tall, 1, tall, band === "reserved" ? ink.soft : ink[band]);
      }
    }
    let last = -1;
    for (const step of run.marks) {
      const x = Math.floor(step / run.length * width);
      if (x !== last) box(paint, x, 0, 1, 7, ink.bad);
      last = x;
    }
  }
  const paint = ready(whole, width, 34), ink = colours();
  paint.drawImage(timeline.small, 0, 0, width, 34);
  const x = timeline.at / run.length * width;
  paint.strokeStyle = ink.ink; paint.lineWidth = 2;
  paint.strokeRect(Math.max(1, Math.min(width - 5, x - 2)), 1, 4, 32);
}

// --- begin

const RULES = JSON.parse(document.getElementById("rule-words").textContent);
for (const root of document.querySelectorAll(".timeline")) {
  const text = document.getElementById("line-" + root.dataset.line).textContent;
  kvclaims.timelines.push(new Timeline(root, new Run(JSON.parse(text)), RULES));
}
function redraw() { for (const timeline of kvclaims.timelines) timeline.resize(); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
function print(is) {
  for (const timeline of kvclaims.timelines) timeline.printed = is;
  redraw();
}
matchMedia("print").addEventListener("change", event => print(event.matches));
// A printer lays the page out before it tells of the medium.
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
