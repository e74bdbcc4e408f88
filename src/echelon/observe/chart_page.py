"""What a page with charts has once: their style, and a script that adds a crosshair with the nearest record to each."""

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: 2rem 1.75rem; }
.chart { display: flex; flex-direction: column; justify-content: space-between; margin: 0; min-width: 0; }
.chart.wide { grid-column: 1 / -1; --height: 19rem; }
figcaption { display: flex; flex-wrap: wrap; gap: .15rem 1.25rem; align-items: baseline; }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1rem; font-size: .8125rem; color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 1.1em; height: 0; margin-right: .45em; vertical-align: .28em;
  border-top: 2px solid var(--train); }
.key.faint::before { border-top: 1px solid var(--faint); }
.key.points::before { width: .55em; height: .55em; border: 0; border-radius: 50%; background: var(--eval); vertical-align: 0; }
.key.gap { color: var(--bad); }
.key.gap::before { width: 0; height: .7em; border: 0; border-left: 3px solid var(--bad); vertical-align: -.05em; }
.plot { position: relative; margin: 2.1rem .75rem 2.75rem 3.4rem; border-radius: 2px; cursor: crosshair; touch-action: pan-y; }
.plot:focus-visible { outline: 2px solid var(--train); outline-offset: 4px; }
.axes { display: block; width: 100%; height: var(--height, 11rem); overflow: visible; }
.axes text { font-size: .75rem; fill: var(--soft); font-variant-numeric: tabular-nums; }
.axes .y { text-anchor: end; }
.axes .x { text-anchor: middle; }
.axes text.name { fill: var(--ink); }
.axes text.name:first-child { text-anchor: start; transform: translateX(-3.4rem); }
.at { overflow: visible; }
.grid { stroke: var(--grid); shape-rendering: crispEdges; }
.base { stroke: var(--axis); shape-rendering: crispEdges; }
.data { overflow: visible; }
.data path { fill: none; stroke: var(--train); stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round;
  vector-effect: non-scaling-stroke; }
.data .faint { stroke: var(--faint); stroke-width: 1; }
.data .points { stroke: var(--eval); stroke-width: 1.25; }
.data .dot { stroke-width: 5; }
.data .points.dot { stroke-width: 7; }
.data .halo { stroke: var(--paper); stroke-width: 10; }
.data .gap { stroke: var(--bad); stroke-width: 2.5; stroke-linecap: butt; }
.cursor { visibility: hidden; }
.cursor line { stroke: var(--soft); stroke-dasharray: 3 3; }
.cursor circle { fill: var(--train); stroke: var(--paper); stroke-width: 2; visibility: hidden; }
.cursor .faint { fill: var(--dot); }
.cursor .points { fill: var(--eval); }
.tip { position: absolute; top: .25rem; visibility: hidden; pointer-events: none; z-index: 1; display: grid;
  grid-template-columns: auto auto; gap: .1rem .9rem; padding: .45rem .65rem; border: 1px solid var(--axis); border-radius: 4px;
  background: var(--card); font-size: .8125rem; line-height: 1.35; white-space: nowrap; font-variant-numeric: tabular-nums; }
.tip span:nth-child(odd) { color: var(--soft); }
.tip span:nth-child(even) { text-align: right; }
"""

# Texts go in by textContent only, elements by cloning or createElement("span"): labels are the user's.
SCRIPT = """
for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.querySelector("script").textContent);
  const tip = plot.querySelector(".tip"), cursor = plot.querySelector(".cursor");
  const line = cursor.querySelector("line"), dots = cursor.querySelectorAll("circle");
  const records = data.series.filter(s => s.kind !== "smooth");
  const steps = [...new Set(records.flatMap(s => s.x))].sort((a, b) => a - b);
  const marked = new Set(records.filter(s => s.kind === "points").flatMap(s => s.x));
  const place = (v, [low, high], f) => (f(v) - f(low)) / (f(high) - f(low));
  const across = x => place(x, data.x, v => v), up = y => place(y, data.y, data.log ? Math.log10 : v => v);
  const nearest = (xs, distance) => xs.reduce((best, x, i) => distance(x) < distance(xs[best]) ? i : best, 0);
  let at = -1;
  const hide = () => { at = -1; for (const e of [tip, cursor, ...dots]) e.style.visibility = ""; };
  const show = i => {
    at = Math.max(0, Math.min(steps.length - 1, i));
    const step = steps[at], x = across(step), rows = ["step", step];
    data.series.forEach((s, k) => {
      const j = s.kind === "smooth" ? nearest(s.x, v => Math.abs(v - step)) : s.x.indexOf(step);
      const value = s.y[j], drawn = typeof value === "number";
      if (value !== undefined) rows.push(s.label, value);
      dots[k].style.visibility = drawn ? "visible" : "hidden";
      if (drawn) {
        dots[k].setAttribute("cx", 100 * across(s.x[j]) + "%");
        dots[k].setAttribute("cy", 100 - 100 * up(value) + "%");
      }
    });
    for (const end of ["x1", "x2"]) line.setAttribute(end, 100 * x + "%");
    tip.replaceChildren(...rows.map(text => Object.assign(document.createElement("span"), { textContent: text })));
    tip.style.left = 100 * x + "%";
    tip.style.transform = x > 0.5 ? "translateX(calc(-100% - 12px))" : "translateX(12px)";
    tip.style.visibility = cursor.style.visibility = "visible";
  };
  plot.tabIndex = 0;
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), mouse = event.clientX - box.left;
    // Marked points pull from 6 pixels away: among a thousand records nobody hits the one with an evaluation.
    show(nearest(steps, x => Math.abs(across(x) * box.width - mouse) - (marked.has(x) ? 6 : 0)));
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
