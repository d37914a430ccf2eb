"""How the layers of a model share blocks: in groups, some of which look no further back than a window."""

from __future__ import annotations

from typing import NamedTuple

GONE = -1
"""In the place of a block that nobody needs any more: its tokens lie behind the window of its group."""


class Layout(NamedTuple):
    """``windows`` has one entry for each group of layers: how many tokens a token of theirs sees, itself among them;
    None: all. A block holds some tokens of one group. A table has the blocks of the same tokens side by side, one a
    group: block ``i * num_groups + k`` is the i-th of group k.

    So groups with a window can give back what lies behind it while the others keep theirs, out of one pool (as in the
    hybrid KV cache manager of vLLM).
    """

    windows: tuple[int | None, ...] = (None,)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def window(self) -> int | None:
        """The longest of the windows; what any of these groups keeps."""
        return max((window for window in self.windows if window is not None), default=None)

    def num_behind(self, num_tokens: int, block_size: int) -> int:
        """How many leading blocks of each group with a window the token after the first ``num_tokens`` does not see."""
        window = self.window
        return 0 if window is None else max(num_tokens - window + 1, 0) // block_size

    def num_spare(self, num_tokens: int, block_size: int) -> int:
        """As ``num_behind``, of those that nobody will write any more: what was computed ahead of the tokens that were
        read is brought into the pool up to a block's worth of steps later (``app.engine.tails``)."""
        return min(self.num_behind(num_tokens, block_size), max(num_tokens // block_size - 1, 0))


ONE_GROUP = Layout()
"""All layers see all tokens."""
