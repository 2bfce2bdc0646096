"""``python -m medfedaug``: the command, where its script is not on the path."""

from medfedaug.cli import main

if __name__ == "__main__":
    main()
