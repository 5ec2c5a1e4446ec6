"""Errors that a user can mend. The command line prints their text and exits with code 2, for a failed check with 1."""


class MotifConvertError(Exception):
    """Base of all; the text names the file, the tensor and what to do."""


class SourceError(MotifConvertError):
    """The source checkpoint is not what it should be."""


class RecipeError(MotifConvertError):
    """The recipe, or a policy in it, does not fit."""


class OutputError(MotifConvertError):
    """The output folder can't be used, or can't be written."""


class CheckError(MotifConvertError):
    """What was written is not what it should be."""


MOST_ITEMS = 1000


def listing(head: str, items: list[str]) -> str:
    """`head` and every item below it, or a single one on its line: one mistake rarely comes alone."""
    if len(items) == 1:
        return f"{head}: {items[0]}"
    shown = items[:MOST_ITEMS]
    if len(items) > MOST_ITEMS:
        shown.append(f"and {len(items) - MOST_ITEMS} more")
    return head if not items else "\n  - ".join([f"{head}:", *shown])


def quoted(text: object, limit: int = 200) -> str:
    """Foreign text as a message may show it: printable, one line, short."""
    text = str(text)
    shown = text if len(text) <= limit else text[:limit] + "..."
    return shown if shown.isprintable() else repr(shown)[1:-1]
