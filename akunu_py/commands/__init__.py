"""One module a command. Each has `run(args) -> exit code` and is imported only when it is asked
for, so that `akunu --help` stays fast."""
