"""`save_hyperparameters`: the arguments that a constructor was called with, kept as `hparams`."""

from __future__ import annotations

import copy
import inspect
import types
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from echelon.common.errors import UsageError

__all__ = ["AttributeDict", "HyperparametersMixin", "arguments_for"]


class AttributeDict(dict[str, Any]):
    """A dict whose values can be reached as attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"hparams has no {name!r}; it has {', '.join(map(repr, self)) or 'nothing'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HyperparametersMixin:
    """A base of LightningModule and LightningDataModule."""

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Iterable[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the constructor's arguments in `hparams`. Call it in `__init__`.

        Args:
            args: names of the arguments to keep, by default all; or one dict or Namespace with what to keep.
            ignore: names to leave out.
            logger: whether loggers get them.
        """
        if frame is None:
            own_frame = inspect.currentframe()
            frame = own_frame.f_back if own_frame is not None else None
        given = {} if frame is None else _arguments(self, frame)
        left = {ignore} if isinstance(ignore, str) else set(ignore or ())
        named = [each for each in args if isinstance(each, str)]
        others = [each for each in args if not isinstance(each, str)]
        if others:
            if len(args) > 1:
                raise UsageError("save_hyperparameters() takes names, or one dict or Namespace.")
            given = dict(vars(others[0])) if isinstance(others[0], Namespace) else dict(others[0])
        elif named:
            given = {name: given[name] for name in named}
        kept = vars(self).setdefault("_hparams", AttributeDict())
        kept.update({name: value for name, value in given.items() if name not in left})
        vars(self)["_hparams_logged"] = logger
        vars(self)["_hparams_initial"] = copy.copy(kept)

    @property
    def hparams(self) -> AttributeDict:
        kept: AttributeDict = vars(self).setdefault("_hparams", AttributeDict())
        return kept

    @property
    def hparams_initial(self) -> AttributeDict:
        """The hyperparameters as `save_hyperparameters` saved them."""
        hparams: AttributeDict = vars(self).get("_hparams_initial", AttributeDict())
        return copy.copy(hparams)


def _arguments(thing: object, frame: types.FrameType | None) -> dict[str, Any]:
    """Arguments of the constructors that are running, from this frame out to that of the class that was called."""
    arguments: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        names, _, keywords, values = inspect.getargvalues(frame)
        if not names or values.get(names[0]) is not thing:
            break
        more = values.get(keywords, {}) if keywords else {}
        code = frame.f_code
        only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        arguments |= {**more, **{name: values[name] for name in (*names[1:], *only) if name in values}}
        frame = frame.f_back
    return arguments


def arguments_for(cls: type, hparams: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A constructor's arguments: the saved ones that it takes, and those given now, which have precedence."""
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {**{n: v for n, v in hparams.items() if takes_all or n in parameters}, **given}
