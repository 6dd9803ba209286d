"""Make docs/api.md from the docstrings of the public names, so that the page and the program cannot differ.

python docs/make_api.py            print the page
python docs/make_api.py --write    put it into docs/api.md
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
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


# A Google section of a docstring: its name, and the indented lines below it. Only an example has empty lines.
SECTION = re.compile(
    r"^(?:(Args|Attributes|Returns|Yields|Raises):\n((?: {4}.+\n?)+)"
    r"|(Example):\n((?: {4}.+\n?|\n(?=\n* {4}))+))",
    re.MULTILINE,
)


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
    docstring = SECTION.sub(_rendered, inspect.getdoc(found) or "").strip()
    methods = [_method(method, each) for method, each in methods_of(found)]
    parts = [f"## {name}", f"`{name}{_signature(found)}`", docstring, "\n".join(methods)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _method(name: str, method: Any) -> str:
    """An entry of a list: the signature, the first paragraph and the sections, without the example."""
    entry = f"- `{name}{_signature(method)}`: {_first(method)}"
    sections = [section for section in SECTION.finditer(inspect.getdoc(method) or "") if section[1]]
    below = "\n".join(map(_rendered, sections)).strip()
    return f"{entry}\n\n{textwrap.indent(below, '    ')}" if below else entry


def _rendered(section: re.Match[str]) -> str:
    """A section in Markdown: a list of arguments, a paragraph for each error, and code as it stands."""
    if section[3]:
        # Fenced: below a list, indented lines belong to its last entry.
        return f"```python\n{textwrap.dedent(section[4]).strip()}\n```\n"
    name, body = section[1], textwrap.dedent(section[2]).strip()
    if name in ("Returns", "Yields"):
        return f"{name}: {' '.join(body.split())}\n"
    # An entry begins at the margin; its other lines are indented.
    entries = [" ".join(entry.split()).partition(": ") for entry in re.split(r"\n(?=\S)", body)]
    if name == "Raises":
        return "\n\n".join(f"Raises `{error}`: {text}" for error, _, text in entries) + "\n"
    return "\n".join(f"- `{argument}`: {text}" for argument, _, text in entries) + "\n"


def methods_of(found: Any) -> Iterator[tuple[str, Any]]:
    """The methods and properties that a public class defines itself and explains, by name."""
    for name, each in vars(found).items() if inspect.isclass(found) else ():
        is_method = isinstance(each, (property, classmethod)) or inspect.isfunction(each)
        # An override without a docstring of its own is explained by its base.
        if is_method and not name.startswith("_") and each.__doc__ and not _first(each).startswith("See "):
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
