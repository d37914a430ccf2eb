"""What this server refuses and what can fail in it: one tree, mapped to HTTP once, in ``app.api.errors``."""

from __future__ import annotations

import traceback


class MlxcelError(Exception):
    """Root of the tree. ``str(error)`` is fit to be shown to the person who asked."""


class StartError(MlxcelError):
    """The server cannot start; the text is one line that names the cause and the remedy."""


class AddressInUse(StartError):
    """Something else listens where this server would."""


class InvalidRequest(MlxcelError):
    """The request can never be served as it stands. ``param`` names the field at fault, if one is."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not serve."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model '{name}' does not exist on this server.", "model", "model_not_found")


class ResponseNotFound(InvalidRequest):
    """No response is kept under this id, for this key."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id[:64]}' not found.", "response_id", "response_not_found")


class Unauthorized(MlxcelError):
    """No key, or a wrong one: the answer is the same."""

    def __init__(self) -> None:
        super().__init__("Invalid API Key")


class FeatureOff(MlxcelError):
    """The route or feature is turned off on this server, or does not exist on it."""


class Overloaded(MlxcelError):
    """Every slot and every place in the queue is taken. ``retry_after_s`` is when that may be otherwise."""

    def __init__(self, message: str = "Server is busy. Retry later.", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueTimeout(Overloaded):
    """The request waited to be admitted longer than it may."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"The request waited {waited_s:.0f} s to be admitted. Retry later.")


class MemoryShortage(MlxcelError):
    """The pool has no bound and no memory to grow into, now: the request may fit later."""

    def __init__(self) -> None:
        super().__init__("There is not enough memory for the context of this request at the moment. Retry later.")


class RateLimited(MlxcelError):
    """A key has used up what it may ask for; ``retry_after_s`` is when there will be enough again."""

    def __init__(self, limit: str, retry_after_s: float) -> None:
        super().__init__(f"Rate limit reached: {limit}. Retry later.")
        self.retry_after_s = retry_after_s


class Unavailable(MlxcelError):
    """Not serving at this moment: loading or draining."""


class BackendError(MlxcelError):
    """The engine failed while it worked on this request."""

    def __init__(self) -> None:
        super().__init__("inference backend error")


class EngineFault(MlxcelError):
    """A whole step failed in the engine, and with it all that the block pool held. The text is for the log."""


def kind_and_place(error: BaseException) -> str:
    """What failed and where, for the log. The text of an exception is left out: it may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{place}"
