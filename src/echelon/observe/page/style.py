"""The style of the page: light and dark, from a phone to a wide screen."""

__all__ = ["STYLE"]

_COLOURS = """
:root { color-scheme: light dark; --paper: #fcfcfa; --card: #ffffff; --ink: #1c2126; --soft: #59626b; --rule: #dcdfdf;
  --grid: #e9ebea; --axis: #a9b0b4; --train: #1f5fa8; --faint: #97b8de; --dot: #6f9bd0; --eval: #b8500a; --good: #1d7044;
  --bad: #b3261e; --warn: #85600a; --cold: #f1f4f3; --hot: #0b3f7d;
  --r0: #1f5fa8; --r1: #b8500a; --r2: #1d7044; --r3: #8a3a9c; --r4: #85600a; --r5: #0d7f8c; --r6: #b3261e; --r7: #59626b;
  --p0: #d1762a; --p1: #2f6fb4; --p2: #6fa3d8; --p3: #1d8a7a; --p4: #c9ced1; --p5: #8a4ba0; --p6: #b9a13a; --p7: #7a828a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --card: #1d2125; --ink: #e3e6e8; --soft: #9aa4ac; --rule: #30363b;
  --grid: #252a2e; --axis: #58626a; --train: #79b4f2; --faint: #3c6492; --dot: #4f86bf; --eval: #f2a35c; --good: #6cc796;
  --bad: #ff8d84; --warn: #e0b64f; --cold: #1f2529; --hot: #9fd0ff;
  --r0: #79b4f2; --r1: #f2a35c; --r2: #6cc796; --r3: #cf95e3; --r4: #e0b64f; --r5: #5fc9d6; --r6: #ff8d84; --r7: #9aa4ac;
  --p0: #e79a55; --p1: #5b9be0; --p2: #3c6ea3; --p3: #46b5a3; --p4: #4a535a; --p5: #b57fcb; --p6: #c9b458; --p7: #8d969e; } }
"""

_PAGE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; }
h1 { margin: 0; font-size: 1.625rem; line-height: 1.25; overflow-wrap: anywhere; }
header p { margin: .4rem 0 0; color: var(--soft); overflow-wrap: anywhere; }
h2 { margin: 0 0 .9rem; font-size: 1.0625rem; }
section { margin-top: 2.75rem; }
.status { margin-right: .4em; font-weight: 600; }
a { color: var(--train); }
:focus-visible { outline: 2px solid var(--train); outline-offset: 3px; border-radius: 2px; }
.status::before { content: ""; display: inline-block; width: .6em; height: .6em; margin-right: .4em; border-radius: 50%;
  background: currentColor; }
.status.finished { color: var(--good); }
.status.failed { color: var(--bad); }
.status.stopped { color: var(--warn); }
.status.unknown { color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); gap: 1.1rem 1.125rem; margin: 1.75rem 0 0;
  padding: 1.1rem 0; border: solid var(--rule); border-width: 1px 0; }
.figures dt { font-size: .8125rem; color: var(--soft); }
.figures dd { margin: 0; font-size: 1.375rem; line-height: 1.3; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.figures .under { font-size: .8125rem; color: var(--soft); }
.notes { margin: 1.25rem 0 0; padding: .6rem 1rem .6rem 2rem; border-left: 3px solid var(--warn); background: var(--card);
  font-size: .875rem; overflow-wrap: anywhere; }
.none { color: var(--soft); }
.failure { padding: 1rem 1.25rem; border: 1px solid var(--rule); border-left: 4px solid var(--bad); background: var(--card); }
.failure h2 { color: var(--bad); overflow-wrap: anywhere; }
.failure p { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { max-height: 26rem; margin: 0; overflow: auto; font: .8125rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem 1.25rem .4rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
.rows td { white-space: nowrap; }
.rows td:last-child { white-space: normal; min-width: 12rem; overflow-wrap: anywhere; }
.facts th { width: 8rem; }
.facts td { overflow-wrap: anywhere; white-space: pre-wrap; }
.compared { margin-top: 1.75rem; }
.compared td:last-child { min-width: 0; }
.compared small { display: block; color: var(--soft); }
th label { color: var(--ink); cursor: pointer; }
summary { cursor: pointer; }
summary h2 { display: inline; }
.run { --c: var(--r0); }
.r1 { --c: var(--r1); } .r2 { --c: var(--r2); } .r3 { --c: var(--r3); } .r4 { --c: var(--r4); } .r5 { --c: var(--r5); }
.r6 { --c: var(--r6); } .r7 { --c: var(--r7); }
th.run, label.run { color: var(--c); font-weight: 600; }
label.run input { accent-color: var(--c); margin: 0 .3em 0 0; }
"""

_CHARTS = """
.controls { display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; align-items: baseline; margin: 0 0 1.25rem; font-size: .875rem; }
.controls[hidden], .heat[hidden] { display: none; }
.controls h2 { margin: 0; flex: 1 0 auto; }
.controls label, .heat label { color: var(--soft); }
.controls input { width: 7rem; vertical-align: middle; accent-color: var(--train); }
.controls output { display: inline-block; min-width: 4.5em; color: var(--ink); }
select { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--axis); border-radius: 4px;
  padding: .1rem .3rem; max-width: 100%; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: 2rem 1.75rem; }
.chart { display: flex; flex-direction: column; justify-content: space-between; margin: 0; min-width: 0; }
.chart.wide { grid-column: 1 / -1; --height: 19rem; }
figcaption { display: flex; flex-wrap: wrap; gap: .15rem 1.25rem; align-items: baseline; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1rem; font-size: .8125rem; color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 1.1em; height: 0; margin-right: .45em; vertical-align: .28em;
  border-top: 2px solid var(--train); }
.key.faint::before { border-top: 1px solid var(--faint); }
.key.points::before { width: .55em; height: .55em; border: 0; border-radius: 50%; background: var(--eval); vertical-align: 0; }
.key.run::before { border-top-color: var(--c); }
.key.restart::before { width: 0; height: .9em; border: 0; border-left: 1px dashed var(--warn); vertical-align: -.1em; }
.key.checkpoint::before { width: 0; border: solid transparent; border-width: 0 .3em .6em; border-bottom-color: var(--good);
  vertical-align: 0; }
.key.gap { color: var(--bad); }
.key.gap::before { width: 0; height: .7em; border: 0; border-left: 3px solid var(--bad); vertical-align: -.05em; }
.plot { position: relative; margin: 2.1rem .75rem 2.75rem 3.4rem; border-radius: 2px; cursor: crosshair; touch-action: pan-y; }
.plot:focus-visible { outline-offset: 4px; }
.axes { display: block; width: 100%; height: var(--height, 11rem); overflow: visible; }
.axes text { font-size: .75rem; fill: var(--soft); font-variant-numeric: tabular-nums; }
.axes .y { text-anchor: end; }
.axes .x { text-anchor: middle; }
.axes text.name { fill: var(--ink); }
.axes text.name:first-child { text-anchor: start; transform: translateX(-3.4rem); }
.at { overflow: visible; }
.grid { stroke: var(--grid); shape-rendering: crispEdges; }
.base { stroke: var(--axis); shape-rendering: crispEdges; }
.mark.restart { stroke: var(--warn); stroke-dasharray: 5 4; }
.mark.checkpoint { fill: var(--good); }
.data { overflow: visible; }
.data path { fill: none; stroke: var(--c, var(--train)); stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round;
  vector-effect: non-scaling-stroke; }
.data .faint { stroke: var(--faint); stroke-width: 1; }
.run .faint { stroke: var(--c); stroke-opacity: .3; }
.raw .smooth { display: none; }
.raw .data .faint { stroke: var(--c, var(--train)); stroke-opacity: 1; }
.data .points { stroke: var(--c, var(--eval)); stroke-width: 1.25; }
.data .run .points { stroke-dasharray: 6 4; }
.data .dot { stroke-width: 5; }
.data .points.dot, .data .run .points.dot { stroke-width: 7; stroke-dasharray: none; }
.data .halo, .data .run .halo { stroke: var(--paper); stroke-width: 10; stroke-dasharray: none; }
.data .gap { stroke: var(--bad); stroke-width: 2.5; stroke-linecap: butt; }
.data .off { display: none; }
.cursor { visibility: hidden; }
.cursor line { stroke: var(--soft); stroke-dasharray: 3 3; }
.cursor circle { fill: var(--c, var(--train)); stroke: var(--paper); stroke-width: 2; visibility: hidden; }
.cursor .faint { fill: var(--c, var(--dot)); }
.cursor .points { fill: var(--c, var(--eval)); }
.tip { position: absolute; top: .25rem; visibility: hidden; pointer-events: none; z-index: 1; display: grid;
  grid-template-columns: auto auto; gap: .1rem .9rem; padding: .45rem .65rem; border: 1px solid var(--axis); border-radius: 4px;
  background: var(--card); font-size: .8125rem; line-height: 1.35; white-space: nowrap; font-variant-numeric: tabular-nums; }
.tip span:nth-child(odd) { color: var(--soft); max-width: 14rem; overflow: hidden; text-overflow: ellipsis; }
.tip span:nth-child(even) { text-align: right; }
"""

_RANKS = """
.timeline { display: block; width: 100%; height: 44px; overflow: visible; }
.timeline rect { fill: var(--soft); fill-opacity: .35; }
.timeline .finished { fill: var(--good); } .timeline .failed { fill: var(--bad); } .timeline .stopped { fill: var(--warn); }
.timeline .evaluation { fill: var(--eval); fill-opacity: .6; }
.timeline .saved { stroke: var(--good); stroke-width: 2; }
.key.saved::before { width: 0; height: .9em; border: 0; border-left: 2px solid var(--good); vertical-align: -.1em; }
.key.evaluation::before { height: .7em; border: 0; background: var(--eval); opacity: .6; vertical-align: -.05em; }
.ends { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; margin: .3rem 0 .4rem; font-size: .8125rem;
  color: var(--soft); font-variant-numeric: tabular-nums; }
.bars td { vertical-align: middle; }
.bars td:nth-child(4) { width: 50%; min-width: 10rem; }
.bar { display: block; width: 100%; height: 1.1rem; }
.p0 { --p: var(--p0); } .p1 { --p: var(--p1); } .p2 { --p: var(--p2); } .p3 { --p: var(--p3); } .p4 { --p: var(--p4); }
.p5 { --p: var(--p5); } .p6 { --p: var(--p6); } .p7 { --p: var(--p7); }
.bar rect { fill: var(--p); }
.g { --p: var(--good); } .h { --p: var(--bad); }
.goodput td:last-child { min-width: 0; }
.goodput .bar { height: 1.6rem; margin-bottom: .75rem; }
.goodput th { color: var(--ink); }
.ranks .key::before, .goodput .key::before { width: .7em; height: .7em; border: 0; background: var(--p); vertical-align: -.05em; }
.heat { margin-top: 1.5rem; font-size: .875rem; }
.heat .scale { display: inline-flex; gap: .5em; align-items: center; margin-left: 1rem; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.heat .scale i { width: 6rem; height: .8rem; border-radius: 2px; background: linear-gradient(to right, var(--cold), var(--hot)); }
.heat .grid { display: flex; gap: .6rem; margin-top: .6rem; }
.heat .names { display: flex; flex-direction: column; color: var(--soft); font-size: .75rem; line-height: 1; }
.heat .names span { flex: 1; display: flex; align-items: center; justify-content: end; min-height: 0; white-space: nowrap; }
.heat .cells { position: relative; flex: 1; min-width: 0; cursor: crosshair; touch-action: pan-y; }
.heat canvas { display: block; width: 100%; image-rendering: pixelated; border-radius: 2px; }
.heat .cells b { position: absolute; visibility: hidden; border: 2px solid var(--eval); pointer-events: none; }
.heat .ends { padding-left: 2rem; }
@media (max-width: 40rem) { main { padding: 1.25rem 1rem 3rem; } .plot { margin-right: .25rem; }
  .heat .scale { margin-left: 0; } }
"""

STYLE = _COLOURS + _PAGE + _CHARTS + _RANKS
