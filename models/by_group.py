"""``ModulesByGroup``: one module per group, whatever the names of the groups are."""

from collections.abc import ItemsView, Iterator, KeysView
from typing import Any, Final, final
from urllib.parse import unquote

from torch import nn

_EMPTY: Final = nn.ModuleDict()


def module_name(group: str) -> str:
    """Return the name of a group's submodule in an ``nn.ModuleDict``.

    It is the group's name, unless a module cannot have it: a dot would separate two
    modules, and attributes of modules, such as ``train``, are taken. No two groups get
    the same name.
    """
    quoted = group.replace("%", "%25").replace(".", "%2E")
    return f"{quoted}%" if hasattr(_EMPTY, quoted) or not quoted else quoted


@final
class ModulesByGroup(nn.ModuleDict):
    """Modules by group. The keys are the groups' names, in any case.

    The names in a ``state_dict`` are those of ``module_name``.
    """

    pure_forward = True
    by_row = True

    def __getitem__(self, group: str) -> nn.Module:
        """Return the module of a group."""
        return super().__getitem__(module_name(group))

    def __setitem__(self, group: str, module: nn.Module) -> None:
        """Set the module of a group."""
        super().__setitem__(module_name(group), module)

    def __getattr__(self, name: str) -> Any:
        """Return a submodule or a parameter.

        Raises:
            AttributeError: for any other name; shows how to get that of one group.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            modules = self.__dict__.get("_modules") or {}
            groups = list(self.keys()) if modules else []
            if not groups or not hasattr(self[groups[0]], name):
                raise
            raise AttributeError(
                f"There are several groups, and each has its own {name}: write "
                f"{' and '.join(f'policy[{group!r}].{name}' for group in groups)}."
            ) from error

    def __delitem__(self, group: str) -> None:
        """Remove the module of a group."""
        super().__delitem__(module_name(group))

    def __contains__(self, group: object) -> bool:
        """Return whether the group has a module."""
        return isinstance(group, str) and super().__contains__(module_name(group))

    def __iter__(self) -> Iterator[str]:
        """Yield the groups."""
        return iter(self.keys())

    def keys(self) -> KeysView[str]:
        """Return the groups."""
        return dict(self.items()).keys()

    def items(self) -> ItemsView[str, nn.Module]:
        """Return the groups and their modules."""
        modules = self._modules.items()
        return {unquote(name.removesuffix("%")): m for name, m in modules}.items()
