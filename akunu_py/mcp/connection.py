"""The connection to one MCP server, by standard streams or streamable HTTP."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, Implementation

from akunu_py.errors import AkunuError, one_line
from akunu_py.mcp.config import ServerConfig, mcp_file
from akunu_py.mcp.output import ListedTool, ToolOutput, output_of
from akunu_py.text import collapse
from akunu_py.version import __version__

START_S = 60.0  # A package runner may download the server first.
_MAX_TOOLS = 1000  # of a server
_TAIL = 2000  # characters kept of stderr
_MAX_REASON = 300  # characters
_HTTP_TIMEOUT_S = 30.0

for _name in ("mcp", "client"):  # Without a handler, warnings would be written to the terminal.
    logging.getLogger(_name).addHandler(logging.NullHandler())


class Connection:
    """A server that is started when needed, also after it ended. Use it in one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None  # owns the client's context
        self._stop = asyncio.Event()
        self._starting = asyncio.Lock()
        self._stderr = _Tail()

    async def start(self) -> list[ListedTool]:
        """Start the server and return its tools. Raises AkunuError."""
        async with self._starting:
            return await self._start()

    async def _start(self) -> list[ListedTool]:
        await self.close()
        self._stop = asyncio.Event()
        started: asyncio.Future[list[ListedTool]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(started))
        return await started

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        """Call a tool; start the server first if it ended. Cancelling cancels the call.

        Raises AkunuError if there is no result.
        """
        async with self._starting:
            if self._client is None:
                await self._start()
            client = self._client
        assert client is not None
        try:
            async with asyncio.timeout(self.config.timeout):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError as error:
            seconds = self.config.timeout
            raise AkunuError(f"no result within {seconds:g} s; the call was cancelled") from error
        except MCPError as error:
            if _is_closed(error):
                if self._client is client:  # Another call may have started the server again.
                    await self.close()
                raise AkunuError(self._ended("ended during the call")) from error
            return ToolOutput(error.message, is_error=True)
        except Exception as error:  # any error of a transport
            raise AkunuError(self._explain(error)) from error
        return output_of(result)

    async def close(self) -> None:
        self._stop.set()
        self._client = None
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, started: asyncio.Future[list[ListedTool]]) -> None:
        """Own the client: its context must be left in the task that entered it."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(START_S):
                    client = await stack.enter_async_context(await self._make(stack))
                    tools = await _list_tools(client)
                started.set_result(tools)  # raises if the caller was cancelled
                self._client = client
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - reported to the user
            self._client = None
            if not started.done():
                started.set_exception(AkunuError(self._explain(error)))

    async def _make(self, stack: contextlib.AsyncExitStack) -> Client:
        config = self.config
        if config.url:
            timeout = httpx2.Timeout(_HTTP_TIMEOUT_S, read=config.timeout)
            http = httpx2.AsyncClient(headers=dict(config.headers), timeout=timeout)
            transport = streamable_http_client(
                config.url, http_client=await stack.enter_async_context(http)
            )
        else:
            parameters = StdioServerParameters(
                command=config.command,
                args=list(config.args),
                env=dict(config.env),
                cwd=config.cwd or None,
                encoding_error_handler="replace",
            )
            errlog = await stack.enter_async_context(self._stderr.file())
            transport = stdio_client(parameters, errlog=errlog)
        return Client(transport, client_info=Implementation(name="akunu", version=__version__))

    def _explain(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        config = self.config
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            if config.cwd and not os.path.isdir(config.cwd):
                return f"there is no directory {config.cwd!r}; correct cwd in {mcp_file()}"
            return f"command {config.command!r} not found; install it, or correct {mcp_file()}"
        if isinstance(error, TimeoutError):
            return self._ended(f"did not answer within {START_S:g} s")
        if isinstance(error, MCPError) and _is_closed(error):
            return self._ended("ended while it started")
        if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code in (401, 403):
            return f"{config.url} requires authorization; add it to headers in {mcp_file()}"
        if isinstance(error, httpx2.TransportError):
            return f"cannot reach {config.url}: {one_line(error)}"
        return one_line(error, _MAX_REASON)

    def _ended(self, what: str) -> str:
        """Return what happened, with the last line that the server wrote to stderr."""
        last = self._stderr.last_line()
        return f"the server {what}{f': {last[:_MAX_REASON]}' if last else ''}"


def _is_closed(error: MCPError) -> bool:
    # Servers use the code for errors of their own.
    return error.code == CONNECTION_CLOSED and error.message == "Connection closed"


async def _list_tools(client: Client) -> list[ListedTool]:
    tools: list[ListedTool] = []
    cursor: str | None = None
    while len(tools) < _MAX_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += [
            ListedTool(each.name, each.description or "", each.input_schema) for each in page.tools
        ]
        if not (cursor := page.next_cursor):
            break
    return tools[:_MAX_TOOLS]


class _Tail(asyncio.Protocol):
    """The end of what a process writes to stderr."""

    def __init__(self) -> None:
        self._text = ""

    @contextlib.asynccontextmanager
    async def file(self) -> AsyncIterator[Any]:
        self._text = ""
        reading, writing = os.pipe()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: self, os.fdopen(reading, "rb", 0))
        try:
            with os.fdopen(writing, "w") as file:
                yield file
        finally:
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._text = (self._text + data.decode("utf-8", "replace"))[-_TAIL:]

    def last_line(self) -> str:
        lines = [collapse(line) for line in self._text.splitlines()]
        return next((line for line in reversed(lines) if line), "")
