"""Class of the model that wrote a checkpoint: another one with equal parameters would give other scores.

A digest of its syntax tree shows changes of the source, but not of comments, docstrings, annotations and
formatting. The classes of the library have none: a newer version must read the checkpoints of an older one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from recsuite.checkpoint.chain import ChoiceError
from recsuite.checkpoint.format import MANIFEST, Manifest, parsing
from recsuite.errors import printable
from recsuite.files import digest_of_bytes, typed

# Key in `Manifest.about`.
ORIGIN = "model_class"
LIBRARY = "library"
# Classes with their digests that compute the same: those of example.py, as they were and as they are, and
# those of the library from which earlier versions made the same models. Add a line when the source in
# example.py changes and what it computes does not; a test compares the newest.
EQUAL_MODELS = (
    {
        ("Interaction", LIBRARY),
        ("RatingModel", "21a5e16136966b87c457b2eefdb949a0"),
        ("RatingModel", "728f416bf3eef2486763c1e89c9c35fb"),
        ("RatingModel", "cffe85d10fae52f5f29382f9d78ede72"),
    },
    {("Response", LIBRARY), ("ResponseModel", "a107fb1e54e79fa3efd7fc2470bdc35a")},
)
FIX = (
    "use the script that trained it, or give the function that makes it: ServedModel.open(folder, "
    "model=make_model), serve.main(model=make_model) or score.main(model=make_model)."
)
# Fields of a syntax tree that change no result, or that not every version of Python has.
OMITTED = ("annotation", "returns", "type_comment", "type_params", "kind", "ctx")


@dataclass(frozen=True)
class ModelOrigin:
    """Class of a model.

    module, name: of the class; digest: of its source, and of the functions, classes and constants that it
    uses, "" if they cannot be read, as in a notebook; is_library: True for a class of this library.
    """

    module: str
    name: str
    digest: str
    is_library: bool

    @property
    def keys(self) -> set[tuple[str, str]]:
        """Equal models have one of these in common."""
        own = self.name, LIBRARY if self.is_library and not self.digest else self.digest
        return next((equal for equal in EQUAL_MODELS if own in equal), {own})

    def has_class_of(self, other: ModelOrigin) -> bool:
        """Return True if both classes have one name, or names of one set in `EQUAL_MODELS`."""
        is_same = (self.name, self.is_library) == (other.name, other.is_library)
        names = [{name for name, _ in equal} for equal in EQUAL_MODELS]
        return is_same or any({self.name, other.name} <= equal for equal in names)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def origin_of(model: Any) -> ModelOrigin:
    """Return the class of a model, without the wrappers of torch. Not collective."""
    while type(model).__module__.startswith("torch."):
        # Of torch.compile, and of DistributedDataParallel.
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not hasattr(inner, "modules"):
            break
        model = inner
    kind = type(model)
    names, module = _globals_of(kind), kind.__module__
    if module == "__main__":
        # The same as when another script imports it.
        module = getattr(names.get("__spec__"), "name", None) or Path(names.get("__file__") or module).stem
    # Parts and functions that a script gives to a model are a part of its formula too.
    usual = vars(torch.nn.Module()).keys()
    own = (value for part in _parts(model) for key, value in vars(part).items() if key not in usual)
    given = [*map(type, _parts(model)), *_given(own)]
    parts = frozenset(each for each in given if _has_source(each) and _is_own(_globals_of(each)))
    # Classes and functions of torch, such as an activation, are known by their names.
    of_torch = frozenset(
        each.__qualname__
        for each in given
        if inspect.isbuiltin(each) or str(getattr(each, "__module__", "")).startswith("torch.")
        if hasattr(each, "__qualname__")
    )
    digest, is_library = "", module.startswith("recsuite.")
    # An expression may be too long.
    with contextlib.suppress(RecursionError):
        # Without its own source, these names alone would tell nothing of a change.
        if parts or module.startswith("torch."):
            digest = _digest_of(parts, of_torch)
    return ModelOrigin(printable(module), printable(kind.__qualname__), digest, is_library)


def recorded_origin(folder: Path, manifest: Manifest) -> ModelOrigin | None:
    """Return the class of the model that wrote a checkpoint; None if an earlier version wrote it.

    Raises:
        UserError: when the manifest does not say it.
    """
    entry = manifest.about.get(ORIGIN)
    if entry is None:
        return None
    with parsing(f"the class of the model in {folder / MANIFEST}"):
        origin: ModelOrigin = typed(ModelOrigin, entry, ORIGIN)
    return origin


def no_maker(folder: Path, manifest: Manifest) -> ChoiceError:
    """Return the error for a checkpoint that is opened without the function that makes its model."""
    origin = recorded_origin(folder, manifest)
    if origin is None or origin.is_library:
        fix = "such as make_model of example.py: from example import make_model."
    else:
        fix = f"the function of {origin.module}.py that makes it."
    return ChoiceError(
        f"{folder} requires the function that makes its model{f', {origin}' if origin else ''}. Fix: give "
        f"model=, {fix}"
    )


def check_origin(folder: Path, manifest: Manifest, model: Any, accepts_changed: bool) -> str:
    """Refuse another model than the one that wrote a checkpoint. Return a line to print, or "".

    accepts_changed: True to use a model of the same name whose source has changed.

    Raises:
        UserError: names both, and what to give.
    """
    theirs = recorded_origin(folder, manifest)
    if theirs is None:
        return f"{folder} was written by an earlier version, which did not record the class of its model"
    ours = origin_of(model)
    if theirs.keys & ours.keys:
        return ""
    if not theirs.has_class_of(ours):
        raise ChoiceError(
            f"{folder} was trained with the model {theirs}, and this program has {ours}. Fix: use the script "
            f"that trained it, or give model= its function that makes {theirs.name}."
        )
    if not theirs.is_library and not (theirs.digest and ours.digest):
        return f"the source of {ours} cannot be read, so it is not known if it changed since the training"
    if not accepts_changed:
        fix = "restore that source" if theirs.module == ours.module else FIX.rstrip(".")
        raise ChoiceError(
            f"{folder} was trained with the model {theirs}, and {ours} here has another source. Fix: {fix}"
            "; or give --accept_changed_model (in Python accept_changed_model=True) if this one computes the "
            "same."
        )
    return f"{folder} was trained with another source of {ours}, accepted by --accept_changed_model"


# --- digest of a source ---


# Cached: a file may be edited meanwhile.
@functools.lru_cache
def _digest_of(parts: frozenset[Any], of_torch: frozenset[str]) -> str:
    """Return the digest of the source of classes and functions, and of the names of those of torch."""
    definitions = functools.cache(_definitions)
    # The texts of the definitions by file and name.
    sources: dict[tuple[str, str], list[str]] = {}
    pending = [(_globals_of(part), part.__qualname__) for part in parts]
    while pending:
        names, qualified = pending.pop()
        # A class in a function is defined by it.
        key = file, name = names.get("__file__", ""), qualified.partition(".")[0]
        if key in sources or not _is_own(names):
            continue
        statements = definitions(file).get(name, [])
        sources[key] = [repr(_tree(statement)) for statement in statements]
        # Local variables with the name of a global one too: rather too much than too little.
        nodes = (node for each in statements for node in ast.walk(each) if isinstance(node, ast.Name))
        for used in {node.id for node in nodes}:
            value: Any = names.get(used)
            if used in definitions(file):
                pending.append((names, used))
            elif isinstance(value, ModuleType):
                pending += [(vars(value), each) for each in definitions(getattr(value, "__file__", "") or "")]
            elif _has_source(value):
                pending.append((_globals_of(value), value.__qualname__))
            elif isinstance(value, (bool, int, float, str)) and used != "__name__":
                sources[key].append(f"{used} = {value!r}")
    texts = sorted(text for source in sources.values() for text in source)
    texts += sorted(of_torch) if texts or not parts else []
    return digest_of_bytes("\n".join(texts).encode()) if texts else ""


def _parts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a model and its modules, without the layers of this library: they change with its version."""
    yield model
    for child in model.children():
        if not type(child).__module__.startswith("recsuite."):
            yield from _parts(child)


def _given(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and those in lists, mappings and partial functions."""
    for value in values:
        if isinstance(value, functools.partial):
            yield from _given([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, (list, tuple, dict)):
            yield from _given(value.values() if isinstance(value, dict) else value)
        elif callable(value) and not hasattr(value, "__qualname__"):
            # The class of an object that is called is its formula.
            yield type(value)
        else:
            yield value


def _has_source(thing: Any) -> bool:
    return inspect.isclass(thing) or inspect.isfunction(thing)


def _globals_of(thing: Any) -> dict[str, Any]:
    """Return the globals of the module of a class or function; none where they are not known."""
    # Of its functions first: another module may have taken the name since.
    for part in (thing, *getattr(thing, "__dict__", {}).values()):
        names = inspect.unwrap(part).__globals__ if inspect.isfunction(part) else {}
        if names.get("__name__") == thing.__module__:
            return names
    return vars(sys.modules[thing.__module__]) if thing.__module__ in sys.modules else {}


def _is_own(names: dict[str, Any]) -> bool:
    """Return True for the globals of a user's file: installed packages change with their versions."""
    package, file = str(names.get("__name__", "")).partition(".")[0], names.get("__file__")
    is_installed = {"site-packages", "dist-packages"} & {*Path(file or "").parts}
    return bool(file) and package not in {"recsuite", *sys.stdlib_module_names} and not is_installed


def _definitions(file: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of a file by the names that they define; none if it cannot be read."""
    definitions: dict[str, list[ast.stmt]] = {}
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return definitions
    for statement in body:
        nodes = [statement] if hasattr(statement, "name") else [*ast.walk(statement)]
        stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        defined = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        for name in stored | defined:
            definitions.setdefault(name, []).append(statement)
    return definitions


def _tree(node: Any) -> Any:
    """Return a syntax tree as lists and texts, without what changes no result."""
    if isinstance(node, list):
        # A text alone is a docstring.
        is_text = (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in node)
        return [_tree(each) for each, text in zip(node, is_text, strict=True) if not text]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in OMITTED)
    return [type(node).__name__, *((name, _tree(value)) for name, value in fields if value not in (None, []))]
