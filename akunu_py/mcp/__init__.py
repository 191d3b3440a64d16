"""Tools of MCP servers (Model Context Protocol) that the user configured."""
