"""Real source files of many languages for `python -m tests.measure.oracle DIR`, from packages of
Debian, PyPI and npm, through their own clients.

    python -m tests.support.fetch_sources DIR
    python -m tests.support.fetch_sources DIR held-out      # others, which no rule was made by

Needs apt-get with its lists updated, dpkg-deb, pip and npm. What is fetched is measured with and
never kept here. A package that cannot be had is named and left out.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

# language: endings, and its packages as client:name
PACKAGES = {
    "python": ((".py",), ("pip:flask", "pip:attrs", "pip:requests", "pip:sqlalchemy")),
    "javascript": ((".js", ".mjs"), ("npm:express", "npm:mocha", "npm:eslint", "npm:lodash")),
    "typescript": ((".ts", ".tsx"), ("npm:rxjs", "npm:zod", "npm:react-native-screens")),
    "java": ((".java",), ("npm:react-native", "npm:react-native-svg")),
    "kotlin": ((".kt",), ("npm:expo-modules-core", "npm:react-native-screens")),
    "swift": ((".swift",), ("npm:expo-modules-core", "npm:expo-image")),
    "c": ((".c",), ("npm:tree-sitter", "npm:lmdb", "npm:utp-native")),
    "cpp": ((".cc", ".cpp", ".hpp"), ("npm:leveldown", "npm:react-native-reanimated")),
    "csharp": ((".cs",), ("npm:edge-js", "npm:react-native-webview")),
    "go": ((".go",), ("apt:golang-github-spf13-cobra-dev", "apt:golang-golang-x-net-dev")),
    "rust": ((".rs",), ("apt:librust-regex-dev", "apt:librust-serde-json-dev")),
    "ruby": ((".rb",), ("apt:ruby-rack", "apt:ruby-sinatra", "apt:ruby-faraday")),
    "php": ((".php",), ("apt:php-symfony-console", "apt:php-monolog")),
    "lua": ((".lua",), ("apt:lua-penlight", "apt:lua-busted")),
    "perl": ((".pm", ".pl"), ("apt:libmojolicious-perl", "apt:libmoose-perl")),
    "shell": ((".sh", ".bash", ""), ("apt:bash-completion", "apt:initramfs-tools-core")),
    "sql": ((".sql",), ("apt:postgresql-15", "apt:postgresql-15-cron")),
    "html": ((".html",), ("npm:startbootstrap-sb-admin-2", "npm:swagger-ui-dist")),
    "css": ((".css", ".scss"), ("npm:bootstrap", "npm:startbootstrap-sb-admin-2")),
    "yaml": ((".yml", ".yaml"), ("pip:ansible-core", "npm:rxjs", "npm:express")),
}
HELD_OUT = {
    "python": ("pip:httpx", "pip:click"),
    "javascript": ("npm:koa", "npm:commander", "npm:chokidar"),
    "typescript": ("npm:date-fns", "npm:react-native-gesture-handler"),
    "java": ("npm:react-native-maps", "npm:react-native-video"),
    "kotlin": ("npm:react-native-gesture-handler", "npm:expo-updates"),
    "swift": ("npm:expo-updates", "npm:expo-video"),
    "c": ("npm:tree-sitter-bash", "npm:bufferutil", "npm:sodium-native"),
    "cpp": ("npm:bcrypt", "npm:react-native-mmkv"),
    "csharp": ("npm:edge-cs",),
    "go": ("apt:golang-github-gorilla-mux-dev", "apt:golang-github-urfave-cli-dev"),
    "rust": ("apt:librust-itertools-dev", "apt:librust-anyhow-dev"),
    "ruby": ("apt:ruby-haml", "apt:ruby-mail"),
    "php": ("apt:php-symfony-finder", "apt:php-guzzlehttp-psr7"),
    "lua": ("apt:lua-lpeg", "apt:lua-copas", "apt:lua-argparse"),
    "perl": ("apt:libtry-tiny-perl", "apt:libwww-perl"),
    "shell": ("apt:debconf", "apt:byobu", "apt:dkms"),
    "sql": ("apt:postgresql-15-pgtap", "apt:postgresql-15-partman"),
    "html": ("npm:startbootstrap-agency", "npm:startbootstrap-freelancer"),
    "css": ("npm:bulma", "npm:startbootstrap-agency"),
    "yaml": ("pip:ansible-lint", "npm:eslint-config-airbnb-base"),
}
_SIZES = range(800, 80_000)  # bytes of a file
_FILES = 20  # of a package, evenly apart


def main() -> None:
    root, held_out = Path(sys.argv[1]), sys.argv[2:] == ["held-out"]
    for language, (endings, packages) in PACKAGES.items():
        for package in HELD_OUT[language] if held_out else packages:
            client, _, name = package.partition(":")
            with TemporaryDirectory() as temporary:
                try:
                    unpacked = _fetch(client, name, Path(temporary))
                except (OSError, subprocess.CalledProcessError) as error:
                    print(f"{language}: no {package}: {error}", file=sys.stderr)
                    continue
                count = _keep(unpacked, endings, root / language / name)
            print(f"{language}: {count} files of {package}")


def _fetch(client: str, name: str, directory: Path) -> Path:
    """Where the files of a package lie, in `directory`."""
    commands = {
        "apt": ["apt-get", "-q", "download", name],
        "pip": [sys.executable, "-m", "pip", "-q", "download", "--no-deps", name],
        "npm": ["npm", "pack", "--silent", name],
    }
    subprocess.run(commands[client], cwd=directory, check=True, stdout=subprocess.DEVNULL)
    (archive,) = directory.iterdir()
    unpacked = directory / "unpacked"
    if client == "apt":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(unpacked)], check=True)
    elif client == "pip" and archive.suffix == ".whl":
        zipfile.ZipFile(archive).extractall(unpacked)
    else:
        with tarfile.open(archive) as packed:
            packed.extractall(unpacked, filter="data")
    return unpacked


def _keep(unpacked: Path, endings: tuple[str, ...], target: Path) -> int:
    found = [path for path in sorted(unpacked.rglob("*")) if _is_source(path, endings)]
    step = max(1, -(-len(found) // _FILES))
    for path in found[::step]:
        # One file of a name is enough: the directories of packages are deep.
        target.mkdir(parents=True, exist_ok=True)
        name = "-".join(path.relative_to(unpacked).parts[-2:])
        shutil.copyfile(path, target / (name if path.suffix else f"{name}.sh"))
    return len(found[::step])


def _is_source(path: Path, endings: tuple[str, ...]) -> bool:
    if not path.is_file() or path.is_symlink() or path.suffix not in endings:
        return False
    if path.name.endswith(".d.ts") or ".min." in path.name or path.stat().st_size not in _SIZES:
        return False
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    if not path.suffix and not text.startswith(("#!/bin/sh", "#!/bin/bash", "# ")):
        return False
    return max(map(len, text.splitlines())) < 400  # what a machine wrote has longer lines


if __name__ == "__main__":
    main()
