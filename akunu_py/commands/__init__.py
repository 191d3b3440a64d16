"""One module per command, with `add_options(parser)` and `run(args) -> exit code`.

`cli` imports only the module of the given command, so that `akunu --help` stays fast.
"""
