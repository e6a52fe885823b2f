"""`python -m curvescope`."""

from curvescope.cli import main

if __name__ == "__main__":
    main()
