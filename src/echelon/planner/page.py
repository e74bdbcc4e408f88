"""A plan as one HTML page that works offline, without scripts: bars of memory, and the update of the first layouts over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from echelon.planner.memory import Answer, Picture, duration, size
from echelon.planner.trace import KINDS

__all__ = ["page"]

_WIDTH, _BAR, _HEIGHT, _LANE = 960, 22, 180, 46
_MOST_PICTURES = 4


def page(answers: Sequence[Answer], budget: int, text: str, title: str) -> str:
    """
    Args:
        answers: the plans; for the first few, the update is drawn.
        budget: bytes of a device, or 0.
        text: the table.
        title: what was planned, such as the script's name.
    """
    known = [each for each in answers if each.peak]
    kinds = [kind for kind in KINDS if any((each.by_kind or {}).get(kind) for each in known)]
    made = [f"<h1>{escape(title)}</h1>", f"<pre>{escape(text)}</pre>"]
    if known:
        made += ["<h2>Memory of a rank where it is fullest</h2>", _legend(kinds), _bars(known, budget, kinds)]
    for each in known[:_MOST_PICTURES]:
        if each.picture is not None:
            made.append(_update(each, each.picture, kinds))
    return _PAGE.format(title=escape(title), body="\n".join(made))


def _bars(answers: Sequence[Answer], budget: int, kinds: Sequence[str]) -> str:
    most = max(each.peak for each in answers)
    budget = 0 if budget > 10 * most else budget  # or the bars would be too short to see
    most = max(budget, most)
    made = []
    for row, each in enumerate(answers):
        x, y = 0.0, row * (_BAR + 26)
        name = f"{each.layout}{' (yours)' if each.is_own else ''}: {size(each.peak)} {each.verdict}"
        made.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        for kind in kinds:
            much = (each.by_kind or {}).get(kind, 0)
            width = _WIDTH * much / most
            made.append(_rect(kind, x, y + 20, width, _BAR, f"{each.layout}: {kind} {size(much)}"))
            x += width
    height = len(answers) * (_BAR + 26) + 6
    if budget:
        at = _WIDTH * budget / most
        made.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}"><title>{size(budget)} of the device</title></line>')
    return _svg(made, height, f"memory of {len(answers)} layouts by what it is for")


def _update(answer: Answer, picture: Picture, kinds: Sequence[str]) -> str:
    made = [
        f"<h2>{escape(answer.layout)}: an update</h2>",
        "<p>Memory, by operators in their order</p>",
        _area(answer, picture, kinds),
    ]
    if not picture.shares:
        return "\n".join(made)
    lanes = {
        "operators": [(kind, each) for (kind, collective), each in picture.shares.items() if not collective],
        "collectives": [(kind, each) for (kind, collective), each in picture.shares.items() if collective],
    }
    stage = ", of a stage, without what it waits for others" if answer.stages else ""
    made.append(f"<p>Time: {duration(answer.seconds)}{stage}; how much of each part of it operators and collectives take</p>")
    made.append(_legend([kind for lane in lanes.values() for kind, _ in lane]))
    drawn, y = list[str](), 0
    for name, shares in lanes.items():
        drawn.append(f'<text x="0" y="{y + 14}">{name}</text>')
        for part in range(max((len(each) for _, each in shares), default=0)):
            drawn += _column(part, len(shares[0][1]), [(kind, each[part]) for kind, each in shares], y + 20)
        y += _LANE + 30
    return "\n".join([*made, _svg(drawn, y, f"time of an update of {answer.layout}")])


def _area(answer: Answer, picture: Picture, kinds: Sequence[str]) -> str:
    """Stacked bands, one for each kind of memory."""
    most, step = max(answer.peak, 1), _WIDTH / len(picture.memory)
    base, made = [0.0] * len(picture.memory), list[str]()
    for kind in kinds:
        top = [below + part[KINDS.index(kind)] for below, part in zip(base, picture.memory, strict=True)]
        there = [f"{at * step:.1f},{_HEIGHT * (1 - much / most):.1f}" for at, much in enumerate(top)]
        back = [f"{at * step:.1f},{_HEIGHT * (1 - much / most):.1f}" for at, much in reversed(list(enumerate(base)))]
        largest = max(part[KINDS.index(kind)] for part in picture.memory)
        points = " ".join([*there, *back])
        made.append(f'<polygon class="{_class(kind)}" points="{points}"><title>{kind}: at most {size(largest)}</title></polygon>')
        base = top
    return _svg(made, _HEIGHT, f"memory over an update of {answer.layout}")


def _column(part: int, parts: int, shares: Iterable[tuple[str, float]], y: float) -> list[str]:
    width, made, left = _WIDTH / parts, list[str](), 1.0
    for kind, share in shares:
        share = min(left, share)  # collectives of several groups can run at the same time
        left -= share
        if share > 0.005:
            made.append(_rect(kind, part * width, y + _LANE * left, width, _LANE * share, f"{kind} {share:.0%}"))
    return made


def _rect(kind: str, x: float, y: float, width: float, height: float, says: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{_class(kind)}" {box}><title>{escape(says)}</title></rect>' if width > 0 else ""


def _legend(kinds: Iterable[str]) -> str:
    return "<p>" + " ".join(f'<span class="{_class(kind)}">&#9632;</span> {escape(kind)}' for kind in kinds) + "</p>"


def _class(kind: str) -> str:
    return "k-" + "".join(each if each.isalnum() else "-" for each in kind)


def _svg(parts: Iterable[str], height: float, says: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(says)}">{"".join(parts)}</svg>'


# Kinds of memory, then operators, then collectives; a colour for light pages and one for dark pages.
_COLOURS = {
    "parameters": ("#1f5fa8", "#79b4f2"),
    "gradients": ("#b8500a", "#f2a35c"),
    "optimizer": ("#1d7044", "#6cc796"),
    "buffers": ("#59626b", "#9aa4ac"),
    "kept": ("#8a3a9c", "#cf95e3"),
    "activations": ("#85600a", "#e0b64f"),
    "gathered": ("#0d7f8c", "#5fc9d6"),
    "communication": ("#b3261e", "#ff8d84"),
    "temporary": ("#b9b0a0", "#6b655a"),
    "product": ("#1f5fa8", "#79b4f2"),
    "attention": ("#8a3a9c", "#cf95e3"),
    "memory": ("#b9b0a0", "#6b655a"),
    "all-gather": ("#0d7f8c", "#5fc9d6"),
    "reduce-scatter": ("#b3261e", "#ff8d84"),
    "all-reduce": ("#b8500a", "#f2a35c"),
    "all-to-all": ("#85600a", "#e0b64f"),
    "broadcast": ("#59626b", "#9aa4ac"),
}


def _rules(shade: int) -> str:
    return " ".join(f".{_class(kind)} {{ fill: {both[shade]}; color: {both[shade]} }}" for kind, both in _COLOURS.items())


_PAGE = (
    "<!doctype html>\n<html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>\n"
    "<title>{title}</title>\n"
    "<style>:root {{ color-scheme: light dark; --ink: #1c2126; --paper: #fcfcfa }} "
    "body {{ margin: 2rem auto; max-width: 68rem; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--ink); "
    "background: var(--paper) }} pre {{ overflow-x: auto; font-size: 13px }} svg {{ width: 100%; height: auto }} "
    "text {{ font-size: 13px; fill: var(--ink) }} line {{ stroke: var(--ink); stroke-dasharray: 4 3 }} "
    + _rules(0).replace("{", "{{").replace("}", "}}")
    + " @media (prefers-color-scheme: dark) {{ :root {{ --ink: #e3e6e8; --paper: #14171a }} "
    + _rules(1).replace("{", "{{").replace("}", "}}")
    + " }}</style>\n{body}\n</html>\n"
)
