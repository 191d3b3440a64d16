"""Tool calls: a table of formats, and the parser and renderer that follow from it."""
