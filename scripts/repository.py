"""Puts the address of the repository where people look for it: `python scripts/repository.py`.

Fill in `ADDRESS` first. It then is in pyproject.toml, CITATION.cff and mkdocs.yml, and README.md has a `git clone`.
"""

import re
from pathlib import Path

# Such as https://github.com/somebody/maml_rl; empty where there is none.
ADDRESS = ""

ROOT = Path(__file__).resolve().parent.parent
# By file: what its place begins with, and what is put there.
PLACES = {
    "pyproject.toml": ("# The repository's address, by scripts/repository.py.\n", 'urls = {{ Repository = "{}" }}\n'),
    "CITATION.cff": ("# The repository's address, by scripts/repository.py.\n", 'repository-code: "{}"\n'),
    "mkdocs.yml": ("# The repository's address, by scripts/repository.py.\n", "repo_url: {}\n"),
    "README.md": ("<!-- The repository's address, by scripts/repository.py. -->\n", "```\ngit clone {}\n```\n"),
}


def write(address: str, root: Path = ROOT) -> None:
    """Write the address into the files below `root`, in the place of one that is there; empty removes it.

    Raises:
        ValueError: If a file has not exactly one place for it.
    """
    for name, (mark, line) in PLACES.items():
        text = (root / name).read_text(encoding="utf-8")
        before, found, after = text.partition(mark)
        if not found or mark in after:
            raise ValueError(f"{name} needs one line {mark.strip()!r}")
        present = re.escape(line.format("\0")).replace("\0", r"\S+").replace("\\\n", "\n")
        after = re.sub(f"\\A{present}", "", after)
        (root / name).write_text(before + mark + (line.format(address) if address else "") + after, encoding="utf-8")


if __name__ == "__main__":
    write(ADDRESS)
