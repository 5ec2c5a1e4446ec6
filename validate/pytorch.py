"""PyTorch kept out of commands that do not ask for it.

transformers, which mlx-lm imports, takes PyTorch in wherever it is installed, though a build needs none of it: that is
1.5 s and 190 MB for every command that loads a model.
"""

import sys


def keep_out() -> None:
    """From now on PyTorch seems not to be installed; nothing, if it is imported already."""
    sys.modules.setdefault("torch", None)


def let_in() -> None:
    """It can be imported again; transformers has looked for it by then, and does without."""
    if sys.modules.get("torch") is None:
        sys.modules.pop("torch", None)
