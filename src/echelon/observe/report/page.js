// The script of the page: curves, drawn by uPlot from the facts in #facts, and the map of ranks.
// Texts go in by textContent only: labels are the user's.
"use strict";
const make = (tag, kind, text) => {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
};
const finite = v => typeof v === "number";
const spans = texts => texts.map(text => make("span", "", text));
const colours = getComputedStyle(document.documentElement);
const colour = name => colours.getPropertyValue(name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");

const facts = JSON.parse(document.getElementById("facts")?.textContent ?? '{"updates": [0, 1], "marks": [], "charts": []}');
const choice = { smoothing: 2, scale: "fits", hidden: new Set() };
const LEAST = 1e-290;  // on a logarithmic axis: powers of ten below have fewer digits, and at last none
const SHARES = [0, 160, 40, 12, 5], WORDS = ["none", "light", "medium", "strong", "strongest"];

// A trend: medians of five, so that one spike does not become a hill, then triangular weights over a share of the series.
// Symmetric at the start, where losses fall steeply; one-sided at the end, so that the last point is a mean, too.
const around = (i, reach, length) => [i - Math.min(reach, i), Math.min(length, i + Math.min(reach, i) + 1)];
const median = values => {
  const sorted = values.slice().sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : sorted[half - 1] / 2 + sorted[half] / 2;
};
const trend = (values, share) => {
  const steady = values.map((v, i) => finite(v) ? median(values.slice(...around(i, 2, values.length)).filter(finite)) : v);
  const reach = Math.floor(values.length / share) + 1;
  return steady.map((v, i) => {
    if (!finite(v)) return v;
    const near = [];
    const [from, to] = around(i, reach, steady.length);
    for (let j = from; j < to; j++) if (finite(steady[j])) near.push([reach + 1 - Math.abs(j - i), steady[j]]);
    const total = near.reduce((sum, [weight]) => sum + weight, 0);
    return near.reduce((sum, [weight, each]) => sum + weight / total * each, 0);
  });
};

// Nice numbers (1, 2 or 5 times a power of ten) that cover [low, high]. A range too narrow to be told apart is widened.
const ticks = (low, high, count, whole) => {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= Math.max(1e-6 * size, 1e-300)) {
    const pad = size > 1e-300 ? 0.05 * size : 1;
    [low, high] = [low - pad, high + pad];
  }
  const rough = high / count - low / count, power = 10 ** Math.floor(Math.log10(rough));
  const nice = ([1, 2, 5].find(m => m * power >= rough * (1 - 1e-9)) ?? 10) * power;
  const step = whole ? Math.max(1, nice) : nice;
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => +((first + i) * step).toPrecision(12));
};
// With the same decimals, and the same suffix or exponent.
const labels = marks => {
  const top = Math.max(...marks.map(Math.abs)), power = Math.floor(Math.log10(top) + 1e-9);
  const thousands = top >= 1e4 && top < 1e15, plain = top >= 1e-3 && top < 1e4;
  const exponent = thousands ? 3 * Math.floor(power / 3) : plain ? 0 : power;
  const suffix = thousands ? { 3: "k", 6: "M", 9: "G", 12: "T" }[exponent] : plain ? "" : "e" + exponent;
  const decimals = Math.max(0, exponent - Math.floor(Math.log10(marks[1] - marks[0]) + 1e-9));
  return marks.map(v => v === 0 ? "0" : (v / 10 ** exponent).toFixed(decimals) + suffix);
};
// Powers of ten that cover [low, high], both above 0; over less than two of them also twice and five times each.
const powers = (low, high) => {
  const first = Math.floor(Math.log10(low)), last = Math.max(first + 1, Math.ceil(Math.log10(high)));
  if (high < 100 * low) {
    const all = [];
    for (let e = first; e <= last; e++) for (const m of [1, 2, 5]) all.push(+`${m}e${e}`);
    const from = Math.max(0, all.findLastIndex(v => v <= low)), to = all.findIndex((v, i) => v >= high && i > from);
    if (to > from && to - from < 7) return all.slice(from, to + 1);
  }
  const stride = Math.max(1, Math.ceil((last - first) / 6)), marks = [];
  for (let e = first; e < last + stride; e += stride) marks.push(+`1e${Math.min(e, 308)}`);
  return marks;
};
const powerLabel = v => {
  const exponent = Math.floor(Math.log10(v) + 1e-9);
  return Math.abs(exponent) <= 3 ? String(+v.toPrecision(6)) : (v / 10 ** exponent).toFixed(0) + "e" + exponent;
};

// All is drawn in a square of 1 x 1, so that no size of a number is beyond what uPlot can divide into ticks.
const [FIRST, LAST] = facts.updates;
const across = step => (step - FIRST) / (LAST - FIRST);
const several = document.querySelector("input[data-run]") !== null;
let view = [0, 1];  // of all charts: what part of the updates is seen

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.records = spec.series.filter(s => s.kind !== "smooth");
    this.steps = [...new Set(this.records.flatMap(s => s.x))].sort((a, b) => a - b);
    this.pulls = new Set(this.records.filter(s => s.kind === "points").flatMap(s => s.x));
    const values = this.records.flatMap(s => s.y.filter(finite));
    this.fitsLog = spec.log && values.length > 0 && values.every(v => v > LEAST) && Math.max(...values) > 50 * median(values);
    this.at = -1;
    this.box();
    this.plot.append(this.tip);
    this.uplot = new uPlot(this.options(), [[]], this.plot);
    this.draw();
    this.listen();
  }
  box() {
    const { spec } = this;
    this.figure = make("figure", spec.wide ? "chart wide" : "chart");
    this.unit = make("span", "unit");
    this.plot = make("div", "plot");
    this.tip = make("div", "tip");
    this.tip.setAttribute("role", "status");
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "application");
    this.plot.setAttribute("aria-label", spec.title + "; arrow keys move through the updates");
    this.plot.setAttribute("aria-describedby", "curves");
    const caption = make("figcaption"), legend = make("span", "legend");
    if (spec.legend && spec.series.length > 1)
      for (const s of spec.series)
        legend.append(make("span", `key ${s.kind}` + (s.run === undefined ? "" : ` run r${s.run % 8}`), s.label));
    if (spec.legend && spec.wide)
      for (const kind of ["restart", "checkpoint"])
        if (facts.marks.some(mark => mark[1] === kind)) legend.append(make("span", `key ${kind}`, kind));
    if (spec.not_finite) legend.append(make("span", "key gap", "not finite: " + spec.not_finite));
    caption.append(make("b", "", spec.title), legend);
    this.figure.append(caption, this.unit, this.plot);
    document.querySelector(".charts").append(this.figure);
  }
  options() {
    const font = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";
    const line = name => ({ stroke: () => colour(name), width: 1 });
    const axis = { stroke: () => colour("--soft"), font, labelFont: font, gap: 6 };
    const marks = name => ({ splits: () => this[name].map(m => m[0]), values: () => this[name].map(m => m[1]) });
    return {
      width: this.plot.clientWidth, height: this.plot.clientHeight, legend: { show: false }, padding: [8, 14, 0, 0],
      scales: { x: { time: false, range: () => view }, y: { range: () => [0, 1] } },
      axes: [
        { ...axis, ...marks("bottom"), label: "update", size: 28, labelSize: 18, grid: { show: false },
          ticks: { ...line("--axis"), size: 5 }, border: { show: true, ...line("--axis") } },
        { ...axis, ...marks("left"), ticks: { show: false },
          size: (u, names) => Math.max(54, ...(names ?? []).map(name => 12 + 7 * name.length)),
          grid: { ...line("--grid"), filter: (u, all) => all.map(v => v > 0 ? v : null) } },
      ],
      series: [{}, ...this.spec.series.map(s => this.series(s))],
      cursor: {
        y: false, drag: { setScale: false, dist: 5 }, move: (u, left, top) => [this.snapped(left), top],
        dataIdx: (u, i, at) => this.near(i, at), bind: { dblclick: () => () => zoom([0, 1]) },
        points: { size: 11, width: 2, stroke: () => colour("--paper"), fill: (u, i) => this.colour(this.spec.series[i - 1]) },
      },
      hooks: {
        setCursor: [() => this.tell()], setSelect: [u => this.selected(u)],
        drawAxes: [u => this.drawMarks(u)], draw: [u => this.drawGaps(u)],
      },
    };
  }
  series(s) {
    const stroke = () => this.colour(s), dots = s.kind === "points";
    return {
      stroke, pxAlign: 0, width: { faint: 1, points: 1.25 }[s.kind] ?? 1.75, dash: dots && several ? [6, 4] : undefined,
      // A record between two gaps is a dot.
      points: dots ? { show: true, size: 10, width: 2, fill: stroke, stroke: () => colour("--paper") }
        : { show: false, size: 5, width: 0, fill: stroke, filter: (u, i) => this.alone(u.data[i]) },
    };
  }
  colour(s) {
    if (s.run !== undefined) return colour("--r" + s.run % 8);
    return colour(s.kind === "points" ? "--eval" : s.kind === "faint" && choice.smoothing ? "--faint" : "--train");
  }
  alone(ys) {
    const there = ys.flatMap((y, i) => y === undefined ? [] : [i]);
    return there.filter((i, n) => ys[i] !== null && (ys[there[n - 1]] ?? null) === null && (ys[there[n + 1]] ?? null) === null);
  }
  hides(s) { return choice.hidden.has(s.run) && several || s.kind === "smooth" && !choice.smoothing; }
  draw() {
    const { spec } = this, share = SHARES[choice.smoothing];
    const shown = spec.series.map(s => s.kind === "smooth" && share ? trend(s.y, share) : s.y);
    [this.x, ...this.ys] = uPlot.join(spec.series.map((s, i) => [s.x, shown[i]]));
    const seen = x => across(x) >= view[0] && across(x) <= view[1];
    const values = spec.series.flatMap((s, i) => this.hides(s) ? [] : shown[i].filter((y, j) => finite(y) && seen(s.x[j])));
    const above = values.filter(v => v > LEAST);
    const log = above.length > 0 && (choice.scale === "powers" || choice.scale === "fits" && this.fitsLog);
    const low = Math.min(...(log ? above : values)), high = Math.max(...values), zero = spec.from_zero ? 0 : low;
    const ends = values.length ? [Math.min(low, zero), Math.max(high, zero)] : [0, 1];
    const marks = log ? powers(low, high) : ticks(...ends, 5);
    const size = log ? Math.log10 : v => v, bottom = size(marks[0]), height = size(marks.at(-1)) - bottom;
    this.up = y => finite(y) && (!log || y > LEAST) ? (size(y) - bottom) / height : null;
    const names = log ? marks.map(powerLabel) : labels(marks);
    this.left = marks.map((v, i) => [this.up(v), names[i]]);
    const [from, to] = view.map(part => FIRST + part * (LAST - FIRST));
    const steps = ticks(from, to, Math.max(2, this.plot.clientWidth / 55), true), stepNames = labels(steps);
    this.bottom = steps.flatMap((v, i) => v >= from && v <= to ? [[across(v), stepNames[i]]] : []);
    this.unit.textContent = spec.unit + (log ? " (log scale)" : "") || "\u00a0";
    this.uplot.batch(() => {
      spec.series.forEach((s, i) => {
        this.uplot.series[i + 1].alpha = several && s.kind === "faint" && choice.smoothing ? 0.3 : 1;
        this.uplot.setSeries(i + 1, { show: !this.hides(s) });
      });
      this.uplot.setData([this.x.map(across), ...this.ys.map(ys => ys.map(y => y === undefined ? y : this.up(y)))]);
    });
  }
  drawMarks({ ctx, bbox, valToPos }) {
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.strokeStyle = colour("--warn");
    ctx.fillStyle = colour("--good");
    const foot = bbox.top + bbox.height, wide = 3.5 * devicePixelRatio;
    for (const [step, kind] of facts.marks) {
      const at = across(step), x = valToPos(at, "x", true);
      if (at < view[0] || at > view[1]) continue;
      ctx.beginPath();
      if (kind === "restart") { ctx.moveTo(x, bbox.top); ctx.lineTo(x, foot); ctx.stroke(); }
      else { ctx.moveTo(x, foot - 2 * wide); ctx.lineTo(x + wide, foot); ctx.lineTo(x - wide, foot); ctx.fill(); }
    }
    ctx.restore();
  }
  drawGaps({ ctx, bbox, valToPos }) {
    ctx.fillStyle = colour("--bad");
    const shown = this.ys.filter((_, i) => this.spec.series[i].kind !== "smooth" && !this.hides(this.spec.series[i]));
    this.x.forEach((x, j) => {
      const at = across(x), left = valToPos(at, "x", true) - devicePixelRatio;
      if (at >= view[0] && at <= view[1] && shown.some(ys => typeof ys[j] === "string"))
        ctx.fillRect(left, bbox.top + bbox.height, 2.5 * devicePixelRatio, -7 * devicePixelRatio);
    });
  }

  // The cursor stands on a record. Marked points pull from 6 pixels away: nobody would hit an evaluation among a thousand.
  nearest(left) {
    let best = -1, least = Infinity;
    this.steps.forEach((step, i) => {
      const at = across(step), far = Math.abs(this.uplot.valToPos(at, "x") - left) - (this.pulls.has(step) ? 6 : 0);
      if (at >= view[0] && at <= view[1] && far < least) [best, least] = [i, far];
    });
    return best;
  }
  snapped(left) {
    const found = this.nearest(left);
    return left < 0 || found < 0 ? left : this.uplot.valToPos(across(this.steps[found]), "x");
  }
  near(i, at) {
    const s = this.spec.series[i - 1];
    if (!s || this.ys[i - 1][at] !== undefined) return at;
    if (s.kind !== "smooth" && (!several || s.kind === "points")) return null;
    const far = j => Math.abs(across(s.x[j]) - across(this.x[at]));
    const best = s.x.reduce((found, _, j) => far(j) < far(found) ? j : found, 0);
    return s.kind === "smooth" || far(best) < 0.005 ? this.x.indexOf(s.x[best]) : null;
  }
  show(i) {
    if (i < 0 || i >= this.steps.length) return;
    const at = across(this.steps[i]);
    if (at < view[0] || at > view[1]) zoom([at - (view[1] - view[0]) / 2, at + (view[1] - view[0]) / 2]);
    this.uplot.setCursor({ left: this.uplot.valToPos(at, "x"), top: 10 });
  }
  hide() { this.uplot.setCursor({ left: -10, top: -10 }); }
  tell() {
    const { left, idx, idxs } = this.uplot.cursor;
    if (!(left >= 0) || idx === null || idx === undefined) {
      this.at = -1;
      this.tip.style.visibility = this.tip.style.left = "";
      return;
    }
    const step = this.x[idx], rows = ["update", step];
    this.at = this.steps.indexOf(step);
    this.spec.series.forEach((s, i) => {
      const value = this.hides(s) || several && s.kind === "faint" && choice.smoothing ? undefined : this.ys[i][idxs[i + 1]];
      if (value !== undefined) rows.push(s.label, finite(value) ? +value.toPrecision(9) : value);
    });
    for (const [where, kind, text] of facts.marks) {
      const close = Math.abs(this.uplot.valToPos(across(where), "x") - left) < 4;
      if (close) rows.push(kind, where === step ? text : text + " at " + where);
    }
    this.tip.replaceChildren(...spans(rows));
    // Beside the line, and never beyond the window.
    const width = this.tip.offsetWidth, box = this.plot.getBoundingClientRect();
    const here = left + this.uplot.over.offsetLeft, right = here + 12 + width + box.left < document.documentElement.clientWidth;
    this.tip.style.left = Math.max(4 - box.left, right ? here + 12 : here - 12 - width) + "px";
    this.tip.style.visibility = "visible";
  }
  selected(u) {
    const { left, width } = u.select;
    if (width < 5) return;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }
  listen() {
    const { plot } = this;
    new ResizeObserver(() => {
      if (plot.clientWidth === this.uplot.width && plot.clientHeight === this.uplot.height) return;
      this.hide();  // what it says may stand beyond a narrower window
      this.uplot.setSize({ width: plot.clientWidth, height: plot.clientHeight });
      this.draw();
    }).observe(plot);
    plot.addEventListener("pointermove", event => {
      const left = event.clientX - this.uplot.over.getBoundingClientRect().left;
      if (event.pointerType === "touch") this.uplot.setCursor({ left: this.snapped(left), top: 10 });
    });
    plot.addEventListener("blur", () => this.hide());
    plot.addEventListener("keydown", event => {
      const by = event.shiftKey ? 10 : 1, last = this.steps.length - 1, { at } = this;
      const clamp = i => Math.max(0, Math.min(last, i));
      const to = { ArrowLeft: at < 0 ? last : clamp(at - by), ArrowRight: clamp(at + by), Home: 0, End: last }[event.key];
      const middle = at < 0 ? (view[0] + view[1]) / 2 : across(this.steps[at]), half = (view[1] - view[0]) / 2;
      if (event.key === "Escape") this.hide();
      else if (event.key === "+") zoom([middle - half / 2, middle + half / 2]);
      else if (event.key === "-") zoom([middle - 2 * half, middle + 2 * half]);
      else if (to !== undefined) this.show(to);
      else return;
      event.preventDefault();
    });
  }
}

const controls = document.querySelector(".controls"), whole = document.getElementById("whole");
const zoom = ([from, to]) => {
  if (to - from < 1e-6) return;
  const width = Math.min(1, to - from), start = Math.max(0, Math.min(1 - width, from));
  view = [start, start + width];
  whole.hidden = width === 1;
  for (const chart of charts) chart.draw();
};
if (controls) controls.hidden = false;  // first: it takes height
const charts = facts.charts.map(spec => new Chart(spec));
dark.addEventListener("change", () => { for (const chart of charts) chart.draw(); });
if (controls) {
  const range = document.getElementById("smoothing"), scale = document.getElementById("scale");
  const word = controls.querySelector("output");
  const apply = () => {
    choice.smoothing = +range.value; choice.scale = scale.value;
    word.textContent = range.ariaValueText = WORDS[choice.smoothing];
    for (const chart of charts) chart.draw();
  };
  word.textContent = WORDS[+range.value];
  if (+range.value !== 2 || scale.value !== "fits") apply();  // as the browser kept them when the page was loaded again
  controls.addEventListener("submit", event => event.preventDefault());
  for (const each of [range, scale]) each.addEventListener("input", apply);
  whole.addEventListener("click", () => zoom([0, 1]));
}
for (const box of document.querySelectorAll("input[data-run]")) {
  const apply = () => {
    choice.hidden[box.checked ? "delete" : "add"](+box.dataset.run);
    for (const chart of charts) chart.draw();
  };
  box.addEventListener("input", apply);
  if (!box.checked) apply();
}

for (const heat of document.querySelectorAll(".heat")) {
  const data = JSON.parse(heat.querySelector("script").textContent), canvas = heat.querySelector("canvas");
  const select = heat.querySelector("select"), cells = heat.querySelector(".cells"), tip = heat.querySelector(".tip");
  const box = heat.querySelector("b"), names = heat.querySelector(".names"), ends = heat.querySelectorAll(".scale span");
  const rows = data.ranks.length, columns = Object.values(data.layers)[0][0].length;
  const height = Math.max(6, Math.min(28, 320 / rows));
  let at = null;
  const rgb = name => [1, 3, 5].map(i => parseInt(colour(name).slice(i, i + 2), 16));
  const paint = () => {
    const layer = data.layers[select.value], values = layer.flat().filter(finite), cold = rgb("--cold"), hot = rgb("--hot");
    const low = Math.min(...values), high = Math.max(...values), pen = canvas.getContext("2d");
    canvas.width = columns; canvas.height = rows; canvas.style.height = rows * height + "px";
    layer.forEach((row, y) => row.forEach((value, x) => {
      if (!finite(value)) return;
      const part = high > low ? (value - low) / (high - low) : 0;
      pen.fillStyle = "rgb(" + cold.map((c, i) => Math.round(c + part * (hot[i] - c))).join(",") + ")";
      pen.fillRect(x, y, 1, 1);
    }));
    [low, high].forEach((value, i) => ends[i].textContent = values.length ? value + " ms" : "");
  };
  const hide = () => { at = null; tip.style.visibility = tip.style.left = box.style.visibility = ""; };
  const show = (x, y) => {
    at = [x = Math.max(0, Math.min(columns - 1, x)), y = Math.max(0, Math.min(rows - 1, y))];
    const [low, high] = data.steps, from = Math.floor(low + (high - low) * x / columns), wide = cells.clientWidth / columns;
    const value = data.layers[select.value][y][x], said = finite(value) ? value + " ms" : "no update";
    tip.replaceChildren(...spans(["rank", data.ranks[y], "from update", from, select.value, said]));
    const place = { left: x * wide, top: y * height, width: Math.max(4, wide), height };
    for (const [name, pixels] of Object.entries(place)) box.style[name] = pixels + "px";
    const right = (x + 1) * wide + 8;
    tip.style.left = (right + tip.offsetWidth < cells.clientWidth ? right : Math.max(0, x * wide - 8 - tip.offsetWidth)) + "px";
    tip.style.top = (y + 1) * height + 6 + "px";
    tip.style.visibility = box.style.visibility = "visible";
  };
  const every = Math.ceil(rows / Math.max(1, Math.floor(rows * height / 13)));
  names.replaceChildren(...spans(data.ranks.map((name, i) => i % every ? "" : name)));
  names.style.height = rows * height + "px";
  heat.hidden = false;
  paint();
  select.addEventListener("input", () => { paint(); if (at) show(...at); });
  dark.addEventListener("change", paint);
  cells.addEventListener("pointermove", event => {
    const place = cells.getBoundingClientRect();
    show(Math.floor(columns * (event.clientX - place.left) / place.width), Math.floor((event.clientY - place.top) / height));
  });
  cells.addEventListener("pointerleave", hide);
  cells.addEventListener("blur", hide);
  cells.addEventListener("keydown", event => {
    const [x, y] = at ?? [-1, 0], by = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: [x - by, y], ArrowRight: [x + by, y], ArrowUp: [x, y - 1], ArrowDown: [x, y + 1], Home: [0, y],
      End: [columns - 1, y] }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    show(...to);
  });
}
