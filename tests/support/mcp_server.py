"""A small MCP server for tests: `python -m tests.support.mcp_server [PORT]`.

It uses standard streams, or streamable HTTP at a port of this machine (0: any free one).
"""

import asyncio
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")


@server.tool()
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


@server.tool()
def repeat(text: str, times: int) -> str:
    """Repeat a text."""
    return text * times


@server.tool()
def picture() -> list[str | Image]:
    """Return a text and an image."""
    return ["before", Image(data=b"\x89PNG" + bytes(2996), format="png")]


@server.tool()
def refuse() -> str:
    """Fail."""
    raise ToolError("the disk is on fire")


@server.tool()
def environment(name: str) -> str:
    """Return a variable of the server's environment."""
    return os.environ.get(name, "")


@server.tool()
def die() -> str:
    """End the server without a result."""
    print("Traceback: something\nbroke badly", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def wait(file: str) -> str:
    """Write `file`, then wait; after a cancellation, write `file`.cancelled."""
    Path(file).touch()
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        Path(f"{file}.cancelled").touch()
        raise
    return "done"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
