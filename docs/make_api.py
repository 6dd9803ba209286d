"""Make docs/api.md from the docstrings of the public names, so that the page and the program cannot differ.

python docs/make_api.py            print the page
python docs/make_api.py --write    put it into docs/api.md
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import recsuite

PAGE = Path(__file__).with_name("api.md")
HEAD = """# Public names

`import recsuite as rs` gives these names; everything else may change. B are the events of a batch, D the
numbers of a row, V the values of all lists of a batch, U users and N items. "Collective" means that every
rank makes the call. `python docs/make_api.py --write` makes this page.
"""


class Plain(str):
    """A text that a signature shows without quotes."""

    __repr__ = str.__str__


def main() -> None:
    """Print the page, or write it."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--write", action="store_true", help="into docs/api.md")
    if flags.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


def page() -> str:
    """The page: a part for each public name, classes before functions."""
    return "\n".join([HEAD, *(_part(name) for name in sorted(recsuite.PUBLIC))])


def _part(name: str) -> str:
    found = getattr(recsuite, name)
    docstring = (inspect.getdoc(found) or "").replace("Raises:\n    UserError:", "Raises `UserError`:")
    docstring = docstring.replace("\n    KeyboardInterrupt:", " `KeyboardInterrupt`:")
    methods = [f"- `{method}{_signature(each)}`: {_first(each)}" for method, each in methods_of(found)]
    parts = [f"## {name}", f"`{name}{_signature(found)}`", docstring, "\n".join(methods)]
    return "\n\n".join(filter(None, parts)) + "\n"


def methods_of(found: Any) -> Iterator[tuple[str, Any]]:
    """The methods and properties that a public class defines itself and explains, by name."""
    for name, each in vars(found).items() if inspect.isclass(found) else ():
        is_method = isinstance(each, (property, classmethod)) or inspect.isfunction(each)
        if is_method and not name.startswith("_") and not _first(each).startswith("See "):
            yield name, each


def _signature(found: Any) -> str:
    if isinstance(found, property) or found is recsuite.UserError:
        return ""
    signature = inspect.signature(getattr(found, "__func__", found))
    parameters = [
        each.replace(
            annotation=_plain(each.annotation),
            default=Plain("...") if "factory" in repr(each.default) else each.default,
        )
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    returned = signature.empty if inspect.isclass(found) else _plain(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returned))


def _plain(found: Any) -> Any:
    """An annotation as it stands in the code."""
    text = getattr(found, "__forward_arg__", found)
    return Plain(text) if isinstance(text, str) else found


def _first(found: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())


if __name__ == "__main__":
    main()
