"""`ModelArgs` of motif.py without the rest of that file, for which mlx-lm would take a second and 60 MB to import."""

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

NEEDED = {"FIXED", "HIDDEN_CLAMP_INERT", "DTYPES", "ModelArgs", "_with_flat_rope_keys"}


class BaseModelArgs:
    """As mlx-lm has it: keys that are no field are left out."""

    @classmethod
    def from_dict(cls, params: dict):
        return cls(**{k: v for k, v in params.items() if k in inspect.signature(cls).parameters})


@cache
def model_args() -> type:
    """The class `ModelArgs`, made of the lines of our own motif.py that it needs."""
    source = (files(__package__) / "motif.py").read_text(encoding="utf-8")
    nodes = [node for node in ast.parse(source).body if _defined(node) & NEEDED]
    names = {"BaseModelArgs": BaseModelArgs, "dataclass": dataclass, "__name__": __name__}
    exec(compile(ast.Module(nodes, []), "motif.py", "exec"), names)
    return names["ModelArgs"]


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set()
