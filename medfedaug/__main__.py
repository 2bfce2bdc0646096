"""The entry of the ``medfedaug`` command, also as ``python -m medfedaug``."""


def main() -> None:
    """Run the command; an interrupt while it is imported ends it without a traceback."""
    try:
        from medfedaug.cli import main as command
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    command()


if __name__ == "__main__":
    main()
