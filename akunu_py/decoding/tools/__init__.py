"""Tool calls: a table of formats, and the parser, grammar and renderer that follow from it."""
