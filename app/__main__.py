"""``python -m app`` is the ``mlxcel`` command."""

import signal

# Until the server takes its signals over, Ctrl-C ends the process without a traceback from the midst of an import.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from app.cli import entry  # noqa: E402

entry()
