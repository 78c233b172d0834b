"""Compares the names, arguments and defaults of this package with those of the distribution it replaces.

    python surface.py                          the comparison: a table; status 1 when anything is missing
    python surface.py --from-dump DUMP         writes data/surface.txt from a dump of the other distribution

The file ``data/surface.txt`` has a line per name: modules without indentation, their names with two spaces,
the members of classes with four. A name with arguments is a function; several lines of one name are
overloads. ``argN`` is an argument that has no name there: any name will do here. ``ReplicateConfig()`` stands
for a default that is an instance of that class.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("data") / "surface.txt"

# Names that are here and not there, on purpose.
EXTRA = {
    "mooncake.store.ReplicateConfig.with_soft_pin": "formerly: soft_pin_action = ENABLE; connectors use it",
}

# Signatures that no Python text can express, and what `inspect.signature` says here.
SHOWN_AS = {
    # There, an argument without a default follows one with a default; the call needs `file_name` here, too.
    "mooncake.store.MooncakeDistributedStore.load_tensor_from_safetensor": "key=None, file_name=None",
}


@dataclass
class Entry:
    """A name of a module or of a class, with its overloads (texts of arguments) and its members."""

    overloads: list[str] = field(default_factory=list)
    members: dict[str, Entry] = field(default_factory=dict)
    is_class: bool = False


Surface = dict[str, dict[str, Entry]]


@dataclass(frozen=True)
class Parameter:
    name: str
    default: str | None

    def matches(self, other: Parameter) -> bool:
        """Whether a call that works with ``self`` means the same with ``other``."""
        is_unnamed = re.fullmatch(r"arg\d+", self.name) is not None
        return (is_unnamed or self.name == other.name) and self.default == other.default


# -- texts of arguments --------------------------------------------------------------------------------------


def _split(text: str) -> Iterator[str]:
    """The parts of ``text`` between commas that are in no brackets and no quotes."""
    depth, quote, part = 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{<":
            depth += 1
        elif char in ")]}>":
            depth -= 1
        elif char == "," and depth == 0:
            yield part.strip()
            part = ""
            continue
        part += char
    if part.strip():
        yield part.strip()


def _default(text: str) -> str:
    if re.match(r"<mooncake\.store\.ReplicateConfig object at|ReplicateConfig\(\)$|\.\.\.$|Ellipsis$", text):
        return "ReplicateConfig()"
    return text.replace('"', "'")


def parameters(text: str) -> list[Parameter]:
    """The parameters between the parentheses of a signature, without ``self``, ``/`` and ``*``."""
    found = []
    for part in _split(text):
        declared, equals, default = part.partition("=")
        name = declared.split(":")[0].strip()
        if name not in ("self", "$self", "/", "*") or name.startswith("**"):
            found.append(Parameter(name, _default(default.strip()) if equals else None))
    return found


def render(params: Iterable[Parameter]) -> str:
    return ", ".join(p.name if p.default is None else f"{p.name}={p.default}" for p in params)


_SIGNATURE = re.compile(r"(?:^|\|\| )(?:\d+\. )?(\w+)\((.*?)\) ->", re.DOTALL | re.MULTILINE)


def overloads(name: str, text: str) -> list[str]:
    """The texts of arguments of each signature of ``name`` in a documentation text."""
    found = [render(parameters(args)) for called, args in _SIGNATURE.findall(text) if called == name]
    return [args for args in found if args != "*args, **kwargs"]


# -- the file ------------------------------------------------------------------------------------------------


def write(surface: Surface) -> str:
    lines = []
    for module, entries in surface.items():
        lines.append(module)
        for name, entry in sorted(entries.items()):
            lines.extend(_lines(name, entry, 1))
            for member, inner in sorted(entry.members.items()):
                lines.extend(_lines(member, inner, 2))
    return "\n".join(lines) + "\n"


def _lines(name: str, entry: Entry, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if entry.is_class:
        yield f"{indent}class {name}"
    elif not entry.overloads:
        yield indent + name
    for args in entry.overloads:
        yield f"{indent}{name}({args})"


def read(text: str) -> Surface:
    surface: Surface = {}
    entries: dict[str, Entry] = {}
    members: dict[str, Entry] = {}
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, paren, args = line.strip().partition("(")
        if not name or name.startswith("#"):
            continue
        if depth == 0:
            entries = surface.setdefault(name, {})
        elif name.startswith("class "):
            members = entries.setdefault(name.removeprefix("class "), Entry(is_class=True)).members
        else:
            entry = (entries if depth == 1 else members).setdefault(name, Entry())
            if paren:
                entry.overloads.append(args.removesuffix(")"))
    return surface


def from_dump(text: str) -> Surface:
    """The surface in a dump: ``## MODULE``, ``class NAME``, ``attr NAME``, and indented members."""
    surface: Surface = {}
    entries: dict[str, Entry] = {}
    members: dict[str, Entry] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            entries = surface.setdefault(line.split()[1], {})
        elif line.startswith("class "):
            members = entries.setdefault(line.split()[1], Entry(is_class=True)).members
        elif line.startswith(("attr ", "    ")):
            is_member = line.startswith("    ")
            name, _, rest = line.removeprefix("attr ").strip().partition(" ")
            rest = rest.removeprefix("instancemethod ").removeprefix("builtin_function_or_method ")
            target = members if is_member else entries
            target[name] = Entry(overloads=overloads(name, rest.removeprefix(f"{name}(*args, **kwargs) ")))
    return surface


# -- the comparison ------------------------------------------------------------------------------------------


@dataclass
class Report:
    names: int = 0
    functions: int = 0
    missing: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)


def compare(surface: Surface) -> Report:
    """Compares the modules, which are imported, with ``surface``."""
    report = Report()
    for module_name, entries in surface.items():
        module = importlib.import_module(module_name)
        _compare_names(report, module_name, module, entries)
        ours = {name for name in vars(module) if not name.startswith("_")}
        report.extra += sorted(f"{module_name}.{name}" for name in ours - set(entries) - {"annotations"})
    report.extra = [name for name in report.extra if name not in EXTRA]
    return report


def _compare_names(report: Report, where: str, owner: Any, entries: dict[str, Entry]) -> None:
    for name, entry in entries.items():
        report.names += 1
        path = f"{where}.{name}"
        ours = getattr(owner, name, None)
        if ours is None:
            report.missing.append(path)
            continue
        # Methods of operators have no documented arguments: Python defines them.
        if entry.overloads and (name == "__init__" or not name.startswith("__")):
            report.functions += 1
            _compare_overloads(report, path, ours, owner, name, entry.overloads)
        if entry.is_class:
            _compare_names(report, path, ours, entry.members)
            members = {member for member in vars(ours) if not member.startswith("_")}
            report.extra += sorted(f"{path}.{member}" for member in members - set(entry.members))


def _compare_overloads(
    report: Report, path: str, ours: Any, owner: Any, name: str, wanted: list[str]
) -> None:
    documented = owner.__doc__ if name == "__init__" else ours.__doc__
    ours_by_doc = overloads(name, documented or "")
    for args in wanted:
        if not any(_same(args, candidate) for candidate in ours_by_doc):
            report.different.append(f"{path}: ({args}) there; documented here: {ours_by_doc or 'nothing'}")
    # Callers that look for an argument by `inspect.signature` find the first overload.
    if not name.startswith("__"):
        try:
            signature = inspect.signature(ours)
        except ValueError:
            report.different.append(f"{path}: no signature for inspect")
            return
        shown = [p for p in signature.parameters.values() if p.name != "self"]
        text = ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in shown)
        if not _same(SHOWN_AS.get(path, wanted[0]), render(parameters(text))):
            report.different.append(f"{path}: ({wanted[0]}) there; inspect.signature here: ({text})")


def _same(theirs: str, ours: str) -> bool:
    there, here = parameters(theirs), parameters(ours)
    return len(there) == len(here) and all(a.matches(b) for a, b in zip(there, here, strict=True))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from-dump", metavar="DUMP", type=Path, help="write data/surface.txt from this dump"
    )
    arguments = parser.parse_args(words)
    if arguments.from_dump:
        DATA.write_text(write(from_dump(arguments.from_dump.read_text())))
        print(f"wrote {DATA}")
        return 0
    report = compare(read(DATA.read_text()))
    for title, findings in (
        ("missing", report.missing),
        ("different", report.different),
        ("extra", report.extra),
    ):
        for finding in findings:
            print(f"{title}: {finding}")
    print(f"{report.names} names, of which {report.functions} functions with arguments:")
    print(f"{len(report.missing)} missing, {len(report.different)} different, {len(report.extra)} extra")
    return 1 if report.missing or report.different else 0


if __name__ == "__main__":
    sys.exit(main())
