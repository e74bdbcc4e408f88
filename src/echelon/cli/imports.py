"""Change a script's import lines so that names of other libraries come from `echelon.compat`. Nothing else changes.

libcst keeps every other character. `compat_names` says which names compat has.
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
    """A name that stays as it is, or whose use is refused.

    Args:
        line: from 1.
        name: with its module.
        why: what to do.
    """

    line: int
    name: str
    why: str


@dataclass
class Moved:
    """A changed script.

    Args:
        text: after the change.
        encoding: of the text before and after.
        names: number of imported names that are now echelon's.
        notes: the names that are not.
    """

    text: bytes
    encoding: str
    names: int
    notes: list[Note] = field(default_factory=list)


def move(text: bytes) -> Moved:
    """Change the import lines of a script.

    Raises:
        libcst.ParserSyntaxError: the text is not Python; has the line.
        SyntaxError: libcst would change other characters.
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
    """Attributes that the script uses of modules it imports whole."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        self.bound: dict[str, str] = {}  # name -> module, for modules that are imported whole
        self.chains: dict[str, int] = {}  # such as "fairscale.nn.Pipe" -> its first line
        self.of_transformers: set[str] = set()  # names bound to that module, from which the script uses what compat has
        self.is_moved: set[str] = set()  # names already bound to compat's module
        self.notes: list[Note] = []

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)

    def visit_Import(self, node: cst.Import) -> None:
        for each in node.names:
            module, bound = _name(each.name), _bound_by(each)
            if library_of(module) is not None:
                self.bound[bound] = module if each.asname is not None else module.partition(".")[0]
            else:  # the next function may bind `pl` to another library
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
                f"In echelon it is {moved(module)}."
                if is_here
                else f"It stays {library_of(module)}'s; echelon.compat has other names of it."
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
                else:  # a submodule: compat has only some names of it
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
                if module != "transformers":  # a submodule, which is loaded as before
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
                made.append(_import_of(moved(module)))  # loads the submodule; the next statement binds the name
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
                why = answer.instead or "import by name what the script uses: a star does not show which names those are."
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
    """The line with these statements, which may be more than it had."""
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
    """The module of an absolute import; "" for a relative one."""
    return _name(node.module) if node.module is not None and not node.relative else ""


def _bound_by(alias: cst.ImportAlias) -> str:
    """The name that an import binds."""
    return _name(alias.asname.name) if alias.asname is not None else _name(alias.name).partition(".")[0]


def _is_chain(node: cst.BaseExpression) -> bool:
    """Whether this is a dotted name, such as a.b.c."""
    return isinstance(node, cst.Name) or (isinstance(node, cst.Attribute) and _is_chain(node.value))


def _dotted(module: str) -> cst.Attribute | cst.Name:
    around, _, last = module.rpartition(".")
    return cst.Attribute(_dotted(around), cst.Name(last)) if around else cst.Name(last)


def _import_of(module: str) -> cst.Import:
    return cst.Import([cst.ImportAlias(_dotted(module))])


def _binding(module: str, asname: cst.AsName | None) -> cst.BaseSmallStatement:
    """The statement that binds the name `import module` would bind."""
    home = moved(module)
    if asname is not None:
        return cst.Import([cst.ImportAlias(_dotted(home), asname)])
    around, _, last = home.rpartition(".")
    known = None if last == module else cst.AsName(cst.Name(module))
    return cst.ImportFrom(_dotted(around), [cst.ImportAlias(cst.Name(last), known)])


def _with(node: cst.Import | cst.ImportFrom, names: Sequence[cst.ImportAlias]) -> cst.BaseSmallStatement:
    """The same statement with only these names; each keeps its comments, behind it and above it."""
    assert not isinstance(node.names, cst.ImportStar)
    given, lpar = node.names, node.lpar if isinstance(node, cst.ImportFrom) else None
    # gaps[i] is the text before name i: comments above it, and behind the comma those on the previous name.
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
        # One name per line: keep the comment behind the name, and put the bracket on the next line.
        closing = cst.Comma(whitespace_after=space.with_changes(empty_lines=[], last_line=cst.SimpleWhitespace("")))
        rpar = node.rpar if isinstance(was_last.comma, cst.Comma) else cst.RightParen()
        return node.with_changes(names=[*made, last.with_changes(comma=closing)], rpar=rpar)
    return node.with_changes(names=[*made, last.with_changes(comma=was_last.comma)])


def _behind(name: cst.ImportAlias) -> cst.BaseParenthesizableWhitespace:
    return name.comma.whitespace_after if isinstance(name.comma, cst.Comma) else cst.SimpleWhitespace("")


def _gap(
    behind: cst.BaseParenthesizableWhitespace, above: cst.BaseParenthesizableWhitespace
) -> cst.BaseParenthesizableWhitespace:
    """The text between two names whose neighbours went: comments behind the first, and above the second."""
    if not isinstance(above, cst.ParenthesizedWhitespace):
        return behind.with_changes(empty_lines=[]) if isinstance(behind, cst.ParenthesizedWhitespace) else behind
    if isinstance(behind, cst.ParenthesizedWhitespace):
        return behind.with_changes(empty_lines=above.empty_lines)
    return above.with_changes(first_line=above.first_line.with_changes(whitespace=cst.SimpleWhitespace(""), comment=None))


def _from(node: cst.BaseSmallStatement, module: str) -> cst.BaseSmallStatement:
    return node.with_changes(module=_dotted(module))
