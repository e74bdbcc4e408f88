"""Another library's names and modules that compat lacks: they can be imported, and using them is an error with a remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from echelon.common.errors import NotHereError

__all__ = ["Missing", "complete", "nearest", "refusing", "register"]


class Missing:
    """Stands for an absent name: it can be imported, and any use of it is an error that says what to use instead."""

    def __init__(self, why: str) -> None:
        self.__dict__["_why"] = why

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotHereError(self._why)

    __call__ = __mro_entries__ = __getitem__ = __bool__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by Python itself, for example by inspect
            raise AttributeError(name)
        return self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{self._why}>"


def refusing(lost: Mapping[str, tuple[str, str]]) -> Callable[[str], Callable[[str], Any]]:
    """Return a maker of a module's `__getattr__`, given its `__name__`. Importing an absent name is no error; using it is.

    Args:
        lost: name -> (its full name in the other library, what to use instead). Every module answers for all names.
    """

    def absent(module: str) -> Callable[[str], Any]:
        def getattr_(name: str) -> Any:
            if name not in lost:
                raise AttributeError(f"module {module!r} has no attribute {name!r}")
            known_as, instead = lost[name]
            return Missing(f"{known_as} is not part of echelon.compat. Instead: {instead}")

        return getattr_

    return absent


class _Absent(ModuleType):
    """A module in which every name is absent, and so is every module below it."""

    def __init__(self, name: str, known_as: str, instead: str) -> None:
        super().__init__(name, f"Not part of echelon.compat. Instead: {instead}")
        self.__path__: list[str] = []  # no folder to search for modules below it
        vars(self).update(_known_as=known_as, _instead=instead)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._known_as}.{name} is not part of echelon.compat. Instead: {self._instead}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a call, for functions that have the same name as their module."""
        raise NotHereError(f"{self._known_as} is not part of echelon.compat. Instead: {self._instead}")


class _Finder:
    """Finds modules below an absent module; they are absent too. It comes last, after all other finders."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_below = isinstance(sys.modules.get(name.rpartition(".")[0]), _Absent)
        return ModuleSpec(name, _Finder(), is_package=True) if is_below else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        around, _, last = spec.name.rpartition(".")
        above = sys.modules[around]
        return _Absent(spec.name, f"{above._known_as}.{last}", above._instead)

    @staticmethod
    def exec_module(module: ModuleType) -> None: ...


sys.meta_path.append(_Finder)


def register(system: str, package: str, modules: Mapping[str, str], aliases: Mapping[str, str] | None = None) -> None:
    """Make modules importable that have no file.

    Args:
        system: the package's name in the other library.
        package: the package of compat that the modules are below.
        modules: absent module -> what to use instead of it and of modules below it; parents come before their children.
        aliases: name -> the module below `package` that it stands for, which must be imported already.
    """
    for name, same in (aliases or {}).items():
        _attach(f"{package}.{name}", sys.modules[f"{package}.{same}".rstrip(".")])
    for name, instead in modules.items():
        _attach(f"{package}.{name}", _Absent(f"{package}.{name}", f"{system}.{name}", instead))


def complete(package: str, absent: Callable[[str], Callable[[str], Any]]) -> None:
    """Let the modules of a package, which are imported by now, answer for absent names, unless they have a `__getattr__`.

    Args:
        absent: makes a module's `__getattr__`, given its name, as `refusing` does.
    """
    for name, module in [*sys.modules.items()]:
        if f"{name}.".startswith(f"{package}."):
            vars(module).setdefault("__getattr__", absent(name))


def nearest(modules: Mapping[str, str], module: str) -> str | None:
    """The entry for a module, or else for its nearest parent, in a table given to `register`; None if neither is in it."""
    above = [each for each in modules if f"{module}.".startswith(f"{each}.")]
    return modules[max(above, key=len)] if above else None


def _attach(name: str, module: ModuleType) -> None:
    """Let a module be imported under this name, unless one has it, and be found in the module above it."""
    around, _, last = name.rpartition(".")
    present = sys.modules.setdefault(name, module)
    if (parent := sys.modules.get(around)) is not None and last not in vars(parent):
        setattr(parent, last, present)
