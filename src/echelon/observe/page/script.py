"""The script of the page: a crosshair in each chart, the reader's choice of smoothing and scale, and the map of ranks.

Texts go in by textContent only, elements by createElement: labels are the user's. Without the script the page shows all but the
map, which the table of ranks has in words.
"""

__all__ = ["SCRIPT"]

_DRAWING = """
const make = name => document.createElementNS(document.querySelector("svg").namespaceURI, name);
const finite = v => typeof v === "number";
const spans = rows => rows.map(text => Object.assign(document.createElement("span"), { textContent: text }));
const choice = { smoothing: 2, scale: "fits" };
const marks = JSON.parse(document.getElementById("marks")?.textContent ?? "[]");
const several = document.querySelector("input[data-run]") !== null;

// As observe/thinning.py: medians of five, then triangular weights over a share of the series.
const around = (i, reach, length) => [i - Math.min(reach, i), Math.min(length, i + Math.min(reach, i) + 1)];
const middle = values => { values.sort((a, b) => a - b); const h = values.length >> 1;
  return values.length % 2 ? values[h] : (values[h - 1] + values[h]) / 2; };
const calm = (values, share) => {
  const steady = values.map((v, i) => finite(v) ? middle(values.slice(...around(i, 2, values.length)).filter(finite)) : v);
  const reach = Math.floor(values.length / share) + 1;
  return steady.map((v, i) => {
    if (!finite(v)) return v;
    const [from, to] = around(i, reach, steady.length);
    let sum = 0, total = 0;
    for (let j = from; j < to; j++) if (finite(steady[j])) {
      const weight = reach + 1 - Math.abs(j - i);
      sum += weight * steady[j]; total += weight;
    }
    return sum / total;
  });
};
const SHARES = [0, 160, 40, 12, 5], WORDS = ["none", "light", "medium", "strong", "strongest"];

class Chart {
  constructor(plot) {
    this.plot = plot;
    this.data = JSON.parse(plot.querySelector("script").textContent);
    this.groups = [...plot.querySelectorAll(".data > g")];
    this.name = plot.querySelector("text.name");
    this.values = plot.querySelector("g.values");
    this.shown = this.data.series.map(s => s.y);
    this.smooth();
  }
  get log() { return this.data.powers !== null && (choice.scale === "powers" || (choice.scale === "fits" && this.data.log)); }
  get axis() { return this.log ? this.data.powers : this.data.plain; }
  across(x) { const [low, high] = this.data.x; return (x - low) / (high - low); }
  up(y) { const f = this.log ? Math.log10 : v => v, [low, high] = this.axis.y; return (f(y) - f(low)) / (f(high) - f(low)); }
  draws(y) { return finite(y) && (!this.log || y >= this.axis.y[0]); }
  smooth() {
    this.shown = this.data.series.map(s => s.kind === "smooth" && choice.smoothing ? calm(s.y, SHARES[choice.smoothing]) : s.y);
  }
  hides(s) { return s.kind === "smooth" ? !choice.smoothing : s.kind === "faint" && several && choice.smoothing > 0; }
  redraw() {
    this.name.textContent = this.data.title + (this.log ? " (log scale)" : "");
    this.values.replaceChildren(...this.axis.ticks.flatMap(([value, label]) => {
      const y = 100 - 100 * this.up(value) + "%", line = make("line"), text = make("text");
      for (const [key, to] of [["class", "grid"], ["x2", "100%"], ["y1", y], ["y2", y]]) line.setAttribute(key, to);
      for (const [key, to] of [["class", "y"], ["y", y], ["dx", -8], ["dy", ".32em"]]) text.setAttribute(key, to);
      text.textContent = label;
      return [line, text];
    }));
    this.data.series.forEach((s, k) => this.draw(this.groups[k], s, this.shown[k]));
  }
  draw(group, s, ys) {
    const lines = [], dots = [];
    let run = [];
    const end = () => {
      if (run.length > 1) lines.push("M" + run.join("L"));
      if (run.length === 1 || s.kind === "points") for (const at of run) dots.push("M" + at + "h0");
      run = [];
    };
    s.x.forEach((x, i) => this.draws(ys[i])
      ? run.push((1000 * this.across(x)).toFixed(1) + "," + (1000 - 1000 * this.up(ys[i])).toFixed(1)) : end());
    end();
    const path = (kind, d) => {
      const made = make("path");
      made.setAttribute("class", kind); made.setAttribute("d", d);
      return made;
    };
    const paths = lines.length ? [path(s.kind, lines.join(""))] : [];
    if (dots.length && s.kind === "points") paths.push(path(s.kind + " halo", dots.join("")));
    if (dots.length) paths.push(path(s.kind + " dot", dots.join("")));
    group.replaceChildren(...paths);
  }
}
const charts = [...document.querySelectorAll(".plot")].map(plot => new Chart(plot));
"""

_CURSOR = """
for (const chart of charts) {
  const { plot, data } = chart;
  const tip = plot.querySelector(".tip"), cursor = plot.querySelector(".cursor");
  const line = cursor.querySelector("line"), dots = cursor.querySelectorAll("circle");
  const records = data.series.filter(s => s.kind !== "smooth");
  const steps = [...new Set(records.flatMap(s => s.x))].sort((a, b) => a - b);
  const marked = new Set(records.filter(s => s.kind === "points").flatMap(s => s.x));
  const nearest = (xs, distance) => xs.reduce((best, x, i) => distance(x) < distance(xs[best]) ? i : best, 0);
  let at = -1;
  const hide = () => { at = -1; for (const e of [tip, cursor, ...dots]) e.style.visibility = ""; };
  const show = i => {
    at = Math.max(0, Math.min(steps.length - 1, i));
    const step = steps[at], x = chart.across(step), rows = ["update", step];
    data.series.forEach((s, k) => {
      const near = nearest(s.x, v => Math.abs(v - step));
      const close = s.kind === "smooth" || (several && s.kind !== "points" && Math.abs(chart.across(s.x[near]) - x) < 0.005);
      const j = close ? near : s.x.indexOf(step);
      const off = chart.hides(s) || chart.groups[k].matches(".off");
      const value = off ? undefined : chart.shown[k][j];
      if (value !== undefined) rows.push(s.label, finite(value) ? +value.toPrecision(9) : value);
      const drawn = value !== undefined && chart.draws(value);
      dots[k].style.visibility = drawn ? "visible" : "hidden";
      if (drawn) {
        dots[k].setAttribute("cx", 100 * chart.across(s.x[j]) + "%");
        dots[k].setAttribute("cy", 100 - 100 * chart.up(value) + "%");
      }
    });
    for (const [where, kind, text] of marks) {
      const close = Math.abs(chart.across(where) - x) * plot.clientWidth < 4;
      if (close) rows.push(kind, where === step ? text : text + " at " + where);
    }
    for (const end of ["x1", "x2"]) line.setAttribute(end, 100 * x + "%");
    tip.replaceChildren(...spans(rows));
    // Beside the line, and never beyond the window.
    const width = tip.offsetWidth, here = x * plot.clientWidth, box = plot.getBoundingClientRect();
    const left = here + 12 + width + box.left < document.documentElement.clientWidth ? here + 12 : here - 12 - width;
    tip.style.left = Math.max(4 - box.left, left) + "px";
    tip.style.visibility = cursor.style.visibility = "visible";
  };
  plot.tabIndex = 0;
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), mouse = event.clientX - box.left;
    // Marked points pull from 6 pixels away: among a thousand records nobody hits the one with an evaluation.
    show(nearest(steps, x => Math.abs(chart.across(x) * box.width - mouse) - (marked.has(x) ? 6 : 0)));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", event => {
    const by = event.shiftKey ? 10 : 1, last = steps.length - 1;
    const to = { ArrowLeft: at < 0 ? last : at - by, ArrowRight: at + by, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}
"""

_CONTROLS = """
const controls = document.querySelector(".controls");
if (controls) {
  const range = document.getElementById("smoothing"), scale = document.getElementById("scale");
  const word = controls.querySelector("output");
  const apply = () => {
    choice.smoothing = +range.value; choice.scale = scale.value;
    word.textContent = range.ariaValueText = WORDS[choice.smoothing];
    document.body.classList.toggle("raw", !choice.smoothing);
    for (const chart of charts) { chart.smooth(); chart.redraw(); }
  };
  controls.hidden = false;
  word.textContent = WORDS[+range.value];
  if (+range.value !== 2 || scale.value !== "fits") apply();  // as the browser kept them when the page was loaded again
  controls.addEventListener("submit", event => event.preventDefault());
  for (const each of [range, scale]) each.addEventListener("input", apply);
}
for (const box of document.querySelectorAll("input[data-run]")) {
  const apply = () => {
    for (const group of document.querySelectorAll(".data > g[data-run='" + box.dataset.run + "']"))
      group.classList.toggle("off", !box.checked);
  };
  box.addEventListener("input", apply);
  apply();
}
"""

_MAP = """
for (const heat of document.querySelectorAll(".heat")) {
  const data = JSON.parse(heat.querySelector("script").textContent), canvas = heat.querySelector("canvas");
  const select = heat.querySelector("select"), cells = heat.querySelector(".cells"), tip = heat.querySelector(".tip");
  const box = heat.querySelector("b"), names = heat.querySelector(".names"), ends = heat.querySelectorAll(".scale span");
  const rows = data.ranks.length, columns = Object.values(data.layers)[0][0].length;
  const height = Math.max(6, Math.min(28, 320 / rows));
  let at = null;
  const colour = name => {
    const found = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return [1, 3, 5].map(i => parseInt(found.slice(i, i + 2), 16));
  };
  const paint = () => {
    const layer = data.layers[select.value], values = layer.flat().filter(finite), cold = colour("--cold"), hot = colour("--hot");
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
  const hide = () => { at = null; tip.style.visibility = box.style.visibility = ""; };
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
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
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
"""

SCRIPT = _DRAWING + _CURSOR + _CONTROLS + _MAP
