"""Calls to the Hub that are made again where that helps, and a line for the user where it does not.

No text of an exception is shown but what the Hub itself answered: h11 quotes a header that it can't send, token and
all, and the URLs in httpx's texts are signed.
"""

import json
import time
from collections.abc import Callable
from typing import TypeVar

# httpx's or httpx2's, whichever this huggingface_hub is made with
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars, logging, parse_ratelimit_headers

from ..quantize.errors import OutputError, quoted

TRIES = 6
FIRST_WAIT, LONGEST_WAIT = 1, 300  # seconds; doubled from try to try, unless the Hub says how long
NO_TOKEN = "log in with `hf auth login`, or set HF_TOKEN"
AGAIN = "run the same command again; what has arrived is not sent again"
FULL = ("storage limit", "quota", "upgrade your plan", "payment required")
NOT_SENT = ("LocalProtocolError", "UnsupportedProtocol")  # of httpx: the request can't be sent, now or later

Result = TypeVar("Result")


def keep_quiet(bars: bool) -> None:
    """Keeps huggingface_hub from talking, unless HF_HUB_VERBOSITY asks for more: of its retries it shows signed URLs.

    Args:
        bars: whether its progress bars stay.
    """
    if logging.get_verbosity() == logging.WARNING:
        logging.set_verbosity_error()
    if not bars:
        disable_progress_bars()


def patiently(repo: str, call: Callable[[], Result], say: Callable[[str], None]) -> Result:
    """What `call` returns, in the end: rate limits, server errors and lost connections are waited out.

    Only for calls that may be made twice.

    Args:
        repo: named in the error.
        say: told of each wait.
    Raises:
        OutputError: refused for good, or still failing after TRIES tries; it says what to do.
    """
    for tried in range(1, TRIES + 1):
        try:
            return call()
        except (HTTPError, OSError, RuntimeError, ValueError) as e:
            error = _behind(e)
            if tried == TRIES or not may_pass(error):
                raise refusal(error, repo) from None
            wait = seconds_to_wait(error, tried)
            say(f"{_met(error)}; trying again in {wait} s ({tried} of {TRIES - 1}).")
            time.sleep(wait)
    raise AssertionError("not reached")


def may_pass(error: Exception) -> bool:
    """Whether the same request may be answered later."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status in (408, 429) or status >= 500
    if isinstance(error, json.JSONDecodeError):
        return True  # a proxy's page of HTML, where huggingface_hub expects JSON
    return isinstance(error, HTTPError) and type(error).__name__ not in NOT_SENT


def refusal(error: Exception, repo: str) -> OutputError:
    """What an error of huggingface_hub means, and what to do."""
    if isinstance(error, HfHubHTTPError):
        return OutputError(_answered(error.response.status_code, error.server_message or "", repo))
    if isinstance(error, LocalTokenNotFoundError):
        return OutputError(f"{repo}: no token to write with; {NO_TOKEN}")
    if isinstance(error, OfflineModeIsEnabled):
        return OutputError(f"{repo}: HF_HUB_OFFLINE is set, so the Hub is not asked; unset it")
    if isinstance(error, UnicodeError) or type(error).__name__ == "LocalProtocolError":
        return OutputError(f"{repo}: the token holds characters that no token has; {NO_TOKEN}")
    if isinstance(error, HTTPError):
        return OutputError(f"{repo}: {_met(error)}; see to the network and {AGAIN}")
    return OutputError(f"{repo}: {quoted(error)}; when that is mended, {AGAIN}")


def _behind(error: Exception) -> Exception:
    """The HTTP error of a failed PUT, which huggingface_hub wraps in a RuntimeError."""
    return error.__cause__ if isinstance(error, RuntimeError) and isinstance(error.__cause__, HTTPError) else error


def _met(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"The Hub answers {error.response.status_code}"
    if isinstance(error, HTTPError):
        return f"The Hub can't be reached ({type(error).__name__})"
    return "The Hub's answer can't be read"


def seconds_to_wait(error: Exception, tried: int) -> int:
    """Before the next try: what the Hub asks for, else twice as long from try to try."""
    wait = FIRST_WAIT << (tried - 1)
    if isinstance(error, HfHubHTTPError):
        asked, limit = error.response.headers.get("retry-after", ""), parse_ratelimit_headers(error.response.headers)
        if asked.isdigit():
            wait = int(asked)
        elif limit and not limit.remaining:
            wait = limit.reset_in_seconds + 1
    return min(wait, LONGEST_WAIT)


def _answered(status: int, message: str, repo: str) -> str:
    said = quoted(message) if message else f"HTTP {status}, without a reason"
    if status == 402 or (status < 500 and any(word in message.lower() for word in FULL)):
        return (
            f"{repo}: the Hub has no room for it: {said}; remove something, or see "
            f"https://huggingface.co/settings/billing, then {AGAIN}"
        )
    match status:
        case 401:
            return f"{repo}: the Hub does not accept this token; {NO_TOKEN}"
        case 403:
            return (
                f"{repo}: refused: {said}; use a token that may write there, see "
                "https://huggingface.co/settings/tokens, or ask its owner"
            )
        case 404:
            return f"{repo}: not there, or hidden from this token: {said}"
        case 409 | 412:
            return f"{repo}: somebody else has changed it meanwhile ({said}); {AGAIN}"
        case 408 | 429 | 500 | 502 | 503 | 504:
            return f"{repo}: the Hub still answers {status} after {TRIES} tries: {said}; later, {AGAIN}"
    return f"{repo}: the Hub answers {status}: {said}"
