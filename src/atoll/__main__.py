"""`python -m atoll` and the console script."""

from __future__ import annotations


def main() -> None:
    from atoll.cli import atoll

    atoll(prog_name="atoll")


if __name__ == "__main__":
    main()
