"""Where the GPU worker's code touches the host: every place must stand in docs/host_touches.md, and nothing else may.

The static half of the rule that the launch path never waits; test_cuda_device.py has the dynamic half, on an emulation.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "host_touches.md"

# What makes the host wait for the device, or copies memory that is not pinned, in one of torch's or numpy's spellings.
_VALUES = {"item", "tolist", "cpu", "numpy", "equal", "is_nonzero", "allclose"}
_SHAPES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave"}
_COPIES = {"tensor", "as_tensor", "asarray", "from_numpy", "pin_memory", "multinomial"}
_WAITS = {"synchronize", "wait", "query", "mem_get_info", "empty_cache", "elapsed_time"}
_RANKS = {"minimum", "agree", "check_same", "barrier", "broadcast_object_list"}  # wait for other ranks' hosts
CALLS = frozenset(_VALUES | _SHAPES | _COPIES | _WAITS | _RANKS)
_ARRAYS = frozenset({"np.minimum", "torch.minimum", "tl.minimum"})
CONVERSIONS = frozenset({"int", "float", "bool"})  # of a device tensor these wait too
LAYERS = ("embedding", "experts", "linear", "mlp", "norm", "rope")  # on whatever device
ROW = re.compile(r"^\| `(?P<file>[^`]+)` \| `(?P<function>[^`]+)` \| `(?P<call>[^`]+)` \| (?P<reason>.+) \|$")

Touch = tuple[str, str, str]  # file, function, call


class Finder(ast.NodeVisitor):
    """Calls of a file that touch the host, with the function that they stand in."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self._names: list[str] = []

    def _enter(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    visit_ClassDef = visit_FunctionDef = _enter  # noqa: N815 - names of ast

    def visit_Call(self, node: ast.Call) -> None:
        call = spelled(node)
        if call:
            self.found.add((".".join(self._names) or "module", call))
        self.generic_visit(node)


def spelled(node: ast.Call) -> str:
    """How the document names a call that touches the host; "" for one that does not."""
    function = node.func
    if any(keyword.arg == "pin_memory" for keyword in node.keywords):
        return "pin_memory=True"
    if isinstance(function, ast.Attribute):
        if function.attr in CALLS and ast.unparse(function) not in _ARRAYS:
            return f".{function.attr}()"
        if function.attr == "to" and any(isinstance(a, ast.Constant) and a.value == "cpu" for a in node.args):
            return '.to("cpu")'
    converts = isinstance(function, ast.Name) and function.id in CONVERSIONS and node.args
    if converts and not isinstance(node.args[0], ast.Constant):
        assert isinstance(function, ast.Name)
        return f"{function.id}()"
    return ""


def files() -> list[Path]:
    """The GPU worker's own code: nothing else runs between two launches but what these call."""
    found = [*ROOT.glob("worker/cuda/*.py"), *ROOT.glob("worker/models/*.py")]
    return sorted([*found, *(ROOT / "worker" / "layers" / f"{name}.py" for name in LAYERS)])


def touches() -> set[Touch]:
    found = set()
    for path in files():
        finder = Finder()
        finder.visit(ast.parse(path.read_text()))
        found |= {(str(path.relative_to(ROOT)), function, call) for function, call in finder.found}
    return found


def listed() -> dict[Touch, str]:
    rows = [ROW.match(line) for line in DOCUMENT.read_text().splitlines()]
    return {(row["file"], row["function"], row["call"]): row["reason"] for row in rows if row}


def test_every_touch_is_listed_with_its_reason_and_no_row_is_left_over() -> None:
    assert len(files()) > 10
    found, rows = touches(), listed()
    missing = [f"| `{file}` | `{function}` | `{call}` | ? |" for file, function, call in sorted(found - rows.keys())]
    assert not missing, "add to docs/host_touches.md, or do without:\n" + "\n".join(missing)
    assert not rows.keys() - found, "no longer in the code"
    assert all(len(reason) > 5 for reason in rows.values())


@pytest.mark.parametrize(
    "code",
    [
        "ids.item()",
        "ids.tolist()",
        "ids.cpu()",
        'ids.to("cpu")',
        "torch.cuda.synchronize()",
        "stream.synchronize()",
        "weight.nonzero()",
        "torch.tensor([1], device='cuda')",
        "torch.empty(1, pin_memory=True)",
        "int(ids[0])",
        "x = [float(v) for v in logits]",
        "self._group.minimum(pages)",
        'group.check_same((1, 2), "a plan")',
        "dist.barrier()",
    ],
)
def test_the_check_sees(code: str) -> None:
    finder = Finder()
    finder.visit(ast.parse(f"class Device:\n    def launch(self):\n        {code}\n"))
    assert [function for function, _ in finder.found] == ["Device.launch"]


@pytest.mark.parametrize(
    "code",
    ["a.copy_(b, non_blocking=True)", "event.record()", "np.minimum(a, b)", 'x.to("cuda")', "dist.all_reduce(x)"],
)
def test_the_check_lets_pass(code: str) -> None:
    finder = Finder()
    finder.visit(ast.parse(code))
    assert not finder.found
