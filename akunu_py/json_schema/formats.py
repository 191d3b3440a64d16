"""The formats that are enforced, as patterns; all others are notes to the reader, as the standard
lets them be. From RFC 3339 (dates and times), 5321 (e-mail), 1123 (hosts), 3986 (URIs), 4122."""

from __future__ import annotations

_DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|[12]\d)))"
)
_TIME = (
    r"(?:(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?(?:[zZ]|[+-](?:[01]\d|2[0-3]):[0-5]\d))"
)
_DAYS = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_HOURS = r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_GROUP = r"[0-9a-fA-F]{1,4}"
_LAST_GROUPS = rf"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "|".join(
    [
        rf"(?:{_GROUP}:){{6}}{_LAST_GROUPS}",
        *(
            rf"(?:(?:{_GROUP}:){{0,{left}}}{_GROUP})?::(?:{_GROUP}:){{{4 - left}}}{_LAST_GROUPS}"
            if left >= 0
            else rf"::(?:{_GROUP}:){{5}}{_LAST_GROUPS}"
            for left in range(-1, 5)
        ),
        rf"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
        rf"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::",
    ]
)
_PART = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"  # of a path
_NAME = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2})"
_HOST = rf"(?:\[(?:{_IPV6}|v[0-9a-fA-F]+\.[a-zA-Z0-9\-._~!$&'()*+,;=:]+)\]|{_NAME}*)"
_AUTHORITY = rf"//(?:(?:{_NAME}|:)*@)?{_HOST}(?::\d*)?(?:/{_PART}*)*"
_PATH = rf"(?:/(?:{_PART}+(?:/{_PART}*)*)?|{_PART}+(?:/{_PART}*)*)"
_TAIL = rf"(?:\?(?:{_PART}|[/?])*)?(?:#(?:{_PART}|[/?])*)?"

# A relative reference may not look as if its first part were a scheme.
_FIRST = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=@]|%[0-9a-fA-F]{2})+"
_RELATIVE = rf"(?:{_AUTHORITY}|/(?:{_PART}+(?:/{_PART}*)*)?|{_FIRST}(?:/{_PART}*)*|){_TAIL}"
_URI = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:{_AUTHORITY}|{_PATH}|){_TAIL}"


def _regex(depth: int) -> str:
    """Of ECMAScript, with groups in groups down to `depth`."""
    atom = r"[^\\^$.*+?()\[\]{}|]|\\[^cux]|\\c[a-zA-Z]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|[.^$\]}]"
    atom += r"|\[\^?(?:[^\]\\]|\\.)+\]"
    if depth:
        atom += rf"|\((?:\?[:=!]|\?<[=!])?{_regex(depth - 1)}\)"
    return rf"(?:(?:{atom})(?:[*+?]\??|\{{\d+(?:,\d*)?\}}\??)?|\|)*"


FORMATS = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[tT]{_TIME}",
        "duration": rf"P(?:{_DAYS}{_HOURS}?|{_HOURS}|\d+W)",
        "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}(?:\.{_LABEL})*|\[{_IPV4}\])",
        "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
        "uri": _URI,
        "uri-reference": f"{_URI}|{_RELATIVE}",
        "idn-email": r"[^\s@\x00-\x1f]+@[^\s@\x00-\x1f]+",
        "json-pointer": r"(?:/(?:[^~/]|~[01])*)*",
        "regex": _regex(3),
    }.items()
}
