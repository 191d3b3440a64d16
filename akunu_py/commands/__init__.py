"""One module per command, with `add_options(parser)` and `run(args) -> exit code`.

A command with subcommands needs no `run`: `add_actions` takes a function for each.
`cli` imports only the module of the given command, so that `akunu --help` stays fast.
"""
