"""Errors that a user can mend. The command line prints their text and exits with code 2."""


class MotifConvertError(Exception):
    """Base of all; the text names the file, the tensor and what to do."""


class SourceError(MotifConvertError):
    """The source checkpoint is not what it should be."""


class RecipeError(MotifConvertError):
    """The recipe, or a policy in it, does not fit."""


class OutputError(MotifConvertError):
    """The output folder can't be used, or can't be written."""


def listing(head: str, items: list[str]) -> str:
    """`head` and every item below it: one mistake rarely comes alone."""
    return head if not items else "\n  - ".join([f"{head}:", *items])
