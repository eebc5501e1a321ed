"""Structure of the package in numbers: files by subpackage ("room"), imports, sizes, names and docstrings.

    python tools/structure.py [--json FILE] [ROOT]

``ROOT`` is a checkout of this repository at any commit, so calls before and after a change show its effect.
"""

import argparse
import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOMS = (  # lowest first: a module imports only from its own room and those before it
    *("deploy", "errors", "types", "contract", "envs", "config", "nets", "engine", "data"),
    *("remote", "collect", "algos", "run", "reports", "wrap", "api", "lab", "cli"),
)
ALLOWED = {
    ("contract.registry", "envs"): "the table of built-in simulators is in their package",
    ("contract.grouped", "engine.deadlines"): "there is one table of deadlines; it imports the standard library alone",
    ("contract.conformance", "engine.tape"): "whether a simulator can be captured is shown by capturing it",
}
"""Imports against the order of ``ROOMS`` that are allowed, with their reasons."""
PATH = ("run/build.py", "engine/schedule.py", "algos/off_policy.py", "algos/ddpg.py", "data/replay.py")
"""The reading path of docs/layout.md."""
QUESTION = re.compile(r"(What|Who|Where|Those|Whether)\b")
SHAPE = re.compile(r"\[[^\]]*\]|scalar|shape")


@dataclass
class Module:
    """A module: its syntax tree, and its imports from this package (at module level, in functions)."""

    name: str
    path: Path
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)  # module -> "top", "function" or "typing"

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]


def modules(root: Path) -> dict[str, Module]:
    """Return the package's modules by dotted name below ``pql``."""
    found = {}
    for path in sorted((root / "pql").rglob("*.py")):
        parts = path.relative_to(root / "pql").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, ast.parse(path.read_text()))
    for module in found.values():
        for target, kind in _imports(module.tree, "top"):
            while target and target not in found:
                target = target.rpartition(".")[0]
            if target and target != module.name and module.imports.get(target) != "top":
                module.imports[target] = kind
    return found


def _imports(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = "function" if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else kind
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inner = "typing"
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("pql"):
            for alias in child.names:
                yield f"{child.module}.{alias.name}".removeprefix("pql").removeprefix("."), inner
        if isinstance(child, ast.Import):
            yield from ((a.name.removeprefix("pql."), inner) for a in child.names if a.name.startswith("pql."))
        yield from _imports(child, inner)


def upward(found: dict[str, Module]) -> list[tuple[str, str]]:
    """Return imports from a room later in ``ROOMS``, except ``ALLOWED`` ones and those for type checkers."""
    rank = {room: i for i, room in enumerate(ROOMS)}
    return [
        (module.name, target)
        for module in found.values()
        for target, kind in module.imports.items()
        if kind != "typing"
        and (module.name, target) not in ALLOWED
        and rank.get(target.partition(".")[0], -1) > rank.get(module.room, len(rank))
    ]


def cycles(found: dict[str, Module]) -> list[list[str]]:
    """Return the cycles of imports, function-level imports included (Tarjan 1972)."""
    graph = {
        name: [t for t, kind in module.imports.items() if kind != "typing" and (name, t) not in ALLOWED]
        for name, module in found.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                groups.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in index:
            visit(name)
    return groups


def depth(found: dict[str, Module]) -> int:
    """Return the number of modules in the longest chain of imports at module level."""
    known: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in known:
            known[name] = 0  # ends cycles
            known[name] = 1 + max((of(t) for t, k in found[name].imports.items() if k == "top"), default=0)
        return known[name]

    return max(of(name) for name in found)


def functions(found: dict[str, Module]) -> Iterator[tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module in found.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield module, node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(args) - (bool(args) and args[0].arg in ("self", "cls"))


def repeated_names(found: dict[str, Module]) -> dict[str, list[str]]:
    """Return public classes and functions that several modules define, outside of ``envs`` and ``reports``."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module in found.values():
        if module.room in ("envs", "reports"):
            continue
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                homes[node.name].append(module.name)
    return {name: where for name, where in sorted(homes.items()) if len(where) > 1}


def questions(found: dict[str, Module]) -> list[str]:
    """Return the docstrings that begin with a question word."""
    out = []
    for module in found.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if QUESTION.match(text):
                    out.append(f"{module.name}: {text.splitlines()[0]}")
    return out


def shapeless(found: dict[str, Module]) -> list[str]:
    """Return public functions that take tensors and name no shape, neither in their docstring nor in their class's."""
    out = []
    for module in found.values():
        scopes: list[ast.Module | ast.ClassDef] = [n for n in module.tree.body if isinstance(n, ast.ClassDef)]
        for scope in [module.tree, *scopes]:
            about = ast.get_docstring(scope) or "" if isinstance(scope, ast.ClassDef) else ""
            for node in scope.body:
                if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                    continue
                args = [*node.args.args, *node.args.kwonlyargs]
                takes = any(
                    a.annotation is not None and re.fullmatch(r"Tensor( \| None)?", ast.unparse(a.annotation))
                    for a in args
                )
                text = (ast.get_docstring(node) or "") + about
                overrides = isinstance(scope, ast.ClassDef) and scope.bases and ast.get_docstring(node) is None
                if takes and not overrides and not SHAPE.search(text):
                    out.append(f"{module.name}.{node.name}")
    return out


def long_files(found: dict[str, Module], most: int = 400) -> dict[str, int]:
    """Return the modules with more than ``most`` lines, and their lines."""
    lines = {name: module.path.read_text().count("\n") for name, module in found.items()}
    return {name: count for name, count in lines.items() if count > most}


def long_functions(found: dict[str, Module], most: int = 60) -> dict[str, int]:
    """Return the functions with more than ``most`` lines, as ``module.name``, and their lines."""
    spans = {f"{m.name}.{node.name}": (node.end_lineno or 0) - node.lineno + 1 for m, node in functions(found)}
    return {name: count for name, count in spans.items() if count > most}


def reading_path(root: Path) -> int:
    """Return the lines of the modules that the README names to read first."""
    return sum((root / "pql" / name).read_text().count("\n") for name in PATH)


def lines_of_code(root: Path, folder: str) -> int:
    """Return the lines of a folder's Python files."""
    return sum(path.read_text().count("\n") for path in (root / folder).rglob("*.py"))


def pages(root: Path) -> int:
    """Return the number of the documentation's pages."""
    return len([*(root / "docs").rglob("*.md")])


def measure(root: Path) -> dict[str, object]:
    """Return all numbers by name."""
    found = modules(root)
    sources = {m.name: m.path.read_text() for m in found.values()}
    tests = [p.read_text() for folder in ("tests", "tools") for p in (root / folder).rglob("*.py")]
    entries = [p for p in (root / "pql").iterdir() if p.name != "__pycache__"]
    rooms = {p.name: len([*p.glob("*.py")]) for p in entries if p.is_dir()}
    longest = max(functions(found), key=lambda pair: (pair[1].end_lineno or 0) - pair[1].lineno)
    length = (longest[1].end_lineno or 0) - longest[1].lineno + 1
    file = max(sources, key=lambda name: sources[name].count("\n"))
    return {
        "entries of pql/": len(entries),
        "modules by room": rooms,
        "modules in the largest room": max(rooms.values()),
        "import depth": depth(found),
        "imports upward": upward(found),
        "cycles": cycles(found),
        "longest function": f"{longest[0].name}.{longest[1].name}: {length} lines",
        "longest file": f"{file}: {sources[file].count(chr(10))} lines",
        "functions with more than six parameters": sum(parameters(node) > 6 for _, node in functions(found)),
        "lines of the reading path": reading_path(root) if all((root / "pql" / p).exists() for p in PATH) else None,
        "files of more than 400 lines": long_files(found),
        "functions of more than 60 lines": long_functions(found),
        **{f"lines of {folder}": lines_of_code(root, folder) for folder in ("pql", "tests", "tools")},
        "pages of documentation": pages(root),
        "public names defined twice": repeated_names(found),
        "docstrings that open with a question word": len(questions(found)),
        "public functions with tensors and no shape": len(shapeless(found)),
        "fmt: skip": sum(text.count("# fmt: skip") for text in (*sources.values(), *tests)),
        "type: ignore": sum(text.count("# type: ignore") for text in (*sources.values(), *tests)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--list", choices=("questions", "shapeless"), help="list every entry of this kind, instead of the numbers"
    )
    args = parser.parse_args()
    if args.list:
        print("\n".join({"questions": questions, "shapeless": shapeless}[args.list](modules(args.root))))
        return
    numbers = measure(args.root)
    for name, value in numbers.items():
        if isinstance(value, list | dict) and name != "modules by room":
            print(f"{name:45} {len(value)}  {', '.join(map(str, list(value)[:12]))}")
        else:
            print(f"{name:45} {value}")
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
