"""``python -m fastrack`` is the command ``fastrack``."""

from fastrack._cli import main

if __name__ == "__main__":
    main()
