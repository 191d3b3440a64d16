"""What drafters of all kinds offer to the engine.

Each takes the target's hidden states: the outputs of the layers `taps` (-1: the embedding), or the
state after the final norm if `needs_final`. `states` turns them into what is kept of a position,
`extend` appends committed positions to a cache from `make_cache`, in any number of calls, and
`start` begins a draft of up to `longest` tokens. A block drafter starts from the newest token,
whose states do not exist yet, the others from the last row that `extend` returned. `logits` of a
draft takes the depth, from 0 in order, and the token before; it is -inf for impossible tokens.
"""

from collections.abc import Callable

import mlx.core as mx

Embed = Callable[[mx.array], mx.array]
"""The target's embedding: tokens [1, n] to [1, n, target width], scaled as its layers take it."""
Project = Callable[[mx.array], mx.array]
"""The target's lm_head: [..., target width] to logits [..., vocabulary], without a softcap."""
