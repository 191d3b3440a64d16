"""Write the Homebrew formula of a release: `make_formula.py LOCK SDIST URL HOMEPAGE > akunu.rb`.

LOCK is a pylock.toml of the dependencies, made by `uv pip compile --format pylock.toml`. Each
package becomes a resource, except those that Homebrew has as formulas.
"""

import hashlib
import sys
import tomllib
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("akunu.rb.in")
FORMULAS = ("certifi", "mlx", "mlx-metal", "numpy")  # dependencies in the template


def make_formula(lock: dict[str, Any], sdist: bytes, url: str, homepage: str) -> str:
    """Return the formula. Raises ValueError if a package has no source archive."""
    packages = sorted(lock["packages"], key=lambda package: package["name"])
    resources = [_resource(each) for each in packages if each["name"] not in FORMULAS]
    values = {
        "@HOMEPAGE@": homepage,
        "@URL@": url,
        "@SHA256@": hashlib.sha256(sdist).hexdigest(),
        "@RESOURCES@": "\n\n".join(resources),
    }
    formula = TEMPLATE.read_text("utf-8")
    for name, value in values.items():
        formula = formula.replace(name, value)
    return formula


def _resource(package: dict[str, Any]) -> str:
    name, archive = package["name"], package.get("sdist")
    if archive is None:
        raise ValueError(f"{name} has no source archive; add it to FORMULAS and the template")
    lines = (
        f'  resource "{name}" do',
        f'    url "{archive["url"]}"',
        f'    sha256 "{archive["hashes"]["sha256"]}"',
        "  end",
    )
    return "\n".join(lines)


if __name__ == "__main__":
    lock_file, sdist_file, *addresses = sys.argv[1:]
    content = tomllib.loads(Path(lock_file).read_text("utf-8"))
    print(make_formula(content, Path(sdist_file).read_bytes(), *addresses), end="")
