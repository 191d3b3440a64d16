"""A container that is as high as its parts, also where they have a maximum height.

Works around:
    Textual ignores a `max-height` in `vh` or `%` when it sums up the parts of a container with
    `height: auto`. The container is then higher than the screen, with empty rows at its end.
Upstream: no issue found, textual 8.2.8.
Remove when: tests/tui/test_answering.py and test_tools.py pass with `Vertical`.
"""

from textual.containers import Vertical
from textual.geometry import Size


class SummedHeight(Vertical):
    """A vertical container for parts without a height in `fr`."""

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self.arrange(Size(width, container.height)).total_region.height
