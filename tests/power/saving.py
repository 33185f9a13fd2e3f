"""Saves checkpoints into a directory until the power is cut: `saving.py DIRECTORY NAMES SEED`.

One line on standard output before each save, and one when all of it was synced: `begun NAME NUMBER` and `safe NAME NUMBER`.
"""

import os
import sys
from pathlib import Path
from random import Random


def content(number: int) -> bytes:
    """What the save of that number writes. Every 64 bytes of it tell which one it is."""
    return (b"%063d\n" % number) * Random(number).choice([1, 20, 900, 5000])


def save(directory: Path, name: str, number: int, *, synced: bool) -> None:
    temporary = directory / f".{name}.tmp"
    with open(temporary, "wb") as file:
        for part in (content(number)[at : at + 50_000] for at in range(0, len(content(number)), 50_000)):
            file.write(part)
        file.flush()
        if synced:
            os.fsync(file.fileno())
    temporary.rename(directory / name)
    if synced:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(descriptor)
        os.close(descriptor)


def main() -> None:
    directory, names, seed = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
    chance = Random(seed)
    number = seed * 1_000_000
    try:
        while True:
            number += 1
            name, synced = chance.choice(names), chance.random() < 0.5
            print("begun", name, number, flush=True)
            save(directory, name, number, synced=synced)
            if synced:
                print("safe", name, number, flush=True)
    except OSError:
        pass  # the power is gone


if __name__ == "__main__":
    main()
