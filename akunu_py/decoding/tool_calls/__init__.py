"""Tools: how a model is told of them (`conversation`), its calls found in what it writes
(`parser`, in the format of its family: `families`), and calls that it must make (`choice`)."""
