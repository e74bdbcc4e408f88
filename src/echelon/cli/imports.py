"""A script's import lines, changed so that names of other libraries are `echelon.compat`'s; nothing else of it changes.

libcst keeps every other character. What is here and what is not says `compat_names`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider

from echelon.cli.compat_names import Answer, find, library_of, moved

__all__ = ["Moved", "Note", "move"]

_Statements = cst.SimpleStatementLine | cst.SimpleStatementSuite
_T = TypeVar("_T", cst.SimpleStatementLine, cst.SimpleStatementSuite)


@dataclass(frozen=True, order=True)
class Note:
    """A name that stays, or whose use is refused.

    Args:
        line: where, from 1 on.
        name: with its module.
        why: what to do.
    """

    line: int
    name: str
    why: str


@dataclass
class Moved:
    """A script, changed.

    Args:
        text: the new one.
        encoding: that of both.
        names: how many imported names are echelon's now.
        notes: what is not.
    """

    text: bytes
    encoding: str
    names: int
    notes: list[Note] = field(default_factory=list)


def move(text: bytes) -> Moved:
    """
    Raises:
        libcst.ParserSyntaxError: it is no Python; with the line.
        SyntaxError: it would not stay as it is.
    """
    before = cst.parse_module(text)
    if before.bytes != text:
        raise SyntaxError("characters that are not kept, such as line ends of old Macs")
    wrapper = MetadataWrapper(before, unsafe_skip_copy=True)
    uses = _Uses()
    wrapper.visit(uses)
    change = _Change(uses)
    new = wrapper.visit(change)
    return Moved(new.bytes, new.encoding, change.names, sorted({*uses.notes, *change.notes}))


class _Uses(cst.CSTVisitor):
    """What is used by attribute of modules that are imported whole, anywhere in the script."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        self.bound: dict[str, str] = {}  # name -> module, of modules that are imported whole
        self.chains: dict[str, int] = {}  # such as "fairscale.nn.Pipe" -> its first line
        self.of_transformers: set[str] = set()  # names of that module, of which what compat has is used
        self.is_moved: set[str] = set()  # names that a line binds to compat's module already
        self.notes: list[Note] = []

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)

    def visit_Import(self, node: cst.Import) -> None:
        for each in node.names:
            module, bound = _name(each.name), _bound_by(each)
            if library_of(module) is not None:
                self.bound[bound] = module if each.asname is not None else module.partition(".")[0]
            else:  # `pl` may be another library's in the next function
                self.bound.pop(bound, None)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        module = _module_of(node)
        if isinstance(node.names, cst.ImportStar):
            return False
        if module == "echelon.compat":
            self.is_moved |= {_bound_by(each) for each in node.names}
        if library_of(module) is not None:
            for each in node.names:
                whole = f"{module}.{_name(each.name)}"
                if not find(module, _name(each.name)).instead and find(whole).module:
                    self.bound[_bound_by(each)] = whole
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool | None:
        whole = get_full_name_for_node(node) if _is_chain(node) else None
        if whole is None:
            return True
        self.chains.setdefault(whole, self._line(node))
        return False

    def visit_Call(self, node: cst.Call) -> None:
        called = get_full_name_for_node(node.func) or ""
        if called.rpartition(".")[2] not in ("import_module", "__import__") or not node.args:
            return
        value = node.args[0].value
        if isinstance(value, cst.SimpleString) and isinstance(module := value.evaluated_value, str) and library_of(module):
            is_here = module == "transformers" or find(module).module
            why = (
                f"Here it is {moved(module)}."
                if is_here
                else f"It is {library_of(module)}'s, of which echelon.compat has other names."
            )
            self.notes.append(Note(self._line(node), f'{called}("{module}")', f"a name in a string stays. {why}"))

    def leave_Module(self, original_node: cst.Module) -> None:
        for chain, line in self.chains.items():
            first, _, rest = chain.partition(".")
            if first in self.bound:
                self._look(self.bound[first], rest.split("."), first, line)

    def _look(self, module: str, names: Sequence[str], bound: str, line: int) -> None:
        if module.partition(".")[0] == "transformers":
            self._look_in_transformers(module, names, bound, line)
            return
        for name in names:
            answer = find(module, name)
            if answer.instead is not None or not answer.is_known:
                self.notes.append(_note(line, module, name, answer))
                return
            if not find(f"{module}.{name}").module:
                return
            module = f"{module}.{name}"

    def _look_in_transformers(self, module: str, names: Sequence[str], bound: str, line: int) -> None:
        for name in names:
            if find(module, name).module:
                if module == "transformers":
                    self.of_transformers |= {bound} - self.is_moved
                else:  # other names of that module are used, too, which compat does not have
                    why = f"import it by its name, as `from echelon.compat.transformers import {name}`."
                    self.notes.append(Note(line, f"{module}.{name}", why))
                return
            module = f"{module}.{name}"


class _Change(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, uses: _Uses) -> None:
        self.uses, self.names = uses, 0
        self.notes: list[Note] = []

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        made = self._changed(original_node, updated_node)
        if len(made) == len(updated_node.body) or len(updated_node.body) > 1:
            return _on_its_line(updated_node, made)
        lines = [updated_node.with_changes(body=[made[0]])]
        return cst.FlattenSentinel([*lines, *(updated_node.with_changes(body=[each], leading_lines=()) for each in made[1:])])

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.BaseSuite:
        return _on_its_line(updated_node, self._changed(original_node, updated_node))

    def _changed(self, original: _Statements, updated: _Statements) -> list[cst.BaseSmallStatement]:
        line = int(self.get_metadata(PositionProvider, original).start.line)
        made: list[cst.BaseSmallStatement] = []
        for each in updated.body:
            if isinstance(each, cst.Import):
                made += self._import(each, line)
            elif isinstance(each, cst.ImportFrom):
                made += self._import_from(each, line)
            else:
                made.append(each)
        return made

    def _import(self, node: cst.Import, line: int) -> list[cst.BaseSmallStatement]:
        stay: list[cst.ImportAlias] = []
        made: list[cst.BaseSmallStatement] = []
        for each in node.names:
            module = _name(each.name)
            library, bound = library_of(module), _bound_by(each)
            if library == "transformers" and bound in self.uses.of_transformers:
                if module != "transformers":  # a module below it, which is loaded as before
                    stay.append(each)
                made.append(_binding("transformers", each.asname))
                self.names += 1
                continue
            answer = find(module) if library is not None and library != "transformers" else None
            if answer is not None and (answer.instead is not None or not answer.is_known):
                self.notes.append(_note(line, module, "", answer))
            if answer is None or not answer.module:
                stay.append(each)
                continue
            self.names += 1
            if each.asname is None and "." in module:
                made.append(_import_of(moved(module)))  # loads it; the other binds the name
            made.append(_binding(module if each.asname is not None else module.partition(".")[0], each.asname))
        if not made:
            return [node]
        return [*([_with(node, stay)] if stay else []), *made]

    def _import_from(self, node: cst.ImportFrom, line: int) -> list[cst.BaseSmallStatement]:
        module = _module_of(node)
        library = library_of(module)
        if library is None:
            return [node]
        if isinstance(node.names, cst.ImportStar):
            answer = find(module, "*")
            if not answer.module or answer.instead is not None:
                why = answer.instead or "name what the script uses of it: with a star it is not seen what that is."
                self.notes.append(Note(line, f"{module}.*", why))
            return [_from(node, answer.module) if answer.module else node]
        stay: list[cst.ImportAlias] = []
        moving: dict[str, list[cst.ImportAlias]] = {}
        for each in node.names:
            answer = find(module, _name(each.name))
            if answer.instead is not None or not answer.is_known:
                self.notes.append(_note(line, module, _name(each.name), answer))
            if answer.module:
                self.names += 1
                moving.setdefault(answer.module, []).append(each)
            else:
                stay.append(each)
        if not moving:
            return [node]
        first = [_with(node, stay)] if stay else []
        return [*first, *(_from(_with(node, names), where) for where, names in moving.items())]


def _on_its_line(node: _T, made: Sequence[cst.BaseSmallStatement]) -> _T:
    """With these statements: as many on the line as there were, or more."""
    if len(made) != len(node.body):
        made = [each.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for each in made]
    changed: _T = node.with_changes(body=made)
    return changed


def _note(line: int, module: str, name: str, answer: Answer) -> Note:
    whole = f"{module}.{name}".rstrip(".")
    if answer.instead is None:
        return Note(line, whole, f"echelon.compat does not know it, and the line stays {library_of(module)}'s.")
    return Note(line, whole, f"not part of echelon.compat. Instead: {answer.instead}")


def _name(node: cst.BaseExpression) -> str:
    return get_full_name_for_node(node) or ""


def _module_of(node: cst.ImportFrom) -> str:
    """Of an import that is not relative; else ""."""
    return _name(node.module) if node.module is not None and not node.relative else ""


def _bound_by(alias: cst.ImportAlias) -> str:
    """The name that an import binds."""
    return _name(alias.asname.name) if alias.asname is not None else _name(alias.name).partition(".")[0]


def _is_chain(node: cst.BaseExpression) -> bool:
    """a.b.c and nothing else."""
    return isinstance(node, cst.Name) or (isinstance(node, cst.Attribute) and _is_chain(node.value))


def _dotted(module: str) -> cst.Attribute | cst.Name:
    around, _, last = module.rpartition(".")
    return cst.Attribute(_dotted(around), cst.Name(last)) if around else cst.Name(last)


def _import_of(module: str) -> cst.Import:
    return cst.Import([cst.ImportAlias(_dotted(module))])


def _binding(module: str, asname: cst.AsName | None) -> cst.BaseSmallStatement:
    """What binds the name that `import module` would."""
    home = moved(module)
    if asname is not None:
        return cst.Import([cst.ImportAlias(_dotted(home), asname)])
    around, _, last = home.rpartition(".")
    known = None if last == module else cst.AsName(cst.Name(module))
    return cst.ImportFrom(_dotted(around), [cst.ImportAlias(cst.Name(last), known)])


def _with(node: cst.Import | cst.ImportFrom, names: Sequence[cst.ImportAlias]) -> cst.BaseSmallStatement:
    """The same statement with some of its names; each keeps the comments behind it and above it."""
    assert not isinstance(node.names, cst.ImportStar)
    given, lpar = node.names, node.lpar if isinstance(node, cst.ImportFrom) else None
    # What stands before each name: above it what is said of it, behind a comma what is said of the one before.
    gaps = [lpar.whitespace_after if lpar is not None else cst.SimpleWhitespace(""), *map(_behind, given)]
    places = [place for place, each in enumerate(given) if each in names]
    made = [
        each.with_changes(comma=each.comma.with_changes(whitespace_after=_gap(gaps[place + 1], gaps[following])))
        for place, following in itertools.pairwise(places)
        if isinstance((each := given[place]).comma, cst.Comma)
    ]
    if lpar is not None and places[0]:
        node = node.with_changes(lpar=lpar.with_changes(whitespace_after=_gap(gaps[0], gaps[places[0]])))
    last, was_last, space = names[-1], given[-1], gaps[places[-1] + 1]
    if last is was_last:
        return node.with_changes(names=[*made, last])
    if isinstance(node, cst.ImportFrom) and node.rpar is not None and isinstance(space, cst.ParenthesizedWhitespace):
        # A name a line: what stands behind it, as a comment, stays, and the bracket follows on the next line.
        closing = cst.Comma(whitespace_after=space.with_changes(empty_lines=[], last_line=cst.SimpleWhitespace("")))
        rpar = node.rpar if isinstance(was_last.comma, cst.Comma) else cst.RightParen()
        return node.with_changes(names=[*made, last.with_changes(comma=closing)], rpar=rpar)
    return node.with_changes(names=[*made, last.with_changes(comma=was_last.comma)])


def _behind(name: cst.ImportAlias) -> cst.BaseParenthesizableWhitespace:
    return name.comma.whitespace_after if isinstance(name.comma, cst.Comma) else cst.SimpleWhitespace("")


def _gap(
    behind: cst.BaseParenthesizableWhitespace, above: cst.BaseParenthesizableWhitespace
) -> cst.BaseParenthesizableWhitespace:
    """Between two names that had others between them: of the first what stands behind it, of the second what is above it."""
    if not isinstance(above, cst.ParenthesizedWhitespace):
        return behind.with_changes(empty_lines=[]) if isinstance(behind, cst.ParenthesizedWhitespace) else behind
    if isinstance(behind, cst.ParenthesizedWhitespace):
        return behind.with_changes(empty_lines=above.empty_lines)
    return above.with_changes(first_line=above.first_line.with_changes(whitespace=cst.SimpleWhitespace(""), comment=None))


def _from(node: cst.BaseSmallStatement, module: str) -> cst.BaseSmallStatement:
    return node.with_changes(module=_dotted(module))
