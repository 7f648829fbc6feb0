"""Link to other projects' documentation in a build that has no network.

Intersphinx learns the addresses of foreign names from an inventory that it downloads. Here
the inventories are text files in `_inventories/`, one line for each foreign name that our
signatures and pages mention: `role name address`. They are short, they are reviewed like
code, and a misspelt reference still fails the build, which a list of names to ignore would
not give.

Intersphinx itself does the linking: this only writes the binary form that it reads.
"""

import zlib
from pathlib import Path


def read(source: Path) -> list[tuple[str, str, str]]:
    """The entries of a text inventory as (role, name, address), comments left out.

    Raises:
        ValueError: If a line is not of that form.
    """
    entries = []
    for number, line in enumerate(source.read_text().splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        match line.split():
            case [role, name, address] if role.startswith("py:"):
                entries.append((role, name, address))
            case _:
                raise ValueError(f"{source.name}:{number}: {line!r} is not `py:role name address`")
    return entries


def pack(source: Path, target: Path) -> Path:
    """Write a text inventory in the form that intersphinx reads, and return where it is."""
    header = [
        "# Sphinx inventory version 2",
        f"# Project: {source.stem}",
        "# Version: offline",
        "# The remainder of this file is compressed using zlib.",
    ]
    body = [f"{name} {role} 1 {address} -" for role, name, address in read(source)]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(
        "".join(f"{line}\n" for line in header).encode()
        + zlib.compress("".join(f"{line}\n" for line in body).encode())
    )
    return target
