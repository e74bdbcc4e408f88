"""Names and modules that another system has, and that here are another's, or have a successor instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from echelon.common.errors import NotHereError

__all__ = ["Missing", "nearest", "refusing", "register"]


class Missing:
    """Stands for a name that is not here: it can be imported, and any use of it is an error that says what to use instead."""

    def __init__(self, why: str) -> None:
        self.__dict__["_why"] = why

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotHereError(self._why)

    __call__ = __mro_entries__ = __getitem__ = __bool__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself, as by inspect
            raise AttributeError(name)
        return self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{self._why}>"


def refusing(lost: Mapping[str, tuple[str, str]]) -> Callable[[str], Callable[[str], Any]]:
    """What makes a module's `__getattr__` from its `__name__`. Importing a name that is not here is no error; using it is.

    Args:
        lost: name -> (what it is called there, with its module; what to use in its place). Every module here answers for all.
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
    """A module whose every name stands for something that is not here; and so does every module below it."""

    def __init__(self, name: str, known_as: str, instead: str) -> None:
        super().__init__(name, f"Not part of echelon.compat. Instead: {instead}")
        self.__path__: list[str] = []  # a module below it is in no folder
        vars(self).update(_known_as=known_as, _instead=instead)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._known_as}.{name} is not part of echelon.compat. Instead: {self._instead}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Where a function has its module's name, and the package has both."""
        raise NotHereError(f"{self._known_as} is not part of echelon.compat. Instead: {self._instead}")


class _Finder:
    """Finds what is below an absent module, as absent, too. It is asked where no other finder has found anything."""

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
    """Let modules be imported that have no file: import lines that name them work.

    Args:
        system: as the other system calls the package.
        package: below which they are.
        modules: of which nothing is here -> what a use of it, or of what is below it, says to take; those above come first.
        aliases: name -> the module below `package` that it is, which is imported already.
    """
    for name, same in (aliases or {}).items():
        _attach(f"{package}.{name}", sys.modules[f"{package}.{same}".rstrip(".")])
    for name, instead in modules.items():
        _attach(f"{package}.{name}", _Absent(f"{package}.{name}", f"{system}.{name}", instead))


def nearest(modules: Mapping[str, str], module: str) -> str | None:
    """What a table that was given to `register` says of a module: itself, or the nearest above it; None if neither is in it."""
    above = [each for each in modules if f"{module}.".startswith(f"{each}.")]
    return modules[max(above, key=len)] if above else None


def _attach(name: str, module: ModuleType) -> None:
    """Let a module be imported under this name, unless one has it, and be found in the module above it."""
    around, _, last = name.rpartition(".")
    present = sys.modules.setdefault(name, module)
    if (parent := sys.modules.get(around)) is not None and last not in vars(parent):
        setattr(parent, last, present)
