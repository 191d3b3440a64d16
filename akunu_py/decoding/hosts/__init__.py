"""One model on several machines or processes: mx.distributed moves what they compute, and this
moves what they are to compute. Rank 0 owns the session, the others follow it."""
