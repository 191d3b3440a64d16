"""How the drafts did in the answers to a request."""

from __future__ import annotations

from typing import Any

from akunu_py.decoding.generate.events import Ended


def statistics(*answers: Ended) -> dict[str, Any]:
    """Of all of them together, for those who look for it; clients ignore it."""
    stats = [each.stats for each in answers]
    drafted, accepted = sum(each.drafted for each in stats), sum(each.accepted for each in stats)
    passes = sum(each.target_passes for each in stats)
    decoded = sum(each.decoded_tokens for each in stats)
    decode_s = sum(each.decode_s for each in stats)
    return {
        "target_passes": passes,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_pass": round(decoded / passes, 4) if passes else 0.0,
        "tokens_per_s": round(decoded / decode_s, 4) if decode_s > 0 else 0.0,
        "prefill_s": round(sum(each.prefill_s for each in stats), 4),
        "decode_s": round(decode_s, 4),
    }
