"""Names with an underscore that TorchTNT's programs set, having no other."""

from __future__ import annotations

__all__ = ["private_names"]


def private_names(*names: str) -> dict[str, property]:
    """Properties for a class's body: each attribute under its name with an underscore as well, to read and to set."""

    def of(name: str) -> property:
        return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))

    return {f"_{name}": of(name) for name in names}
