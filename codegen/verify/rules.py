"""Rules of a device whose compiler is not here, checked on the text of a module.

They stand in the backend's profile; Ascend's come from triton-ascend's documentation and issues.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from analyzers.backends import TritonTarget

LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}
MISSING = {"dot_scaled", "sort", "inline_asm_elementwise"}
"""Functions of `tl` that triton-ascend has not."""


def broken_rules(text: str, target: TritonTarget) -> list[str]:
    """What the module does that the target does not allow, with its line; nothing when it keeps
    the rules."""
    tree = ast.parse(text)
    found = []
    if not target.num_warps:
        found += _launch_options(tree)
    if target.max_grid_product:
        found += _unbounded_grids(tree, target.max_grid_product)
    if target.pointer_style == "block_pointer":
        found += _masked(tree)
    found += [
        f"line {call.lineno}: {ast.unparse(call.func)}"
        for call in _calls(tree)
        if isinstance(call.func, ast.Attribute) and call.func.attr in MISSING
    ]
    return found


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _launch_options(tree: ast.AST) -> list[str]:
    return [
        f"line {call.lineno}: {word.arg} is no option there"
        for call in _calls(tree)
        for word in call.keywords
        if word.arg in LAUNCH_OPTIONS
    ]


def _unbounded_grids(tree: ast.AST, most: int) -> list[str]:
    """Kernels are launched by `_run` alone, which takes at most MOST_PROGRAMS at once."""
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name != "_run":
            found += [
                f"line {call.lineno}: a launch outside of _run"
                for call in _calls(function)
                if isinstance(call.func, ast.Subscript) and isinstance(call.func.slice, ast.Tuple)
            ]
    limits = [
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MOST_PROGRAMS"
    ]
    if len(limits) != 1 or not 0 < limits[0] <= most:
        found.append(f"MOST_PROGRAMS is {limits}, a launch takes {most}")
    return found


def _masked(tree: ast.AST) -> list[str]:
    """Masked elements are read all the same."""
    return [
        f"line {call.lineno}: a masked {ast.unparse(call.func)}"
        for call in _calls(tree)
        if ast.unparse(call.func) in ("tl.load", "tl.store")
        and any(word.arg == "mask" for word in call.keywords)
    ]
