"""Hold every import of our packages against the rules: who may import whom, no cycles, the worker's floors.

Imports inside functions and under TYPE_CHECKING count too. Prints one line for each breach; exits 1 if there is one.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("server", "tokenizer_proc", "detokenizer_proc", "scheduler", "worker")

# Who may import what of ours. The longest matching name of the importer decides.
ALLOWED: dict[str, tuple[str, ...]] = {
    "proto": ("proto",),
    "quintet_client": ("quintet_client",),
    "engine.runtime": ("engine.runtime", "proto"),
    "engine": ("engine", "proto", "quintet_client"),
    "server": ("server", "engine.runtime", "proto", "quintet_client.v1"),
    **{stage: (stage, "engine.runtime", "proto") for stage in STAGES if stage != "server"},
}
# The worker from the ground up. A floor's packages and modules may import what is below, never a neighbour on their own
# floor: no device imports another, and no layer or model imports a device.
WORKER_FLOORS: tuple[tuple[str, ...], ...] = (
    ("worker.device", "worker.steps"),
    ("worker.ranks",),
    ("worker.layers",),
    ("worker.models",),
    ("worker.loader",),
    ("worker.cpu", "worker.cuda", "worker.sim"),
    ("worker.output",),
    ("worker.loop",),
    ("worker.start",),
    ("worker.__main__",),
)
# Third parties that belong to one place.
RESERVED: dict[str, tuple[str, ...]] = {
    "zmq": ("proto.channel",),
    "torch": ("worker",),
    "safetensors": ("worker",),
    "numba": ("worker",),
    "flashinfer": ("worker",),
    "transformers": (),
    "pickle": (),
}
OURS = ("engine", "proto", "quintet_client", *STAGES)


@dataclass(frozen=True, slots=True)
class Import:
    """`importer`, a module of ours, names `imported` in line `line` of `path`."""

    path: Path
    line: int
    importer: str
    imported: str


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    """True when `module` is one of the packages or lies inside one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def source_files(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """Every module of ours with its dotted name; tests and scripts, which may import anything, are left out."""
    client = root / "proto" / "client"
    for package in OURS:
        base = client if package == "quintet_client" else root
        for path in sorted((base / package).rglob("*.py")):
            if package == "proto" and path.is_relative_to(client):
                continue
            parts = path.relative_to(base).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """All imports of one file. `from a import b` counts as `a.b`, which names a module or a thing inside `a`."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, module, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(filter(None, [*parents[: len(parents) - node.level + 1], base]))
            for alias in node.names:
                yield Import(path, node.lineno, module, f"{base}.{alias.name}")


def breach(found: Import) -> str:
    """Say what is wrong with one import; "" when nothing is."""
    top = found.imported.partition(".")[0]
    if top in RESERVED and not is_within(found.importer, RESERVED[top]):
        return f"only {' and '.join(RESERVED[top]) or 'nobody'} may import {top}"
    if top in OURS:
        rule = max((name for name in ALLOWED if is_within(found.importer, (name,))), key=len)
        if not is_within(found.imported, ALLOWED[rule]):
            return f"{rule} may import {', '.join(ALLOWED[rule])} of ours, not {found.imported}"
    if top == "worker" and is_within(found.importer, ("worker",)):
        return climb(found.importer, found.imported)
    return ""


def climb(importer: str, imported: str) -> str:
    """Say that an import within the worker goes up or sideways; "" when it goes down or stays in its package."""
    floors = {place: floor for floor, places in enumerate(WORKER_FLOORS) for place in places}
    source, target = (next((p for p in floors if is_within(name, (p,))), "") for name in (importer, imported))
    if not source or not target:
        return f"{imported if source else importer} has no floor in WORKER_FLOORS"
    if source == target or floors[target] < floors[source]:
        return ""
    return f"{source} may import what is below it in WORKER_FLOORS, not {target}"


def cycle(imports: list[Import], modules: set[str]) -> list[str]:
    """Find modules that import each other in a circle, the first again at the end; [] when there are none."""
    graph: dict[str, set[str]] = {}
    for found in imports:
        target = found.imported
        while target and target not in modules:
            target = target.rpartition(".")[0]
        if target and target != found.importer:
            graph.setdefault(found.importer, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # graphlib lists each before the one that imports it
    return []


def breaches(root: Path = ROOT) -> list[str]:
    """One line for each import against the rules, in the order of the files, and one for a cycle."""
    modules = dict(source_files(root))
    imports = [found for module, path in modules.items() for found in imports_of(module, path)]
    lines = [
        f"{found.path.relative_to(root)}:{found.line}: {complaint}" for found in imports if (complaint := breach(found))
    ]
    if circle := cycle(imports, set(modules)):
        lines.append(f"{modules[circle[0]].relative_to(root)}: import cycle: {' → '.join(circle)}")
    return lines


def main() -> int:
    found = breaches()
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
